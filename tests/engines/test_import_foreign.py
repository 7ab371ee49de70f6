"""What another tool's file says is compared with what the real engine computes, before it counts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest

import kvsnap
from kvsnap.engines import LlamaCpp
from kvsnap.formats.errors import Damaged, KvsnapError, Unsupported, UsageError
from kvsnap.formats.interchange.foreign import GGUF, HALVES, ForeignRows
from kvsnap.formats.names import token_array
from kvsnap.kvstore.interchange.fitting import Target
from kvsnap.kvstore.interchange.importing import ImportReport, import_rows, token_ids_of
from tests.engines.shifting import shift

pytestmark = pytest.mark.engine

TEXT = (
    "On 29 November the old library by the river opened at nine, and Mrs. Hale counted 3417 books,"
    " 18 maps and one umbrella that nobody had asked for since the flood of 1953. "
)
TOKENS = 230
"""Three blocks and a tail: the second one is neither at an end nor computed."""
Change = Callable[[ForeignRows], ForeignRows]


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[llama_cpp.Llama]:
    made = llama_cpp.Llama(str(model), n_ctx=512, verbose=False)
    yield made
    made.close()


@pytest.fixture(scope="module")
def ids(llm: llama_cpp.Llama) -> Any:
    found = llm.tokenize((TEXT * 8).encode())[:TOKENS]
    assert len(set(found)) < 80
    return token_array(found)


@pytest.fixture(scope="module")
def own(llm: llama_cpp.Llama, ids: Any) -> ForeignRows:
    """What an engine of other batches holds of these tokens, as a file would have it."""
    llm.reset()
    engine = LlamaCpp(llm)
    for start in [*range(20), *range(20, TOKENS, 23)]:
        engine.evaluate(ids[start : start + (1 if start < 20 else 23)])
    rows = engine.export(0, TOKENS)
    return target_of(engine).give(rows, ids, GGUF)


def target_of(engine: LlamaCpp) -> Target:
    return Target(engine.identity(64, lambda path: "blake3:00"))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[kvsnap.Store]:
    with kvsnap.Store(tmp_path / "store") as opened:
        yield opened


def take(
    store: kvsnap.Store, llm: llama_cpp.Llama, rows: ForeignRows, name: str = "s", **more: Any
) -> ImportReport:
    llm.reset()
    session = kvsnap.Session(store, LlamaCpp(llm), name)
    return import_rows(session, rows, token_ids_of(rows, None), **more)


def reused(store: kvsnap.Store, llm: llama_cpp.Llama, ids: Any, **more: Any) -> int:
    """By a prompt that goes on from these tokens, in an engine that holds nothing."""
    llm.reset()
    session = kvsnap.Session(store, LlamaCpp(llm), more.pop("name", None), **more)
    return session.resume(ids, leave=0).reused_tokens


def test_what_the_engine_would_compute_is_stored_bit_for_bit_and_reused_by_every_prompt(
    store: kvsnap.Store, llm: llama_cpp.Llama, own: ForeignRows, ids: Any
) -> None:
    report = take(store, llm, own)
    assert report.verified
    assert report.saved.fidelity == "exact"
    assert report.saved.blocks_written == 3
    assert 0 < report.difference <= report.bound
    assert reused(store, llm, ids) == 192
    engine = LlamaCpp(llm)
    found = engine.export(0, 192)
    for layer, (k, v) in enumerate(zip(own.k, own.v, strict=True)):
        np.testing.assert_array_equal(found["full.k"][layer], k[:192])
        np.testing.assert_array_equal(found["full.v"][layer], v[:192])
    assert reused(store, llm, ids, name="s") == TOKENS


def test_the_check_computes_both_ends_blocks_between_and_each_id_once(
    store: kvsnap.Store, llm: llama_cpp.Llama, own: ForeignRows, ids: Any
) -> None:
    report = take(store, llm, own)
    ends = 2 * (64 + 16 + 48)  # the block; its front one by one; its rest once more
    between = 2 * 64
    assert report.computed_tokens == ends + between + len(set(ids.tolist())) + 16
    llm.reset()
    longer = take(store, llm, own, "whole", whole=True)
    assert longer.computed_tokens == TOKENS + 16 + (TOKENS - 16)


def shifted(rows: ForeignRows) -> ForeignRows:
    return change(rows, lambda layer: np.roll(layer, 1, axis=0))


def change(rows: ForeignRows, of_layer: Callable[[Any], Any], planes: str = "kv") -> ForeignRows:
    k = tuple(of_layer(layer.copy()) if "k" in planes else layer for layer in rows.k)
    v = tuple(of_layer(layer.copy()) if "v" in planes else layer for layer in rows.v)
    return dataclasses.replace(rows, k=k, v=v)


def zeroed(start: int, stop: int) -> Change:
    def zero(layer: Any) -> Any:
        layer[start:stop] = 0
        return layer

    return lambda rows: change(rows, zero)


def in_halves(rows: ForeignRows) -> ForeignRows:
    """K as transformers has it, called GGUF's."""
    return change(
        rows,
        lambda layer: np.ascontiguousarray(
            layer.reshape(TOKENS, -1, 32, 2).swapaxes(-1, -2).reshape(layer.shape)
        ),
        "k",
    )


