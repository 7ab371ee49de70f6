"""A server on loopback that answers as a test says, byte for byte, and keeps what it was asked."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

MODIFIED = {"Last-Modified": "Wed, 21 Oct 2015 07:28:00 GMT"}


@dataclass
class Request:
    method: str
    target: str
    headers: dict[str, str]
    body: bytes


@dataclass
class Answering:
    """`answer` gets each request and the connection. Returning keeps the connection open; raising
    OSError ends it."""

    answer: Callable[[Request, socket.socket], None]
    requests: list[Request] = field(default_factory=list)
    url: str = ""
    tls: ssl.SSLContext | None = None

    def serve(self, connection: socket.socket) -> None:
        try:
            if self.tls:
                connection = self.tls.wrap_socket(connection, server_side=True)
        except OSError:  # the client does not trust the certificate
            connection.close()
            return
        with (
            connection,
            connection.makefile("rb") as stream,
            contextlib.suppress(OSError, ValueError),
        ):
            while line := stream.readline():
                method, target, _ = line.decode("ascii").split(" ")
                headers = dict[str, str]()
                while text := stream.readline().strip().decode("latin-1"):
                    name, _, value = text.partition(":")
                    headers[name.lower()] = value.strip()
                body = stream.read(int(headers.get("content-length", "0")))
                self.requests.append(Request(method, target, headers, body))
                self.answer(self.requests[-1], connection)


@contextlib.contextmanager
def answering(
    answer: Callable[[Request, socket.socket], None], tls: ssl.SSLContext | None = None
) -> Iterator[Answering]:
    server = Answering(answer, tls=tls)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server.url = f"http{'s' if tls else ''}://127.0.0.1:{listening.getsockname()[1]}"

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listening.accept()
                    threading.Thread(target=server.serve, args=(connection,), daemon=True).start()

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            thread.join(10)


def reply(
    connection: socket.socket,
    status: int,
    body: bytes = b"",
    length: int | None = None,
    **extra: str,
) -> None:
    """An answer; `length` is what it claims to have, `extra` are headers (`_` for `-`)."""
    headers = {"Content-Length": str(len(body) if length is None else length)} | MODIFIED
    headers |= {name.replace("_", "-"): value for name, value in extra.items()}
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    connection.sendall(f"HTTP/1.1 {status} Said\r\n{lines}\r\n".encode() + body)


def end(connection: socket.socket) -> None:
    connection.shutdown(socket.SHUT_RDWR)
    raise OSError("this connection has ended")
