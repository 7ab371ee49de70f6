"""The methods of one Llama that a `LlamaCache` stands in for, and when.

The library saves by `save_state`, which copies the whole context and its logits (512 rows of a
vocabulary of 128k: 262 MB). Only that one call gets a light state: everybody else's `save_state`
and `load_state` do what they always did.
"""

from __future__ import annotations

import functools
import inspect
import sys
import weakref
from typing import Any, NoReturn

import llama_cpp
import numpy as np

from kvsnap.formats.errors import UsageError
from kvsnap.formats.names import TokenIds, common_prefix, token_array

_CALLER = "_create_completion"
_ANOTHERS = UsageError(
    "this state is of another Llama's LlamaCache, or of one that is not set any more",
    "make a kvsnap.LlamaCache for each Llama",
)


class HeldState:
    """Stands for the rows that a Llama holds, by their token ids; it copies nothing else."""

    def __init__(self, hooks: LlamaHooks, token_ids: TokenIds) -> None:
        self.hooks = hooks
        self.input_ids = token_ids.astype(np.intc)  # as in the library's LlamaState
        self.n_tokens = len(token_ids)

    @property
    def scores(self) -> NoReturn:
        """What a `load_state` of the library's own asks for first, before it changes anything."""
        raise _ANOTHERS


class LlamaHooks:
    """What is replaced on one Llama, once, however many caches are made for it. It is held weakly,
    because it holds this."""

    whole_prompt = False
    """A running completion wants logits of its whole prompt, which restored rows do not have."""
    restored = False
    """Rows came from the store since that was last asked for."""

    def __init__(self, llm: llama_cpp.Llama) -> None:
        self._llm = weakref.ref(llm)
        self._own_states: weakref.WeakSet[Any] = weakref.WeakSet()
        self._foreign = token_array([])
        llm.save_state, llm.load_state = self.save_state, self.load_state
        if getattr(llm, "_logits_all", False):
            llm.create_completion = self.create_completion

    def save_state(self) -> Any:
        """Light for a completion that ends while a `LlamaCache` is set, else the library's own."""
        llm = self._alive()
        if self._cache() is not None and sys._getframe(1).f_code.co_name == _CALLER:
            return HeldState(self, token_array(llm.input_ids[: llm.n_tokens]))
        state = type(llm).save_state(llm)
        self._own_states.add(state)
        return state

    def load_state(self, state: Any) -> None:
        """A light state is restored from the store, any other as the library does it."""
        llm = self._alive()
        if isinstance(state, HeldState):
            cache = self._cache()
            if state.hooks is not self or cache is None:
                raise _ANOTHERS
            cache.load(state)
            return
        type(llm).load_state(llm, state)
        if state not in self._own_states:
            self._foreign = token_array(llm.input_ids[: llm.n_tokens])

    @functools.wraps(llama_cpp.Llama.create_completion)
    def create_completion(self, *args: Any, **kwargs: Any) -> Any:
        """Log probabilities of the prompt itself (`echo`) need logits of every token of it."""
        llm = self._alive()
        original = type(llm).create_completion
        given = inspect.signature(original).bind(llm, *args, **kwargs).arguments
        if not given.get("echo") or given.get("logprobs") is None:
            return original(llm, *args, **kwargs)
        if self.restored:
            llm.reset()
            self.restored = False
        self.whole_prompt = True
        try:
            return original(llm, *args, **kwargs)
        finally:
            self.whole_prompt = False

    def is_of_now(self, state: Any) -> bool:
        """Whether a state is of this Llama, and of the tokens that it holds now."""
        llm = self._alive()
        count, ids = getattr(state, "n_tokens", -1), getattr(state, "input_ids", ())
        if getattr(state, "hooks", self) is not self or count != llm.n_tokens:
            return False
        return np.array_equal(ids[:count], llm.input_ids[:count])

    def holds_foreign_rows(self, held: TokenIds) -> bool:
        """Whether the Llama may still hold rows of a state that it did not save itself: nobody
        knows which model, adapter or setting computed them."""
        if not common_prefix(held, self._foreign):
            self._foreign = token_array([])
        return len(self._foreign) > 0

    def _cache(self) -> Any:
        """The `LlamaCache` that is set on the Llama, if one is, and its own."""
        cache = self._alive().cache
        return cache if getattr(cache, "hooks", None) is self else None

    def _alive(self) -> llama_cpp.Llama:
        llm = self._llm()
        assert llm is not None  # the hooks are called on it
        return llm


def hooks_of(llm: llama_cpp.Llama) -> LlamaHooks:
    """The hooks of a Llama, which gets them now where it has none."""
    found = getattr(llm, "_kvsnap_hooks", None)
    if found is None:
        found = llm._kvsnap_hooks = LlamaHooks(llm)
    return found
