"""The base of the wrappers: a remote around a remote, which hands everything on."""

from __future__ import annotations

from collections.abc import Iterator

from kvsnap.kvstore.remotes.base import Buffer, Entry, Object, Remote


class Wrapped(Remote):
    """A subclass overrides what it changes. Each operation goes to its namesake within, none to
    another one: `replace` around a remote that compares on its own stays one step."""

    def __init__(self, remote: Remote) -> None:
        self.remote = remote
        self.url = remote.url
        self.abilities = remote.abilities

    def get(self, key: str, limit: int) -> Object:
        return self.remote.get(key, limit)

    def get_start(self, key: str, count: int) -> bytes:
        return self.remote.get_start(key, count)

    def size(self, key: str) -> int | None:
        return self.remote.size(key)

    def put(self, key: str, data: Buffer) -> None:
        self.remote.put(key, data)

    def replace(self, key: str, data: Buffer, version: str | None) -> bool:
        return self.remote.replace(key, data, version)

    def list(self, prefix: str) -> Iterator[Entry]:
        return self.remote.list(prefix)

    def delete(self, key: str) -> None:
        self.remote.delete(key)

    def close(self) -> None:
        self.remote.close()
