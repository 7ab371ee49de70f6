"""Pass a request on and its response back, byte by byte as it comes."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping
from typing import Any

import httpx2

from kvsnap.kvstore.proxy.answer import Outcome, Tail, timings_of
from kvsnap.kvstore.proxy.upstream import Upstream

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

_OF_THE_CONNECTION = {
    b"connection",
    b"host",
    b"keep-alive",
    b"proxy-authenticate",
    b"proxy-authorization",
    b"proxy-connection",
    b"te",
    b"trailer",
    b"transfer-encoding",
    b"upgrade",
}
"""RFC 9110, 7.6.1: these are between two neighbours."""
MOST_BUFFERED = 64_000_000
"""A response of one piece is read whole, so that its headers can say what its body counts."""


def passed_on(headers: Headers, *, body_changed: bool = False) -> Headers:
    """A request's or a response's headers without those of its own connection."""
    named = {
        name.strip().lower()
        for key, value in headers
        if key.lower() == b"connection"
        for name in value.split(b",")
    }
    if body_changed:
        named |= {b"content-length", b"content-encoding"}
    return [
        (key, value)
        for key, value in headers
        if key.lower() not in _OF_THE_CONNECTION and key.lower() not in named
    ]


async def forward(
    upstream: Upstream,
    method: str,
    target: str,
    headers: Headers,
    body: bytes | AsyncIterator[bytes] | None,
    send: Send,
    *,
    started: Callable[[], None] = lambda: None,
    more: Callable[[Mapping[str, Any]], Mapping[str, str]] | None = None,
) -> Outcome:
    """`started` is called when the response begins. `more`: headers to add, given the timings of the
    body, which are {} where it comes as a stream. Raises `httpx2.HTTPError` before the response
    begins; one that breaks off later is ended, so that the client sees it is not whole."""
    own = passed_on(headers, body_changed=isinstance(body, bytes))
    # Not by the client, which would add headers of its own: an encoding that was not asked for.
    request = httpx2.Request(method, upstream.url + target, headers=own, content=body)
    outcome = Outcome()
    answer = await upstream.client.send(request, stream=True)
    try:
        started()
        outcome.status = answer.status_code
        kind = answer.headers.get("content-type", "")
        length = answer.headers.get("content-length", "")
        whole = more is not None and length.isdigit() and int(length) <= MOST_BUFFERED
        if whole and "json" in kind and answer.status_code == 200:
            content = b"".join([chunk async for chunk in answer.aiter_raw()])
            outcome.timings = timings_of(content)
            await _begin(send, answer, more, outcome.timings)
            await send({"type": "http.response.body", "body": content, "more_body": False})
            outcome.complete = True
            return outcome
        await _begin(send, answer, more if answer.status_code == 200 else None)
        tail = Tail()
        async for chunk in answer.aiter_raw():
            tail.add(chunk)
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        outcome.timings, outcome.complete = tail.timings(), True
        return outcome
    finally:
        await answer.aclose()


async def refuse(send: Send, status: int, message: str) -> None:
    """An error as llama-server words it."""
    kind = "unavailable_error" if status == 503 else "proxy_error"
    body = json.dumps({"error": {"code": status, "message": message, "type": kind}}).encode()
    headers = [
        (b"content-type", b"application/json; charset=utf-8"),
        (b"content-length", str(len(body)).encode()),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def _begin(
    send: Send,
    answer: httpx2.Response,
    more: Callable[[Mapping[str, Any]], Mapping[str, str]] | None,
    timings: Mapping[str, Any] | None = None,
) -> None:
    headers = passed_on(list(answer.headers.raw))
    if more is not None:
        headers += [(k.encode(), v.encode()) for k, v in more(timings or {}).items()]
    await send({"type": "http.response.start", "status": answer.status_code, "headers": headers})
