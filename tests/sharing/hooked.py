"""A remote that tells of each operation before it begins, and lets the one who is told do anything."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvsnap.kvstore.remotes.base import Buffer, Entry, Object, Remote
from kvsnap.kvstore.remotes.wrapped import Wrapped

Hook = Callable[[str, str], None]
"""(operation, key); what it raises is raised by the operation, which then does not happen."""


class Hooked(Wrapped):
    """`hook` is called in the thread of the operation; one that uses the remote itself takes the
    remote within. A listing is told of when it is begun."""

    def __init__(self, remote: Remote, hook: Hook) -> None:
        super().__init__(remote)
        self.hook = hook

    def get(self, key: str, limit: int) -> Object:
        self.hook("get", key)
        return super().get(key, limit)

    def get_start(self, key: str, count: int) -> bytes:
        self.hook("get_start", key)
        return super().get_start(key, count)

    def size(self, key: str) -> int | None:
        self.hook("size", key)
        return super().size(key)

    def put(self, key: str, data: Buffer) -> None:
        self.hook("put", key)
        super().put(key, data)

    def replace(self, key: str, data: Buffer, version: str | None) -> bool:
        self.hook("replace", key)
        return super().replace(key, data, version)

    def list(self, prefix: str) -> Iterator[Entry]:
        self.hook("list", prefix)
        return super().list(prefix)

    def delete(self, key: str) -> None:
        self.hook("delete", key)
        super().delete(key)
