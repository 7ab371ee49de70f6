"""Session: a conversation in an engine, resumed from a store and saved to it.

resume: tokens → names → index → files → rows → engine
save:   engine → rows → blocks → files → index → session file
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

from kvsnap.engines.base import Engine
from kvsnap.formats.codecs import Codec, chosen_codec, get_codec
from kvsnap.formats.errors import (
    Damaged,
    DoesNotFit,
    NotFound,
    StoreError,
    StoreFull,
    Unsupported,
    UsageError,
)
from kvsnap.formats.identity import EXACT, Root
from kvsnap.formats.names import TokenIds, chain_names, common_prefix, token_array
from kvsnap.formats.session import SessionFile, SessionRecord, plain_notes
from kvsnap.formats.session_name import check_session_name
from kvsnap.formats.tenant import Tenant, tenant_id
from kvsnap.kvstore import events
from kvsnap.kvstore.background import Background
from kvsnap.kvstore.branch import branch_session
from kvsnap.kvstore.chain_reader import ChainReader
from kvsnap.kvstore.chain_writer import STATES_AT_ONCE, ChainWriter
from kvsnap.kvstore.fidelity import codec_of_held, refuse_other_fidelity, set_apart, usable_tokens
from kvsnap.kvstore.reports import ResumeReport, SaveReport
from kvsnap.kvstore.retry import try_again
from kvsnap.kvstore.saving import Saving
from kvsnap.kvstore.session_codec import SessionCodec
from kvsnap.kvstore.session_file import no_session
from kvsnap.kvstore.session_report import stopped_by
from kvsnap.kvstore.session_version import NextVersion
from kvsnap.kvstore.sessions import Version
from kvsnap.kvstore.store import Store
from kvsnap.kvstore.wanted import Wanted
from kvsnap.kvstore.whose_engine import (
    alone,
    claim,
    holds_another_tenants,
    refuse_another_conversation,
)


class Session:
    """A conversation; without a name its blocks are saved but no session file.

    The engine is the caller's: generate with it as ever. Reuse is exact by construction: rows are
    found under a name that covers model, settings, tenant and every token id before them.

    Any thread may call: calls on one engine wait for each other. To generate is not such a call:
    keep a turn (resume, generate, save) together. As a context manager it is closed at the end.
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
        store.keys.add(tenant)
        self.layout = engine.layout
        if not self.layout.in_blocks.can_cut:
            raise Unsupported("engines whose rows are whole pages are not handled yet")
        self._problems: list[str] = []
        self.stored: SessionFile | None = None
        self._version: Version = (0, "")
        self._background = Background()
        self._published: list[SessionFile] = []
        self._load()
        identity = engine.identity(store.block_size, store.file_digest)
        self._coding = SessionCodec(store, identity, self.layout, tenant, allow_lossy)
        self._reader = ChainReader(store, engine)
        self._asked: TokenIds | None = None
        own = self._coding.own_of(self.stored and self.stored.record, self._problems)
        self.store_by(chosen_codec(codec) if codec is not None else own)

    def store_by(self, codec: Codec) -> None:
        """From now on blocks are stored by this codec, under the root of its fidelity. Raises
        `NotFound` or `Unsupported` where its calibration is not here, or it cannot code these rows."""
        self._coding.use(codec)
        self._writer = ChainWriter(self.store, self.engine, self.root, self.codec)

    @property
    def codec(self) -> Codec:
        return self._coding.codec

    @property
    def root(self) -> Root:
        """Of the blocks that are stored; see `roots`."""
        return self._coding.root

    @property
    def weights(self) -> str:
        """Digest of the engine's weights."""
        return self._coding.weights

    def stored_token_ids(self) -> TokenIds:
        """The ids that the session was saved with; raises `NotFound` where it was not."""
        if self.stored is None:
            if self._problems:
                raise NotFound(f"session {self.name!r} cannot be read", self._problems[0])
            raise no_session(str(self.name))
        return self.stored.record.token_ids

    def same_weights(self, record: SessionRecord) -> bool:
        """Whether a session was saved with the weights that the engine has now."""
        return self._coding.same_weights(record)

    def replaces_another(self, token_ids: TokenIds) -> bool:
        """Whether saving these ids would drop stored ones that they do not go on from."""
        stored = self.stored.record.token_ids if self.stored is not None else token_array([])
        return common_prefix(stored, token_ids) < len(stored)

    @alone
    @events.counts_resume
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
        if holds_another_tenants(self.engine, self.tenant_id):
            held = 0
        there = codec_of_held(self.engine, held)
        if self._coding.allow_lossy and not self.codec.lossy and there is not None:
            self.store_by(there)
        held = self.engine.reach(usable_tokens(self.engine, held, self.root))
        set_apart(self.engine, self.root, ids)
        self.engine.truncate(held)
        self._asked = ids
        self.engine.holder = (self.tenant_id, self.name)
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
        own = self.stored.record if self.stored else None
        return ResumeReport(
            prompt_tokens=len(ids),
            reused_tokens=reused,
            from_store=reused - min(held, reused),
            stopped_by=stopped_by(self.store, self.root, self.tenant, ids, leave, found, own),
            damage=tuple(found.damage),
            fidelity=self.engine.held_fidelity(),
        )

    @alone
    def truncate(self, tokens: int) -> ResumeReport:
        """Go back to the first `tokens` tokens that the engine holds; the next save stores those.

        Models that cannot be cut at any position may hold fewer afterwards: the report says how
        many there are to compute again.
        """
        self._refuse_another_conversation()
        held = self.engine.token_ids()
        if not 0 <= tokens <= len(held):
            raise UsageError(
                f"the engine holds {len(held)} tokens, not {tokens}", "truncate within them"
            )
        return self.resume(held[:tokens], leave=0)

    @alone
    def branch(
        self, new_name: str, tokens: int | None = None, *, notes: Mapping[str, Any] | None = None
    ) -> Session:
        """A new session of the first `tokens` tokens that this one was saved with (None: of all),
        stored when this returns. No block is written, and nothing computed.

        `notes` are the new one's; without them it takes over this one's, if it takes all tokens.
        Raises as `branch_session` does, and `NotFound` where this session was never saved.
        """
        self.flush()
        self.stored_token_ids()
        assert self.stored is not None
        branch_session(self.store, self.stored, new_name, tokens, notes=notes, tenant=self.tenant)
        lossy = self._coding.allow_lossy
        return Session(self.store, self.engine, new_name, tenant=self.tenant, allow_lossy=lossy)

    def roots(self) -> list[Root]:
        """Whose blocks may be restored, the better ones first."""
        return self._coding.roots()

    def has_lossy_only(self, report: ResumeReport) -> bool:
        """Whether a resume found nothing because what is stored is lossy, and that was not
        allowed."""
        return self._coding.has_lossy_only(report)

    @alone
    @events.counts_save("blocks")
    def put_filled(self) -> None:
        """Store the filled blocks that the engine holds and the store lacks; no session file.

        Called between batches of a long prefill it makes an interruption cost one batch. State
        checkpoints that wait are stored as well.
        """

        self.store.check_tenant(self.tenant_id)
        self.engine.check_held()
        claim(self.engine, self.tenant_id)
        refuse_other_fidelity(self.engine, self.root)

        def put() -> None:
            with self.store.holds.lease() as lease:
                wanted = self._writer.chain()
                self._writer.put(wanted, lease)
                self._writer.put_states(self._writer.waiting_on(wanted), lease)
            if self.store.behind is not None and self.name is None:
                names = [block.name for block in wanted]
                self.store.behind.send_chain(self.tenant_id, names)

        try_again(put)

    @alone
    def checkpoint(self) -> None:
        """Keep the state where the engine stands, so that a conversation can go on from here.

        For models that cannot be cut at any position (sliding windows, recurrent layers); others
        need none, and nothing happens. It is stored by the next `put_filled` or `save`, which adds
        one where it finds the engine.
        """
        state = self._writer.take_state()
        if state is not None:
            self._writer.waiting.append(state)
            if len(self._writer.waiting) >= STATES_AT_ONCE:
                try:
                    self.put_filled()
                except StoreFull:  # the deepest is taken once more by the save
                    self._writer.waiting.clear()
                    raise

    @alone
    def save(self, notes: Mapping[str, Any] | None = None, *, pinned: bool = False) -> SaveReport:
        """Store what the engine holds; when this returns it survives a power cut.

        Raises `SessionMoved` (after storing it under another name, which is this session's from
        then on) where somebody saved it meanwhile, `NotAllStored` (after storing it with the blocks
        that fit) where the store is full, `StoreError`s where the disk does not take it: blocks
        written until then are kept and found by the next save.

        What went wrong with a `save_soon` before it is raised first, and nothing is saved.
        """
        self.flush()

        def save() -> SaveReport:
            with self.store.holds.lease() as lease:
                return self._saving(notes, pinned).write(lease)

        return try_again(save)

    @alone
    def save_soon(self, notes: Mapping[str, Any] | None = None, *, pinned: bool = False) -> None:
        """As `save`, but the writing is left to a thread: when this returns, the rows are out of
        the engine, and nothing is sure yet. `flush` waits until it is.

        A save in progress is waited for; what went wrong with that is raised, and nothing is saved.
        `stored` is the version before until then. At most `MOST_BLOCKS` blocks wait in memory; of
        more, the first are written before this returns.
        """
        self.flush()
        hold = self._published.append
        self._background.start(self.store, lambda: self._saving(notes, pinned), hold)

    @alone
    def flush(self) -> SaveReport | None:
        """Wait for the save that `save_soon` left to a thread: its report, None where there is
        none. What went wrong is raised here as by `save`, or by the next save, and only once."""
        try:
            return self._background.finish()
        finally:
            if self._published:
                self._hold(self._published[-1])
                self._published.clear()

    def close(self) -> None:
        """`flush`, and end the thread. Before the store is closed."""
        try:
            self.flush()
        finally:
            self._background.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self.close()
        except Exception as problem:
            if error is None:
                raise
            error.add_note(f"the session's last save failed as well: {problem}")

    def _saving(self, notes: Mapping[str, Any] | None, pinned: bool) -> Saving:
        """What the engine holds, to be stored as the session's next version."""
        self.store.check_tenant(self.tenant_id)
        self.engine.check_held()
        if self.name is not None:
            self._refuse_another_conversation()
            self.engine.holder = (self.tenant_id, self.name)
        claim(self.engine, self.tenant_id)
        refuse_other_fidelity(self.engine, self.root)
        wanted, tokens = self._writer.chain(), len(self.engine.token_ids())
        last = self._writer.take_state()
        states = [*self._writer.waiting_on(wanted), *([last] if last else ())]
        state = last.wanted.name if last else b""
        new = self._next_version(self.name, wanted, state, notes) if self.name is not None else None
        return Saving(self.store, self._writer, wanted, tokens, new, pinned, self._hold, states)

    def _next_version(
        self, name: str, chain: Sequence[Wanted], state: bytes, notes: Mapping[str, Any] | None
    ) -> NextVersion:
        ids, size = self.engine.token_ids(), self.store.block_size
        start = len(chain) * size
        record = SessionRecord(
            name=name,
            tenant_id=self.tenant_id,
            root_id=self.root.root_id,
            identity=self.root.identity,
            fidelity=self.root.fidelity,
            block_size=size,
            revision=self._version[0] + 1,
            token_ids=ids,
            chain=tuple(block.name for block in chain),
            state=state,
            notes=plain_notes(notes or {}),  # the caller may change them while they are written
        )
        tail = self.engine.export(start, len(ids)) if start < len(ids) and not state else {}
        return NextVersion(record, self._coding.of_tail, self.layout, tail, self._version)

    def _refuse_another_conversation(self) -> None:
        if self.name is None:
            return
        own = self._asked
        if own is None and self.stored is not None:
            own = self.stored.record.token_ids
        refuse_another_conversation(self.engine, self.tenant_id, self.name, own)

    def _hold(self, stored: SessionFile) -> None:
        """This is the session's file from now on: its tail to restore, its version to go on from."""
        if self.engine.holder == (self.tenant_id, self.name):
            self.engine.holder = (self.tenant_id, stored.record.name)
        self.name = stored.record.name
        self.stored, self._problems = stored, []
        self._version = (stored.record.revision, stored.file_digest)

    def _load(self) -> None:
        if self.name is None:
            return
        try:
            self._hold(self.store.find_session(self.name, self.tenant))
        except NotFound:
            pass
        except (Damaged, StoreError) as error:
            self._problems.append(error.what)
