"""A client's request as it comes in."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from starlette.types import Receive, Scope

from kvsnap.kvstore.proxy.prompt import CHAT, MOST_BODY, TEXT


class Incoming:
    """One request. Its body is read once: by `body`, or by `stream`."""

    def __init__(self, scope: Scope, receive: Receive) -> None:
        self._receive = receive
        self.method: str = scope["method"]
        raw: bytes = scope.get("raw_path") or scope["path"].encode()
        query: bytes = scope.get("query_string", b"")
        self.path: str = raw.split(b"?")[0].decode("latin-1")
        self.target: str = self.path + ("?" + query.decode("latin-1") if query else "")
        self.headers: list[tuple[bytes, bytes]] = list(scope["headers"])
        self._first: list[bytes] = []
        self._read = asyncio.Event()

    def may_be_completion(self) -> bool:
        return self.method == "POST" and self.path in (*CHAT, *TEXT)

    async def body(self) -> bytes | None:
        """All of it; None where it is too long, and `stream` gives it from the start."""
        parts, size = [], 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise asyncio.CancelledError
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if not message.get("more_body", False):
                self._read.set()
                return b"".join(parts)
            if size > MOST_BODY:
                self._first = parts
                return None

    async def stream(self) -> AsyncIterator[bytes]:
        for part in self._first:
            yield part
        while not self._read.is_set():
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise asyncio.CancelledError
            if not message.get("more_body", False):
                self._read.set()
            if message.get("body"):
                yield message["body"]

    async def gone(self) -> None:
        """Returns when the client closed the connection, once its request was read."""
        await self._read.wait()
        while (await self._receive())["type"] != "http.disconnect":
            pass
