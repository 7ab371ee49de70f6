"""A real Redis server on loopback, with a password, a unix socket and TLS where it has that."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.remotes.servers import free_ports, program, running

PASSWORD = "canary-password-of-redis"


@dataclass(frozen=True)
class RedisServer:
    """A server in `folder`; `process` may be stopped (SIGSTOP) and continued."""

    port: int
    tls_port: int
    folder: Path
    process: subprocess.Popen

    @property
    def socket(self) -> Path:
        return self.folder / "redis.sock"

    def url(self, path: str = "/0", password: str = PASSWORD) -> str:
        return f"redis://:{password}@127.0.0.1:{self.port}{path}"

    @contextlib.contextmanager
    def hanging(self) -> Iterator[None]:
        """Its connections stand, and nothing answers."""
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)


@contextlib.contextmanager
def redis_server(folder: Path, *options: str, tls: Path | None = None) -> Iterator[RedisServer]:
    """`redis-server` with nothing kept on disk; `options` go to its command line. With `tls`, a
    folder of cert.pem and key.pem, it speaks TLS on a port of its own."""
    command = [program("redis-server"), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)]
    port, tls_port = free_ports(2)
    command += ["--port", str(port), "--requirepass", PASSWORD]
    command += ["--unixsocket", str(folder / "redis.sock"), *options]
    if tls is not None:
        command += ["--tls-port", str(tls_port), "--tls-auth-clients", "no"]
        command += [
            "--tls-cert-file",
            str(tls / "cert.pem"),
            "--tls-key-file",
            str(tls / "key.pem"),
        ]

    def ready() -> bool:
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=1) as connection:
                connection.sendall(b"PING\r\n")
                return connection.recv(64).startswith((b"-NOAUTH", b"+PONG"))
        except OSError:
            return False

    with running(command, folder / "redis.log", ready) as process:
        yield RedisServer(port, tls_port, folder, process)
