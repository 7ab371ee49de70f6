"""mlx-lm files that are damaged, of another kind, or not what was given: refused, with the reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvsnap.formats.errors import Damaged, KvsnapError, Unsupported, UsageError
from kvsnap.formats.interchange.foreign import GGUF, Format, Given
from kvsnap.formats.interchange.mlx_lm import MLX_LM, MLX_LM_0_31
from kvsnap.formats.interchange.safetensors_file import ForeignTensor
from tests.formats.interchange.mlx_files import NEW, OLD, Edit, edited, i32, made, zeros
from tests.formats.interchange.sample_rows import EXPECTED, one_file

NEW_8, OLD_8 = "mlx_lm_0.32.2_quantized8.safetensors", "mlx_lm_0.31.0_quantized8.safetensors"
ALL = range(4)


def format_of(name: str) -> Format:
    return MLX_LM_0_31 if "0.31" in name else MLX_LM


def put(key: str, *shape: int, dtype: str = "BF16", item: int = 2) -> Edit:
    """A tensor of zeros; `*` in the key is each layer."""
    made = zeros(*shape, dtype=dtype, item=item)
    return lambda _, tensors: tensors.update({key.replace("*", str(n)): made for n in ALL})


def offset(number: int, *layers: int) -> Edit:
    return lambda _, tensors: tensors.update({f"{n}.2": i32(number) for n in layers or ALL})


def text(key: str, value: str) -> Edit:
    return lambda metadata, _: metadata.update({key.replace("*", str(n)): value for n in ALL})


def without(key: str) -> Edit:
    return lambda metadata, tensors: [metadata.pop(key, None), tensors.pop(key, None)]


def number(at: int, value: int) -> Edit:
    """Of a quantized cache, in either layout: 0 offset, 1 group size, 2 bits."""

    def edit(metadata: dict[str, str], tensors: dict[str, ForeignTensor]) -> None:
        for layer in ALL:
            if f"{layer}.2" in tensors:
                tensors[f"{layer}.{2 + at}"] = i32(value)
            else:
                metadata[f"0.{layer}.{at}"] = str(value)

    return edit


BAD: list[tuple[str, Edit, type[KvsnapError], str]] = [
    (NEW, offset(0), Damaged, "holds 0 tokens"),
    (NEW, offset(257), Damaged, "holds 257 tokens"),
    (NEW, offset(-1), Damaged, "holds -1 tokens"),
    (NEW, offset(39, 2), Unsupported, "layers of 39, 40 tokens"),
    (NEW, put("0.2", dtype="I64", item=8), Damaged, "offset of layer 0"),
    (NEW, put("0.2", 1, dtype="I32", item=4), Damaged, "offset of layer 0"),
    (NEW, text("1.*", "MambaCache"), Unsupported, "MambaCache"),
    (NEW, text("1.3", "ArraysCache"), Unsupported, "several kinds"),
    (NEW, text("1.3", "RotatingKVCache"), Unsupported, "several kinds"),
    (NEW, text("1.4", "KVCache"), Damaged, "of 5 layers of KVCache has other tensors"),
    (NEW, text("1.x", "KVCache"), Damaged, "holes"),
    (NEW, without("1.2"), Damaged, "holes"),
    (NEW, without("1.0"), Damaged, "names no class"),
    (NEW, without("3.1"), Damaged, r"3\.1"),
    (NEW, without("3.2"), Damaged, r"3\.2"),
    (NEW, put("4.0", 1), Damaged, r"4\.0"),
    (NEW, put("x", 1), Damaged, "names no class"),
    (NEW, text("2.1.1", "none"), Unsupported, "the cache is empty"),
    (NEW, text("2.1.1", "string"), Unsupported, "string"),
    (NEW, text("2.1.0", "9.9"), Unsupported, "9.9"),
    (NEW, put("0.0", 2, 256, 64), Unsupported, "four axes"),
    (NEW, put("0.0", 1, 2, 300, 64), Damaged, "numbers of rows"),
    (NEW, put("0.0", 1, 2, 256, 64, dtype="F16"), Unsupported, "BF16, F16"),
    (OLD, put("*.0", 1, 2, 40, 64, dtype="I16"), Unsupported, "BF16, I16"),
    (OLD, put("1.0", 1, 3, 40, 64), Unsupported, "layer 1"),
    (OLD, put("1.1", 1, 2, 40, 32), Unsupported, "V of layer 1"),
    (OLD, put("2.1", 1, 2, 39, 64), Damaged, "numbers of rows"),
    (OLD, text("0.1", "x"), Damaged, "information"),
    (OLD, text("2.1", ""), Unsupported, "several kinds"),
    (NEW_8, number(0, 0), Damaged, "holds 0 tokens"),
    (NEW_8, number(0, 41), Damaged, "holds 41 tokens"),
    (NEW_8, number(1, 32), Damaged, "groups of 32"),
    (NEW_8, number(1, 0), Damaged, "groups of 0"),
    (NEW_8, number(2, 3), Unsupported, "3 bits"),
    (NEW_8, number(2, 0), Unsupported, "0 bits"),
    (NEW_8, number(2, 4), Damaged, "heads of 128"),
    (NEW_8, put("0.0.1", 1, 2, 40, 3), Damaged, "not 3 groups"),
    (NEW_8, put("0.0.1", 1, 2, 39, 1), Damaged, "shapes"),
    (NEW_8, put("0.0.0", 1, 2, 40, 16), Damaged, "BF16"),
    (NEW_8, put("0.1.1", 1, 2, 40, 1, dtype="F16"), Unsupported, "BF16, F16"),
    (OLD_8, number(0, 41), Damaged, "holds 41 tokens"),
    (OLD_8, text("0.0.0", "x"), Damaged, "not a number"),
    (OLD_8, text("0.0.0", "4" * 99), Damaged, "not a number"),
    (OLD_8, without("0.0.2"), Damaged, "bits of layer 0|other tensors"),
]


@pytest.mark.parametrize(("name", "edit", "error", "reason"), BAD)
def test_a_file_that_lies_is_refused(
    name: str, edit: Edit, error: type[KvsnapError], reason: str
) -> None:
    with pytest.raises(error, match=reason):
        format_of(name).read(edited(name, edit), Given())


def test_lengths_shapes_and_batches_that_all_layers_share_are_looked_at_too() -> None:
    def everywhere(*shape: int) -> dict[str, memoryview]:
        return edited(OLD, lambda _, t: t.update({key: zeros(*shape) for key in t}))

    for shape, error, reason in (
        ((1, 2, 0, 64), Damaged, "holds 0 tokens"),
        ((1, 0, 40, 64), Unsupported, "empty"),
        ((1, 2, 40, 0), Unsupported, "empty"),
        ((2, 2, 40, 64), UsageError, "batch of 2"),
    ):
        with pytest.raises(error, match=reason):
            MLX_LM_0_31.read(everywhere(*shape), Given())
    assert MLX_LM_0_31.read(everywhere(2, 2, 40, 64), Given(batch_row=1)).tokens == 40


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"layers": 5}, "layers 4, and 5"),
        ({"heads": 4}, "heads 2, and 4"),
        ({"head_dim": 32}, "head_dim 64, and 32"),
        ({"dtype": "f16"}, "dtype bf16, and f16"),
        ({"token_ids": np.arange(41, dtype=np.uint32)}, "40 tokens, and 41 token ids"),
        ({"batch_row": 1}, "none of number 1"),
    ],
)
@pytest.mark.parametrize("name", [NEW, OLD, NEW_8, OLD_8])
def test_a_file_that_is_not_what_was_given_is_refused(name: str, given: Any, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        format_of(name).read(one_file(name), Given(**given))


def test_the_other_layouts_file_is_refused_by_the_name_of_its_layout() -> None:
    with pytest.raises(UsageError, match=r"layout of mlx-lm-0\.31"):
        MLX_LM.read(one_file(OLD), Given())
    with pytest.raises(UsageError, match="layout of mlx-lm"):
        MLX_LM_0_31.read(one_file(NEW), Given())


@pytest.mark.parametrize("name", [NEW, OLD, NEW_8, OLD_8])
def test_a_file_that_is_cut_is_refused_at_every_boundary(name: str) -> None:
    whole = one_file(name)[name]
    data = int.from_bytes(whole[:8], "little") + 8
    for end in (*range(64), *range(data - 2, len(whole), 997), data, len(whole)):
        for size in (end - 1, end, end + 1):
            if 0 <= size < len(whole):
                with pytest.raises(Damaged):
                    format_of(name).read({name: whole[:size]}, Given())


@pytest.mark.parametrize("name", [n for n in EXPECTED if "mlx_lm" in n])
def test_no_flipped_bit_of_the_header_gives_other_rows_or_another_error(name: str) -> None:
    whole = one_file(name)[name]
    size = int.from_bytes(whole[:8], "little") + 8
    random = np.random.default_rng(0)
    refused = 0
    for at in {*range(8), *random.integers(8, size, 300).tolist()}:
        damaged = bytearray(whole)
        damaged[at] ^= 1 << int(random.integers(8))
        files = {name: memoryview(damaged)}
        for known in (MLX_LM, MLX_LM_0_31):
            known.recognise(files)
            try:
                rows = known.read(files, Given())
            except KvsnapError:
                refused += 1
            else:
                assert (rows.tokens, rows.heads, rows.head_dim) == (40, 2, 64)
    assert refused > 300


@pytest.mark.parametrize(
    ("changes", "given", "reason"),
    [
        ({"order": GGUF}, {}, "order gguf"),
        ({"rotation": (64, 64)}, {}, "rotated"),
        ({"rotation": None}, {}, "rotated"),
        ({"k_type": "q8_0"}, {}, "q8_0 and bf16"),
        ({"v_type": "f16"}, {}, "bf16 and f16"),
        ({"heads": None}, {}, "how many heads"),
        ({"head_dim": None}, {"heads": 2}, "how many heads"),
        ({"heads": 3}, {}, "3 heads of 3"),
        ({"k_type": "f32", "v_type": "f32"}, {}, "of f32 cannot be"),
        ({"k": (), "v": ()}, {}, "no tokens"),
        ({}, {"dtype": "f16"}, "the target has f16"),
    ],
)
def test_rows_that_the_target_cannot_hold_are_refused(
    changes: Mapping[str, Any], given: Mapping[str, Any], reason: str
) -> None:
    for target in (MLX_LM, MLX_LM_0_31):
        assert target.write is not None
        with pytest.raises(UsageError, match=reason):
            target.write(replace(made(), **changes), Given(**given))