def other_layers(rows: ForeignRows) -> ForeignRows:
    return dataclasses.replace(rows, k=rows.k[::-1], v=rows.v[::-1])


def swapped(rows: ForeignRows) -> ForeignRows:
    return dataclasses.replace(rows, k=rows.v, v=rows.k)


def nan(rows: ForeignRows) -> ForeignRows:
    def poison(layer: Any) -> Any:
        layer[100, 5] = 0x7E00
        return layer

    return change(rows, poison, "v")


@pytest.mark.parametrize(
    "wrong",
    [
        shifted,
        in_halves,
        other_layers,
        swapped,
        nan,
        zeroed(0, 1),
        zeroed(63, 64),
        zeroed(TOKENS - 1, TOKENS),
        zeroed(64, 166),
    ],
    ids=[
        "one position off", "K in another order", "layers reversed", "K and V swapped", "NaN",
        "first row zero", "end of the first block zero", "last row zero", "all between zero",
    ],
)  # fmt: skip
def test_rows_that_the_model_does_not_compute_are_refused_and_nothing_is_stored(
    store: kvsnap.Store, llm: llama_cpp.Llama, own: ForeignRows, wrong: Change
) -> None:
    with pytest.raises(Damaged):
        take(store, llm, wrong(own))
    assert list(store.path.rglob("*.safetensors")) == []
    assert LlamaCpp(llm).token_ids().tolist() == []


@pytest.mark.parametrize("position", [0, 64, 80, 128, 165, TOKENS - 1])
def test_rows_of_other_ids_are_refused_wherever_the_ids_differ(
    store: kvsnap.Store, llm: llama_cpp.Llama, own: ForeignRows, ids: Any, position: int
) -> None:
    """A prompt with another date in it has as many tokens, and its ends are equal."""
    digits = llm.tokenize(b"7", add_bos=False, special=False)
    wrong = ids.copy()
    wrong[position] = digits[-1] if ids[position] != digits[-1] else digits[-1] + 1
    with pytest.raises(Damaged):
        take(store, llm, dataclasses.replace(own, token_ids=wrong))


def test_rows_that_were_shifted_over_tokens_which_are_gone_are_refused(
    store: kvsnap.Store, llm: llama_cpp.Llama, ids: Any
) -> None:
    """As llama-server's context shift and --cache-reuse leave them: the first block is right, V of the first
    layer is that of the ids, and the last block was computed on top of what is there."""
    llm.reset()
    engine = shift(llm, ids, 64, 40, 190, ids[:80])
    now = engine.token_ids()
    rows = target_of(engine).give(engine.export(0, len(now)), now, GGUF)
    with pytest.raises(Damaged, match="not what this model computes"):
        take(store, llm, rows)
    assert list(store.path.rglob("*.safetensors")) == []


def test_rows_of_other_rope_options_are_refused(
    model: Path, store: kvsnap.Store, own: ForeignRows
) -> None:
    stretched = llama_cpp.Llama(str(model), n_ctx=512, rope_freq_base=20000.0, verbose=False)
    try:
        with pytest.raises(Damaged, match="not what this model computes"):
            take(store, stretched, own)
    finally:
        stretched.close()


def test_a_file_of_another_element_type_or_shape_is_refused_by_name(
    store: kvsnap.Store, llm: llama_cpp.Llama, own: ForeignRows
) -> None:
    for wrong, told in [
        (dataclasses.replace(own, k_type="bf16"), "--cache-type-k bf16"),
        (dataclasses.replace(own, k=own.k[:-1], v=own.v[:-1]), "the model that"),
        (dataclasses.replace(own, heads=9, head_dim=64), "the model that"),
        (dataclasses.replace(own, rotation=(64, 64)), "LLAMA_ATTN_ROT_DISABLE"),
        (change(own, lambda layer: layer[:, :64]), "the model that"),
    ]:
        with pytest.raises(Unsupported) as caught:
            take(store, llm, wrong)
        assert told in caught.value.hint


