"""Block files: what goes in comes out, and the digests say what they cover."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from blake3 import blake3

from kvsnap.formats.block import BlockRecord, pack_block, parse_block
from kvsnap.formats.codecs import get_codec
from kvsnap.formats.container import Packed, check_file_digest
from kvsnap.formats.errors import Damaged
from kvsnap.formats.layout import Layout

Rows = Callable[..., dict[str, np.ndarray]]
Bytes = Callable[..., bytes]
CODECS = ["raw", "zstd"]


def same_record(a: BlockRecord, b: BlockRecord) -> bool:
    ids = np.array_equal(a.token_ids, b.token_ids)
    return ids and replace(a, token_ids=b.token_ids) == b


@pytest.mark.parametrize("codec", CODECS)
def test_record_and_rows_come_back_bit_for_bit(
    block_record: BlockRecord, layout: Layout, random_rows: Rows, block_bytes: Bytes, codec: str
) -> None:
    block = parse_block(memoryview(block_bytes(codec)))
    assert same_record(block.record, block_record)
    assert block.codec.id == codec
    out = layout.empty(4)
    block.decode_into(layout, out)
    for name, array in random_rows().items():
        assert np.array_equal(out[name], array)
    block.check_content()


@pytest.mark.parametrize("codec", CODECS)
def test_equal_content_gives_equal_bytes(block_bytes: Bytes, codec: str) -> None:
    assert block_bytes(codec) == block_bytes(codec)


def test_rows_need_not_be_contiguous(
    random_rows: Rows, layout: Layout, block_record: BlockRecord, block_bytes: Bytes, whole: Bytes
) -> None:
    strided = {n: np.repeat(a, 2, axis=1)[:, ::2] for n, a in random_rows().items()}
    assert not any(array.flags.c_contiguous for array in strided.values())
    assert whole(pack_block(block_record, get_codec("raw"), layout, strided)) == block_bytes()


def test_planes_may_come_in_any_order(random_rows: Rows, block_bytes: Bytes) -> None:
    backwards = dict(reversed(random_rows().items()))
    assert block_bytes(rows=backwards) == block_bytes()


def test_raw_and_zstd_files_of_one_block_differ_only_in_how_they_are_stored(
    block_bytes: Bytes,
) -> None:
    raw, packed = (memoryview(block_bytes(codec)) for codec in CODECS)
    one, two = parse_block(raw), parse_block(packed)
    assert one.content == two.content
    assert same_record(one.record, two.record)
    assert check_file_digest(raw) != check_file_digest(packed)


def test_content_covers_every_row(
    random_rows: Rows, layout: Layout, block_record: BlockRecord, whole: Callable[[Packed], bytes]
) -> None:
    def content(rows: dict[str, np.ndarray]) -> str:
        packed = pack_block(block_record, get_codec("raw"), layout, rows)
        return parse_block(memoryview(whole(packed))).content

    rows = random_rows()
    digests = {content(rows)}
    for name, array in rows.items():
        for at in np.ndindex(array.shape):
            changed = array.copy()
            changed[at] ^= 1
            digests.add(content(rows | {name: changed}))
    assert len(digests) == 1 + sum(array.size for array in rows.values())


@pytest.mark.parametrize(
    "change",
    [
        {"name": bytes(32)},
        {"parent": b"\1" * 32},
        {"root_id": "00" * 32},
        {"start": 4},
        {"token_ids": np.array([5, 6, 7, 8], np.uint32)},
        {"extras": b"\1"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_content_covers_every_field_that_decides_what_an_engine_receives(
    block_record: BlockRecord,
    layout: Layout,
    random_rows: Rows,
    block_bytes: Bytes,
    whole: Callable[[Packed], bytes],
    change: dict[str, Any],
) -> None:
    other = replace(block_record, **change)
    file = whole(pack_block(other, get_codec("raw"), layout, random_rows()))
    block = parse_block(memoryview(file))
    assert same_record(block.record, other)
    assert block.content != parse_block(memoryview(block_bytes())).content


def test_content_follows_from_its_description(
    block_record: BlockRecord, random_rows: Rows, block_bytes: Bytes
) -> None:
    # u32 length, JSON of fields and shapes, ids, then the planes in order of their names.
    rows = random_rows()
    fields = {
        "extras": "",
        "fidelity": "exact",
        "kind": "block",
        "name": block_record.name.hex(),
        "parent": "00" * 32,
        "root_id": block_record.root_id,
        "start": "0",
    }
    shapes = {
        "full.k": ["uint16", 2, 4, 8],
        "full.v": ["uint16", 2, 4, 4],
        "quantized.k": ["uint8", 1, 4, 18],
    }
    text = json.dumps([fields, shapes], sort_keys=True, separators=(",", ":")).encode()
    data = len(text).to_bytes(4, "little") + text + block_record.token_ids.tobytes()
    data += b"".join(rows[name].tobytes() for name in sorted(rows))
    assert parse_block(memoryview(block_bytes())).content == blake3(data).hexdigest()


def test_rows_swapped_inside_the_file_are_found_by_content(
    block_bytes: Bytes, resign: Callable[..., bytes]
) -> None:
    # The file's own digest is right, as an attacker would make it; the signed one is not.
    def swap(header: dict[str, Any], data: bytearray) -> None:
        begin, end = header["full.k"]["data_offsets"]
        half = (end - begin) // 2
        data[begin:end] = data[begin + half : end] + data[begin : begin + half]

    file = memoryview(resign(block_bytes(), swap))
    check_file_digest(file)
    with pytest.raises(Damaged, match="content digest differs"):
        parse_block(file).check_content()


def test_rows_that_do_not_fit_the_layout_are_not_packed(
    block_record: BlockRecord, layout: Layout, random_rows: Rows
) -> None:
    rows, codec = random_rows(), get_codec("raw")
    for wrong in (random_rows(5), {}, rows | {"full.q": rows["full.k"]}):
        with pytest.raises(Damaged):
            pack_block(block_record, codec, layout, wrong)
    for array in (rows["full.k"].view(np.int16), rows["full.k"].astype(np.uint32)):
        with pytest.raises(Damaged, match=r"full\.k"):
            pack_block(block_record, codec, layout, rows | {"full.k": array})


def test_nothing_in_a_file_shows_the_root(block_bytes: Bytes, root: Any) -> None:
    for codec in CODECS:
        assert root.key not in block_bytes(codec)
        assert root.key.hex().encode() not in block_bytes(codec)
