"""Who can reach `python -m kvsnap.llama_server`, and what becomes of those who send it nonsense (A67)."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import pickle
import random
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("llama_cpp")
pytest.importorskip("gguf", reason="gguf is not installed")
pytest.importorskip("uvicorn", reason="the server's packages are not installed")
pytest.importorskip("sse_starlette", reason="the server's packages are not installed")

from kvsnap.testing.tiny_gguf import write_tiny

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="sockets are read from /proc"),
]

MEGABYTE = 1 << 20
LISTENS = "0A"
"""The state of a socket that waits for others, in /proc/net/tcp."""


class Canary:
    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple:
        return open, (self.path, "w")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, int]]:
    """(process, port) of a server that was told nothing about where to listen."""
    folder = tmp_path_factory.mktemp("server")
    model, log = write_tiny(folder / "m.gguf", "llama", window=0), folder / "log"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "kvsnap.llama_server", "--model", str(model)]
    command += ["--kvsnap-store", str(folder / "store"), "--n_threads", "1", "--n_ctx", "256"]
    clean = {k: v for k, v in os.environ.items() if k not in ("HOST", "CONFIG_FILE")}
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=out, env={**clean, "PORT": str(port)}
        )
    try:
        until = time.monotonic() + 200
        while "Uvicorn running" not in log.read_text():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < until, log.read_text()
            time.sleep(0.1)
        yield process.pid, port
    finally:
        process.kill()
        process.wait()


def listening(process: int) -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """The addresses that a process waits at."""
    own = set()
    for handle in Path(f"/proc/{process}/fd").iterdir():
        with contextlib.suppress(OSError):
            own.add(str(handle.readlink()))
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{process}/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == LISTENS and f"socket:[{words[9]}]" in own:
                raw = bytes.fromhex(words[1].partition(":")[0])
                # Each group of four bytes is in the machine's order.
                turned = b"".join(raw[at : at + 4][::-1] for at in range(0, len(raw), 4))
                found.append(ipaddress.ip_address(turned))
    return found


def memory(process: int) -> int:
    """Bytes that the process has taken at most so far."""
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("/proc does not say")


def send(port: int, data: bytes) -> bytes:
    """What comes back until the server hangs up, or has nothing to say for two seconds."""
    said = b""
    connection = socket.create_connection(("127.0.0.1", port), timeout=2)
    with connection, contextlib.suppress(OSError):
        connection.sendall(data)
        while part := connection.recv(65536):
            said += part
    return said


def test_it_waits_at_the_loopback_alone(server: tuple[int, int]) -> None:
    found = listening(server[0])
    assert found
    assert all(address.is_loopback for address in found)


def test_nonsense_gets_an_error_and_the_server_goes_on(
    server: tuple[int, int], tmp_path: Path
) -> None:
    process, port = server
    before = memory(process)
    post = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    bomb = pickle.dumps(Canary(tmp_path / "canary"))
    for data in (
        random.Random(1).randbytes(MEGABYTE),
        bomb,
        b"\xff" * 8 + bytes(MEGABYTE),
        b"GET /" + b"a" * MEGABYTE,
        post + b"Content-Length: 9223372036854775808\r\n\r\n{}",
        post + b"Content-Length: -1\r\n\r\n{}",
        post + b"Content-Length: %d\r\n\r\n%s" % (len(bomb), bomb),
        post + b"Content-Length: 10\r\n\r\n" + b"[" * 10,
    ):
        assert b" 200 " not in send(port, data).partition(b"\r\n")[0]
    assert memory(process) - before < 64 * MEGABYTE
    assert not (tmp_path / "canary").exists()
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=60) as answer:
        assert json.load(answer)["data"]


def test_a_config_file_runs_nothing(tmp_path: Path) -> None:
    canary, config = tmp_path / "canary", tmp_path / "config.yaml"
    config.write_text(f"models: !!python/object/apply:builtins.open ['{canary}', 'w']\n")
    command = [sys.executable, "-m", "kvsnap.llama_server", "--config_file", str(config)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=200)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 2
    assert not canary.exists()
