"""A disk cache for llama-cpp-python: `llm.set_cache(kvsnap.LlamaCache(store, llm))`.

Before a completion the library asks `cache[prompt]`; after it, it sets
`cache[prompt + completion] = llm.save_state()` (Llama._create_completion of 0.3.36). What is stored
is what the engine holds, never that key: the last token was sampled, but no KV of it exists.
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import llama_cpp
import numpy as np
from llama_cpp.llama_cache import BaseLlamaCache

from kvsnap.engines.llama_cache_hooks import HeldState, LlamaHooks, hooks_of
from kvsnap.engines.llama_cache_tenant import TenantOf, Tenants
from kvsnap.engines.llamacpp import LlamaCpp
from kvsnap.formats.errors import EngineError, KvsnapError, UsageError
from kvsnap.formats.names import TokenIds, common_prefix, token_array
from kvsnap.formats.tenant import Tenant, tenant_id
from kvsnap.kvstore.explain.dry_match import dry_match
from kvsnap.kvstore.reports import ResumeReport, SaveReport
from kvsnap.kvstore.session import Session
from kvsnap.kvstore.store import Store
from kvsnap.kvstore.whose_engine import holds_another_tenants

logger = logging.getLogger("kvsnap")


class LlamaCache(BaseLlamaCache):  # type: ignore[misc]
    """Keeps what one Llama computed in a store, and puts stored prefixes back into it.

    Restored is only what the store has beyond the live context. Kept are filled blocks: a restart
    costs the tokens after the last one, fewer than a block. They are on the disk's way when a
    completion ends, and safe from a power cut after `save`. A completion that did not come to its
    end (a stream that was dropped, an exception) is stored when the next one would overwrite it.

    Nothing that goes wrong with the store stops a completion: it is logged once as a warning, to
    the logger `kvsnap`, and again after it went well in between.

    With a callback for `tenant` it is asked once a request, in the thread that serves it: a server of
    many tenants answers for each, and None where nothing is to be kept. When the tenant changes the
    live context is let go of: that a prompt is there at once would tell that somebody else asked it.

    Like its Llama, not for several threads at once. Any number of caches may share one store.
    """

    report: ResumeReport
    """Of the last completion's prompt: what was reused, and why no more."""

    def __init__(
        self,
        store: Store,
        llm: llama_cpp.Llama,
        *,
        tenant: Tenant | TenantOf | None = None,
        codec: str | None = None,
    ) -> None:
        """`codec` as in `Session`. Reads the model's file once, for its digest. Raises
        `Unsupported` for models that the adapter refuses, and `UsageError` for a callback's tenants in
        a store that is not encrypted."""
        if not isinstance(llm, llama_cpp.Llama):
            raise UsageError(
                "a LlamaCache needs its Llama: token ids do not tell models apart",
                "llm.set_cache(kvsnap.LlamaCache(store, llm))",
            )
        if not isinstance(store, Store):
            raise UsageError(
                f"a LlamaCache keeps things in a Store, not in a {type(store).__name__}",
                "kvsnap.LlamaCache(kvsnap.Store(path), llm)",
            )
        super().__init__(store.budget.capacity or sys.maxsize)
        self.store = store
        self._tenants, self._codec = Tenants(tenant), codec
        if self._tenants.several and not store.encrypt:
            raise UsageError(
                "a store that tenants share must be encrypted: each could read the others' files",
                "kvsnap.Store(path, encrypt=True)",
            )
        self._engine = _WeaklyHeld(llm)
        self.hooks: LlamaHooks = hooks_of(llm)
        self._failing: set[str] = set()
        self._tried = token_array([])
        self._session = self._new_session()
        self._nothing_reused((), "no prompt was looked up")

    @property
    def cache_size(self) -> int:
        """Bytes of all files in the store, other models' included: what its capacity counts."""
        return self.store.space.used()

    def __getitem__(self, key: Sequence[int]) -> HeldState:
        """Put the longest stored prefix of `key` into the Llama, where the store has more of it
        than the live context. The result says what the Llama holds now; `KeyError` is nothing."""
        if not self._turn_to_tenant():
            self._nothing_reused(key, "the look-up failed: see the log")
            raise KeyError(self.report.stopped_by)
        if self.hooks.whole_prompt:
            self._nothing_reused(key, "log probabilities of the whole prompt were asked for")
            raise KeyError(self.report.stopped_by)
        self._nothing_reused(key, "the look-up failed: see the log")
        found = self._try("look up a prompt", lambda: self._look_up(key))
        if found and self._engine.layout.needs_state:
            self._try("take state checkpoints", lambda: self._compute_to_checkpoints(key))
        if not self.report.reused_tokens:
            raise KeyError(self.report.stopped_by)
        return HeldState(self.hooks, self._engine.token_ids())

    def __contains__(self, key: Sequence[int]) -> bool:
        """Whether the live context or the store has a prefix of `key`; nothing is restored."""
        ids, (tenant, known) = token_array(key), self._tenants.ask()
        if not known:
            return False
        held = self._engine.token_ids() if self._is_served(tenant, known) else token_array([])
        if common_prefix(held, ids):
            return True
        return dry_match(self._session_of(tenant), ids).tokens > 0

    def __setitem__(self, key: Sequence[int], value: Any) -> None:
        """Store the filled blocks that the Llama holds. `value` must be its state, as `save_state`
        gives it; raises `UsageError` for another one's, or one of an earlier moment."""
        if not self.hooks.is_of_now(value):
            raise UsageError(
                "this state is not what the Llama of this LlamaCache holds",
                "make a LlamaCache for each Llama, and give it no states by hand",
            )
        if self._tenants.known:
            self._try("store a completion", self._store)

    def save(self) -> SaveReport:
        """Store the filled blocks that the Llama holds now; when this returns they survive a power
        cut. Raises what `Session.save` raises. For those who drop streams, before they end."""
        self._refuse_foreign_rows()
        return self._session.save()

    def load(self, state: HeldState) -> None:
        """`llm.load_state` for a state of this cache: what is stored of it is restored."""
        self._refuse_unknown_tenant()
        self._resume(token_array(state.input_ids), leave=0)

    def _nothing_reused(self, key: Sequence[int], why: str) -> None:
        self.report = ResumeReport(
            prompt_tokens=len(key), reused_tokens=0, from_store=0, stopped_by=why
        )

    def _new_session(self) -> Session:
        """For each prompt (0.3 ms): it notices a model file that changed under the engine."""
        return self._session_of(self._tenants.now)

    def _session_of(self, tenant: Tenant | None) -> Session:
        return Session(self.store, self._engine, tenant=tenant, codec=self._codec)

    def _open_session(self, tenant: Tenant | None) -> None:
        self._session = self._session_of(tenant)

    def _is_served(self, tenant: Tenant | None, known: bool) -> bool:
        """Whether the context is of this very tenant."""
        same = known and self._tenants.known and tenant == self._tenants.now
        return same and not holds_another_tenants(self._engine, tenant_id(tenant))

    def _turn_to_tenant(self) -> bool:
        """Begin a request; whether it can be served from its tenant's blocks. What the context holds of
        another one is stored for that one and let go of, before anything of it can be reused: also by
        the library, which goes on from the context where nothing is found here."""
        tenant, known = self._tenants.ask()
        if not self._is_served(tenant, known):
            if self._is_served(self._tenants.now, True):
                self._try("look up a prompt", lambda: self._store_untried(token_array([])))
            self._engine.truncate(0)
            self._tried = token_array([])
            known = known and self._try("look up a prompt", lambda: self._open_session(tenant))
            self._engine.holder = (tenant_id(tenant) if known else "", None)
            self._tenants.turn_to(tenant, known)
        return known

    def _look_up(self, key: Sequence[int]) -> None:
        self._store_untried(token_array(key))
        self._resume(key, leave=1)

    def _store_untried(self, kept: TokenIds) -> None:
        """What is overwritten, all but the front that is `kept`, and nobody tried to store is stored
        before: of a completion that did not come to its end. In the common case there is none."""
        held, size = self._engine.token_ids(), self.store.block_size
        filled = len(held) // size * size
        if max(common_prefix(held, kept), common_prefix(held, self._tried)) < filled:
            self._try("store a completion", self._store)

    def _resume(self, token_ids: Sequence[int] | TokenIds, leave: int) -> None:
        ids, llm = token_array(token_ids), self._engine.llm
        # A prompt that the context holds as a whole, with its logits, is sampled from at once.
        ready = np.array_equal(ids, self._engine.token_ids()) and not llm._requires_eval
        self._session = self._new_session()
        try:
            report = self._session.resume(ids, leave=0 if ready else leave)
        except BaseException:
            self.hooks.restored = True  # perhaps
            raise
        self.report = report
        self.hooks.restored |= report.from_store > 0
        for damage in report.damage:
            logger.warning("kvsnap: computed instead of reused: %s", damage)
        logger.info(
            "kvsnap: %d of %d prompt tokens reused, %d of them from the store: %s",
            report.reused_tokens,
            report.prompt_tokens,
            report.from_store,
            report.stopped_by,
        )

    def _compute_to_checkpoints(self, key: Sequence[int]) -> None:
        """A model that cannot be cut at any position goes on from states only, and a state exists
        while the engine stands there: so the prompt is computed up to these places at a time. They
        are where its first message ends (other chats share that one), and its last."""
        ids, vocabulary = token_array(key), self._engine.llm._model.vocab
        is_end = [llama_cpp.llama_vocab_is_eog(vocabulary, int(token)) for token in ids[:-1]]
        ends = (np.flatnonzero(is_end) + 1).tolist()
        if not ends:  # no chat: the last block's edge
            ends = [(len(ids) - 1) // self.store.block_size * self.store.block_size]
        for stop in sorted({ends[0], ends[-1]}):
            held = len(self._engine.token_ids())
            if held < stop:
                self._engine.evaluate(ids[held:stop])
                self._session.checkpoint()

    def _store(self) -> None:
        self._refuse_foreign_rows()
        self._tried = self._engine.token_ids()
        self._new_session()  # raises where the model's file changed since the prompt was looked up
        self._session.checkpoint()
        self._session.put_filled()
        self.store.index.write_notes(wait=False)

    def _refuse_unknown_tenant(self) -> None:
        if not self._tenants.known:
            raise UsageError(
                "whose request the Llama serves cannot be told: nothing is stored or restored",
                "look for what the tenant callback did, in the log",
            )

    def _refuse_foreign_rows(self) -> None:
        self._refuse_unknown_tenant()
        if self.hooks.holds_foreign_rows(self._engine.token_ids()):
            raise EngineError(
                "the Llama goes on from a state that it did not save itself: nothing is stored",
                "what such a state was computed with is not known",
            )

    def _try(self, what: str, action: Callable[[], None]) -> bool:
        """Whether it went well. A cache that fails is slower, never an error of the completion."""
        try:
            action()
        except Exception as error:
            known = isinstance(error, KvsnapError)
            logger.log(
                logging.DEBUG if what in self._failing else logging.WARNING,
                "kvsnap: cannot %s: %s%s",
                what,
                error or type(error).__name__,
                f"; {error.hint}" if isinstance(error, KvsnapError) and error.hint else "",
                exc_info=None if known else error,
            )
            self._failing.add(what)
            return False
        self._failing.discard(what)
        return True


class _WeaklyHeld(LlamaCpp):
    """The adapter of a cache that its own Llama holds: in a cycle `del llm` would free the model's
    memory only when the collector comes by."""

    @property
    def llm(self) -> llama_cpp.Llama:
        llm = self._llm()
        if llm is None:
            raise EngineError("the Llama of this LlamaCache is gone", "make a cache for a new one")
        return llm

    @llm.setter
    def llm(self, llm: llama_cpp.Llama) -> None:
        self._llm = weakref.ref(llm)
