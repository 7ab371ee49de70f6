"""Going back in a context that keeps the last rows of windowed layers only (`swa_full=False`).

llama.cpp lets such a sequence go back to any position, also to one whose window is gone: what it
computes from there is wrong, and nothing says so. `Llama.generate` goes back by itself, to where a
new prompt parts from what is held. So its call is watched: it is refused where rows are missing, and
the library then computes the prompt anew.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import llama_cpp


def guard_windows(llm: llama_cpp.Llama, has_window: Callable[[llama_cpp.Llama, int], bool]) -> None:
    """Watch one Llama, once. `has_window(llm, position)`: whether the rows are there that the token
    at a position sees. What it computed before is not vouched for."""
    context = llm._ctx
    if hasattr(context, "_kvsnap_sure"):
        return
    context._kvsnap_sure = llm.n_tokens == 0
    # Weakly: in a cycle `del llm` would free the model's memory only when the collector comes by.
    of_llm, of_context = weakref.ref(llm), weakref.ref(context)

    def kv_cache_seq_rm(seq_id: int, p0: int, p1: int) -> bool:
        llm, context = of_llm(), of_context()
        assert llm is not None, "it is called on it"
        assert context is not None, "it is called on it"
        last = llama_cpp.llama_memory_seq_pos_max(llama_cpp.llama_get_memory(llm.ctx), 0)
        if p0 <= 0:
            context._kvsnap_sure = True
        elif p0 <= last and not has_window(llm, p0):
            if p0 < llm.n_tokens:
                return False
            context._kvsnap_sure = False  # it has gone back already, and does not ask
        return bool(type(context).kv_cache_seq_rm(context, seq_id, p0, p1))

    context.kv_cache_seq_rm = kv_cache_seq_rm


def is_sure(llm: llama_cpp.Llama) -> bool:
    """Whether all that a watched Llama holds was computed on rows that were there."""
    return bool(getattr(llm._ctx, "_kvsnap_sure", True))


def note_empty(llm: llama_cpp.Llama) -> None:
    """To be called when the context holds nothing any more: what comes is computed from the start, or restored."""
    if hasattr(llm._ctx, "_kvsnap_sure"):
        llm._ctx._kvsnap_sure = True
