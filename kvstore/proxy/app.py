"""The ASGI application: completions go through `Turns`, everything else is passed on as it comes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.types import Receive, Scope, Send

from kvsnap.engines.llamacpp_load import LoadOptions
from kvsnap.formats.codecs import DEFAULT_CODEC, get_codec
from kvsnap.formats.errors import NotFound, UsageError
from kvsnap.formats.tenant import Tenant
from kvsnap.kvstore.proxy.answer import Outcome
from kvsnap.kvstore.proxy.forward import Headers, forward, refuse
from kvsnap.kvstore.proxy.identity import Attacher, Wanted
from kvsnap.kvstore.proxy.incoming import Incoming
from kvsnap.kvstore.proxy.link import Link
from kvsnap.kvstore.proxy.prompt import understood
from kvsnap.kvstore.proxy.slot_files import SlotFiles
from kvsnap.kvstore.proxy.told import Told
from kvsnap.kvstore.proxy.turn import Turns
from kvsnap.kvstore.proxy.upstream import Upstream
from kvsnap.kvstore.store import Store

_AUTH = (b"authorization", b"x-api-key")


@dataclass(frozen=True, kw_only=True)
class ProxyOptions:
    """`upstream`: the server's URL; `slot_dir`: its --slot-save-path; `key`: its --api-key, for what the
    proxy asks by itself; `load`: the options of RoPE that the server was started with."""

    upstream: str
    slot_dir: Path
    model: Path | None = None
    load: LoadOptions = field(default_factory=LoadOptions)
    tenant: Tenant | None = None
    codec: str = DEFAULT_CODEC
    key: str | None = None


def create_app(store: Store, options: ProxyOptions) -> Starlette:
    """The application; the store stays the caller's. Raises `UsageError` and `NotFound` for options
    that cannot be right."""
    if not options.upstream.startswith(("http://", "https://")):
        raise UsageError(
            f"{options.upstream!r} is no URL of a server", "give --upstream http://127.0.0.1:8080"
        )
    if options.model is not None and not options.model.is_file():
        raise NotFound(f"no model file {options.model}", "check the path after --model")
    codec = get_codec("raw" if store.encrypt else options.codec)
    if codec.lossy:
        raise UsageError(
            f"codec {codec.id} is lossy, and a server's slots are kept exactly", "give raw or zstd"
        )
    files = SlotFiles(options.slot_dir.absolute())
    upstream, told = Upstream(options.upstream, options.key), Told()
    wanted = Wanted(options.model, options.load, options.tenant)
    link = Link(upstream, Attacher(upstream, store, files, wanted), told)
    proxy = _Proxy(upstream, link, Turns(upstream, link, store, files, codec, told))

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        first = asyncio.ensure_future(link.current())  # so that the first client does not wait
        try:
            yield
        finally:
            await proxy.turns.close()
            first.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await first
            await upstream.close()
            files.close()

    return Starlette(routes=[Mount("/", app=proxy)], lifespan=lifespan)


class _Proxy:
    def __init__(self, upstream: Upstream, link: Link, turns: Turns) -> None:
        self._upstream, self._link, self.turns = upstream, link, turns

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        incoming = Incoming(scope, receive)
        work = asyncio.ensure_future(self._answer(incoming, send))
        gone = asyncio.ensure_future(incoming.gone())
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (work, gone):
                task.cancel()
            await asyncio.wait({work, gone})
        if not work.cancelled():
            work.result()

    async def _answer(self, incoming: Incoming, send: Send) -> None:
        begun = False

        async def sending(message: Any) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._serve(incoming, sending)
        except httpx2.HTTPError as error:
            if begun:  # a response that is not whole must not end as if it were
                raise
            await refuse(send, 502, f"the server does not answer: {type(error).__name__} {error}")

    async def _serve(self, incoming: Incoming, send: Send) -> None:
        if incoming.method == "POST" and incoming.path.startswith("/lora-adapters"):
            self._link.forget()
        body = await incoming.body() if incoming.may_be_completion() else None
        request = understood(incoming.path, body) if body is not None else None
        if request is not None:

            async def deliver(
                pinned: bytes,
                started: Callable[[], None],
                more: Callable[[Mapping[str, Any]], Mapping[str, str]],
            ) -> Outcome:
                return await forward(
                    self._upstream,
                    "POST",
                    incoming.target,
                    incoming.headers,
                    pinned,
                    send,
                    started=started,
                    more=more,
                )

            if await self.turns.serve(request, _auth(incoming.headers), deliver):
                return
        content = body if body is not None else incoming.stream()
        await forward(
            self._upstream, incoming.method, incoming.target, incoming.headers, content, send
        )


def _auth(headers: Headers) -> dict[str, str]:
    """What a client proves its right by, for calls that are made for it."""
    return {k.decode("latin-1"): v.decode("latin-1") for k, v in headers if k.lower() in _AUTH}
