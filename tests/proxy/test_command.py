"""`kvsnap proxy` as a process."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.proxy.conftest import free_port

KVSNAP = [sys.executable, "-m", "kvsnap"]


@pytest.mark.engine
def test_the_command_serves_until_it_is_told_to_end_and_leaves_nothing(
    tiny: Path, start_upstream: Any, slot_dir: Path, tmp_path: Path
) -> None:
    upstream = start_upstream(tiny)
    port = free_port()
    command = [*KVSNAP, "proxy", "--upstream", upstream.url, "--slot-dir", str(slot_dir)]
    command += ["--port", str(port), "--store", str(tmp_path / "store")]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        url = f"http://127.0.0.1:{port}"
        for _ in range(600):
            with contextlib.suppress(httpx2.HTTPError):
                if httpx2.get(url + "/health").status_code == 200:
                    break
            assert process.poll() is None
            time.sleep(0.05)
        body = {"prompt": "x" * 200, "n_predict": 2}
        answer = httpx2.post(url + "/completion", json=body, timeout=60)
        assert answer.headers["x-kvsnap-slot"] == "0"
        process.send_signal(signal.SIGTERM)
        _, told = process.communicate(timeout=30)
    finally:
        process.kill()
        process.communicate()
    assert f"in front of {upstream.url}" in told
    assert "warning" not in told
    assert "Traceback" not in told
    assert not list(slot_dir.iterdir())
    assert any(path.is_file() for path in (tmp_path / "store" / "blocks").rglob("*"))


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--host", "0.0.0.0"], "--expose"),
        (["--host", "example.org"], "--expose"),
        (["--upstream", "localhost:1"], "no URL"),
        (["--upstream", "http://localhost:8081"], "itself"),
        (["--upstream", "http://127.0.0.1:7/v1", "--port", "7"], "itself"),
        (["--host", "0.0.0.0", "--expose", "--upstream", "http://[::1]:8081"], "itself"),
        (["--host", "203.0.113.5", "--expose"], "cannot listen"),
        (["--model", "/no/such/model.gguf"], "no model file"),
        (["--write-behind"], "KVSNAP_REMOTE"),
        (["--codec", "q4"], "lossy"),
        (["--slot-dir", "/no/such/folder"], "no folder"),
    ],
)
def test_options_that_cannot_be_right_are_refused(
    tmp_path: Path, arguments: list[str], word: str
) -> None:
    command = [*KVSNAP, "proxy", "--slot-dir", str(tmp_path), "--store", str(tmp_path / "s")]
    done = subprocess.run(
        [*command, *arguments], capture_output=True, text=True, check=False, env={**os.environ}
    )
    assert done.returncode in (1, 2)
    assert word in done.stderr
    assert len(done.stderr.splitlines()) == 2
    assert [path.name for path in tmp_path.iterdir()] in ([], ["s"])


def test_a_port_that_is_taken_is_one_clear_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = [*KVSNAP, "proxy", "--slot-dir", str(tmp_path), "--store", str(tmp_path / "s")]
        done = subprocess.run(
            [*command, "--port", port], capture_output=True, text=True, check=False
        )
    assert done.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["s"]
    assert len(done.stderr.splitlines()) == 2
