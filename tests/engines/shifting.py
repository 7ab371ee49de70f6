"""A context that is shifted, as llama-server's context shift and --cache-reuse do it."""

from __future__ import annotations

import llama_cpp
import numpy as np

from kvsnap.engines import LlamaCpp
from kvsnap.formats.names import TokenIds


def shift(
    llm: llama_cpp.Llama, ids: TokenIds, keep: int, gone: int, before: int, after: TokenIds
) -> LlamaCpp:
    """Evaluate `before` ids, forget `gone` of them behind the first `keep`, close the gap, and evaluate the
    ids `after` on top of it."""
    LlamaCpp(llm).evaluate(ids[:before])
    memory = llama_cpp.llama_get_memory(llm.ctx)
    assert llama_cpp.llama_memory_seq_rm(memory, 0, keep, keep + gone)
    llama_cpp.llama_memory_seq_add(memory, 0, keep + gone, before, -gone)
    kept = np.concatenate([ids[:keep], ids[keep + gone : before]])
    llm.n_tokens = len(kept)
    llm.input_ids[: len(kept)] = kept
    engine = LlamaCpp(llm)
    engine.evaluate(after)
    return engine
