"""mlx-lm's prompt caches: real ones read to the value, written ones as the tool writes them."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np
import pytest
import torch

from kvsnap.formats.errors import Damaged, Unsupported
from kvsnap.formats.interchange import recognise
from kvsnap.formats.interchange.foreign import HALVES, Format, Given
from kvsnap.formats.interchange.mlx_lm import MLX_LM, MLX_LM_0_31
from kvsnap.formats.interchange.mlx_quantized import dequantized, in_type
from kvsnap.formats.interchange.safetensors_file import (
    ForeignTensor,
    parse_tensors,
    tensor_of,
)
from tests.formats.interchange.mlx_files import NEW, edited, i32, made
from tests.formats.interchange.sample_rows import (
    EXPECTED,
    as_f32,
    one_file,
    same_rows,
    stored_digest,
)

NAMES = [name for name in EXPECTED if "mlx_lm" in name]
KVCACHES = [name for name in NAMES if "kvcache" in name]
QUANTIZED = [name for name in NAMES if "quantized" in name]
ROTATING = [name for name in NAMES if "rotating" in name]
OURS = "prompt_cache.safetensors"


def format_of(name: str) -> Format:
    return MLX_LM_0_31 if "0.31" in name else MLX_LM


def digest(planes: np.ndarray) -> str:
    """Of float32 [layer][K, V][row][head][element]."""
    return hashlib.sha256(np.ascontiguousarray(planes, "<f4").tobytes()).hexdigest()


@pytest.mark.parametrize("name", NAMES)
def test_a_cache_is_recognised_as_its_own_layout_only(name: str) -> None:
    assert recognise(one_file(name)) is format_of(name)
    assert [f.recognise(one_file(name)) for f in (MLX_LM, MLX_LM_0_31)].count(True) == 1


@pytest.mark.parametrize("name", sorted(set(EXPECTED) - set(NAMES)))
def test_other_tools_files_are_not_claimed(name: str) -> None:
    assert not any(f.recognise(one_file(name)) for f in (MLX_LM, MLX_LM_0_31))


@pytest.mark.parametrize("name", KVCACHES)
def test_rows_are_the_values_that_were_recorded(name: str) -> None:
    rows, expected = format_of(name).read(one_file(name), Given()), EXPECTED[name]
    assert (len(rows.k), rows.tokens) == (expected["n_layers"], expected["n_rows"])
    assert (rows.heads, rows.head_dim) == (expected["n_kv_heads"], expected["head_dim"])
    assert (rows.order, rows.rotation, rows.inexact) == (HALVES, (0, 0), "")
    assert stored_digest(rows) == expected["rows_as_stored_f32_sha256"]
    assert rows.told == {"class": "KVCache", "model": "llama4L"}
    assert rows.token_ids is None


@pytest.mark.parametrize("name", QUANTIZED)
def test_a_quantized_cache_gives_its_values_rounded_to_the_models_type(name: str) -> None:
    file = parse_tensors(one_file(name)[name])
    bits, group = (4, 32) if "quantized4" in name else (8, 64)
    values = [
        [
            dequantized(
                [file.tensors[f"{layer}.{plane}.{part}"] for part in range(3)],
                40,
                {"bits": bits, "group_size": group},
            )[0].swapaxes(0, 1)
            for plane in range(2)
        ]
        for layer in range(4)
    ]
    assert digest(np.array(values)) == EXPECTED[name]["rows_as_stored_f32_sha256"]
    rows = format_of(name).read(one_file(name), Given())
    assert rows.inexact == f"decoded from {bits} bits"
    kept = in_type(np.array(values), "bf16").reshape(4, 2, 40, 128)
    assert np.array_equal([rows.k, rows.v], kept.swapaxes(0, 1))


@pytest.mark.parametrize("name", ROTATING)
def test_the_rows_of_a_rotating_cache_lie_as_recorded_and_are_refused(name: str) -> None:
    expected = EXPECTED[name]
    told = dict(zip(*[iter(expected["note"].partition(";")[0].split())] * 2, strict=True))
    offset, keep, idx = (int(told[key]) for key in ("offset", "keep", "idx"))
    file = parse_tensors(one_file(name)[name])
    stored = np.array(
        [
            [file.tensors[f"{layer}.{p}"].array()[0].swapaxes(0, 1) for p in range(2)]
            for layer in range(4)
        ]
    )
    rows = list(range(stored.shape[2]))
    in_time = rows if idx == len(rows) else rows[:keep] + rows[idx:] + rows[keep:idx]
    assert digest(as_f32(stored[:, :, in_time], "bf16")) == expected["rows_as_stored_f32_sha256"]
    last = len(rows) - keep
    assert expected["row_positions"] == [*range(keep), *range(offset - last, offset)]
    with pytest.raises(Unsupported, match=f"of 32 rows that had {offset} tokens"):
        format_of(name).read(one_file(name), Given())


def unwrapped(metadata: dict[str, str], tensors: dict[str, ForeignTensor]) -> None:
    """0.32: as if 20 tokens had been put into a cache of 32 rows."""
    for layer in range(4):
        tensors[f"{layer}.2"] = tensors[f"{layer}.5"] = i32(20)


def test_a_rotating_cache_that_never_wrapped_is_read() -> None:
    files = edited("mlx_lm_0.32.2_rotating_decode.safetensors", unwrapped)
    rows = MLX_LM.read(files, Given())
    first = parse_tensors(files["x"]).tensors["0.0"].array()[0, :, :20]
    assert rows.tokens == 20
    assert np.array_equal(rows.k[0].reshape(20, 2, 64), first.swapaxes(0, 1))

    def old(metadata: dict[str, str], tensors: dict[str, ForeignTensor]) -> None:
        for layer in range(4):
            metadata |= {f"0.{layer}.2": "20", f"0.{layer}.3": "20"}

    files = edited("mlx_lm_0.31.0_rotating_decode.safetensors", old)
    assert MLX_LM_0_31.read(files, Given()).tokens == 20


def test_a_rotating_cache_whose_next_row_is_elsewhere_is_refused() -> None:
    def turned(metadata: dict[str, str], tensors: dict[str, ForeignTensor]) -> None:
        unwrapped(metadata, tensors)
        tensors["2.5"] = i32(7)

    files = edited("mlx_lm_0.32.2_rotating_decode.safetensors", turned)
    with pytest.raises(Damaged, match="says that it holds 20 tokens"):
        MLX_LM.read(files, Given())


@pytest.mark.parametrize("name", KVCACHES)
def test_written_again_it_holds_what_the_tool_wrote(name: str) -> None:
    """Byte for byte but for the order of the data in the file, which is that of a hash table of the
    tool (and of its platform), and the entry that `mlx_lm.generate` asks for."""
    rows = format_of(name).read(one_file(name), Given())
    written = format_of(name).write
    assert written is not None
    again = written(rows, Given(model_name="llama4L"))
    ours = parse_tensors(memoryview(again[OURS]))
    theirs = parse_tensors(one_file(name)[name])
    user = "1." if "0.31" in name else "0."
    assert ours.metadata.pop(f"{user}tokenizer_config") == "{}"
    assert ours.metadata == theirs.metadata
    assert ours.tensors.keys() == theirs.tensors.keys()
    for key, tensor in theirs.tensors.items():
        mine = ours.tensors[key]
        data = bytes(tensor.data)
        if "unpadded" in name and key[-1] in "01":
            assert mine.shape == (1, 2, 256, 64)
            data = np.pad(tensor.array(), ((0, 0), (0, 0), (0, 216), (0, 0))).tobytes()
        assert (mine.dtype, bytes(mine.data)) == (tensor.dtype, data)
    assert again == written(rows, Given(model_name="llama4L"))


@pytest.mark.parametrize("target", [MLX_LM, MLX_LM_0_31], ids=lambda f: str(f.name))
@pytest.mark.parametrize(("kind", "item"), [("f16", 2), ("bf16", 2), ("f32", 4)])
@pytest.mark.parametrize("tokens", [1, 255, 256, 257])
def test_what_is_written_is_read_again(target: Format, kind: str, item: int, tokens: int) -> None:
    rows = made(tokens, kind, item)
    assert target.write is not None
    files = {name: memoryview(data) for name, data in target.write(rows, Given()).items()}
    assert recognise(files) is target
    again = target.read(files, Given())
    assert (again.k_type, again.v_type, again.tokens) == (kind, kind, tokens)
    assert same_rows(again, rows)


def test_heads_can_be_given_where_the_rows_do_not_say() -> None:
    assert MLX_LM.write is not None
    rows = replace(made(), heads=None, head_dim=None)
    assert MLX_LM.write(rows, Given(heads=2, head_dim=3)) == MLX_LM.write(made(), Given())


def test_given_ids_stand_beside_the_rows_and_are_not_proven() -> None:
    ids = np.arange(40, dtype=np.uint32)
    rows = MLX_LM.read(one_file(NEW), Given(token_ids=ids, layers=4, dtype="bf16"))
    assert np.array_equal(rows.token_ids, ids)
    assert not rows.ids_proven


def test_padding_is_ignored_whatever_is_in_it() -> None:
    def filled(metadata: dict[str, str], tensors: dict[str, ForeignTensor]) -> None:
        for key, tensor in tensors.items():
            if tensor.dtype == "BF16":
                array = tensor.array().copy()
                array[:, :, 40:] = 0x7FC0  # NaN
                tensors[key] = tensor_of("BF16", array)

    rows = MLX_LM.read(edited(NEW, filled), Given())
    assert stored_digest(rows) == EXPECTED[NEW]["rows_as_stored_f32_sha256"]


def test_user_metadata_and_the_empty_scalar_may_be_missing() -> None:
    def bare(metadata: dict[str, str], tensors: dict[str, ForeignTensor]) -> None:
        del metadata["0.model"], metadata["2.0"]

    files = edited(NEW, bare)
    assert MLX_LM.recognise(files)
    assert MLX_LM.read(files, Given()).tokens == 40


@pytest.mark.parametrize(
    "value", [0.0, -0.0, 1.0, 1.00390625, 1.01171875, 3.4e38, float("inf"), float("nan"), 1e-40]
)
def test_values_are_rounded_as_torch_rounds_them(value: float) -> None:
    wide = np.array([value, -value], np.float32)
    for name, dtype in (("bf16", torch.bfloat16), ("f16", torch.float16), ("f32", torch.float32)):
        theirs = torch.from_numpy(wide).to(dtype)
        mine = as_f32(in_type(wide, name), name)
        assert np.array_equal(mine, theirs.float().numpy(), equal_nan=True)


@pytest.mark.parametrize("dtype", ["F16", "F32"])
def test_scales_of_each_type_are_read(dtype: str) -> None:
    """q of 4 bits from the lowest up, two groups of 4 elements: the formula, element by element."""
    kind = {"F16": np.float16, "F32": np.float32}[dtype]
    scales, biases = np.array([0.5, 3], kind), np.array([-1, 0.25], kind)
    parts = [
        tensor_of("U32", np.array([0x76543210], np.uint32).reshape(1, 1, 1, 1)),
        *(
            tensor_of(dtype, part.view(f"u{part.itemsize}").reshape(1, 1, 1, 2))
            for part in (scales, biases)
        ),
    ]
    found = dequantized(parts, 1, {"bits": 4, "group_size": 4})
    assert found.shape == (1, 1, 1, 8)
    assert found.ravel().tolist() == [-1, -0.5, 0, 0.5, 12.25, 15.25, 18.25, 21.25]
