"""Files of torch.save that are no whole cache, damaged, or a stranger's: refused, with the reason."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvsnap.formats.errors import Damaged, KvsnapError, Unsupported, UsageError
from kvsnap.formats.interchange.foreign import GGUF, Given
from kvsnap.formats.interchange.torch_cache import TORCH_CACHE as CACHE
from kvsnap.formats.interchange.torch_save import Tensor, save
from kvsnap.formats.interchange.torch_zip import read_entries, write_entries
from tests.formats.interchange.mlx_files import made
from tests.formats.interchange.sample_rows import EXPECTED, one_file
from tests.formats.interchange.torch_files import (
    Cache,
    Layer,
    Window,
    entries_of,
    of_transformers,
    pairs,
    plane,
    read,
)

NAMES = [name for name in EXPECTED if name.endswith(".pt")]

K, V = plane(), plane(start=1)
NEGATIVE = torch.ones(1, 2, 4, 3, dtype=torch.complex64).conj().imag


@pytest.mark.parametrize(
    ("cache", "error", "reason"),
    [
        (Cache(), Damaged, "neither layers nor as many keys"),
        (Cache(layers=1), Damaged, "no list"),
        (Cache(layers=[1]), Unsupported, "no DynamicLayer"),
        (Cache(layers=[Cache()]), Unsupported, "no DynamicLayer"),
        (Cache(layers=[Layer()]), Unsupported, "no pair of tensors"),
        (Cache(layers=[]), Unsupported, "no layers"),
        (Cache(layers=[Window(keys=K, values=V)]), Unsupported, "DynamicSlidingWindowLayer"),
        (Cache(key_cache=[K], value_cache=[]), Damaged, "as many keys"),
        (Cache(key_cache=[K], value_cache=[V]), Unsupported, "saw None tokens"),
        (Cache(key_cache=[K], value_cache=[V], _seen_tokens=9), Unsupported, "saw 9 tokens"),
        (
            Cache(key_cache=[[]], value_cache=[[]], _seen_tokens=4),
            Unsupported,
            "no pair of tensors",
        ),
        (Layer(keys=K, values=V), Unsupported, "a Stub is no cache"),
    ],
)
def test_a_cache_that_is_not_whole_is_refused(
    cache: Any, error: type[KvsnapError], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(error, match=reason):
        CACHE.read(of_transformers(monkeypatch, cache), Given())


@pytest.mark.parametrize(
    ("value", "error", "reason"),
    [
        ((), Unsupported, "no layers"),
        (K, Unsupported, "a TorchTensor is no cache"),
        ("text", Unsupported, "a str is no cache"),
        ({"state": 1}, Unsupported, "a dict with"),
        ({"past_key_values": None}, Unsupported, "a NoneType is no cache"),
        ((K, V), Unsupported, "layer 0 is no pair"),
        (((K,),), Unsupported, "layer 0 is no pair"),
        (((K, V, None, None),), Unsupported, "layer 0 is no pair"),
        (((K, 1),), Unsupported, "no pair of tensors"),
        (((K, V, 8),), Unsupported, "sliding window"),
        (((K, V, torch.tensor(8)),), Unsupported, "sliding window"),
        (((K, V), (plane(tokens=3), plane(tokens=3))), Unsupported, "sliding window"),
        (((K, plane(tokens=3)),), Unsupported, "V of layer 0 holds 3 tokens and layer 0 4"),
        (((K, V[..., :2]),), Unsupported, "V of layer 0 has shape"),
        (((K[0], V[0]),), Unsupported, r"shape \[2, 4, 3\], not"),
        (((K, V.half()),), Unsupported, "bf16, f16"),
        (((K.double(), V.double()),), Unsupported, "type f64"),
        (((K.int(), V.int()),), Unsupported, "type i32"),
        (((K[:, :, :0], V[:, :, :0]),), Unsupported, "empty"),
        (((K[:0], V[:0]),), Unsupported, "empty"),
        (((K[:, :, :1].expand(1, 2, 9, 3), V),), Unsupported, "more than once"),
        (((K.to("meta"), V),), Unsupported, "_rebuild_meta_tensor"),
        (((NEGATIVE, NEGATIVE),), Unsupported, "metadata"),
        (((K.to_sparse(), V),), Unsupported, "the pickle names"),
        ({"past_key_values": pairs(), "input_ids": K}, Unsupported, "neither a tensor of integers"),
        (
            {"past_key_values": pairs(), "input_ids": "x"},
            Unsupported,
            "neither a tensor of integers",
        ),
        ({"past_key_values": pairs(), "input_ids": [True]}, Unsupported, "neither a tensor"),
        ({"past_key_values": pairs(), "input_ids": [-1]}, Unsupported, "neither a tensor"),
        (
            {"past_key_values": pairs(), "input_ids": torch.tensor([-1, 0, 0, 0])},
            Damaged,
            "outside",
        ),
        ({"past_key_values": pairs(), "input_ids": torch.tensor([2**32] * 4)}, Damaged, "outside"),
        (
            {"past_key_values": pairs(), "input_ids": torch.zeros(1, 1, 4).long()},
            UsageError,
            "no such",
        ),
        ({"past_key_values": pairs(), "input_ids": torch.tensor(4)}, UsageError, "no such"),
        (
            {"past_key_values": pairs(), "attention_mask": torch.tensor([[0, 1, 1, 1]])},
            Unsupported,
            "padding",
        ),
    ],
)
def test_what_is_no_whole_cache_is_refused(
    value: Any, error: type[KvsnapError], reason: str
) -> None:
    with pytest.raises(error, match=reason):
        read(value)


def test_layers_that_share_one_storage_are_not_multiplied() -> None:
    with pytest.raises(Unsupported, match="share their storage"):
        read(((K, V),) * 1000)


def test_the_old_format_without_a_zip_is_not_recognised() -> None:
    file = io.BytesIO()
    torch.save(pairs(), file, _use_new_zipfile_serialization=False)
    files = {"x": file.getbuffer()}
    assert not CACHE.recognise(files)
    with pytest.raises(Damaged):
        CACHE.read(files, Given())


@pytest.mark.parametrize(
    ("changes", "error", "reason"),
    [
        ({"byteorder": b"big"}, Unsupported, "byte order"),
        ({"version": b"4\n"}, Unsupported, "file format '4'"),
        ({"version": None}, Unsupported, "file format ''"),
        ({"data.pkl": None}, Unsupported, "no file of torch.save"),
        ({"constants.pkl": b""}, Unsupported, "no file of torch.save"),
        ({"data/1": None}, Damaged, "lacks the storage '1'"),
        ({"data/1": b"xx"}, Damaged, "has 2 bytes"),
        ({"../data/9": b""}, Damaged, "named"),
    ],
)
def test_a_zip_that_torch_would_not_write_is_refused(
    changes: dict[str, bytes | None], error: type[KvsnapError], reason: str
) -> None:
    entries = entries_of(pairs()) | {f"archive/{n}": d for n, d in changes.items() if d is not None}
    entries = {
        n: d for n, d in entries.items() if changes.get(n.partition("/")[2], b"") is not None
    }
    with pytest.raises(error, match=reason):
        CACHE.read({"x": memoryview(write_entries(list(entries.items())))}, Given())


def test_a_zip_of_several_folders_is_refused() -> None:
    entries = [*entries_of(pairs()).items(), ("other/data/9", b"")]
    for odd in (entries, [("loose", b""), *entries[:-1]]):
        with pytest.raises(Unsupported, match="one folder"):
            CACHE.read({"x": memoryview(write_entries(odd))}, Given())


def test_a_tensor_that_goes_beyond_its_storage_is_refused() -> None:
    layer = Tensor("bf16", np.zeros((1, 2, 4, 3), np.uint16))
    good = save(((layer, layer),), "cache")
    assert CACHE.read({"x": memoryview(good)}, Given()).tokens == 4
    entries = dict(read_entries(memoryview(good)))
    pickled = bytes(entries["cache/data.pkl"])
    shape, strides = b"(K\1K\2K\4K\3t", b"(K\x18K\x0cK\3K\1t"
    assert pickled.count(shape) == pickled.count(strides) == 2
    huge = b"\x8a\x08" + b"\xff" * 7 + b"\x7f"  # 2**63 - 1
    for old, new, reason in (
        (shape, b"(K\1K\2K\5K\3t", "goes beyond"),
        (shape, b"(K\1K\2K\4t", "impossible shape"),
        (shape, b"(K\1K\2K\4J\xff\xff\xff\xfft", "impossible shape"),
        (shape, b"(K\1K\2K\4\x88t", "impossible shape"),
        (shape, b"(" + huge * 4 + b"t", "goes beyond"),
        (shape, b"(K\0" + huge * 3 + b"t", "empty"),
        (strides, b"(K\x18K\x0dK\3K\1t", "goes beyond"),
        (strides, b"(K\x18K\x0cK\3" + huge + b"t", "goes beyond"),
        (b"Q" + b"K\0", b"Q" + b"K\1", "goes beyond"),
        (b"Q" + b"K\0", b"QN", "described otherwise"),
        (b"K\x18tq", b"K\x17tq", "its pickle says"),
        (b"X\7\0\0\0storage", b"X\7\0\0\0storagf", "persistent id"),
        (b"K\x18tq", b"tq", "persistent id"),
        (b"\x89c", b"c", "described otherwise"),
        (b"torch._utils\n_rebuild_tensor_v2\n", b"torch._utils\n_rebuild_parameter\n", "arguments"),
    ):
        assert old in pickled
        entries["cache/data.pkl"] = memoryview(pickled.replace(old, new))
        with pytest.raises(KvsnapError, match=reason):
            CACHE.read({"x": memoryview(write_entries(list(entries.items())))}, Given())
    # A step that is never made may be any number: torch writes odd ones for axes of length 1.
    entries["cache/data.pkl"] = memoryview(pickled.replace(strides, b"(" + huge + b"K\x0cK\3K\1t"))
    assert CACHE.read({"x": memoryview(write_entries(list(entries.items())))}, Given()).tokens == 4


@pytest.mark.parametrize("name", NAMES)
def test_a_file_that_is_cut_is_refused(name: str) -> None:
    whole = one_file(name)[name]
    for size in (*range(0, len(whole), 2003), *range(len(whole) - 120, len(whole))):
        with pytest.raises(Damaged):
            CACHE.read({name: whole[:size]}, Given())
        CACHE.recognise({name: whole[:size]})


def test_a_flipped_bit_of_a_row_is_found_by_its_checksum() -> None:
    name = "hf_v5_tuple.pt"
    damaged = bytearray(one_file(name)[name])
    damaged[len(damaged) // 2] ^= 1
    with pytest.raises(Damaged, match="CRC differs"):
        CACHE.read({name: memoryview(damaged)}, Given())


def test_a_pickle_that_runs_something_is_refused_by_the_name_of_it(tmp_path: Path) -> None:
    class Runs:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "canary",)

    with pytest.raises(Unsupported, match="the pickle names"):
        read({"past_key_values": pairs(), "note": Runs()})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"order": GGUF}, "order gguf"),
        ({"k_type": "q8_0", "v_type": "q8_0"}, "q8_0"),
        ({"token_ids": np.arange(2, dtype=np.uint32)}, "2 token ids do not go with"),
    ],
)
def test_rows_that_cannot_be_written_are_refused(changes: Any, reason: str) -> None:
    assert CACHE.write is not None
    with pytest.raises(UsageError, match=reason):
        CACHE.write(replace(made(), **changes), Given())


@pytest.mark.parametrize(
    ("pickled", "reason"),
    [
        (b"ctorch._utils\n_rebuild_parameter\nN\x89}\x87R.", "parameter of what is no tensor"),
        (b"cbuiltins\nset\nN\x85R.", "a set of something else"),
        (b"cbuiltins\nset\n](K\1e\x85R.", "a set of something else"),
        (b"NQ.", "persistent id"),
    ],
)
def test_calls_that_torch_does_not_make_are_refused(pickled: bytes, reason: str) -> None:
    entries = entries_of(pairs()) | {"archive/data.pkl": pickled}
    with pytest.raises(KvsnapError, match=reason):
        CACHE.read({"x": memoryview(write_entries(list(entries.items())))}, Given())
