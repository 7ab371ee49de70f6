"""Ctrl-C while a remote does not answer. No engine is needed."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvsnap.kvstore.store import Store
from kvsnap.testing.stamped import StampedEngine
from kvsnap.testing.turns import some_ids, turn
from tests.remotes.redis_server import redis_server

redis = pytest.importorskip("redis", reason="kvsnap[remote] is not installed")

PATIENCE = 60.0
"""Seconds; the requests themselves would be tried for more than 90."""


def kvsnap(store: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "kvsnap", "--store", str(store), *arguments]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def interrupted(process: subprocess.Popen[str]) -> str:
    """What it says until it ends."""
    process.send_signal(signal.SIGINT)
    try:
        _, err = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
    assert process.returncode == 130
    return err


def test_ctrl_c_does_not_wait_for_a_server_that_does_not_answer(store: Path) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        silent.settimeout(PATIENCE)
        process = kvsnap(store, "ls", f"redis://127.0.0.1:{silent.getsockname()[1]}/0")
        connection, _ = silent.accept()
        with connection:
            err = interrupted(process)
    assert err.strip() == "interrupted; what was stored before is kept"


def test_ctrl_c_does_not_wait_for_blocks_under_way_and_the_next_push_goes_on(
    store: Path, tmp_path: Path
) -> None:
    with Store(store) as opened:
        turn(opened, StampedEngine(), some_ids(64 * 20), "s")
    (tmp_path / "server").mkdir()
    with redis_server(tmp_path / "server") as server:
        url = server.url("/0/kv")
        with redis.Redis.from_url(server.url()) as admin:
            admin.client_pause(10 * 60 * 1000, all=False)  # reads are answered, writes wait
            process = kvsnap(store, "push", "s", url)
            end = time.monotonic() + PATIENCE
            while not admin.info("clients")["blocked_clients"] and time.monotonic() < end:
                time.sleep(0.02)
            err = interrupted(process)
            assert "21 of 21 files to move" in err
            assert err.endswith("interrupted; what was stored before is kept\n")
            admin.client_unpause()
        again = kvsnap(store, "push", "s", url, "--quiet")
        _, err = again.communicate(timeout=PATIENCE)
        assert (again.returncode, err) == (0, "")
        check = kvsnap(store, "verify", "s", url)
        check.communicate(timeout=PATIENCE)
        assert check.returncode == 0
