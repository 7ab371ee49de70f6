"""transformers through the caller's own model and a `DynamicCache`.

`load` and `save` are for code that calls `generate()` or the model itself; `Transformers` is the
engine under them, for a `Session`. Nothing of the model is changed, and no hook is put into it. So
whoever runs the model on an engine's cache tells the engine which tokens those were: `hold`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from kvsnap.engines.base import Landing, LossyRows
from kvsnap.engines.transformers_batch import one_row, row_of
from kvsnap.engines.transformers_cache import CacheRows
from kvsnap.engines.transformers_check import check_row, check_rows
from kvsnap.engines.transformers_identity import check_model, context_of, identity_of, media_tokens
from kvsnap.engines.transformers_ids import sequence_of
from kvsnap.engines.transformers_layers import make_cache
from kvsnap.engines.transformers_probe import layer_groups, run
from kvsnap.engines.transformers_text import TransformersText
from kvsnap.engines.transformers_weights import version_of
from kvsnap.formats.errors import BadTokenIds, DoesNotFit, EngineError, Unsupported, UsageError
from kvsnap.formats.identity import EXACT, Identity
from kvsnap.formats.layout import Layout, Rows
from kvsnap.formats.names import TokenIds, token_array
from kvsnap.formats.tenant import Tenant
from kvsnap.kvstore.reports import SaveReport
from kvsnap.kvstore.session import Session
from kvsnap.kvstore.store import Store

BATCH = 512
"""Tokens that `evaluate` gives the model at once."""
_ENDLESS = 2**20
"""Tokens that a model may hold whose configuration names no length."""
_TELL = "tell the engine which tokens the cache holds: engine.hold(token_ids)"


class Transformers(TransformersText):
    """Adapter over one model and one cache of one sequence, `engine.cache`.

    `token_ids` are those of a cache that is not empty, at least as many as it holds. A new adapter
    runs two tokens through a model that it has not seen before. Raises `Unsupported` by name for
    caches, layers, weights and models that it does not know, `UsageError` for a cache of a batch.
    """

    def __init__(
        self,
        model: Any,
        cache: DynamicCache | None = None,
        token_ids: Sequence[int] | TokenIds = (),
        *,
        tokenizer: Any = None,
        batch_size: int = BATCH,
        context: int | None = None,
    ) -> None:
        check_model(model)
        self.model, self.tokenizer = model, tokenizer
        self.batch_size = batch_size
        self._rows = CacheRows(model, layer_groups(model))
        self.on_gpu = self._rows.on_gpu
        config = model.config.get_text_config(decoder=True)
        trained = int(getattr(config, "max_position_embeddings", None) or _ENDLESS)
        self._context = min(context or trained, context_of(model) or trained)
        self._media = media_tokens(model)
        self._named: Identity | None = None
        self._for_one_call = False
        self.cache = make_cache(model) if cache is None else cache
        self.hold(token_ids)

    @property
    def layout(self) -> Layout:
        return self._rows.layout

    @property
    def capacity(self) -> int:
        return self._context

    def identity(self, block_size: int, file_digest: Callable[[Path], str]) -> Identity:
        check_model(self.model)
        identity = identity_of(self.model, self.layout, block_size)
        named = replace(identity, block_size=1)
        if self._computed_by is None and len(self._ids) and self._named not in (None, named):
            self._computed_by = self._named
        self._named = named
        return identity

    def hold(self, token_ids: Sequence[int] | TokenIds) -> None:
        """Say which tokens the cache holds, after something else than this engine ran the model on
        it. More ids than it holds are fine: what was sampled last was not evaluated. How many it
        holds is read from the cache itself."""
        ids = token_array(token_ids)
        held = self._rows.tokens(self.cache)
        if held is None:
            raise Unsupported(
                "a cache of recurrent layers only does not say how many tokens it holds",
                "evaluate this model by the engine: Session.resume, engine.evaluate, Session.save",
            )
        if held > len(ids):
            raise UsageError(
                f"the cache holds {held} tokens, and {len(ids)} token ids were given",
                "give the ids of all tokens that the model was run on",
            )
        if self._rows.batch(self.cache) > 1:
            raise UsageError(
                "the cache is that of a batch", "save its rows one by one: save(..., row=0)"
            )
        limit = context_of(self.model)
        if limit is not None and held > limit:
            raise Unsupported(
                f"beyond {limit} tokens this model's RoPE has other factors for all of them",
                "keep sequences of this model shorter",
            )
        self._check(ids[:held])
        self._ids, self._logits = ids[:held].copy(), None
        self._remember()

    def token_ids(self) -> TokenIds:
        """Nothing where the cache was changed and nobody said by which tokens, or by another model."""
        return self._ids.copy() if self._is_ours() else token_array([])

    def check_held(self) -> None:
        self._check_computed_by()
        if not self._is_ours() and self._rows.tensors(self.cache):
            raise UsageError("the cache was changed by something else than the engine", _TELL)
        self._check_named()
        self._computed_by = self._named if len(self._ids) else None

    @property
    def _computed_by(self) -> Identity | None:
        """The model that a cache's rows are known to be of; on the cache, as that is what goes on."""
        return getattr(self.cache, "_kvsnap_model", None)

    @_computed_by.setter
    def _computed_by(self, value: Identity | None) -> None:
        self.cache._kvsnap_model = value

    def _is_of_another_model(self) -> bool:
        return None not in (self._named, self._computed_by) and self._named != self._computed_by

    def _check_computed_by(self) -> None:
        if self._is_of_another_model():
            raise UsageError(
                "the model changed since this cache was loaded: some of its rows are the old one's",
                "load a cache with the model as it is now",
            )

    def _check_named(self) -> None:
        """Reads all weights, so not where the name was given a moment ago."""
        if self._named is None or self._for_one_call:
            return
        if identity_of(self.model, self.layout, 1) != self._named:
            raise UsageError(
                "the model changed since this session was opened: some of its rows are the old one's",
                "open a session on the model as it is now, and let it compute its tokens again",
            )

    def attention_layers(self) -> list[int]:
        """Numbers of the cache's layers that keep keys and values."""
        groups = [group for group in self._rows.groups if group.kind != "linear"]
        return [number for group in groups for number in group.numbers]

    @property
    def holder(self) -> tuple[str, str | None] | None:
        return getattr(self.cache, "_kvsnap_holder", None)

    @holder.setter
    def holder(self, value: tuple[str, str | None] | None) -> None:
        self.cache._kvsnap_holder = value  # adapters come and go; the cache is what is shared

    @property
    def marks(self) -> tuple[LossyRows, ...]:
        return getattr(self.cache, "_kvsnap_marks", ())

    @marks.setter
    def marks(self, value: tuple[LossyRows, ...]) -> None:
        self.cache._kvsnap_marks = value

    def export(self, start: int, stop: int) -> Rows:
        held = len(self.token_ids())
        if not 0 <= start < stop <= held:
            raise UsageError(f"tokens {start}..{stop} of {held} cannot be exported", _TELL)
        return self._rows.export(self.cache, start, stop)

    def export_state(self) -> Rows:
        return self._rows.export_state(self.cache, len(self.token_ids()))

    def reach(self, tokens: int) -> int:
        return self._rows.reach(self.cache, len(self.token_ids()), tokens)

    def landing(self, stop: int, start: int = 0) -> Landing:
        return Landing(start, stop, self._rows.landing(start, stop), None)

    def lossy_landing(self, stop: int, start: int = 0) -> Landing:
        """On the GPU, as far as `CacheRows.device_landing` says."""
        if not self.on_gpu:
            return self.landing(stop, start)
        return Landing(start, stop, self._rows.device_landing(start, stop), None)

    def load(self, landing: Landing, token_ids: TokenIds) -> None:
        start, stop = landing.start, len(token_ids)
        if stop > self.capacity:
            raise DoesNotFit(f"{stop} tokens do not fit a context of {self.capacity}")
        whole = stop == landing.stop or not self.layout.needs_state
        if not (start <= stop <= landing.stop and whole) or start > len(self.token_ids()):
            raise UsageError(f"rows of {start}..{landing.stop} cannot make {stop} tokens")
        self._check_named()
        if stop > start or (stop and self.layout.needs_state):
            try:
                self._rows.put(self.cache, start, landing.rows, stop)
            except RuntimeError as error:  # how torch says that a device has no memory
                raise EngineError(
                    f"the restored rows do not fit the device: {error}", "use a shorter prompt"
                ) from error
        else:
            self.truncate(stop)
        self._ids, self._logits = token_ids.copy(), None
        self._computed_by = self._named
        self._remember()

    def truncate(self, tokens: int) -> None:
        if not self._is_ours():
            tokens = 0  # nobody knows what is in front of a position
        elif tokens >= len(self._ids):
            return
        if self.reach(tokens) != tokens:
            raise UsageError(f"the cache cannot go back to {tokens} of {len(self._ids)} tokens")
        self._rows.cut(self.cache, len(self._ids), tokens)
        self._ids, self._logits = self._ids[:tokens], None
        self._remember()

    def evaluate(
        self, token_ids: TokenIds, step_done: Callable[[int], None] = lambda tokens: None
    ) -> None:
        self._check_computed_by()
        if not self._is_ours():
            raise UsageError("the cache was changed by something else than the engine", _TELL)
        if len(self._ids) + len(token_ids) > self.capacity:
            raise DoesNotFit(
                f"{len(self._ids) + len(token_ids)} tokens do not fit a context of {self.capacity}",
                "make the context larger (--ctx) or the prompt shorter",
            )
        self._check(token_ids)
        for start in range(0, len(token_ids), self.batch_size):
            batch = token_ids[start : start + self.batch_size]
            self._logits = self._forward(batch, logits_to_keep=1)
            step_done(len(batch))

    def _forward(self, token_ids: TokenIds, **more: Any) -> torch.Tensor | None:
        """Logits [tokens, vocabulary] of the next tokens, as many as the model was asked for; None
        where it gives none."""
        held = len(self._ids)
        device = self.model.get_input_embeddings().weight.device
        batch = torch.from_numpy(token_ids.astype(np.int64))[None].to(device)
        try:
            logits = getattr(run(self.model, batch, self.cache, **more), "logits", None)
        except BaseException as error:
            self._go_back(held)
            if isinstance(error, RuntimeError):
                raise EngineError(f"the model could not evaluate: {error}") from error
            raise
        self._ids = np.concatenate([self._ids, token_ids])
        self._remember()
        self.evaluated += len(token_ids)
        return logits[0] if logits is not None else None

    def _go_back(self, held: int) -> None:
        """After a forward that failed between two layers."""
        self._rows.cut(self.cache, held, 0 if self.layout.needs_state else held)
        self._ids = self._ids[: 0 if self.layout.needs_state else held]
        self._logits = None
        self._remember()

    def _check(self, token_ids: TokenIds) -> None:
        if len(token_ids) == 0:
            return
        vocabulary = int(self.model.get_input_embeddings().weight.shape[0])
        if int(token_ids.max()) >= vocabulary:
            raise BadTokenIds(
                f"token id {int(token_ids.max())} is beyond the model's {vocabulary}",
                "give ids as this model's tokenizer gives them",
            )
        if self._media and not self._media.isdisjoint(token_ids.tolist()):
            raise Unsupported(
                "among the tokens are such that stand for media, and ids do not tell images apart",
                "use kvsnap for text only",
            )

    def _remember(self) -> None:
        tensors = self._rows.tensors(self.cache)
        if len(self._ids) == 0:
            self._computed_by = None
        self._seen = [(weakref.ref(tensor), version_of(tensor)) for tensor in tensors]

    def _is_ours(self) -> bool:
        """Whether the cache is as the engine left it: a forward makes new tensors."""
        now = self._rows.tensors(self.cache)
        return (
            len(now) == len(self._seen)
            and not self._is_of_another_model()
            and all(
                ref() is tensor and version == version_of(tensor)
                for tensor, (ref, version) in zip(now, self._seen, strict=True)
            )
        )


