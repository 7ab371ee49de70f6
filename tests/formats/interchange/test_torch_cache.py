"""transformers caches of torch.save: of three generations, of users' own making, and of a stranger's."""

from __future__ import annotations

import collections
import io
import zipfile
from dataclasses import replace

import numpy as np
import pytest
import torch

from kvsnap.formats.errors import Unsupported, UsageError
from kvsnap.formats.interchange import recognise
from kvsnap.formats.interchange.foreign import HALVES, Given
from kvsnap.formats.interchange.torch_cache import TORCH_CACHE as CACHE
from kvsnap.formats.interchange.torch_save import Tensor, save
from kvsnap.formats.interchange.torch_zip import read_entries, write_entries
from tests.formats.interchange.mlx_files import made
from tests.formats.interchange.sample_rows import EXPECTED, one_file, same_rows, stored_digest
from tests.formats.interchange.torch_files import (
    Cache,
    Layer,
    entries_of,
    lists_of,
    of_transformers,
    pairs,
    read,
    rows_like,
)

NAMES = [name for name in EXPECTED if name.endswith(".pt")]
SERIALIZATION_ID = ".data/serialization_id"


@pytest.mark.parametrize("name", NAMES)
def test_a_sample_is_read_to_the_value(name: str) -> None:
    files, expected = one_file(name), EXPECTED[name]
    assert recognise(files) is CACHE
    rows = CACHE.read(files, Given())
    assert (len(rows.k), rows.tokens, rows.heads, rows.head_dim) == (4, 40, 2, 64)
    assert (rows.order, rows.rotation, rows.k_type, rows.inexact) == (HALVES, (0, 0), "bf16", "")
    assert stored_digest(rows) == expected["rows_as_stored_f32_sha256"]
    ids = None if rows.token_ids is None else rows.token_ids.tolist()
    assert ids == expected["token_ids_in_file"]
    assert rows.told["form"] == {
        "hf_v4.46_dynamiccache.pt": "DynamicCache of 4.46",
        "hf_v4.57_dynamiccache.pt": "DynamicCache",
        "hf_v5_dynamiccache.pt": "DynamicCache",
    }.get(name, "tuple")


@pytest.mark.parametrize("name", sorted(set(EXPECTED) - set(NAMES)))
def test_other_tools_files_are_not_claimed(name: str) -> None:
    assert not CACHE.recognise(one_file(name))


@pytest.mark.parametrize("name", ["hf_v4.57_tuple.pt", "hf_v5_tuple.pt", "hf_v5_dict.pt"])
def test_a_sample_written_again_is_the_sample_but_for_its_id(name: str) -> None:
    """Byte for byte: the last entry of torch is a hash of its C++ library, and is put in by hand here.
    The folder in the zip is the file's name, which is another one when kvsnap chooses it."""
    theirs = one_file(name)[name]
    rows = CACHE.read(one_file(name), Given())
    assert CACHE.write is not None
    (ours,) = CACHE.write(rows, Given()).values()
    folder = name.removesuffix(".pt")
    entries = [
        (f"{folder}/{entry.partition('/')[2]}", data)
        for entry, data in read_entries(memoryview(ours)).items()
    ]
    last = f"{folder}/{SERIALIZATION_ID}"
    assert write_entries([*entries, (last, read_entries(theirs)[last])]) == bytes(theirs)


