"""The calls of llama-server's API that the proxy makes itself.

What it looks at (llama.cpp b11434, tools/server/server-context.cpp):

    GET /props            model_path, total_slots, default_generation_settings.n_ctx, and media_marker:
                          32 random letters a process, unless LLAMA_MEDIA_MARKER pins it
    GET /slots            per slot: id, is_processing, n_prompt_tokens (what it holds), id_task
    POST /slots/N?action= save, restore, erase; the file name is one in --slot-save-path
    POST /apply-template  messages to the prompt's text, by the very code of a chat request
    POST /tokenize        text to token ids

/props and the last two are answered by HTTP threads, the others wait for the batch that is computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx2

from kvsnap.formats.errors import KvsnapError

KEEP_ALIVE = 2.0
"""Seconds; llama-server closes idle connections after 5, and one that closes meanwhile is an error."""
CALL_SECONDS = 600.0
"""How long one of the proxy's own calls may take: it waits for batches of other requests."""


class UpstreamError(KvsnapError):
    """The server cannot be reached (`status` 0), or refused a call of the proxy's own."""

    def __init__(self, what: str, hint: str = "", status: int = 0) -> None:
        super().__init__(what, hint)
        self.status = status


@dataclass(frozen=True)
class Props:
    """What /props says, as far as it matters here."""

    process: str
    """Another one whenever the server was started anew."""
    model_path: str
    slots: int
    n_ctx: int
    media: bool
    """Whether the server takes images or sounds."""


@dataclass(frozen=True)
class SlotNow:
    """One slot as the server has it now."""

    number: int
    busy: bool
    tokens: int
    task: int
    """The task that ran in it last, -1 for none since the server was started."""


class Upstream:
    """One llama-server. `key`: its --api-key, for the proxy's own calls; a client's call is made with the
    client's own headers."""

    def __init__(self, url: str, key: str | None = None) -> None:
        self.url = url.rstrip("/")
        limits = httpx2.Limits(
            max_connections=None, max_keepalive_connections=32, keepalive_expiry=KEEP_ALIVE
        )
        self.client = httpx2.AsyncClient(
            base_url=self.url,
            timeout=httpx2.Timeout(None, connect=10.0),
            limits=limits,
            follow_redirects=False,
            trust_env=False,  # a proxy of the environment is not for a server on this machine
        )
        self._own = {"authorization": f"Bearer {key}"} if key else {}

    async def close(self) -> None:
        await self.client.aclose()

    async def props(self, auth: Mapping[str, str] | None = None) -> Props:
        found = await self._json("GET", "/props", auth=auth)
        settings = found.get("default_generation_settings")
        n_ctx = settings.get("n_ctx") if isinstance(settings, dict) else None
        modalities = found.get("modalities")
        return Props(
            process=str(found.get("media_marker", "")),
            model_path=str(found.get("model_path", "")),
            slots=_count(found.get("total_slots")),
            n_ctx=_count(n_ctx),
            media=isinstance(modalities, dict) and any(modalities.values()),
        )

    async def slots(self, auth: Mapping[str, str] | None = None) -> list[SlotNow]:
        found = await self._json("GET", "/slots", auth=auth)
        if not isinstance(found, list):
            raise UpstreamError("the server's /slots is no list")
        return [
            SlotNow(
                number=_count(one.get("id")),
                busy=bool(one.get("is_processing")),
                tokens=_count(one.get("n_prompt_tokens", 0)),
                task=_count(one.get("id_task", -1)),
            )
            for one in found
        ]

    async def adapters(self, auth: Mapping[str, str] | None = None) -> list[float]:
        """The scales of the LoRA adapters that the server was started with."""
        found = await self._json("GET", "/lora-adapters", auth=auth)
        return [float(one.get("scale", 1.0)) for one in found]

    async def apply_template(self, body: bytes, auth: Mapping[str, str]) -> str:
        """`body` is the chat request itself: the server reads it as it would read that."""
        found = await self._json("POST", "/apply-template", content=body, auth=auth)
        return str(found["prompt"])

    async def tokenize(self, content: object, auth: Mapping[str, str]) -> list[int]:
        body = {"content": content, "add_special": True, "parse_special": True}
        found = await self._json("POST", "/tokenize", json=body, auth=auth)
        return [_count(token) for token in found["tokens"]]

    async def slot_action(
        self, slot: int, action: str, name: str | None = None, auth: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """`save`, `restore` or `erase`; raises `UpstreamError` where the server does not."""
        body = {} if name is None else {"filename": name}
        path = f"/slots/{slot}?action={action}"
        found = await self._json("POST", path, json=body, auth=auth)
        return found if isinstance(found, dict) else {}

    async def evaluate(
        self,
        slot: int,
        token_ids: list[int],
        *,
        go_on: bool = False,
        auth: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        """Compute a prompt in one slot, from nothing or (`go_on`) from what it holds; the answer's
        `timings`."""
        body = {
            "prompt": token_ids,
            "n_predict": 0,
            "id_slot": slot,
            "cache_prompt": go_on,
            "n_cache_reuse": 0,
        }
        found = await self._json("POST", "/completion", json=body, auth=auth)
        timings = found.get("timings")
        return timings if isinstance(timings, dict) else {}

    async def _json(
        self, method: str, path: str, *, auth: Mapping[str, str] | None = None, **more: Any
    ) -> Any:
        headers = {**self._own, **(auth or {})}
        if "content" in more:
            headers["content-type"] = "application/json"
        try:
            answer = await self.client.request(
                method, path, headers=headers, timeout=CALL_SECONDS, **more
            )
        except httpx2.HTTPError as error:
            raise UpstreamError(
                f"{self.url} does not answer: {type(error).__name__} {error}".strip(),
                "start llama-server, or give its address with --upstream",
            ) from error
        if answer.status_code != 200:
            raise UpstreamError(
                f"{self.url}{path} answered {answer.status_code}: {answer.text[:200]}",
                status=answer.status_code,
            )
        try:
            return answer.json()
        except ValueError as error:
            raise UpstreamError(f"{self.url}{path} did not answer with JSON") from error


def _count(value: object) -> int:
    if type(value) is not int:
        raise UpstreamError(f"the server gives {value!r} where a number belongs")
    return value
