"""The URL of a Redis remote, the client that it asks for, and the errors of that client as ours."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, unquote, urlsplit

import redis
from redis.backoff import NoBackoff
from redis.exceptions import AskError, ClusterCrossSlotError, ClusterDownError, TryAgainError
from redis.retry import Retry

from kvsnap.formats.errors import (
    Damaged,
    KvsnapError,
    RemoteDenied,
    RemoteDown,
    RemoteError,
    UsageError,
)

CONNECTIONS = 32
PASSWORD = "KVSNAP_REDIS_PASSWORD"
DEFAULT_PREFIX = "kvsnap"
_PREFIX = re.compile(r"[A-Za-z0-9_.~-]+([:/][A-Za-z0-9_.~-]+)*")
_CLUSTER = ("MOVED", "ASK ", "CROSSSLOT")
_PASSING = ("LOADING", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN", "BUSY")
"""Codes that older clients leave in the text; newer ones make classes of most of them."""
_EXAMPLE = "redis://HOST:6379/0/PREFIX?ttl=SECONDS"


@dataclass(frozen=True)
class Place:
    """Where a URL points. `shown` is the URL without what is secret in it."""

    shown: str
    host: str
    port: int
    database: int
    prefix: str
    ttl: int | None
    socket: str | None
    tls: bool
    user: str | None = field(repr=False)
    password: str | None = field(repr=False)


def parse(url: str) -> Place:
    """`UsageError` for what a URL of ours does not have; no message repeats the URL, which may hold
    a password in any of its parts once it is mistyped."""
    try:
        parts = urlsplit(url)
        port = parts.port or 6379
        asked = dict(parse_qsl(parts.query, strict_parsing=True) if parts.query else [])
    except ValueError:
        raise UsageError("the URL of the Redis remote cannot be read", _EXAMPLE) from None
    database, _, prefix = parts.path.strip("/").partition("/")
    ttl, socket = asked.pop("ttl", None), asked.pop("socket", None)
    if not re.fullmatch(r"[0-9]{0,4}", database):
        raise UsageError("the path of a Redis URL begins with a database's number", _EXAMPLE)
    if prefix and not _PREFIX.fullmatch(prefix):
        raise UsageError("the prefix of a Redis URL has letters, digits and _.~-:/", _EXAMPLE)
    if ttl is not None and not re.fullmatch(r"[1-9][0-9]{0,8}", ttl):
        raise UsageError("the ttl of a Redis URL is a number of seconds", _EXAMPLE)
    if asked or parts.fragment:
        raise UsageError("a Redis URL has ttl and socket as its only options", _EXAMPLE)
    host = parts.netloc.rpartition("@")[2] or "localhost"
    return Place(
        f"{parts.scheme}://{host}{parts.path}" + (f"?socket={socket}" if socket else ""),
        parts.hostname or "localhost",
        port,
        int(database or 0),
        prefix or DEFAULT_PREFIX,
        None if ttl is None else int(ttl),
        socket,
        parts.scheme == "rediss",
        unquote(parts.username) if parts.username else None,
        unquote(parts.password) if parts.password else os.environ.get(PASSWORD) or None,
    )


def connect(place: Place, timeout: float) -> redis.Redis:
    """A client with a bounded pool. It connects when it is first used, and never tries again on
    its own: that is the wrapper's."""
    options: dict[str, object] = {"host": place.host, "port": place.port}
    kind: type = redis.Connection
    if place.socket is not None:
        options, kind = {"path": place.socket}, redis.UnixDomainSocketConnection
    elif place.tls:
        kind = redis.SSLConnection
    pool = redis.BlockingConnectionPool(  # type: ignore[no-untyped-call]
        max_connections=CONNECTIONS,
        timeout=timeout,
        connection_class=kind,
        db=place.database,
        username=place.user,
        password=place.password,
        socket_timeout=timeout,
        socket_connect_timeout=timeout,
        retry=Retry(NoBackoff(), 0),
        protocol=2,
        **options,
    )
    return redis.Redis(connection_pool=pool)


@contextlib.contextmanager
def failures(place: Place, key: str) -> Iterator[None]:
    """Turn the client's errors into ours, which stand alone: theirs repeat the command with its
    arguments, and so what the object holds."""
    try:
        yield
    except (redis.RedisError, OSError) as error:
        raise _meaning(place, key, error) from None


def _meaning(place: Place, key: str, error: Exception) -> KvsnapError:
    text = _told(place, error)
    line = f"{place.shown}: {text}"
    denied = (
        redis.AuthenticationError,
        redis.exceptions.AuthorizationError,
        redis.exceptions.NoPermissionError,
        redis.exceptions.AuthenticationWrongNumberOfArgsError,
    )
    if isinstance(error, denied) or text.startswith(("NOAUTH", "WRONGPASS", "NOPERM")):
        return RemoteDenied(line, f"user and password: in the URL, or {PASSWORD}")
    if isinstance(error, redis.OutOfMemoryError) or text.startswith("OOM"):
        return RemoteError(line, "raise its maxmemory, or set a maxmemory-policy or a ttl")
    if isinstance(error, redis.ReadOnlyError):
        return RemoteError(line, "name the primary; this server is a replica")
    if isinstance(error, AskError | ClusterCrossSlotError) or text.startswith(_CLUSTER):
        return RemoteError(f"{place.shown} is a Redis cluster", "name a single server")
    if "CERTIFICATE_VERIFY_FAILED" in text:
        return RemoteError(line, "SSL_CERT_FILE names the certificates that are trusted")
    passing = (redis.ConnectionError, redis.TimeoutError, ClusterDownError, TryAgainError, OSError)
    if isinstance(error, passing) or text.startswith(_PASSING):
        return RemoteDown(line, "is the server up?")
    if "WRONGTYPE" in text:
        return Damaged(f"{key} is no string in {place.shown}, and so no object of ours")
    return RemoteError(line, "the server's log says more")


def _told(place: Place, error: Exception) -> str:
    """What the server or the system said, on one line, without the arguments that servers repeat
    and without the password."""
    text = " ".join(str(error).split()).rpartition(" of pipeline caused error: ")[2]
    text = text.partition(", with args beginning")[0]
    if place.password:
        text = text.replace(place.password, "…")
    return text[:200] or type(error).__name__
