"""Session: a conversation in an engine, resumed from a store and saved to it.

resume: tokens → names → index → files → rows → engine
save:   engine → rows → blocks → files → index → session file
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvsnap.engines.base import Engine
from kvsnap.formats.codecs import DEFAULT_CODEC, Codec, get_codec
from kvsnap.formats.errors import (
    Damaged,
    DoesNotFit,
    NotAllStored,
    NotFound,
    PartlyDone,
    StoreError,
    StoreFull,
    Unsupported,
    UsageError,
)
from kvsnap.formats.identity import EXACT, Root, differences, root_of
from kvsnap.formats.layout import Rows
from kvsnap.formats.names import TokenIds, chain_names, common_prefix, token_array
from kvsnap.formats.rowset import check_codec
from kvsnap.formats.session import SessionFile, SessionRecord
from kvsnap.formats.session_name import check_session_name
from kvsnap.formats.tenant import Tenant, tenant_id
from kvsnap.kvstore.blocks import Wanted
from kvsnap.kvstore.chain_reader import ChainReader, Restored
from kvsnap.kvstore.chain_writer import ChainWriter
from kvsnap.kvstore.fidelity import (
    codec_of_held,
    lossy_roots,
    refuse_other_fidelity,
    usable_tokens,
)
from kvsnap.kvstore.holds import Lease
from kvsnap.kvstore.reports import ResumeReport, SaveReport
from kvsnap.kvstore.retry import try_again
from kvsnap.kvstore.session_file import no_session
from kvsnap.kvstore.sessions import Draft, Version
from kvsnap.kvstore.store import Store
from kvsnap.kvstore.why import why_reuse_ended


class Session:
    """A conversation; without a name its blocks are saved but no session file.

    The engine is the caller's: generate with it as ever. Reuse is exact by construction: rows are
    found under a name that covers model, settings, tenant and every token id before them.
    """

    def __init__(
        self,
        store: Store,
        engine: Engine,
        name: str | None = None,
        *,
        tenant: Tenant | None = None,
        codec: str | None = None,
        allow_lossy: bool = False,
    ) -> None:
        """`codec`: as `get_codec` reads it; None is the stored session's own where that is lossy,
        else the default. A lossy one makes this a lossy session: its blocks are stored so, and
        blocks that are stored so may be restored. `allow_lossy` lets an exact session restore what
        is stored with loss only, which makes it a lossy one from then on."""
        if name is not None:
            check_session_name(name)
        self.store, self.engine, self.name = store, engine, name
        self.tenant, self.tenant_id = tenant, tenant_id(tenant)
        self.layout = engine.layout
        if not self.layout.can_cut:
            raise Unsupported("engines whose rows are whole pages are not handled yet")
        self._problems: list[str] = []
        self.stored: SessionFile | None = None
        self._version: Version = (0, "")
        self._load()
        self._identity = engine.identity(store.block_size, store.file_digest)
        self._exact = root_of(self._identity, tenant)
        self._allow_lossy = allow_lossy
        self._reader = ChainReader(store, engine)
        self._asked: TokenIds | None = None
        self.store_by(get_codec(codec) if codec is not None else self._own_codec())

    def store_by(self, codec: Codec) -> None:
        """From now on blocks are stored by this codec, under the root of its fidelity. Raises
        `NotFound` or `Unsupported` where its calibration is not here, or it cannot code these rows."""
        codec = self.store.calibrations.complete(codec, self.weights)
        check_codec(codec, self.layout)
        identity = dataclasses.replace(self._identity, fidelity=codec.fidelity)
        self.codec = codec
        self.root = root_of(identity, self.tenant)
        self._writer = ChainWriter(self.store, self.engine, self.root, codec)

    def _own_codec(self) -> Codec:
        """That of the stored session, where it is lossy and can still be decoded here."""
        if self.stored is not None and self.stored.record.fidelity != EXACT:
            try:
                codec = get_codec(self.stored.record.fidelity)
                if not self.same_weights(self.stored.record):
                    codec = get_codec(codec.id)  # with this model's calibration, if it needs one
                codec = self.store.calibrations.complete(codec, self.weights)
                check_codec(codec, self.layout)
                return codec
            except (NotFound, Unsupported) as error:
                self._problems.append(error.what)
        return get_codec(DEFAULT_CODEC)

    @property
    def _tail_codec(self) -> Codec:
        """A tail is coded with the block that it becomes; until then it stays as the engine has
        it, or its tokens would be quantized twice."""
        return get_codec(DEFAULT_CODEC) if self.codec.lossy else self.codec

    @property
    def weights(self) -> str:
        """Digest of the engine's weights."""
        return self._identity.weights

    def stored_token_ids(self) -> TokenIds:
        """The ids that the session was saved with; raises `NotFound` where it was not."""
        if self.stored is None:
            if self._problems:
                raise NotFound(f"session {self.name!r} cannot be read", self._problems[0])
            raise no_session(str(self.name))
        return self.stored.record.token_ids

    def same_weights(self, record: SessionRecord) -> bool:
        """Whether a session was saved with the weights that the engine has now."""
        changed = differences(record.identity, self._exact.identity)
        return "weights" not in {field for field, _, _ in changed}

    def replaces_another(self, token_ids: TokenIds) -> bool:
        """Whether saving these ids would drop stored ones that they do not go on from."""
        stored = self.stored.record.token_ids if self.stored is not None else token_array([])
        return common_prefix(stored, token_ids) < len(stored)

    def resume(self, token_ids: Sequence[int] | TokenIds, *, leave: int = 1) -> ResumeReport:
        """Put the longest stored prefix of `token_ids` into the engine, in place of what it holds.

        `leave` tokens at the end are left to compute: a restored cache has no logits to sample
        from. What the engine holds already stays bit for bit and is reused first. Damage is never
        an error here: it makes the reuse shorter and stands in the report.
        """
        ids = token_array(token_ids)
        if len(ids) > self.engine.capacity:
            raise DoesNotFit(
                f"the prompt has {len(ids)} tokens, the engine's context {self.engine.capacity}",
                "make the context larger (--ctx) or the prompt shorter",
            )
        limit = max(0, len(ids) - leave)
        held = min(common_prefix(self.engine.token_ids(), ids), limit)
        there = codec_of_held(self.engine, held)
        if self._allow_lossy and not self.codec.lossy and there is not None:
            self.store_by(there)
        held = usable_tokens(self.engine, held, self.root)
        self.engine.truncate(held)
        self._asked = ids
        self.engine.holder = (self.tenant_id, self.name) if self.name is not None else None
        with self.store.holds.lease() as lease:
            found = self._reader.restore(self.roots(), ids, limit, held, lease, self.stored)
            self.stored, reused = found.own, found.tokens
            if self.engine.held_fidelity() not in (EXACT, self.root.fidelity):
                self.store_by(get_codec(self.engine.held_fidelity()))
            whole = ids[: reused // self.store.block_size * self.store.block_size]
            root = found.root or self.root
            names = chain_names(root.key, whole, self.store.block_size)
            deepest = found.deepest or (names[-1] if names else None)
            self.store.index.count_request(deepest, reused, len(ids) - reused)
        found.damage[:0] = self._problems
        return ResumeReport(
            prompt_tokens=len(ids),
            reused_tokens=reused,
            from_store=reused - min(held, reused),
            stopped_by=self._why(ids, leave, found),
            damage=tuple(found.damage),
            fidelity=self.engine.held_fidelity(),
        )

    def roots(self) -> list[Root]:
        """Whose blocks may be restored, the better ones first."""
        if self.codec.lossy:
            return [self._exact, self.root]
        if not self._allow_lossy:
            return [self._exact]
        return [self._exact, *lossy_roots(self.store, self.tenant, self._identity)]

    def has_lossy_only(self, report: ResumeReport) -> bool:
        """Whether a resume found nothing because what is stored is lossy, and that was not
        allowed."""
        fidelity_differs = report.stopped_by.startswith("identity: fidelity is")
        if self.codec.lossy or self._allow_lossy or not fidelity_differs:
            return False
        return bool(lossy_roots(self.store, self.tenant, self._identity))

    def put_filled(self) -> None:
        """Store the filled blocks that the engine holds and the store lacks; no session file.

        Called between batches of a long prefill it makes an interruption cost one batch.
        """

        refuse_other_fidelity(self.engine, self.root)

        def put() -> None:
            with self.store.holds.lease() as lease:
                self._writer.put(self._writer.chain(), lease)

        try_again(put)

    def save(self, notes: Mapping[str, Any] | None = None, *, pinned: bool = False) -> SaveReport:
        """Store what the engine holds; when this returns it survives a power cut.

        Raises `SessionMoved` (after storing it under another name, which is this session's from
        then on) where somebody saved it meanwhile, `NotAllStored` (after storing it with the blocks
        that fit) where the store is full, `StoreError`s where the disk does not take it: blocks
        written until then are kept and found by the next save.
        """

        def save() -> SaveReport:
            with self.store.holds.lease() as lease:
                return self._save(notes, pinned, lease)

        return try_again(save)

    def _save(self, notes: Mapping[str, Any] | None, pinned: bool, lease: Lease) -> SaveReport:
        self._refuse_another_conversation()
        refuse_other_fidelity(self.engine, self.root)
        wanted = self._writer.chain()
        names = [block.name for block in wanted]
        partly = list[PartlyDone]()
        if self.name is None:
            self._writer.put(wanted, lease, check_all=True)
            self.store.sync(names)
            stored = len(names)
        else:
            record, tail = self._record(names, notes)
            with self._draft(record, tail, wanted, lease) as draft:
                stored = self._put_what_fits(wanted, lease, partly)
                self.store.sync(names[:stored])
                written = self.store.sessions.publish(draft, self._version)
            self._saved(written, record, tail, partly)
            if pinned:
                self.store.pins.pin_session(self.tenant_id, self.name)
        self.store.index.write_notes()
        report = SaveReport(
            session=self.name,
            revision=self._version[0],
            tokens=len(self.engine.token_ids()),
            blocks=len(names),
            blocks_stored=stored,
            blocks_written=len(self._writer.written),
            bytes_written=sum(self._writer.written.values()),
            bytes_raw=self._writer.raw,
            codec=self.codec.id,
            fidelity=self.root.fidelity,
        )
        self._writer.start_anew()
        if partly:
            partly[-1].report = report
            raise partly[-1]
        return report

    @contextlib.contextmanager
    def _draft(
        self, record: SessionRecord, tail: Rows, wanted: Sequence[Wanted], lease: Lease
    ) -> Iterator[Draft]:
        """The session's file, written. It takes others' room; only where that is not enough its own
        blocks': they are a cache, the conversation is not."""
        self._writer.lease_stored(wanted, lease)
        with contextlib.ExitStack() as stack:
            drafting = self.store.sessions.draft
            try:
                draft = stack.enter_context(drafting(record, self._tail_codec, self.layout, tail))
            except StoreFull:
                lease.end(wait=True)
                draft = stack.enter_context(drafting(record, self._tail_codec, self.layout, tail))
            yield draft

    def _put_what_fits(
        self, wanted: Sequence[Wanted], lease: Lease, partly: list[PartlyDone]
    ) -> int:
        """How many blocks of the chain are stored. The conversation itself is small: better saved
        with the blocks that fit than lost."""
        try:
            self._writer.put(wanted, lease, check_all=True)
        except StoreFull as full:
            stored = self._writer.stored(wanted)
            partly.append(NotAllStored(stored, len(wanted), full))
            return stored
        return len(wanted)

    def _record(
        self, chain: Sequence[bytes], notes: Mapping[str, Any] | None
    ) -> tuple[SessionRecord, Rows]:
        """The next revision of the session, and the rows of its tail."""
        assert self.name is not None
        ids, size = self.engine.token_ids(), self.store.block_size
        start = len(chain) * size
        record = SessionRecord(
            name=self.name,
            tenant_id=self.tenant_id,
            root_id=self.root.root_id,
            identity=self.root.identity,
            fidelity=self.root.fidelity,
            block_size=size,
            revision=self._version[0] + 1,
            token_ids=ids,
            chain=tuple(chain),
            notes=dict(notes or {}),
        )
        return record, self.engine.export(start, len(ids)) if start < len(ids) else {}

    def _saved(
        self,
        written: SessionFile | None,
        record: SessionRecord,
        tail: Rows,
        partly: list[PartlyDone],
    ) -> None:
        """Go on from what was written, not from what stands there by now: another process may have
        saved after us, and its version must not pass for ours."""
        sessions = self.store.sessions
        if written is None:
            moved = sessions.store_beside(record, self._tail_codec, self.layout, tail)
            self.name, written = moved.stored_as, moved.stored
            partly.append(moved)
            self._hold(written)
        else:
            self._hold(written)
            sessions.sync(record)
        self.engine.holder = (self.tenant_id, self.name or "")

    def _refuse_another_conversation(self) -> None:
        """Two sessions on one engine: none must be stored with the other's tokens, or with none.

        To save a conversation under a further, new name is fine, and so is to go on with one.
        """
        own = self._asked
        if own is None and self.stored is not None:
            own = self.stored.record.token_ids
        held = self.engine.token_ids()
        if own is None or self.name is None:
            return
        if len(own) and not len(held):
            raise UsageError(
                f"the engine holds nothing of session {self.name!r} any more",
                "resume the session before it is saved",
            )
        others = self.engine.holder not in (None, (self.tenant_id, self.name))
        if others and common_prefix(own, held) < len(own):
            raise UsageError(
                f"the engine holds another conversation than session {self.name!r}",
                "resume the session before it is saved, or use an engine for each",
            )

    def _hold(self, stored: SessionFile) -> None:
        """This is the session's file from now on: its tail to restore, its version to go on from."""
        self.stored, self._problems = stored, []
        self._version = (stored.record.revision, stored.file_digest)

    def _load(self) -> None:
        if self.name is None:
            return
        try:
            self._hold(self.store.sessions.load(self.tenant_id, self.name))
        except NotFound:
            pass
        except (Damaged, StoreError) as error:
            self._problems.append(error.what)

    def _why(self, ids: TokenIds, leave: int, found: Restored) -> str:
        if found.tokens == len(ids):
            return "whole prompt"
        if found.tokens == len(ids) - leave:
            return "whole prompt: the last token is always computed"
        if found.damage:
            return f"damaged: {found.damage[-1]}"
        if found.skipped:
            return found.skipped
        record = self.stored.record if self.stored else None
        return why_reuse_ended(self.store, self.root, self.tenant, ids, found.tokens, record)
