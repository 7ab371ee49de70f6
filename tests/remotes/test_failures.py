"""What failures of servers become, for all that obstore speaks to: the right kind of error, in time,
with a line on what to do and without a word of the server's or a secret."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

import pytest

from kvsnap.formats.errors import (
    Damaged,
    KvsnapError,
    NotFound,
    RemoteDenied,
    RemoteDown,
    RemoteError,
)
from kvsnap.kvstore.remotes.base import Remote
from kvsnap.kvstore.remotes.http import Http
from kvsnap.kvstore.remotes.objects import S3
from tests.remotes.answers import Request, answering, end, reply

KEY, SECRET, TIMEOUT = "blocks/ab/x", "canarysecret", 1.0
Answer = Callable[[Request, socket.socket], None]
KINDS = ("s3", "http")


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDCANARY")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)


@pytest.fixture
def open_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Remote]:
    def open_it(kind: str, url: str) -> Remote:
        if kind == "http":
            return Http(url.replace("://", f"://reader:{SECRET}@") + "/base", TIMEOUT)
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        return S3("s3://bucket/base", TIMEOUT)

    return open_it


def failure(operation: Callable[[], object]) -> KvsnapError:
    """What an operation raises, checked for what no error may hold."""
    begun = time.monotonic()
    with pytest.raises(KvsnapError) as raised:
        operation()
    assert time.monotonic() - begun < TIMEOUT + 2
    shown = (
        f"{raised.value!r} {raised.value.hint} {raised.value.__context__} {raised.value.__cause__}"
    )
    for word in (SECRET, "AKIDCANARY", "Signature", "Authorization", "said by the server"):
        assert word not in shown
    assert isinstance(raised.value, NotFound | Damaged) or raised.value.hint
    return raised.value


def refuses(status: int, body: bytes = b"said by the server") -> Answer:
    return lambda request, connection: reply(
        connection, status, b"" if request.method == "HEAD" else body
    )


def cut(_: Request, connection: socket.socket) -> None:
    reply(connection, 200, b"x" * 50, length=100)
    end(connection)


def trickle(_: Request, connection: socket.socket) -> None:
    reply(connection, 200, length=1000)
    for _turn in range(1000):
        connection.sendall(b"x")
        time.sleep(0.05)


def silence(_: Request, __: socket.socket) -> None:
    time.sleep(2 * TIMEOUT)


def drop(_: Request, connection: socket.socket) -> None:
    end(connection)


def junk(_: Request, connection: socket.socket) -> None:
    connection.sendall(b"said by the server\r\n\r\n")
    end(connection)


def headers_without_end(_: Request, connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\n")
    for number in range(100_000):
        connection.sendall(b"X-%d: %s\r\n" % (number, b"a" * 1000))


def no_length(_: Request, connection: socket.socket) -> None:
    connection.sendall(
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n"
    )


def in_circles(request: Request, connection: socket.socket) -> None:
    reply(connection, 302, Location=f"{request.target}x")


SLOW_DOWN = b"<Error><Code>SlowDown</Code><Message>said by the server</Message></Error>"
FAULTS = {
    "cut": (cut, RemoteDown),
    "trickle": (trickle, RemoteDown),
    "silence": (silence, RemoteDown),
    "drop": (drop, RemoteDown),
    "junk": (junk, RemoteDown),
    "headers without end": (headers_without_end, RemoteDown),
    "500": (refuses(500), RemoteDown),
    "503": (refuses(503, SLOW_DOWN), RemoteDown),
    "429": (refuses(429), RemoteDown),
    "no length": (no_length, RemoteError),
    "in circles": (in_circles, RemoteError),
    "redirected to nowhere": (refuses(301), RemoteError),
    "400": (refuses(400), RemoteError),
    "401": (refuses(401), RemoteDenied),
    "403": (refuses(403), RemoteDenied),
    "404": (refuses(404), NotFound),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_get_that_fails(open_at: Callable, kind: str, fault: str) -> None:
    answer, expected = FAULTS[fault]
    with answering(answer) as server:
        remote = open_at(kind, server.url)
        assert type(failure(lambda: remote.get(KEY, 10_000))) is expected
        if fault != "in circles":
            assert len(server.requests) == 1, "obstore must leave trying again to the wrapper"


@pytest.mark.parametrize(
    "fault", ["silence", "drop", "junk", "500", "503", "401", "403", "404", "400", "in circles"]
)
@pytest.mark.parametrize("what", ["size", "put", "replace", "delete", "list"])
def test_other_operations_that_fail(open_at: Callable, fault: str, what: str) -> None:
    answer, expected = FAULTS[fault]
    with answering(answer) as server:
        remote = open_at("s3", server.url)
        operations: dict[str, Callable[[], object]] = {
            "size": lambda: remote.size(KEY),
            "put": lambda: remote.put(KEY, b"x"),
            "replace": lambda: remote.replace(KEY, b"x", None),
            "delete": lambda: remote.delete(KEY),
            "list": lambda: list(remote.list("")),
        }
        if fault == "404" and what in ("size", "delete"):
            assert operations[what]() is None
            return
        if fault == "404":
            expected = RemoteError  # who writes or lists does not ask for an object
        assert type(failure(operations[what])) is expected
    assert server.requests[0].method in ("HEAD", "PUT", "DELETE", "GET")


@pytest.mark.parametrize("kind", KINDS)
def test_nobody_listens(open_at: Callable, kind: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as bound:
        port = bound.getsockname()[1]
    remote = open_at(kind, f"http://127.0.0.1:{port}")
    assert type(failure(lambda: remote.get(KEY, 10))) is RemoteDown


def test_a_host_without_an_address() -> None:
    remote = Http(f"http://reader:{SECRET}@no-such-host.invalid/", TIMEOUT)
    assert type(failure(lambda: remote.get(KEY, 10))) is RemoteDown


@pytest.mark.parametrize("kind", KINDS)
def test_more_is_announced_than_can_be_needed(open_at: Callable, kind: str) -> None:
    def huge(_: Request, connection: socket.socket) -> None:
        reply(connection, 200, b"x" * 500, length=10**15)
        time.sleep(TIMEOUT)

    with answering(huge) as server:
        remote = open_at(kind, server.url)
        assert type(failure(lambda: remote.get(KEY, 10_000))) is Damaged
        assert remote.get_start(KEY, 8) == b"x" * 8


@pytest.mark.parametrize("kind", KINDS)
def test_a_server_without_ranges_still_gives_the_start(open_at: Callable, kind: str) -> None:
    with answering(lambda _, connection: reply(connection, 200, b"0123456789")) as server:
        assert open_at(kind, server.url).get_start(KEY, 4) == b"0123"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_credentials_do_not_go_along_to_another_server(
    open_at: Callable, kind: str, host: str
) -> None:
    with answering(lambda _, connection: reply(connection, 200, b"hello")) as other:
        target = other.url.replace("127.0.0.1", host) + "/there"
        with answering(lambda _, connection: reply(connection, 302, Location=target)) as server:
            assert open_at(kind, server.url).get(KEY, 10).data == b"hello"
        assert "authorization" in server.requests[0].headers
        assert "authorization" not in other.requests[0].headers
        assert SECRET not in str(other.requests)


def test_what_is_no_key_is_never_sent(open_at: Callable) -> None:
    with answering(refuses(404)) as server:
        for kind in KINDS:
            remote = open_at(kind, server.url)
            for key in ("../x", "a//b", "", "UPPER", "a?b"):
                for ask in (remote.size, lambda k, r=remote: r.get(k, 1)):
                    assert type(failure(lambda a=ask, k=key: a(k))) is Damaged
        assert not server.requests
