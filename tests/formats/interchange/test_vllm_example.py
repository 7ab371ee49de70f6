"""vLLM's ExampleConnector folders: samples of vLLM's read and written, and all that is not one refused."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given as example
from hypothesis import settings
from hypothesis import strategies as st

from kvsnap.formats.errors import Damaged, KvsnapError, Unsupported, UsageError
from kvsnap.formats.interchange.foreign import Given
from kvsnap.formats.interchange.safetensors_file import tensor_of, write_tensors
from kvsnap.formats.interchange.vllm_example import VLLM_EXAMPLE, folder_name, layer_number
from tests.formats.interchange.served import (
    EXPECTED,
    IDS,
    Counted,
    digest,
    equal,
    files_of,
    given,
    made_rows,
    views,
)

FILES = files_of("vllm_example_connector")
FOLDER = "a475f74bc6b0a16263dbf44a39b82c72"
LAYERS = {path.rpartition("/")[2]: content for path, content in FILES.items()}


def layer(number: int) -> str:
    return f"model.layers.{number}.self_attn.attn.safetensors"


def test_the_sample_is_recognised_and_read_to_the_value() -> None:
    assert VLLM_EXAMPLE.recognise(FILES)
    rows = VLLM_EXAMPLE.read(FILES, given())
    assert (rows.tokens, rows.heads, rows.head_dim, rows.k_type) == (64, 2, 64, "bf16")
    assert rows.order == "halves"
    assert rows.ids_proven
    assert list(rows.token_ids) == IDS[:64]
    for path in FILES:
        expected = EXPECTED["files"][f"vllm_example_connector/{path}"]
        number = layer_number(path.rpartition("/")[2])
        assert number is not None
        found = digest(rows, layers=slice(number, number + 1))
        assert found == expected["canonical_f32_sha256"]


def test_the_sample_is_written_again_to_the_byte() -> None:
    rows = VLLM_EXAMPLE.read(FILES, given())
    assert VLLM_EXAMPLE.write is not None
    assert VLLM_EXAMPLE.write(rows, given()) == {n: bytes(c) for n, c in FILES.items()}


def test_without_a_folder_s_name_or_ids_nothing_is_proven() -> None:
    alone = VLLM_EXAMPLE.read(LAYERS, given())
    assert not alone.ids_proven
    assert list(alone.token_ids) == IDS[:64]
    assert "lost" in alone.told["folder"]
    renamed = {f"x/{name}": content for name, content in LAYERS.items()}
    assert not VLLM_EXAMPLE.read(renamed, given()).ids_proven
    unnamed = VLLM_EXAMPLE.read(FILES, given(token_ids=None))
    assert unnamed.token_ids is None
    assert not unnamed.ids_proven


def test_the_block_size_must_be_given_and_divide_the_tokens() -> None:
    with pytest.raises(UsageError, match="block"):
        VLLM_EXAMPLE.read(FILES, given(block=None))
    for block in (3, 48, 65, 2**31 - 1):
        with pytest.raises(Damaged, match="whole blocks"):
            VLLM_EXAMPLE.read(FILES, given(block=block))
    for block in (0, -32, 2**40, True, "32", 32.0):
        with pytest.raises(UsageError):
            VLLM_EXAMPLE.read(FILES, given(block=block))


def test_ids_of_another_text_are_refused() -> None:
    for at in (0, 31, 63):
        wrong = [*IDS]
        wrong[at] += 1
        with pytest.raises(UsageError, match="not the hash"):
            VLLM_EXAMPLE.read(FILES, given(token_ids=wrong))
    with pytest.raises(UsageError, match="63 token ids"):
        VLLM_EXAMPLE.read(FILES, given(token_ids=IDS[:63]))


def test_of_several_folders_that_of_the_ids_is_taken() -> None:
    other = {f"{folder_name(np.arange(32, dtype=np.uint32))}/{n}": c for n, c in LAYERS.items()}
    both = {**other, **FILES}
    counted = Counted(both)
    assert VLLM_EXAMPLE.read(counted, given()).told["folder"] == FOLDER
    assert sorted(counted.read) == sorted(FILES)  # no other file is touched
    with pytest.raises(UsageError, match="2 folders"):
        VLLM_EXAMPLE.read(both, given(token_ids=None))
    with pytest.raises(UsageError, match="hash differs"):
        VLLM_EXAMPLE.read(both, given(token_ids=[7] * 64))
    twice = {**FILES, **{f"again/{name}": content for name, content in FILES.items()}}
    with pytest.raises(UsageError, match="one prompt"):
        VLLM_EXAMPLE.read(twice, given())


@pytest.mark.parametrize("gone", range(4))
def test_a_folder_without_one_layer_is_refused(gone: int) -> None:
    some = {name: content for name, content in LAYERS.items() if name != layer(gone)}
    with pytest.raises(Damaged, match="layers are there"):
        VLLM_EXAMPLE.read(some, given())
    if gone < 3:  # that the last one is missing only the model's own number of layers tells
        with pytest.raises(Damaged, match=f"missing: {gone}"):
            VLLM_EXAMPLE.read(some, given(layers=None))


def test_layers_stand_in_the_order_of_their_numbers() -> None:
    rows = made_rows(8, layers=12)
    assert VLLM_EXAMPLE.write is not None
    written = views(VLLM_EXAMPLE.write(rows, Given(block=4)))
    assert len(written) == 12
    read = VLLM_EXAMPLE.read(dict(sorted(written.items())), Given(block=4))
    assert equal(read, rows, 8)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.4294967296.self_attn.attn.safetensors",
        f"model.layers.{'9' * 200}.self_attn.attn.safetensors",
        "model.layers.03.self_attn.attn.safetensors",
        "model.layers.-1.self_attn.attn.safetensors",
        "model.layers.1.experts.2.attn.safetensors",
        "model.layers.٣.self_attn.attn.safetensors",
        "layer.safetensors",
        ".safetensors",
        "model.\x1b[2J.3.attn.safetensors",
    ],
)
def test_names_that_are_no_layer_s_are_refused(name: str) -> None:
    assert layer_number(name) is None
    wrong = {**LAYERS, name: LAYERS[layer(3)]}
    del wrong[layer(3)]
    assert not VLLM_EXAMPLE.recognise(wrong)
    with pytest.raises(Damaged, match="not named") as caught:
        VLLM_EXAMPLE.read(wrong, given())
    assert "\x1b" not in caught.value.what


def test_layers_of_a_second_model_are_refused_and_other_files_passed_over() -> None:
    draft = {layer(n).replace("model", "draft"): c for n, c in enumerate(LAYERS.values())}
    with pytest.raises(Unsupported, match="several kinds"):
        VLLM_EXAMPLE.read({**LAYERS, **draft}, given())
    more = {**FILES, f"{FOLDER}/.DS_Store": memoryview(b"x"), "notes.txt": memoryview(b"")}
    assert VLLM_EXAMPLE.read(more, given()).ids_proven
    with pytest.raises(UsageError, match="none of these files"):
        VLLM_EXAMPLE.read({"notes.txt": memoryview(b"")}, given())


def test_layers_of_other_shapes_or_types_are_refused() -> None:
    def with_last(dtype: str, array: np.ndarray, name: str = "kv_cache") -> dict[str, memoryview]:
        made = write_tensors({}, {name: tensor_of(dtype, array)})
        return {**LAYERS, layer(3): memoryview(made)}

    bf16 = np.zeros((64, 2, 128), "<u2")
    VLLM_EXAMPLE.read(with_last("BF16", bf16), given())
    for dtype, array in (
        ("F16", bf16),
        ("BF16", bf16[:32]),
        ("BF16", bf16[:, :1]),
        ("BF16", bf16.reshape(64, 4, 64)),
        ("F32", np.zeros((64, 2, 128), "<u4")),
    ):
        with pytest.raises(Damaged, match="differ"):
            VLLM_EXAMPLE.read(with_last(dtype, array), given())
    with pytest.raises(Damaged, match="kv_cache"):
        VLLM_EXAMPLE.read(with_last("BF16", bf16, "other"), given())


@pytest.mark.parametrize(
    ("dtype", "shape", "error"),
    [
        ("U8", (64, 2, 128), Unsupported),  # an fp8 cache
        ("F64", (64, 2, 128), Unsupported),
        ("BF16", (64, 576), Unsupported),  # latent attention
        ("BF16", (64, 2, 127), Damaged),
        ("BF16", (0, 2, 128), Damaged),
        ("BF16", (64, 0, 128), Damaged),
        ("BF16", (64, 2, 0), Damaged),
        ("BF16", (64,), Damaged),
        ("BF16", (2, 2, 16, 1024), Damaged),
    ],
)
def test_shapes_that_are_no_cache_are_refused(
    dtype: str, shape: tuple[int, ...], error: type[KvsnapError]
) -> None:
    wide = {"U8": 1, "F64": 8}.get(dtype, 2)
    made = write_tensors({}, {"kv_cache": tensor_of(dtype, np.zeros(shape, f"<u{wide}"))})
    with pytest.raises(error):
        VLLM_EXAMPLE.read(dict.fromkeys(LAYERS, memoryview(made)), Given(block=32))


@pytest.mark.parametrize(
    ("name", "value"), [("heads", 4), ("head_dim", 128), ("dtype", "f16"), ("layers", 3)]
)
def test_a_folder_of_another_model_is_refused(name: str, value: object) -> None:
    with pytest.raises((UsageError, Damaged), match=name.removesuffix("s").replace("dtype", "f16")):
        VLLM_EXAMPLE.read(FILES, given(**{name: value}))


def test_a_cut_or_changed_file_is_refused_or_differs_in_rows_alone() -> None:
    good = bytes(LAYERS[layer(2)])
    rows = VLLM_EXAMPLE.read(LAYERS, given())
    for length in [*range(100), *range(100, len(good), 997), len(good) - 1]:
        with pytest.raises((Damaged, Unsupported)):
            VLLM_EXAMPLE.read({**LAYERS, layer(2): memoryview(good[:length])}, given())
    with pytest.raises(Damaged):
        VLLM_EXAMPLE.read({**LAYERS, layer(2): memoryview(good + b"\0")}, given())
    for at in range(88):
        flipped = bytearray(good)
        flipped[at] ^= 1 << at % 8
        try:
            read = VLLM_EXAMPLE.read({**LAYERS, layer(2): memoryview(flipped)}, given())
        except KvsnapError:
            continue
        assert equal(read, rows, 64)  # white space of the header


@settings(max_examples=50, deadline=None)
@example(
    st.sampled_from(["f16", "bf16", "f32"]),
    st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(1, 4), st.integers(1, 9),
)  # fmt: skip
def test_what_is_written_is_read(
    kind: str, layers: int, heads: int, half: int, block: int, tokens: int
) -> None:
    rows = made_rows(tokens + block, kind, layers, heads, 2 * half)
    whole = (tokens + block) // block * block
    assert VLLM_EXAMPLE.write is not None
    written = views(VLLM_EXAMPLE.write(rows, Given(block=block)))
    assert VLLM_EXAMPLE.recognise(written)
    read = VLLM_EXAMPLE.read(written, Given(block=block, token_ids=rows.token_ids))
    assert read.tokens == whole
    assert read.ids_proven
    assert equal(read, rows, whole)


def test_rows_that_vllm_does_not_hold_are_not_written() -> None:
    rows, write = made_rows(8), VLLM_EXAMPLE.write
    assert write is not None
    for wrong, what, error in (
        ({"order": "gguf"}, "convert", UsageError),
        ({"k_type": "q8_0", "v_type": "q8_0"}, "q8_0", Unsupported),
        ({"v_type": "bf16"}, "one type", Unsupported),
        ({"k_type": "f32", "v_type": "f32"}, "4-byte", UsageError),
        ({"rotation": (64, 64)}, "rotated", UsageError),
        ({"rotation": None}, "rotated", UsageError),
        ({"inexact": "4 bits"}, "rounded", UsageError),
        ({"token_ids": None}, "hashes", UsageError),
        ({"token_ids": rows.token_ids[:7]}, "each row", UsageError),
        ({"heads": 3}, "unsigned integers", UsageError),
        ({"heads": None}, "KV heads", UsageError),
        ({"v": rows.v[:2]}, "layers", UsageError),
        ({"k": (), "v": (), "token_ids": np.empty(0, np.uint32)}, "0 tokens", UsageError),
    ):
        with pytest.raises(error) as caught:
            write(dataclasses.replace(rows, **wrong), Given(block=4))
        assert what in caught.value.what + caught.value.hint, wrong
    for target, error in (
        (Given(), UsageError),
        (Given(block=9), UsageError),
        (Given(block=4, dtype="bf16"), UsageError),
        (Given(block=4, heads=1), UsageError),
        (Given(block=4, architecture="falcon"), Unsupported),
    ):
        with pytest.raises(error):
            write(rows, target)
    write(rows, Given(block=4, architecture="llama"))


def test_other_tools_files_are_not_taken_for_it() -> None:
    for folder in ("sglang_hicache_file", "lmcache_fs", "vllm_fs_tier"):
        assert not VLLM_EXAMPLE.recognise(files_of(folder))
    assert not VLLM_EXAMPLE.recognise({})
    assert not VLLM_EXAMPLE.recognise({layer(0): memoryview(b"")})
    assert not VLLM_EXAMPLE.recognise({layer(0): memoryview(bytes(300))})
