"""Rows of a batch, saved one by one by the transformers adapter: padding never gets a name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, LlamaForCausalLM

import kvsnap
from kvsnap.engines import Transformers
from kvsnap.engines.transformers import load, save
from kvsnap.formats.errors import Unsupported, UsageError
from kvsnap.formats.names import token_array
from kvsnap.testing.tiny_llama import CACHE, tiny_llama
from kvsnap.testing.turns import some_ids

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny_llama()


@pytest.fixture
def store(tmp_path: Path) -> Any:
    with kvsnap.Store(tmp_path / "store") as store:
        yield store


def padded(rows: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return ids, mask


ROWS = [[int(n) for n in some_ids(n, n, 498)] for n in (5, 12, 70)]


@pytest.mark.parametrize("row", [0, 1, 2])
def test_a_padded_row_is_saved_as_the_sequence_alone(
    row: int, model: Any, store: kvsnap.Store
) -> None:
    """Positions that were shared across a padded batch (A64)."""
    ids, mask = padded(ROWS)
    cache = DynamicCache(config=model.config)
    out = model.generate(
        ids, attention_mask=mask, max_new_tokens=3, do_sample=False, **{CACHE: cache}
    )
    report = save(store, model, cache, out, row=row, attention_mask=mask, name="row")
    told = [*ROWS[row], *out[row, -3:].tolist()]
    assert report.tokens == len(told) - 1
    restored, reused = load(store, model, [*told, 1], name="row")
    assert reused == len(told) - 1
    alone = Transformers(model)
    alone.evaluate(token_array(told[:-1]))
    for own, wanted in zip(restored.layers, alone.cache.layers, strict=True):
        torch.testing.assert_close(own.keys, wanted.keys, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(own.values, wanted.values, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("wrong", ["positions", "mask"])
def test_padding_that_moved_positions_or_was_seen_is_refused(
    wrong: str, model: Any, store: kvsnap.Store
) -> None:
    ids, mask = padded(ROWS)
    cache = DynamicCache(config=model.config)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    given = {"attention_mask": mask} if wrong == "positions" else {"position_ids": positions}
    model(ids, **given, **{CACHE: cache})
    with pytest.raises(Unsupported, match="not that of the sequence alone"):
        save(store, model, cache, ids, row=0, attention_mask=mask)
    assert save(store, model, cache, ids, row=2, attention_mask=mask).blocks_written == 1


def test_batches_without_a_mask_and_with_other_padding_are_refused(
    model: Any, store: kvsnap.Store
) -> None:
    ids, mask = padded(ROWS)
    cache = DynamicCache(config=model.config)
    model(ids, **{CACHE: cache})
    with pytest.raises(UsageError, match="which tokens of the batch are padding"):
        save(store, model, cache, ids, row=0)
    with pytest.raises(UsageError, match="that of a batch"):
        save(store, model, cache, ids[2])
    with pytest.raises(UsageError, match="row 3 of 3"):
        save(store, model, cache, ids, row=3, attention_mask=mask)
    with pytest.raises(UsageError, match="an attention mask of"):
        save(store, model, cache, ids, row=0, attention_mask=mask[:2])
    with pytest.raises(Unsupported, match="padding on the right"):
        save(store, model, cache, ids, row=0, attention_mask=mask.flip(-1))
