"""Redis or Valkey as a remote: a fleet's hot tier.

    redis://[USER:PASSWORD@]HOST[:PORT][/DATABASE[/PREFIX]][?ttl=SECONDS][&socket=PATH]

`rediss` is the same over TLS; its certificates are checked against the system's, or those of
SSL_CERT_FILE. The password may stand in KVSNAP_REDIS_PASSWORD instead. An object is a plain string
at `PREFIX:KEY`; when it was put stands in the sorted set `PREFIX::changed`, written in the same
transaction (no key of ours begins with a colon). With `ttl` objects are forgotten after that time.
A server that evicts (`maxmemory-policy`) may also forget that set: its objects then count as just
changed, which keeps gc from them.

One server, or a primary with replicas; a cluster is not one of them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import redis
from blake3 import blake3

from kvsnap.formats.errors import Damaged, RemoteError
from kvsnap.kvstore.remotes.base import (
    Buffer,
    Entry,
    Object,
    Remote,
    check_key,
    check_prefix,
    is_key,
    no_object,
    too_long,
)
from kvsnap.kvstore.remotes.redis_url import Place, connect, failures, parse

MAX_OBJECT = 512 << 20
"""Redis' own limit for a string (`proto-max-bulk-len`)."""
BATCH = 1000
CLOCK_SECONDS = 60.0


class Redis(Remote):
    """`timeout`: seconds for connecting, for each answer, and for a free connection of the pool."""

    def __init__(self, url: str, timeout: float) -> None:
        self._place: Place = parse(url)
        self.url = self._place.shown
        self._client = connect(self._place, timeout)
        self._changed = f"{self._place.prefix}::changed"
        self._ahead = 0.0
        self._asked = float("-inf")

    def get(self, key: str, limit: int) -> Object:
        size, data = self._read(key, limit)
        if size > limit:
            raise too_long(key, limit)
        if len(data) != size:
            raise Damaged(f"{key} was cut to {len(data)} of {size} bytes on its way")
        return Object(data, _version(data))

    def get_start(self, key: str, count: int) -> bytes:
        return self._read(key, count)[1]

    def size(self, key: str) -> int | None:
        with self._failures(key), self._transaction() as todo:
            todo.exists(self._at(key))
            todo.strlen(self._at(key))
            stands, size = todo.execute()
        return int(size) if stands else None

    def put(self, key: str, data: Buffer) -> None:
        at, now = self._at(key), self._now()
        with self._failures(key), self._transaction() as todo:
            self._set(todo, key, at, _whole(key, data), now)
            todo.execute()

    def replace(self, key: str, data: Buffer, version: str | None) -> bool:
        at, own, now = self._at(key), _whole(key, data), self._now()
        with self._failures(key), self._transaction() as todo:
            todo.watch(at)
            found: Any = todo.get(at)
            if (None if found is None else _version(found)) != version:
                return False
            todo.multi()
            self._set(todo, key, at, own, now)
            try:
                todo.execute()
            except redis.WatchError:  # somebody wrote between the look and the write
                return False
        return True

    def list(self, prefix: str) -> Iterator[Entry]:
        """SCAN may name a key twice: of those handed out, eight bytes each are remembered."""
        pattern = f"{_escaped(self._place.prefix)}:{_escaped(check_prefix(prefix))}*"
        seen: set[int] = set()
        cursor = 0
        while True:
            found: Any
            with self._failures(prefix):
                cursor, found = self._client.scan(cursor, match=pattern, count=BATCH)
            keys = list[str]()
            for raw in found:
                key = raw[len(self._place.prefix) + 1 :].decode("ascii", "replace")
                if is_key(key) and (mark := _mark(key)) not in seen:
                    seen.add(mark)
                    keys.append(key)
            yield from self._entries(keys)
            if cursor == 0:
                return

    def delete(self, key: str) -> None:
        with self._failures(key), self._transaction() as todo:
            todo.delete(self._at(key))
            todo.zrem(self._changed, key)
            todo.execute()

    def close(self) -> None:
        self._client.connection_pool.disconnect()

    def _read(self, key: str, limit: int) -> tuple[int, bytes]:
        """The object's size and at most its first `limit` bytes, of one moment."""
        at = self._at(key)
        with self._failures(key), self._transaction() as todo:
            todo.exists(at)
            todo.strlen(at)
            if limit > 0:
                todo.getrange(at, 0, limit - 1)
            stands, size, *data = todo.execute()
        if not stands:
            raise no_object(key)
        return int(size), data[0] if data else b""

    def _set(self, todo: Any, key: str, at: str, data: bytes, now: float) -> None:
        ttl = self._place.ttl
        todo.set(at, data, ex=ttl)
        todo.zadd(self._changed, {key: now})
        if ttl is not None:
            todo.zremrangebyscore(self._changed, "-inf", now - ttl)

    def _entries(self, keys: Sequence[str]) -> Iterator[Entry]:
        if not keys:
            return
        now = self._now()
        with self._failures(""), self._client.pipeline(transaction=False) as todo:
            for key in keys:
                todo.exists(self._at(key))
                todo.strlen(self._at(key))
                todo.zscore(self._changed, key)
            answers: Any = todo.execute(raise_on_error=False)
        for key, stands, size, changed in zip(
            keys, answers[0::3], answers[1::3], answers[2::3], strict=True
        ):
            if isinstance(size, redis.ResponseError) or not stands:
                continue  # no string and so none of ours, or gone meanwhile
            yield Entry(key, int(size), now if changed is None else float(changed))

    def _now(self) -> float:
        """The server's clock, asked once a minute."""
        if time.monotonic() - self._asked > CLOCK_SECONDS:
            with self._failures(""):
                seconds, micros = self._client.time()
            self._ahead = seconds + micros / 1e6 - time.monotonic()
            self._asked = time.monotonic()
        return self._ahead + time.monotonic()

    def _transaction(self) -> Any:
        return self._client.pipeline(transaction=True)

    def _at(self, key: str) -> str:
        return f"{self._place.prefix}:{check_key(key)}"

    def _failures(self, key: str) -> Any:
        return failures(self._place, key)


def _whole(key: str, data: Buffer) -> bytes:
    size = memoryview(data).nbytes
    if size > MAX_OBJECT:
        raise RemoteError(
            f"{key} has {size} bytes, and Redis holds at most {MAX_OBJECT} under a key",
            "use smaller blocks, or a folder or an object store as remote",
        )
    return bytes(data)


def _version(data: bytes) -> str:
    return blake3(data).hexdigest()


def _mark(key: str) -> int:
    return int.from_bytes(blake3(key.encode()).digest(8))


def _escaped(text: str) -> str:
    """Text that SCAN's MATCH takes literally."""
    return "".join("\\" + char if char in "*?[]\\^" else char for char in text)
