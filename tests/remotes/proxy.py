"""A faulty HTTP proxy of ours on loopback, in front of a real server.

Rules say which requests go wrong, and how; they may be changed while it runs, so that a test can show
that what failed succeeds once the fault has ended. The Host header passes unchanged: S3 signs it.
"""

from __future__ import annotations

import contextlib
import http.client
import re
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

FAULTS = (
    "drop",  # the connection closes without an answer
    "reset_midway",  # the connection is reset after half of the body
    "truncate",  # half of the body, then an orderly end
    "delay",  # the true answer, after `seconds`
    "hang",  # no answer at all, and the connection stands
    "trickle",  # a byte every `seconds`
    "missing",  # 404
    "error",  # 500
    "unavailable",  # 503
    "denied",  # 403
    "announces_more",  # Content-Length is larger than what comes, then the connection stands
    "announces_less",  # Content-Length is smaller than what comes
    "endless",  # the body goes on and on, without a Content-Length
    "other_bytes",  # of the right length
)


@dataclass
class Rule:
    """A fault for requests whose method and path match (`re.search` in the path with its query),
    from the `first` such request on, `times` times."""

    fault: str
    method: str = ".*"
    path: str = ""
    first: int = 1
    times: int = 10**9
    seconds: float = 0.2
    matched: int = 0

    def __post_init__(self) -> None:
        assert self.fault in FAULTS

    def meets(self, method: str, path: str) -> bool:
        if not (re.fullmatch(self.method, method) and re.search(self.path, path)):
            return False
        self.matched += 1
        return self.first <= self.matched < self.first + self.times


@dataclass
class Request:
    """A request that came: `sent` and `received` count body bytes as the client sees them. It is
    counted before it is answered, so that a client that has its answer finds it counted."""

    method: str
    path: str
    sent: int
    fault: str
    status: int = 0
    received: int = 0


@dataclass
class FaultyProxy:
    """`url` stands for `upstream` (http://HOST:PORT)."""

    upstream: str
    url: str = ""
    requests: list[Request] = field(default_factory=list)
    rules: list[Rule] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    healed: threading.Event = field(default_factory=threading.Event)

    def fault(self, fault: str, method: str = ".*", path: str = "", **more: Any) -> Rule:
        """Add a rule; it counts from now on."""
        with self.lock:
            self.healed = threading.Event()
            self.rules.append(Rule(fault, method, path, **more))
            return self.rules[-1]

    def heal(self) -> None:
        """No faults from now on; what hangs is let go of."""
        with self.lock:
            self.rules.clear()
            self.healed.set()

    def forget(self) -> None:
        """Count anew."""
        with self.lock:
            self.requests.clear()

    def count(self, method: str = ".*", path: str = "") -> int:
        with self.lock:
            return sum(
                bool(re.fullmatch(method, request.method) and re.search(path, request.path))
                for request in self.requests
            )

    @property
    def sent(self) -> int:
        """Body bytes that clients sent."""
        with self.lock:
            return sum(request.sent for request in self.requests)

    @property
    def received(self) -> int:
        """Body bytes that clients received."""
        with self.lock:
            return sum(request.received for request in self.requests)

    def rule_for(self, method: str, path: str) -> Rule | None:
        with self.lock:
            met = [rule for rule in self.rules if rule.meets(method, path)]
        return met[0] if met else None