def load(
    store: Store,
    model: Any,
    input_ids: Any,
    *,
    tenant: Tenant | None = None,
    codec: str | None = None,
    allow_lossy: bool = False,
    name: str | None = None,
) -> tuple[DynamicCache, int]:
    """(cache, reused tokens): the longest stored prefix of one sequence, for `generate()` or a forward.

    `input_ids`: a list, a tensor [tokens] or [1, tokens], or what a tokenizer returns. At least the
    last token is left to compute. Each call makes a cache of its own. `name`: a stored session, whose
    tail counts, too.
    """
    ids, engine = sequence_of(input_ids), Transformers(model)
    engine._for_one_call = True
    session = Session(store, engine, name, tenant=tenant, codec=codec, allow_lossy=allow_lossy)
    return engine.cache, session.resume(ids).reused_tokens


def save(
    store: Store,
    model: Any,
    cache: DynamicCache,
    token_ids: Any,
    *,
    row: int | None = None,
    attention_mask: Any = None,
    tenant: Tenant | None = None,
    codec: str | None = None,
    name: str | None = None,
    notes: Mapping[str, Any] | None = None,
) -> SaveReport:
    """Store what a cache holds of `token_ids`, which may end with a token that was sampled last.

    Of a batch: `row` of `token_ids` [rows, tokens], with the `attention_mask` that the model was
    given: left padding is taken off, and the row is computed once more to be sure of it, at the cost
    of its prefill. Of a single sequence the first tokens and the positions of the last are, so that
    padding shows that `generate` masked by itself. Raises as `Session.save` does; `Unsupported` for
    caches, layers and models that are not known, and for rows that are not those of the sequence
    alone; `UsageError` where the model changed since the cache was loaded or saved.
    """
    if cache is None:
        raise UsageError("there is no cache to save", "give the DynamicCache that the model filled")
    checked = False
    if row is not None or attention_mask is not None:
        number = 0 if row is None else row
        engine, checked = _of_row(model, cache, token_ids, number, attention_mask)
    else:
        engine = Transformers(model, cache, sequence_of(token_ids))
    engine._for_one_call = True
    held = engine.held_fidelity()
    if codec is None and held != EXACT:
        codec = held
    session = Session(store, engine, name, tenant=tenant, codec=codec)
    if held == EXACT and not checked:
        check_rows(engine)
    report = session.save(notes)
    cache._kvsnap_model = engine.cache._kvsnap_model
    return report


def _of_row(
    model: Any, cache: Any, token_ids: Any, row: int, mask: Any
) -> tuple[Transformers, bool]:
    """An engine over one row, and whether all of it was computed again."""
    rows = CacheRows(model, layer_groups(model))
    ids, padding = row_of(rows.batch(cache), token_ids, row, mask)
    engine = Transformers(model, one_row(rows, cache, row, padding), ids)
    doubtful = padding > 0 or rows.batch(cache) > 1
    if doubtful:
        check_row(engine)
    return engine, doubtful