@pytest.mark.parametrize(("kind", "item"), [("f16", 2), ("bf16", 2), ("f32", 4)])
@pytest.mark.parametrize("layers", [2, 90])
def test_what_is_written_is_what_torch_saves_and_is_read_again(
    kind: str, item: int, layers: int
) -> None:
    small = made(11, kind, item)
    rows = replace(small, k=small.k * (layers // 2), v=small.v * (layers // 2))
    ids = np.arange(11, dtype=np.uint32) * 3**20
    for token_ids in (None, ids):
        with_ids = replace(rows, token_ids=token_ids)
        assert CACHE.write is not None
        (data,) = CACHE.write(with_ids, Given()).values()
        again = CACHE.read({"x": memoryview(data)}, Given())
        assert same_rows(again, rows)
        assert token_ids is None or np.array_equal(again.token_ids, token_ids)
        theirs = torch.load(io.BytesIO(data), weights_only=True)
        if token_ids is not None:
            assert theirs["input_ids"].tolist() == [token_ids.tolist()]
        # Loaded and saved by torch: the same entries but for the folder and the id.
        file = io.BytesIO()
        torch.save(theirs, file)
        entries = {n.partition("/")[2]: d for n, d in read_entries(file.getbuffer()).items()}
        del entries[SERIALIZATION_ID]
        mine = {n.partition("/")[2]: d for n, d in read_entries(memoryview(data)).items()}
        assert mine == entries
        with zipfile.ZipFile(io.BytesIO(data)) as zipped:
            assert zipped.testzip() is None


def test_equal_rows_give_equal_bytes() -> None:
    assert CACHE.write is not None
    assert CACHE.write(made(), Given()) == CACHE.write(made(), Given())


def test_lists_and_the_triples_of_v5_are_read() -> None:
    layers = pairs()
    for value in (
        layers,
        list(layers),
        [list(layer) for layer in layers],
        tuple((k, v, None) for k, v in layers),
    ):
        assert lists_of(read(value)) == rows_like(layers)


def test_strides_offsets_and_shared_storages_are_followed() -> None:
    packed = torch.arange(4 * 2 * 2 * 2 * 3).reshape(2, 2, 1, 2, 2, 6).bfloat16()
    layers = tuple(
        (packed[n, 0].transpose(1, 2)[..., 1:4], packed[n, 1].transpose(1, 2)[..., ::2])
        for n in range(2)
    )
    assert not layers[0][0].is_contiguous()
    assert lists_of(read(layers)) == rows_like(layers)


def test_parameters_are_tensors() -> None:
    layers = tuple((torch.nn.Parameter(k), v) for k, v in pairs())
    assert lists_of(read(layers)) == rows_like(pairs())


def test_ids_and_a_whole_mask_may_stand_beside_the_layers() -> None:
    ids = [7, 0, 2**32 - 1, 9]
    for kept in (
        torch.tensor([ids]),
        torch.tensor(ids),
        ids,
    ):
        value = {
            "past_key_values": pairs(),
            "input_ids": kept,
            "attention_mask": torch.ones(1, 4).long(),
        }
        rows = read(value)
        assert rows.token_ids is not None
        assert rows.token_ids.tolist() == ids
        assert rows.token_ids.dtype == np.uint32
    assert read({"past_key_values": pairs()}).token_ids is None
    assert (
        read({"past_key_values": pairs(), "input_ids": torch.tensor([[1, 2, 3, 4]]).int()}).tokens
        == 4
    )


def test_a_sequence_of_a_batch_is_taken_with_its_own_ids() -> None:
    layers = pairs(batch=3)
    ids = torch.arange(12).reshape(3, 4)
    value = {"past_key_values": layers, "input_ids": ids, "attention_mask": torch.ones(3, 4).bool()}
    with pytest.raises(UsageError, match="batch of 3"):
        read(value)
    for row in range(3):
        rows = read(value, batch_row=row)
        assert lists_of(rows) == rows_like(layers, row)
        assert rows.token_ids is not None
        assert rows.token_ids.tolist() == ids[row].tolist()
    with pytest.raises(UsageError, match="no such row"):
        read(value, batch_row=3)


def test_ids_that_are_not_as_many_as_the_rows_are_refused() -> None:
    for count in (3, 5):
        value = {"past_key_values": pairs(), "input_ids": torch.arange(count)[None]}
        with pytest.raises(Unsupported, match=f"4 tokens and {count} token ids"):
            read(value)


def test_other_ids_than_the_files_are_refused() -> None:
    value = {"past_key_values": pairs(), "input_ids": torch.arange(4)[None]}
    assert read(value, token_ids=np.arange(4, dtype=np.uint32)).tokens == 4
    with pytest.raises(UsageError, match="not those given"):
        read(value, token_ids=np.arange(1, 5, dtype=np.uint32))


def test_caches_of_each_generation_are_read_also_inside_a_dict(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layers = pairs()
    new = Cache(layers=[Layer(keys=k, values=v) for k, v in layers], layer_class_to_replicate=Layer)
    old = Cache(
        key_cache=[k for k, _ in layers],
        value_cache=[v for _, v in layers],
        _seen_tokens=4,
        _hooks=collections.OrderedDict(),
        _names={"a"},
    )
    for cache in (new, old):
        for value in (cache, {"past_key_values": cache, "input_ids": torch.arange(4)}):
            rows = CACHE.read(of_transformers(monkeypatch, value), Given())
            assert lists_of(rows) == rows_like(layers)
            assert rows.told["form"].startswith("DynamicCache")


def test_files_of_torch_before_2_1_do_not_name_a_byte_order() -> None:
    entries = entries_of(pairs())
    del entries["archive/byteorder"]
    rows = CACHE.read({"x": memoryview(write_entries(list(entries.items())))}, Given())
    assert lists_of(rows) == rows_like(pairs())


def test_several_files_are_no_cache() -> None:
    files = one_file("hf_v5_tuple.pt") | {"other": memoryview(b"")}
    assert not CACHE.recognise(files)
    with pytest.raises(UsageError, match="one file"):
        CACHE.read(files, Given())


def test_numbers_of_any_size_are_written_as_python_writes_them() -> None:
    tensors = [torch.zeros(size).bfloat16() for size in (1, 255, 256, 65535, 65536)]
    value = ((), *(Tensor("bf16", t.view(torch.uint16).numpy()) for t in tensors))
    written = save(value, "archive")
    assert (
        bytes(read_entries(memoryview(written))["archive/data.pkl"])
        == entries_of(((), *tensors))["archive/data.pkl"]
    )