@contextlib.contextmanager
def faulty_proxy(upstream: str) -> Iterator[FaultyProxy]:
    """A proxy in front of the server at `upstream`, on a port of its own."""
    proxy = FaultyProxy(upstream)
    handler = type("Handler", (_Handler,), {"proxy": proxy})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    server.block_on_close = False  # a client may keep its connection for ever
    proxy.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield proxy
    finally:
        proxy.heal()
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    proxy: FaultyProxy
    protocol_version = "HTTP/1.1"
    timeout = 60

    def log_message(self, *args: object) -> None:
        """Nothing: the requests are in the proxy's list."""

    def handle(self) -> None:
        with contextlib.suppress(OSError):  # the client left
            super().handle()

    def serve(self) -> None:
        sent = self._body()
        rule = self.proxy.rule_for(self.command, self.path)
        request = Request(self.command, self.path, len(sent), rule.fault if rule else "")
        with self.proxy.lock:
            self.proxy.requests.append(request)
        answer = _Answer(self, rule, request)
        try:
            if not answer.before(rule):
                status, headers, body = _ask(self.proxy.upstream, self, sent)
                answer.give(status, headers, body)
        except (OSError, http.client.HTTPException):
            self.close_connection = True

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = serve

    def _body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = bytearray()
        while size := int(self.rfile.readline().split(b";")[0], 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        while self.rfile.readline().strip():
            pass
        return bytes(body)


class _Answer:
    """One answer, true or faulty."""

    def __init__(self, to: _Handler, rule: Rule | None, request: Request) -> None:
        self.to = to
        self.rule = rule
        self.request = request
        self.healed = to.proxy.healed

    def before(self, rule: Rule | None) -> bool:
        """Do what needs no true answer; whether that was all."""
        fault = rule.fault if rule else ""
        if rule and fault in ("delay", "hang"):
            self.healed.wait(rule.seconds if fault == "delay" else None)
        if fault in ("drop", "hang"):
            self._end()
            return True
        made_up = {"missing": 404, "error": 500, "unavailable": 503, "denied": 403}.get(fault)
        if made_up:
            self._head(made_up, [], 0)
        return made_up is not None

    def give(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
        fault = self.rule.fault if self.rule else ""
        if self.to.command == "HEAD":
            self._head(status, headers, None)
            return
        half, size = len(body) // 2, len(body)
        announced = {"announces_more": size + 1000, "announces_less": half, "endless": None}
        self._head(status, headers, announced.get(fault, size), whole=fault != "endless")
        if fault in ("truncate", "reset_midway"):
            self._write(body[:half])
            self._end(reset=fault == "reset_midway")
        elif fault == "trickle":
            assert self.rule
            for at in range(size):
                self._write(body[at : at + 1])
                if self.healed.wait(self.rule.seconds):
                    self._end()
                    return
        elif fault == "endless":
            while not self.healed.is_set():
                self._write(bytes(1 << 16))
        else:
            self._write(bytes(byte ^ 0xFF for byte in body) if fault == "other_bytes" else body)
            if fault == "announces_more":
                self.healed.wait()
            if fault.startswith("announces"):
                self._end()

    def _head(
        self, status: int, headers: list[tuple[str, str]], size: int | None, whole: bool = True
    ) -> None:
        self.request.status = status
        self.to.send_response_only(status)
        for name, value in headers:
            if name.lower() not in ("content-length", "transfer-encoding", "connection") or (
                size is None and whole and name.lower() == "content-length"
            ):
                self.to.send_header(name, value)
        if size is not None:
            self.to.send_header("Content-Length", str(size))
        if not whole:
            self.to.send_header("Connection", "close")
            self.to.close_connection = True
        self.to.end_headers()

    def _write(self, data: bytes) -> None:
        self.request.received += len(data)
        self.to.wfile.write(data)

    def _end(self, *, reset: bool = False) -> None:
        self.to.close_connection = True
        linger = b"\x01\x00\x00\x00\x00\x00\x00\x00"  # on, 0 seconds: close() sends RST
        if reset:
            self.to.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            self.to.connection.close()


def _ask(
    upstream: str, request: BaseHTTPRequestHandler, body: bytes
) -> tuple[int, list[tuple[str, str]], bytes]:
    """The true answer, read whole."""
    parts = urlsplit(upstream)
    assert parts.hostname
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=60)
    try:
        connection.putrequest(
            request.command, request.path, skip_host=True, skip_accept_encoding=True
        )
        for name, value in request.headers.items():
            if name.lower() not in ("connection", "transfer-encoding", "content-length", "expect"):
                connection.putheader(name, value)
        if body or request.command in ("PUT", "POST"):
            connection.putheader("Content-Length", str(len(body)))
        connection.putheader("Connection", "close")
        connection.endheaders(body)
        answer = connection.getresponse()
        return answer.status, answer.getheaders(), answer.read()
    finally:
        connection.close()
