"""A small llama-server: the same API over llama-cpp-python, as far as the proxy and its tests use it.

    python -m tests.proxy.upstream MODEL --port N --slot-save-path DIR [--slots N] …

It really computes what it says: slots keep rows, take slot files and write them, `timings` count what was
evaluated. As the real one it takes a list of tokens on trust, reuses the common prefix of what a slot
holds, clears idle slots when a request is started (--clear-idle), and dies of a slot file that is cut.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import secrets
import time
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from kvsnap.engines.llamacpp import LlamaCpp
from kvsnap.engines.llamacpp_load import LoadOptions, load_llama
from kvsnap.engines.llamacpp_memory import planes_of
from kvsnap.formats.errors import Damaged, KvsnapError
from kvsnap.formats.interchange.llama_server_slot import assemble_slot, parse_slot
from kvsnap.formats.interchange.llamacpp import StateType
from kvsnap.formats.interchange.llamacpp_memory import KvCells, assemble_memory
from kvsnap.formats.names import common_prefix, token_array
from kvsnap.kvstore.proxy.rows import SlotRows

ABORTED = 134


@dataclasses.dataclass
class Slot:
    number: int
    ids: Any = dataclasses.field(default_factory=lambda: token_array([]))
    rows: dict[str, Any] = dataclasses.field(default_factory=dict)
    task: int | None = None
    busy: bool = False
    distrusted: bool = False


class Refused(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Server:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        load = LoadOptions(
            ctx=options.ctx,
            threads=1,  # two spin against one another where cores are busy
            flash_attn=True,
            cache_type_k=options.cache_type,
            cache_type_v=options.cache_type,
            rope_freq_base=options.rope_freq_base,
        )
        self.llm = load_llama(Path(options.model), load, options.ctx)
        self.engine = LlamaCpp(self.llm)
        self.kinds = [
            dataclasses.replace(part, version=4, v_trans=False, n_stream=1)
            for part in self.engine.memory.parts
            if isinstance(part, StateType)
        ]
        self.slots = [Slot(n) for n in range(options.slots)]
        self.loaded: Slot | None = None
        self.marker = options.marker or secrets.token_hex(16)
        self.tasks = 0
        self.computing = asyncio.Lock()
        self.idle = asyncio.Condition()
        self.seen: list[dict[str, Any]] = []

    # What a slot holds is in the engine only while it computes.
    def _enter(self, slot: Slot) -> None:
        if self.loaded is slot:
            return
        self._leave()
        self.engine.truncate(0)
        if len(slot.ids):
            landing = self.engine.landing(len(slot.ids))
            for name, array in slot.rows.items():
                landing.rows[name][...] = array
            self.engine.load(landing, slot.ids)
        self.loaded = slot

    def _leave(self) -> None:
        if self.loaded is not None:
            held = self.engine.token_ids()
            self.loaded.ids = held
            self.loaded.rows = (
                {name: a.copy() for name, a in self.engine.export(0, len(held)).items()}
                if len(held)
                else {}
            )
            self.loaded = None

    def clear(self, slot: Slot) -> None:
        self._leave()
        slot.ids, slot.rows, slot.distrusted = token_array([]), {}, False

    def save(self, slot: Slot, path: Path) -> int:
        self._leave()
        draft = assemble_slot(slot.ids, *self.kinds) if len(slot.ids) else None
        if draft is None:
            words = np.array([0x67677371, 4, 4, 2**32 - 1, 1, 0, 0, 1, 0], "<u4")
            path.write_bytes(words.tobytes())
            return 0
        for name, view in planes_of(self.engine.layout.groups, draft.k, draft.v).items():
            view[...] = slot.rows[name]
        buffer = draft.buffer
        if self.options.reversed_cells:
            _reverse(buffer, draft)
        buffer[4:8] = np.frombuffer(self.options.slot_version.to_bytes(4, "little"), np.uint8)
        if self.options.spoil == "nan":
            draft.v[-1][-1] = 0x7E00
        if self.options.spoil == "ids":
            buffer[24:28] = 9
        if len(self.kinds) > 1:
            buffer = self._masked(slot, buffer)
        tail = np.arange(40, dtype=np.uint8) if self.options.spoil == "tail" else buffer[:0]
        path.write_bytes(np.concatenate([buffer, tail]).tobytes())
        return len(slot.ids)

    def _masked(self, slot: Slot, buffer: Any) -> Any:
        """The same file with the last window of the windowed layers, as llama.cpp writes it."""
        tokens, window = len(slot.ids), self.engine.memory.window
        lost = self.options.lose if tokens > self.options.lose else 0
        first = max(0, tokens - window, lost)
        cells = [KvCells(tokens), KvCells(tokens - first, first)]
        memory = assemble_memory(self.kinds, cells, tokens)
        names = iter(self.engine.layout.groups)
        for part, start in zip(memory.parts, (0, first), strict=True):
            group = next(names)
            for name, view in planes_of([group], *part).items():
                view[...] = slot.rows[name][:, start:]
        return np.concatenate([buffer[: 12 + 4 * (4 + tokens)], memory.buffer[8:]])

    def restore(self, slot: Slot, path: Path) -> int:
        self._leave()
        if not path.is_file() or self.options.refuse_restore:
            raise Refused(400, "Unable to restore slot: No available space in KV cache")
        try:
            found = parse_slot(memoryview(path.read_bytes()))
        except Damaged as error:
            if "cut" in error.what:
                os._exit(ABORTED)
            raise Refused(400, f"Unable to restore slot: {error.what}") from error
        except KvsnapError as error:
            raise Refused(400, f"Unable to restore slot: {error.what}") from error
        if [kind.layers for kind in found.kinds] != [kind.layers for kind in self.kinds]:
            raise Refused(400, "Unable to restore slot: other layers")
        others = sum(len(one.ids) for one in self.slots if one is not slot)
        if self.options.unified and others + len(found.token_ids) > self.options.ctx:
            raise Refused(400, "Unable to restore slot: No available space in KV cache")
        slot.ids = found.token_ids.copy()
        slot.rows = dict(
            SlotRows(self.engine.layout, found, len(slot.ids)).export(0, len(slot.ids))
        )
        slot.distrusted = self.options.ignore_restore
        return len(slot.ids)

    def prompt_of(self, fields: dict[str, Any]) -> str:
        messages = fields["messages"]
        if fields.get("tools"):
            messages = [{"role": "system", "content": json.dumps(fields["tools"])}, *messages]
        if "chat_template_kwargs" in fields:
            extra = json.dumps(fields["chat_template_kwargs"])
            messages = [{"role": "system", "content": extra}, *messages]
        parts = []
        for message in messages:
            content = message.get("content") or ""
            if isinstance(content, list):
                content = "".join(part["text"] for part in content)
            parts.append(f"<|im_start|>{message['role']}\n{content}<|im_end|>\n")
        return "".join(parts) + "<|im_start|>assistant\n"

    def tokenize(self, content: Any) -> list[int]:
        if isinstance(content, str):
            return self.engine.tokenize(content, first=True).tolist()
        found: list[int] = []
        for number, part in enumerate(content):
            if isinstance(part, int):
                found.append(part)
            else:
                found += self.engine.tokenize(part, first=number == 0).tolist()
        return found

    def pick(self, wanted: int) -> Slot | None:
        if wanted >= 0:
            slot = self.slots[wanted % len(self.slots)]
            return None if slot.busy else slot
        free = [slot for slot in self.slots if not slot.busy]
        return min(free, key=lambda slot: (len(slot.ids) > 0, slot.task or 0)) if free else None

    async def begin(self, wanted: int) -> Slot:
        async with self.idle:
            while (slot := self.pick(wanted)) is None:
                await self.idle.wait()
            slot.busy = True
        self.tasks += 1
        slot.task = self.tasks
        if self.options.clear_idle:
            async with self.computing:
                for other in self.slots:
                    if not other.busy:
                        self.clear(other)
        return slot

    async def end(self, slot: Slot) -> None:
        async with self.idle:
            slot.busy = False
            self.idle.notify_all()

    async def run(
        self, slot: Slot, ids: list[int], fields: dict[str, Any], timings: dict[str, Any]
    ):
        """Tokens as they are sampled, greedily; `timings` is filled at the end."""
        prompt = token_array(ids)
        if len(ids) >= self.options.ctx:
            raise Refused(400, "request exceeds the available context size")
        most = next(
            (
                fields[n]
                for n in ("n_predict", "max_tokens", "max_completion_tokens")
                if n in fields
            ),
            16,
        )
        async with self.computing:
            await asyncio.to_thread(self._enter, slot)
            held = common_prefix(self.engine.token_ids(), prompt)
            if fields.get("cache_prompt") is False or slot.distrusted:
                held = 0
            slot.distrusted = False
            held = min(held, len(ids) - 1)
            self.engine.truncate(held)
            begun = time.perf_counter()
            for start in range(held, len(ids), 32):
                await asyncio.to_thread(self.engine.evaluate, prompt[start : start + 32])
                await asyncio.sleep(self.options.prompt_seconds * len(prompt[start : start + 32]))
            prompted = time.perf_counter()
            timings |= {
                "cache_n": held,
                "prompt_n": len(ids) - held,
                "prompt_ms": (prompted - begun) * 1000,
            }
        vocabulary = llama_cpp.llama_model_get_vocab(self.llm.model)
        count = 0
        while count < max(1, most):
            async with self.computing:
                if self.loaded is not slot:  # another one computed meanwhile: logits are gone
                    await asyncio.to_thread(self._enter, slot)
                    last = self.engine.token_ids()[-1:]
                    self.engine.truncate(len(self.engine.token_ids()) - 1)
                    await asyncio.to_thread(self.engine.evaluate, last)
                token = int(self.llm.sample(temp=0.0))
                count += 1
                ended = llama_cpp.llama_vocab_is_eog(vocabulary, token)
                if not ended and count < max(1, most):
                    await asyncio.to_thread(self.engine.evaluate, token_array([token]))
            timings |= {"predicted_n": count, "predicted_ms": 0.0}
            if most:
                yield "" if ended else self.engine.detokenize([token]).decode("utf-8", "replace")
            if self.options.token_seconds:
                await asyncio.sleep(self.options.token_seconds)
            if ended:
                return


def _reverse(buffer: Any, draft: Any) -> None:
    """The same state with its cells from the last to the first, as a shared cache may have them."""
    tokens = len(draft.k[0])
    start = 12 + 4 * (4 + tokens) + 8
    cells = buffer[start : start + 12 * tokens].view("<i4").reshape(tokens, 3)
    cells[...] = cells[::-1].copy()
    for array in (*draft.k, *draft.v):
        array[...] = array[::-1].copy()


def application(options: argparse.Namespace) -> Starlette:
    server = Server(options)

    def refused(status: int, message: str) -> Response:
        return JSONResponse({"error": {"code": status, "message": message}}, status)

    def guarded(handler: Any) -> Any:
        async def handle(request: Request) -> Response:
            key = options.api_key
            if key and request.headers.get("authorization") != f"Bearer {key}":
                return refused(401, "Invalid API Key")
            try:
                return await handler(request)
            except Refused as error:
                return refused(error.status, str(error))
            except (KeyError, ValueError, TypeError) as error:
                return refused(400, repr(error))

        return handle

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def props(request: Request) -> Response:
        return JSONResponse(
            {
                "default_generation_settings": {"n_ctx": options.ctx},
                "total_slots": options.slots,
                "model_path": options.model,
                "media_marker": server.marker,
                "modalities": {"vision": False, "audio": False},
            }
        )

    async def slots(request: Request) -> Response:
        found = []
        for slot in server.slots:
            tokens = server.engine.token_ids() if slot is server.loaded else slot.ids
            one: dict[str, Any] = {"id": slot.number, "is_processing": slot.busy}
            if slot.task is not None:
                one |= {"id_task": slot.task, "n_prompt_tokens": len(tokens)}
            found.append(one)
        return JSONResponse(found)

    async def slot_action(request: Request) -> Response:
        action = request.query_params["action"]
        if not options.slot_save_path:
            return refused(501, "This server does not support slots action.")
        number = int(request.path_params["number"])
        slot = server.slots[number % len(server.slots)]
        async with server.idle:
            while slot.busy:
                await server.idle.wait()
        async with server.computing:
            if action == "erase":
                await asyncio.to_thread(server.clear, slot)
                return JSONResponse({"id_slot": number})
            name = (await request.json())["filename"]
            path = Path(options.slot_save_path) / name
            if action == "save":
                count = await asyncio.to_thread(server.save, slot, path)
                return JSONResponse({"id_slot": number, "filename": name, "n_saved": count})
            if options.keep:
                Path(options.keep, f"{time.monotonic_ns()}.slot").write_bytes(path.read_bytes())
            try:
                count = await asyncio.to_thread(server.restore, slot, path)
            except Refused:
                server.clear(slot)
                raise
            return JSONResponse({"id_slot": number, "filename": name, "n_restored": count})

    async def adapters(request: Request) -> Response:
        if options.lora_scale is None:
            return JSONResponse([])
        return JSONResponse([{"id": 0, "path": "a.gguf", "scale": options.lora_scale}])

    async def apply_template(request: Request) -> Response:
        return JSONResponse({"prompt": server.prompt_of(await request.json())})

    async def tokenize(request: Request) -> Response:
        return JSONResponse({"tokens": server.tokenize((await request.json())["content"])})

    async def echo(request: Request) -> Response:
        return JSONResponse(
            {
                "method": request.method,
                "path": request.url.path,
                "query": request.url.query,
                "body": (await request.body()).decode("latin-1"),
                "headers": {k: v for k, v in request.headers.items() if k.startswith("x-")},
            },
            headers={"x-upstream": "yes"},
        )

    async def seen(request: Request) -> Response:
        return JSONResponse(server.seen)

    def chat_chunk(text: str | None, reason: str | None) -> dict[str, Any]:
        delta = {} if text is None else {"role": "assistant", "content": text}
        return {
            "id": "chatcmpl-0",
            "created": 0,
            "model": "m",
            "object": "chat.completion.chunk",
            "choices": [{"index": 0, "delta": delta, "finish_reason": reason}],
        }

    async def complete(request: Request) -> Response:
        fields = await request.json()
        server.seen.append(fields)
        chat = request.url.path.endswith("chat/completions")
        ids = server.tokenize(server.prompt_of(fields) if chat else fields["prompt"])
        slot = await server.begin(int(fields.get("id_slot", -1)))
        timings: dict[str, Any] = {}
        pieces = server.run(slot, ids, fields, timings)

        async def stream() -> Any:
            try:
                async for piece in pieces:
                    one = chat_chunk(piece, None) if chat else {"content": piece, "stop": False}
                    yield f"data: {json.dumps(one)}\n\n"
                last = chat_chunk(None, "stop") if chat else {"content": "", "stop": True}
                yield f"data: {json.dumps({**last, 'timings': timings})}\n\n"
                if chat:
                    yield "data: [DONE]\n\n"
            finally:
                await server.end(slot)

        if fields.get("stream"):
            if len(ids) >= options.ctx:
                await server.end(slot)
                raise Refused(400, "request exceeds the available context size")
            return StreamingResponse(stream(), media_type="text/event-stream")
        try:
            text = ""
            async for piece in pieces:
                if await request.is_disconnected():
                    break
                text += piece
        finally:
            await server.end(slot)
        usage = {
            "prompt_tokens": len(ids),
            "completion_tokens": timings.get("predicted_n", 0),
            "total_tokens": len(ids) + timings.get("predicted_n", 0),
            "prompt_tokens_details": {"cached_tokens": timings.get("cache_n", 0)},
        }
        message = {"role": "assistant", "content": text}
        if chat:
            choice = {"index": 0, "finish_reason": "stop", "message": message}
            head = {"id": "chatcmpl-0", "created": 0, "object": "chat.completion", "model": "m"}
            return JSONResponse({**head, "choices": [choice], "usage": usage, "timings": timings})
        if request.url.path == "/v1/completions":
            choice = {"index": 0, "finish_reason": "stop", "text": text}
            head = {"id": "cmpl-0", "created": 0, "object": "text_completion", "model": "m"}
            return JSONResponse({**head, "choices": [choice], "usage": usage, "timings": timings})
        return JSONResponse({"content": text, "stop": True, "timings": timings})

    completions = (
        "/v1/chat/completions",
        "/chat/completions",
        "/v1/completions",
        "/completions",
        "/completion",
    )
    routes = [
        Route("/health", health),
        Route("/props", guarded(props)),
        Route("/slots", guarded(slots)),
        Route("/slots/{number}", guarded(slot_action), methods=["POST"]),
        Route("/lora-adapters", guarded(adapters)),
        Route("/apply-template", guarded(apply_template), methods=["POST"]),
        Route("/tokenize", guarded(tokenize), methods=["POST"]),
        *[Route(path, guarded(complete), methods=["POST"]) for path in completions],
        Route("/seen", seen),
        Route("/{rest:path}", echo, methods=["GET", "POST", "PUT", "DELETE"]),
    ]
    return Starlette(routes=routes)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--slot-save-path", default="")
    parser.add_argument("--slots", type=int, default=1)
    parser.add_argument("--ctx", type=int, default=1024)
    parser.add_argument("--marker", help="LLAMA_MEDIA_MARKER: the same one in each process")
    parser.add_argument("--reversed-cells", action="store_true")
    parser.add_argument("--cache-type", default="f16")
    parser.add_argument("--clear-idle", action="store_true")
    parser.add_argument("--unified", action="store_true", help="slots share one cache")
    parser.add_argument("--lose", type=int, default=0, help="windowed rows before that are lost")
    parser.add_argument("--ignore-restore", action="store_true")
    parser.add_argument("--refuse-restore", action="store_true")
    parser.add_argument("--slot-version", type=int, default=4)
    parser.add_argument("--spoil", choices=["nan", "ids", "tail"])
    parser.add_argument("--rope-freq-base", type=float, default=0.0)
    parser.add_argument("--lora-scale", type=float)
    parser.add_argument("--api-key")
    parser.add_argument("--keep")
    # A model of a few layers is faster than any restore, and nothing would be restored.
    parser.add_argument("--prompt-seconds", type=float, default=0.001)
    parser.add_argument("--token-seconds", type=float, default=0.0)
    options = parser.parse_args()
    uvicorn.run(application(options), port=options.port, log_level="error")


if __name__ == "__main__":
    main()
