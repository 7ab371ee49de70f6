"""What tests of several folders share: a store with small blocks, and Hypothesis' profile."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from kvsnap.kvstore.signing_key import VARIABLE as SIGNING_KEY
from kvsnap.kvstore.store import Store
from kvsnap.kvstore.trust import VARIABLE as TRUSTED

# Two noisy cores: a deadline would measure the neighbours. Examples that failed are kept out of
# the checkout's way in .hypothesis/, which git ignores.
settings.register_profile(
    "kvsnap", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("kvsnap")

# Saves wait for the device; in memory the store's tests take a third of the time. A test cannot
# cut the power anyhow. pytest reads this where nothing else says where temporary folders go.
if os.access("/dev/shm", os.W_OK):
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", "/dev/shm")

BLOCK_SIZE = 16
CHILD = Path(__file__).parent / "child.py"
_NUMBERS = itertools.count()


@pytest.fixture(autouse=True)
def own_signing_key(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """Where this test's machine has its signing key, once it needs one: the user's is not touched,
    also not by a command that is run without any KVSNAP_ variable. Nobody is trusted from outside."""
    folder = tmp_path_factory.getbasetemp() / f"configuration-{next(_NUMBERS)}"
    path = folder / "kvsnap" / "signing.pem"
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder))
    monkeypatch.setenv("XDG_STATE_HOME", str(folder / "state"))
    monkeypatch.setenv(SIGNING_KEY, str(path))
    monkeypatch.delenv(TRUSTED, raising=False)
    return path


@pytest.fixture(scope="session")
def model() -> Path:
    """The bundled GGUF file."""
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    from kvsnap.cli.bundled import bundled_model

    return bundled_model()


@pytest.fixture
def store_path(tmp_path: Path) -> Path:
    """A folder whose kvsnap.json asks for blocks of 16 tokens; no engine has written to it."""
    path = tmp_path / "store"
    path.mkdir(mode=0o700)
    text = json.dumps({"block_size": BLOCK_SIZE, "created": 1, "format": "1"})
    (path / "kvsnap.json").write_text(text)
    return path


@pytest.fixture
def open_store(store_path: Path) -> Iterator[Callable[[], Store]]:
    """Opens the same folder as often as it is called, as new processes would."""
    opened: list[Store] = []

    def open_again() -> Store:
        opened.append(Store(store_path))
        return opened[-1]

    yield open_again
    for store in opened:
        store.close()


@pytest.fixture
def store(open_store: Callable[[], Store]) -> Store:
    return open_store()


@pytest.fixture
def child() -> Callable[..., list[dict]]:
    """Run an action of child.py in a new process; its lines of JSON. Raises where it failed."""

    def run(*args: object, **options: object) -> list[dict]:
        command = [sys.executable, "-W", "error", str(CHILD), *map(str, args)]
        done = subprocess.run(
            command, check=False, capture_output=True, text=True, timeout=120, **options
        )
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    return run
