"""Caches that people save with safetensors: k_0, v_0 and so on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from kvsnap.formats.errors import Damaged, KvsnapError, Unsupported, UsageError
from kvsnap.formats.interchange import recognise
from kvsnap.formats.interchange.foreign import GGUF, HALVES, Given
from kvsnap.formats.interchange.safetensors_cache import SAFETENSORS_CACHE as CACHE
from tests.formats.interchange.mlx_files import made
from tests.formats.interchange.sample_rows import EXPECTED, one_file, same_rows, stored_digest

NAME = "hf_v5_kv.safetensors"


def saved(
    layers: int = 2, metadata: dict[str, str] | None = None, **changes: torch.Tensor
) -> dict[str, memoryview]:
    tensors = {
        f"{plane}_{layer}": torch.arange(24.0).reshape(1, 2, 4, 3).bfloat16() + layer
        for layer in range(layers)
        for plane in "kv"
    }
    return {"x": memoryview(safetensors.torch.save(tensors | changes, metadata))}


def test_the_sample_is_read_to_the_value_and_written_to_the_byte() -> None:
    files, expected = one_file(NAME), EXPECTED[NAME]
    assert recognise(files) is CACHE
    rows = CACHE.read(files, Given())
    assert (len(rows.k), rows.tokens, rows.heads, rows.head_dim) == (4, 40, 2, 64)
    assert (rows.order, rows.k_type, rows.inexact, rows.token_ids) == (HALVES, "bf16", "", None)
    assert rows.told == {"num_tokens": "40"}
    assert stored_digest(rows) == expected["rows_as_stored_f32_sha256"]
    assert CACHE.write is not None
    assert CACHE.write(rows, Given()) == {"cache.safetensors": bytes(files[NAME])}


@pytest.mark.parametrize("name", sorted(set(EXPECTED) - {NAME}))
def test_other_tools_files_are_not_claimed(name: str) -> None:
    assert not CACHE.recognise(one_file(name))


@pytest.mark.parametrize(("kind", "item"), [("f16", 2), ("bf16", 2), ("f32", 4)])
def test_what_is_written_is_read_here_and_by_the_library(kind: str, item: int) -> None:
    rows = made(11, kind, item)
    assert CACHE.write is not None
    (data,) = CACHE.write(rows, Given()).values()
    assert same_rows(CACHE.read({"x": memoryview(data)}, Given()), rows)
    theirs = safetensors.torch.load(data)
    integers = torch.int16 if item == 2 else torch.int32
    for layer in range(2):
        found = theirs[f"v_{layer}"].view(integers).numpy().view(f"u{item}")
        assert found.shape == (1, 2, 11, 3)
        assert np.array_equal(found[0].swapaxes(0, 1).reshape(11, 6), rows.v[layer])


def test_layers_are_in_the_order_of_their_numbers() -> None:
    rows = CACHE.read(saved(12), Given())
    firsts = [int(layer[0, 0]) for layer in rows.k]
    assert firsts == [int(torch.tensor(float(n)).bfloat16().view(torch.uint16)) for n in range(12)]


@pytest.mark.parametrize(
    ("files", "error", "reason"),
    [
        (saved(k_3=torch.zeros(1)), Damaged, "not k_0, v_0"),
        (saved(other=torch.zeros(1)), Damaged, "not k_0, v_0"),
        (saved(0), Damaged, "not k_0, v_0"),
        (saved(k_1=torch.zeros(1, 2, 4, 3)), Unsupported, "BF16, F32"),
        (saved(1, k_0=torch.zeros(2).int(), v_0=torch.zeros(2).int()), Unsupported, "I32"),
        (
            saved(k_1=torch.zeros(2, 4, 3).bfloat16()),
            Unsupported,
            r"K of layer 1 has shape \[2, 4, 3\]",
        ),
        (saved(v_1=torch.zeros(1, 2, 3, 3).bfloat16()), Unsupported, "sliding window"),
        (saved(v_1=torch.zeros(1, 2, 4, 5).bfloat16()), Unsupported, "V of layer 1"),
    ],
)
def test_a_file_that_is_no_whole_cache_is_refused(
    files: dict[str, memoryview], error: type[KvsnapError], reason: str
) -> None:
    with pytest.raises(error, match=reason):
        CACHE.read(files, Given())


def test_a_file_that_misses_layers_is_recognised_and_refused() -> None:
    files = saved(2, k_5=torch.zeros(1))
    assert recognise(files) is CACHE
    with pytest.raises(Damaged, match="not k_0, v_0"):
        CACHE.read(files, Given())


def test_a_sequence_of_a_batch_must_be_named() -> None:
    batch = torch.arange(48.0).reshape(2, 2, 4, 3).bfloat16()
    files = saved(1, k_0=batch, v_0=batch.clone())
    with pytest.raises(UsageError, match="batch of 2"):
        CACHE.read(files, Given())
    for wrong in (-1, 2):
        with pytest.raises(UsageError, match="none of number"):
            CACHE.read(files, Given(batch_row=wrong))
    rows = CACHE.read(files, Given(batch_row=1))
    wanted = batch[1].transpose(0, 1).reshape(4, 6).view(torch.uint16).numpy()
    assert np.array_equal(rows.k[0], wanted)


def test_a_file_that_is_cut_is_refused_at_every_boundary() -> None:
    whole = one_file(NAME)[NAME]
    for size in (*range(700), *range(700, len(whole), 1013), len(whole) - 1):
        with pytest.raises(Damaged):
            CACHE.read({NAME: whole[:size]}, Given())
        CACHE.recognise({NAME: whole[:size]})


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"order": GGUF}, "order gguf"), ({"k_type": "q8_0", "v_type": "q8_0"}, "q8_0")],
)
def test_rows_that_must_be_converted_first_are_refused(changes: Any, reason: str) -> None:
    assert CACHE.write is not None
    with pytest.raises(UsageError, match=reason):
        CACHE.write(replace(made(), **changes), Given())


def test_several_files_are_no_cache() -> None:
    files = one_file(NAME) | {"other": memoryview(b"")}
    assert not CACHE.recognise(files)
    with pytest.raises(UsageError, match="one file"):
        CACHE.read(files, Given())
