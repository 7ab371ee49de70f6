"""Whose rows an upstream's slots hold: found when it is first seen, and again whenever it was restarted.

A server tells the path of its model and nothing of RoPE options, control vectors or its cache's types.
So a short prompt is computed by it, its slot saved, and the rows compared with those that the same
model computes here under the options that the proxy was started with. Only if they are equal within
rounding do slots get an identity; else requests are forwarded as they come.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvsnap.engines.gguf import model_shards
from kvsnap.engines.llamacpp_identity import stamp_of
from kvsnap.engines.llamacpp_load import LoadOptions
from kvsnap.formats.errors import Damaged, KvsnapError, NotFound, Unsupported
from kvsnap.formats.identity import Root, root_of
from kvsnap.formats.interchange.llama_server_slot import SLOT_VERSION, SlotFile, parse_slot
from kvsnap.formats.interchange.llamacpp import StateType
from kvsnap.formats.layout import Layout, Rows
from kvsnap.formats.names import TokenIds, common_prefix
from kvsnap.formats.tenant import Tenant, tenant_id
from kvsnap.kvstore.proxy.measure import Rates
from kvsnap.kvstore.proxy.model import PROBE_TOKENS, RECURRENT, Model, load_model, probe_ids
from kvsnap.kvstore.proxy.rows import SlotLanding, SlotRows
from kvsnap.kvstore.proxy.slot_files import SlotFiles
from kvsnap.kvstore.proxy.upstream import Props, Upstream
from kvsnap.kvstore.proxy.windows import with_rows_from
from kvsnap.kvstore.store import Store

_TRIES = 3
_FIRST = 1
"""A token after the probe; every vocabulary has it."""


@dataclass(frozen=True)
class Attached:
    """An upstream process whose slots can be used."""

    process: str
    root: Root
    layout: Layout
    kinds: tuple[StateType, ...]
    """Of the memories in its slot files."""
    window: int
    """Tokens, of the layers with a sliding window; 0 where there are none."""
    slots: int
    n_ctx: int
    has_adapters: bool


@dataclass(frozen=True)
class Wanted:
    """What the proxy was started with, as far as identities depend on it."""

    model: Path | None
    options: LoadOptions
    tenant: Tenant | None


class Attacher:
    """Looks at upstream processes, and remembers the models that it loaded for that."""

    def __init__(self, upstream: Upstream, store: Store, files: SlotFiles, wanted: Wanted) -> None:
        self._upstream, self._store, self._files, self._wanted = upstream, store, files, wanted
        self._models: dict[object, Model] = {}

    async def attach(self, props: Props, rates: Rates) -> Attached:
        """Raises `KvsnapError` where its slots cannot be used, with what to do. The probe takes an
        idle slot, whose content is lost."""
        path = self._model_path(props)
        adapters = await self._upstream.adapters()
        if any(adapters):
            raise Unsupported(
                "the server applies LoRA adapters, which change what its rows mean",
                "set their scales to 0, or give requests their own",
            )
        number, slot = await self._probed(rates)
        if slot.version != SLOT_VERSION:
            raise Unsupported(
                f"the server writes slot files of sequence version {slot.version}, kvsnap version"
                f" {SLOT_VERSION}",
                "use a llama-server that kvsnap supports, or a newer kvsnap",
            )
        model = await asyncio.to_thread(self._model, path, slot.state.type, props.n_ctx)
        model.refuse(slot.kinds)
        rows = SlotRows(model.layout, slot, PROBE_TOKENS).export(0, PROBE_TOKENS)
        parted = await asyncio.to_thread(model.difference, rows)
        if parted is not None:
            raise Unsupported(
                f"the server computes other rows than this model does here: they differ by {parted}",
                "start the proxy with the server's own --rope-… and --yarn-… options; control vectors"
                " and other weights than --model cannot be served",
            )
        if model.window:
            await self._check_windows(number, model, slot, rows)
        self._store.keys.add(self._wanted.tenant)
        self._store.check_tenant(tenant_id(self._wanted.tenant))
        return Attached(
            process=props.process,
            root=root_of(model.identity, self._wanted.tenant),
            layout=model.layout,
            kinds=slot.kinds,
            window=model.window,
            slots=props.slots,
            n_ctx=props.n_ctx,
            has_adapters=bool(adapters),
        )

    def _model_path(self, props: Props) -> Path:
        path = self._wanted.model or Path(props.model_path)
        if not path.is_file():
            raise NotFound(
                f"the server's model file {path} is not here",
                "run the proxy on the server's machine, and give the file with --model",
            )
        return path.absolute()

    async def _probed(self, rates: Rates) -> tuple[int, SlotFile]:
        """A slot, and its file with the probe that the server computed in it. Somebody's request may
        clear the slot before it is saved: then once more."""
        ids = probe_ids()
        for _ in range(_TRIES):
            now = await self._upstream.slots()
            idle = [one for one in now if not one.busy] or now
            slot = min(idle, key=lambda one: (one.tokens > 0, one.task)).number
            rates.saw_prompt(await self._upstream.evaluate(slot, ids.tolist()))
            try:
                found = await saved_slot(self._upstream, self._files, slot)
            except (Damaged, Unsupported) as error:
                raise _no_use(error) from error
            if common_prefix(found.token_ids, ids) == len(ids):
                found = await self._unmasked(slot, found)
                await self._upstream.slot_action(slot, "erase")
                return slot, found
        raise Damaged(
            "the server's slot does not hold the prompt that it was given",
            "somebody else uses its slots by number: leave them to the proxy",
        )

    async def _unmasked(self, number: int, slot: SlotFile) -> SlotFile:
        """With the rows of windows that are shorter than the probe."""
        if slot.window is None:
            return slot

        async def cut(ids: TokenIds) -> SlotFile:
            await self._upstream.evaluate(number, ids.tolist(), go_on=True)
            return await saved_slot(self._upstream, self._files, number)

        return await with_rows_from(slot, 0, len(slot.window.positions), cut)

    async def _check_windows(self, number: int, model: Model, slot: SlotFile, rows: Rows) -> None:
        """Whether the server goes on from a restored slot of a model with sliding windows: without
        --swa-full it computes the prompt anyhow. Its count of the next prompt tells."""
        ids = probe_ids()
        engine = SlotLanding(model.layout, slot.kinds, ids)
        landing = engine.landing(len(ids))
        for name, array in rows.items():
            landing.rows[name][...] = array
        engine.load(landing, ids)
        assert engine.draft is not None
        for _ in range(_TRIES):
            with self._files.name() as name:
                self._files.write(name, engine.draft.buffer)
                await self._upstream.slot_action(number, "restore", name)
            timings = await self._upstream.evaluate(number, [*ids.tolist(), _FIRST], go_on=True)
            await self._upstream.slot_action(number, "erase")
            if timings.get("cache_n") == len(ids):
                return
        raise Unsupported(
            "this model has sliding windows, and the server does not go on from a slot that is restored:"
            " requests are forwarded as they come",
            "start llama-server with --swa-full",
        )

    def _model(self, path: Path, kind: StateType, n_ctx: int) -> Model:
        """In a thread: load it, unless that was done for these files."""
        stamps = tuple((part, stamp_of(part)) for part in model_shards(path))
        key = (stamps, kind.layers, kind.v_trans, n_ctx)
        if key not in self._models:
            digest, size = self._store.file_digest, self._store.block_size
            self._models.clear()  # its probe is a megabyte or more
            self._models[key] = load_model(path, self._wanted.options, kind, n_ctx, size, digest)
        return self._models[key]


async def saved_slot(
    upstream: Upstream, files: SlotFiles, slot: int, auth: Mapping[str, str] | None = None
) -> SlotFile:
    """Have the server save a slot, and read that; no file is left. Raises `KvsnapError`."""
    with files.name() as name:
        await upstream.slot_action(slot, "save", name, auth)
        return await asyncio.to_thread(_parsed, files, name)


def _no_use(error: KvsnapError) -> Unsupported:
    """Why the slots of this model or server cannot be used. Nothing in a slot file says that a recurrent
    memory is in it: it is read as K and V, and found to be none."""
    if isinstance(error, Unsupported) and "sliding-window" not in error.what:
        return error
    hint = "kvsnap save and kvsnap.llama_server handle models with recurrent layers"
    return Unsupported(f"{RECURRENT} ({error.what})", hint)


def _parsed(files: SlotFiles, name: str) -> SlotFile:
    try:
        buffer = files.read(name)
    except FileNotFoundError as error:
        raise NotFound(
            f"the server did not save its slot in {files.folder}",
            "give the folder of the server's --slot-save-path with --slot-dir",
        ) from error
    except OSError as error:
        raise KvsnapError(
            f"the server's slot file cannot be read: {error.strerror}",
            "run server and proxy as the same user",
        ) from error
    return parse_slot(buffer)
