"""The token ids of a request, exactly as the server will read them; None for what is left alone.

A chat's text comes from the server's own /apply-template, which is given the request itself and runs the
code of a chat request (tools, template arguments, reasoning). /v1/completions and /completion take
`prompt` as it stands. Both are tokenized with add_special and parse_special.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvsnap.formats.names import TokenIds, token_array
from kvsnap.kvstore.proxy.upstream import Upstream

CHAT = ("/v1/chat/completions", "/chat/completions")
TEXT = ("/v1/completions", "/completions", "/completion")
MOST_BODY = 64_000_000
"""A request of more bytes is passed on as it comes."""
_TEXT_PARTS = ("text", "input_text", "output_text")


@dataclass(frozen=True)
class Request:
    """A request that was understood: its fields."""

    path: str
    body: bytes
    fields: Mapping[str, Any]

    @property
    def stream(self) -> bool:
        return self.fields.get("stream") is True

    def pinned(self, slot: int, *, cache_prompt: bool) -> bytes:
        """The same request for one slot. Nothing in the slot is shifted: shifted rows are not those
        that the server would compute, and would be stored under the same name."""
        more = {"id_slot": slot, "cache_prompt": cache_prompt, "n_cache_reuse": 0}
        return json.dumps({**self.fields, **more}, allow_nan=False).encode()


def understood(path: str, body: bytes) -> Request | None:
    """None for a request that asks for what the proxy does not serve: a slot of its own, no cache,
    shifted rows, adapters, several answers or prompts, media, or no JSON at all."""
    if path not in CHAT and path not in TEXT:
        return None
    try:
        fields = json.loads(body, parse_constant=_refuse)
        json.dumps(fields, allow_nan=False)
    except (ValueError, RecursionError):
        return None
    if not isinstance(fields, dict) or not _is_plain(fields):
        return None
    ours = _plain_chat(fields) if path in CHAT else _plain_prompt(fields)
    return Request(path, body, fields) if ours else None


async def token_ids(
    upstream: Upstream, request: Request, headers: Mapping[str, str]
) -> TokenIds | None:
    """None where the prompt is empty; raises `UpstreamError` where the server refuses it."""
    if request.path in CHAT:
        content: object = await upstream.apply_template(request.body, headers)
    else:
        content = request.fields["prompt"]
        if isinstance(content, list) and len(content) == 1 and isinstance(content[0], str):
            content = content[0]
    if isinstance(content, list) and all(type(token) is int for token in content):
        found = content
    else:
        found = await upstream.tokenize(content, headers)
    if not found or min(found) < 0 or max(found) >= 2**31:
        return None
    return token_array(found)


def _is_plain(fields: Mapping[str, Any]) -> bool:
    return (
        fields.get("id_slot", -1) in (-1, None)
        and fields.get("cache_prompt") in (True, None)
        and not fields.get("n_cache_reuse")
        and not fields.get("lora")
        and fields.get("n") in (1, None)
        and fields.get("n_cmpl") in (1, None)
    )


def _plain_chat(fields: Mapping[str, Any]) -> bool:
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        return False
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else 0
        if isinstance(content, list):
            for part in content:
                if not isinstance(part, dict) or part.get("type") not in _TEXT_PARTS:
                    return False
        elif content is not None and not isinstance(content, str):
            return False
    return True


def _plain_prompt(fields: Mapping[str, Any]) -> bool:
    """One prompt: text, ids, or both mixed."""
    prompt = fields.get("prompt")
    if isinstance(prompt, str):
        return bool(prompt)
    if not isinstance(prompt, list) or not prompt:
        return False
    if any(type(part) is not int and not isinstance(part, str) for part in prompt):
        return False
    return any(type(part) is int for part in prompt) or len(prompt) == 1


def _refuse(constant: str) -> Any:
    raise ValueError(constant)
