"""`kvsnap` in processes of its own, on the bundled model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

SYSTEM = "You are the assistant of a small library. You know its opening hours and its rules. "


@dataclass
class Done:
    """What a command printed, and its exit code."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        assert self.code in (0, 1, 3), self.err
        return json.loads(self.out)


Kvsnap = Callable[..., Done]


@pytest.fixture
def kvsnap(tmp_path: Path) -> Kvsnap:
    """Run `kvsnap ARGS` with the test's own store; no terminal, no environment of the user's."""
    store = tmp_path / "store"

    def run(
        *arguments: object, prefix: Sequence[str] = (), timeout: float = 300, **environment: str
    ) -> Done:
        env = {key: value for key, value in os.environ.items() if not key.startswith("KVSNAP_")}
        done = subprocess.run(
            [*prefix, sys.executable, "-m", "kvsnap", "--store", str(store)]
            + [str(argument) for argument in arguments],
            capture_output=True,
            text=True,
            timeout=timeout,
            env={**env, **environment},
            cwd=tmp_path,
            check=False,
        )
        assert "Traceback" not in done.stderr, done.stderr
        return Done(done.returncode, done.stdout, done.stderr)

    return run


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of a remote."""
    return tmp_path / "remote"


@pytest.fixture
def url(folder: Path) -> str:
    """That remote's."""
    return folder.as_uri()


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """The store of another machine."""
    return tmp_path / "other"


@pytest.fixture
def chat(tmp_path: Path) -> Path:
    """A chat of three blocks and a tail: a long system message and a question."""
    path = tmp_path / "chat.json"
    messages = [
        {"role": "system", "content": SYSTEM * 12},
        {"role": "user", "content": "When do you open?"},
    ]
    path.write_text(json.dumps(messages))
    return path