def test_rows_of_transformers_are_turned_into_the_order_of_the_gguf_file(
    store: kvsnap.Store, llm: llama_cpp.Llama, own: ForeignRows, ids: Any
) -> None:
    halves = dataclasses.replace(in_halves(own), order=HALVES)
    assert take(store, llm, halves).saved.blocks_written == 3
    assert reused(store, llm, ids) == 192
    np.testing.assert_array_equal(LlamaCpp(llm).export(0, 192)["full.k"][3], own.k[3][:192])


class TestUnverified:
    def test_only_its_own_session_restores_it(
        self, store: kvsnap.Store, llm: llama_cpp.Llama, own: ForeignRows, ids: Any
    ) -> None:
        report = take(store, llm, shifted(own), unverified=True)
        assert (report.verified, report.computed_tokens) == (False, 0)
        assert report.saved.fidelity.startswith("unverified@1;source=")
        assert reused(store, llm, ids) == 0
        assert reused(store, llm, ids, allow_lossy=True) == 0
        assert reused(store, llm, ids, name="other", allow_lossy=True) == 0
        assert reused(store, llm, ids, name="s") == TOKENS

    def test_what_is_computed_on_top_is_never_stored_as_the_models_own(
        self, store: kvsnap.Store, llm: llama_cpp.Llama, own: ForeignRows, ids: Any
    ) -> None:
        take(store, llm, shifted(own), unverified=True)
        llm.reset()
        engine = LlamaCpp(llm)
        session = kvsnap.Session(store, engine, "s")
        session.resume(ids, leave=0)
        engine.evaluate(ids[:80])
        with pytest.raises(UsageError, match="unverified"):
            kvsnap.Session(store, engine, "another").save()
        assert session.save().fidelity.startswith("unverified")
        grown = np.concatenate([ids, ids[:80]])
        assert reused(store, llm, grown) == 0
        # The engine holds such rows, and a session of another name begins with the same tokens.
        session = kvsnap.Session(store, engine, "s")
        session.resume(grown, leave=0)
        assert (
            kvsnap.Session(store, engine, "third", allow_lossy=True).resume(grown).reused_tokens
            == 0
        )

    def test_rows_decoded_with_loss_are_not_taken_for_computed_ones(
        self, store: kvsnap.Store, llm: llama_cpp.Llama, own: ForeignRows
    ) -> None:
        quantized = dataclasses.replace(own, inexact="decoded from 8 bits")
        with pytest.raises(UsageError, match="8 bits"):
            take(store, llm, quantized)
        assert not take(store, llm, quantized, unverified=True).verified


def test_an_import_never_replaces_a_session(
    store: kvsnap.Store, llm: llama_cpp.Llama, own: ForeignRows
) -> None:
    take(store, llm, own)
    with pytest.raises(UsageError, match="is there already"):
        take(store, llm, own)


def test_ids_that_are_given_must_be_those_of_the_file(own: ForeignRows, ids: Any) -> None:
    without = dataclasses.replace(own, token_ids=None)
    assert token_ids_of(without, ids) is ids
    assert token_ids_of(own, None) is own.token_ids
    assert token_ids_of(own, ids) is own.token_ids
    for rows, given in [(without, None), (without, ids[:-1]), (own, ids[::-1].copy())]:
        with pytest.raises(KvsnapError):
            token_ids_of(rows, given)


@pytest.mark.parametrize("told", [True, False], ids=["rotation told", "rotation not in the file"])
def test_quantized_rows_are_compared_by_their_values_and_taken_as_they_are(
    model: Path, store: kvsnap.Store, ids: Any, told: bool
) -> None:
    llm = llama_cpp.Llama(str(model), n_ctx=512, type_k=8, type_v=8, flash_attn=True, verbose=False)
    try:
        engine = LlamaCpp(llm)
        engine.evaluate(ids)
        rows = target_of(engine).give(engine.export(0, TOKENS), ids, GGUF)
        assert (rows.k_type, rows.rotation) == ("q8_0", (64, 64))
        given = rows if told else dataclasses.replace(rows, rotation=None)
        assert take(store, llm, given).verified
        assert reused(store, llm, ids) == 192
        np.testing.assert_array_equal(LlamaCpp(llm).export(0, 192)["full.v"][7], rows.v[7][:192])
        with pytest.raises(Damaged):
            take(store, llm, shifted(given), "other")
    finally:
        llm.close()
