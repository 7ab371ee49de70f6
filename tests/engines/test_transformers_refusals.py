"""What a program hands over by mistake, or unknowingly: refused with a word, or told apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    BatchEncoding,
    DynamicCache,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

import kvsnap
from kvsnap.engines.transformers import Transformers, load, save
from kvsnap.formats.errors import KvsnapError, Unsupported, UsageError
from kvsnap.testing.tiny_llama import CACHE, SIZES, tiny_llama
from kvsnap.testing.turns import some_ids

pytestmark = pytest.mark.engine

IDS = some_ids(150, 1, 400)
SPECIAL = {
    "vocab_size": 512,
    "max_position_embeddings": 1024,
    "pad_token_id": 511,
    "eos_token_id": 510,
    "bos_token_id": 509,
}


def make(kind: type[LlamaForCausalLM] = LlamaForCausalLM, **config: Any) -> Any:
    return tiny_llama(kind, **{**SPECIAL, **config})


@pytest.fixture
def store(tmp_path: Path) -> Any:
    with kvsnap.Store(tmp_path / "store") as opened:
        yield opened


def forward(model: Any, ids: Any, **more: Any) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        batch = np.array(ids, np.int64).reshape(-1, np.shape(ids)[-1])
        model(torch.from_numpy(batch), **{CACHE: cache}, **more)
    return cache


def identity(model: Any) -> str:
    return Transformers(model).identity(64, lambda path: "").canonical()


def test_rows_of_a_batch_that_are_not_those_of_their_ids_are_refused(store: Any) -> None:
    """As beam search leaves them: row 1 holds another continuation than the ids say."""
    model = make()
    rows = np.stack([IDS, np.concatenate([IDS[:70], some_ids(80, 2, 400)])]).astype(np.int64)
    cache, ones = forward(model, rows), np.ones_like(rows)
    assert save(store, model, cache, rows, row=1, attention_mask=ones).blocks_written == 2
    rows[1, 75:80] = rows[0, 75:80]
    with pytest.raises(Unsupported, match="not that of the sequence"):
        save(store, model, cache, rows, row=1, attention_mask=ones)


def test_rows_restored_with_loss_are_never_saved_as_exact_ones(store: Any) -> None:
    model, mask = make(), np.ones((1, len(IDS)), int)
    save(store, model, forward(model, IDS), IDS, codec="q4")
    cache, reused = load(store, model, [*IDS.tolist(), 7], allow_lossy=True)
    assert reused == 128
    assert save(store, model, cache, IDS).fidelity.startswith("q4@")
    whole = IDS[:128].astype(np.int64)[None]
    saved = save(store, model, cache, whole, row=0, attention_mask=mask[:, :128])
    assert saved.fidelity.startswith("q4@")
    assert load(store, model, IDS)[1] == 0, "nothing is exact"


@pytest.mark.parametrize(("pad", "place"), [(511, 0), (511, 40), (510, 0), (7, 0), (7, 40)])
def test_padding_that_was_masked_and_nobody_told_of_is_refused(
    store: Any, pad: int, place: int
) -> None:
    """Also that of end-of-text tokens, or of an id that only generate() was told."""
    model = make()
    ids = [*IDS[:place].tolist(), pad, pad, *IDS[place:100].tolist()]
    mask = torch.tensor([[int(token != pad) for token in ids]])
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    cache = forward(model, np.array(ids, np.int64), attention_mask=mask, position_ids=positions)
    with pytest.raises(Unsupported, match="not that of the sequence alone"):
        save(store, model, cache, ids)
    plain = forward(model, np.array(ids, np.int64))
    assert save(store, model, plain, ids).blocks_written == 1, "the same ids, really computed"


def padded(model: Any, ids: list[int], pads: int) -> DynamicCache:
    """As generate() leaves it where the first ids are masked."""
    mask = torch.tensor([[0] * pads + [1] * (len(ids) - pads)])
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    return forward(model, np.array(ids, np.int64), attention_mask=mask, position_ids=positions)


def test_padding_that_was_masked_without_moving_positions_is_refused(store: Any) -> None:
    model, ids = make(), [7] * 20 + IDS[:100].tolist()
    mask = torch.tensor([[0] * 20 + [1] * 100])
    with pytest.raises(Unsupported, match="not that of the sequence alone"):
        save(store, model, forward(model, ids, attention_mask=mask), ids)


def test_padding_whose_embedding_is_zero_is_seen_behind_it(store: Any) -> None:
    model = make()
    model.model.embed_tokens.weight.data[510] = 0.0
    ids = [510] * 20 + IDS[:100].tolist()
    with pytest.raises(Unsupported, match="not that of the sequence alone"):
        save(store, model, padded(model, ids, 20), ids)
    assert save(store, model, forward(model, ids), ids).blocks_written == 1


def test_padding_that_windows_have_lost_is_seen_at_the_positions_behind_it(store: Any) -> None:
    torch.manual_seed(0)
    sizes = {**SIZES, **SPECIAL, "pad_token_id": None}
    model = MistralForCausalLM(MistralConfig(**sizes, sliding_window=32)).eval()
    ids = [510] * 20 + IDS[:100].tolist()
    with pytest.raises(Unsupported, match="not that of the sequence alone"):
        save(store, model, padded(model, ids, 20), ids)
    assert save(store, model, forward(model, ids), ids).tokens == 120


def test_rows_that_are_no_numbers_in_the_model_itself_are_saved(store: Any) -> None:
    """As half precision overflows: not what padding does."""
    model = make()
    model.model.embed_tokens.weight.data[450] = float("nan")
    ids = [*IDS[:3].tolist(), 450, *IDS[3:100].tolist()]
    cache = forward(model, ids)
    save(store, model, cache, ids)
    again, reused = load(store, model, ids)
    assert reused == 64
    for own, saved in zip(again.layers, cache.layers, strict=True):
        bits = (layer.keys[:, :, :64].view(torch.int32) for layer in (own, saved))
        assert torch.equal(*bits)
    assert saved.keys.isnan().any()


def test_nothing_at_all_is_saved_as_nothing(store: Any) -> None:
    model = make()
    assert save(store, model, DynamicCache(config=model.config), IDS).tokens == 0
    ids = IDS[:70].astype(np.int64)[None]
    zeros = np.zeros_like(ids)
    assert save(store, model, forward(model, ids), ids, row=0, attention_mask=zeros).tokens == 0


def test_inference_mode_is_fine(store: Any) -> None:
    with torch.inference_mode():
        model = make()
        cache = DynamicCache(config=model.config)
        model(torch.tensor(IDS.astype(np.int64))[None], **{CACHE: cache})
        assert save(store, model, cache, IDS).blocks_written == 2
        again, reused = load(store, model, IDS)
    assert (reused, again.get_seq_length()) == (128, 128)


def test_a_length_that_rope_factors_follow_from_is_part_of_the_identity() -> None:
    half = [1.0] * 8
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": half,
        "long_factor": half,
        "original_max_position_embeddings": 64,
    }
    models = [make(rope_parameters=dict(rope), max_position_embeddings=n) for n in (256, 1024)]
    assert identity(models[0]) != identity(models[1])
    plain = [make(max_position_embeddings=n) for n in (256, 1024)]
    assert identity(plain[0]) == identity(plain[1])


def test_signs_that_flip_behind_torchs_back_are_seen() -> None:
    model = make()
    before = identity(model)
    model.model.layers[0].self_attn.k_proj.weight.data[:, 1::2] *= -1
    assert identity(model) != before


def test_a_model_that_changes_under_an_open_session_is_not_saved(store: Any) -> None:
    model = make()
    engine = Transformers(model)
    session = kvsnap.Session(store, engine)
    engine.evaluate(IDS[:70])
    model.model.layers[0].self_attn.v_proj.weight.data.mul_(2)
    engine.evaluate(IDS[70:])
    with pytest.raises(UsageError, match="changed since this session was opened"):
        session.save()


def test_a_model_that_changes_under_an_open_session_gets_no_rows_of_the_old_one(store: Any) -> None:
    model = make()
    save(store, model, forward(model, IDS), IDS)
    session = kvsnap.Session(store, Transformers(model))
    model.model.layers[0].self_attn.v_proj.weight.data.mul_(2)
    with pytest.raises(UsageError, match="changed since this session was opened"):
        session.resume(IDS)


@pytest.mark.parametrize("saved", [True, False])
def test_another_session_on_the_engine_does_not_go_on_with_rows_of_the_old_model(
    store: Any, saved: bool
) -> None:
    model = make()
    engine = Transformers(model)
    first = kvsnap.Session(store, engine)
    engine.evaluate(IDS[:100])
    if saved:
        first.save()
    model.model.layers[0].self_attn.v_proj.weight.data.mul_(2)
    second = kvsnap.Session(store, engine)
    with pytest.raises(UsageError, match="the model changed"):
        second.save()
    with pytest.raises(UsageError, match="the model changed"):
        engine.evaluate(IDS[100:])
    assert second.resume(IDS).reused_tokens == 0
    engine.evaluate(IDS)
    assert second.save().blocks_written == 2


def test_a_cache_that_was_saved_and_goes_on_with_other_weights_is_refused(store: Any) -> None:
    model = make()
    cache = forward(model, IDS[:100])
    save(store, model, cache, IDS[:100])
    model.model.layers[1].self_attn.k_proj.weight.data.mul_(2)
    with torch.no_grad():
        model(torch.tensor(IDS[100:].astype(np.int64))[None], **{CACHE: cache})
    with pytest.raises(UsageError, match="changed since this cache"):
        save(store, model, cache, IDS)


@pytest.mark.parametrize("name", ["q_proj", "v_proj"])
def test_values_that_change_places_behind_torchs_back_are_seen(name: str) -> None:
    model = make()
    before = identity(model)
    weight = getattr(model.model.layers[0].self_attn, name).weight.data
    order = torch.arange(len(weight))
    order[[0, 1]] = order[[1, 0]]
    weight[...] = weight[order].clone()  # through .data, which counts nothing
    assert identity(model) != before


def test_a_model_that_changed_between_load_and_save_is_refused(store: Any) -> None:
    model = make()
    save(store, model, forward(model, IDS), IDS)
    cache, _ = load(store, model, IDS)
    model.model.layers[0].self_attn.k_proj.weight.data.mul_(2)
    with pytest.raises(UsageError, match="changed since this cache was loaded"):
        save(store, model, cache, IDS)


def test_another_class_of_model_is_another_model() -> None:
    class Own(LlamaForCausalLM):
        """May compute anything."""

    assert identity(make(Own)) != identity(make())


def test_a_part_in_training_mode_is_refused() -> None:
    model = make()
    model.model.layers[1].train()
    with pytest.raises(Unsupported, match="training mode"):
        Transformers(model)


@pytest.mark.parametrize("ids", [None, "text", [[1, 2], [3, 4]]])
def test_what_is_no_sequence_of_ids_gets_a_word(store: Any, ids: Any) -> None:
    with pytest.raises(KvsnapError):
        load(store, make(), ids)


@pytest.mark.parametrize(
    ("ids", "row", "word"),
    [
        ([[1, 2], [3, 4]], "0", "row '0' of 2"),
        ([[1, 2], [3]], 0, "different lengths"),
        ([[[1, 2]]], 0, "is no batch"),
        ("text", 0, "no token ids"),
    ],
)
def test_what_is_no_batch_gets_a_word(store: Any, ids: Any, row: Any, word: str) -> None:
    model = make()
    cache = forward(model, [[1, 2], [3, 4]])
    with pytest.raises(UsageError, match=word):
        save(store, model, cache, ids, row=row, attention_mask=[[1, 1], [1, 1]])


def test_what_a_tokenizer_gives_is_taken(store: Any) -> None:
    model = make()
    save(store, model, forward(model, IDS), {"input_ids": IDS.astype(np.int64)})
    assert load(store, model, {"input_ids": torch.tensor(IDS.astype(np.int64))[None]})[1] == 128
    assert load(store, model, BatchEncoding({"input_ids": [IDS.tolist()]}))[1] == 128
    assert load(store, model, [IDS.tolist()])[1] == 128


def test_no_cache_is_no_save(store: Any) -> None:
    with pytest.raises(UsageError, match="no cache"):
        save(store, make(), None, IDS)


def test_a_cache_that_grew_behind_the_engines_back_is_not_saved_as_nothing(store: Any) -> None:
    model = make()
    engine = Transformers(model)
    session = kvsnap.Session(store, engine)
    engine.evaluate(IDS[:100])
    with torch.no_grad():
        model(torch.tensor([[5]]), **{CACHE: engine.cache})
    with pytest.raises(UsageError, match="something else than the engine"):
        session.save()
    engine.hold([*IDS[:100].tolist(), 5])
    assert session.save().tokens == 101
