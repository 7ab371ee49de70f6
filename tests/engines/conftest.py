"""The bundled model, and processes that run it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

WORKER = Path(__file__).with_name("worker.py")

Start = Callable[[str, dict[str, Any]], Callable[[], Any]]
"""Starts worker.py on a job, and gives the function that waits for its value."""


@pytest.fixture
def start(tmp_path: Path) -> Start:
    def run(what: str, job: dict[str, Any]) -> Callable[[], Any]:
        path = tmp_path / f"{what}.json"
        path.write_text(json.dumps(job))
        command = [sys.executable, str(WORKER), what, str(path)]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

        def finish() -> Any:
            out, err = process.communicate(timeout=500)
            assert process.returncode == 0, err
            return json.loads(out)

        return finish

    return run
