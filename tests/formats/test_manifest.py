"""Manifest files: written canonically, and everything else refused with one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvsnap.formats.container import Tensor, check_file_digest, header_size, pack, parse
from kvsnap.formats.errors import Damaged, Unsupported
from kvsnap.formats.manifest import (
    BLOCK,
    CALIBRATION,
    MAX_ITEMS,
    SESSION,
    STATE,
    Item,
    Manifest,
    block_key,
    manifest_key,
    pack_manifest,
    parse_manifest,
)
from kvsnap.kvstore.remotes.base import is_key


def item(kind: str, number: int, position: int = 0) -> Item:
    return Item(kind, bytes([number]) * 32, position, 1000 + number, bytes([number + 100]) * 32)


MANIFEST = Manifest(
    name="alice/42",
    tenant_id="default",
    root_id="ab" * 32,
    fidelity="exact",
    block_size=16,
    revision=3,
    tokens=40,
    created=1_700_000_000,
    creator="alice@laptop",
    model="SmolLM2-135M",
    items=(
        item(BLOCK, 1, 16),
        replace(item(BLOCK, 2, 32), content=b"c" * 32),
        item(STATE, 3, 40),
        item(CALIBRATION, 4),
        item(SESSION, 5),
    ),
)


def file_of(manifest: Manifest) -> bytes:
    return b"".join(bytes(memoryview(part).cast("B")) for part in pack_manifest(manifest).buffers)


def changed(
    change: Callable[[dict[str, Tensor]], Any] = lambda found: None, **fields: str
) -> memoryview:
    """The file with other tensors or fields, right by its digest."""
    container = parse(memoryview(file_of(MANIFEST)))
    tensors = dict(container.tensors)
    change(tensors)
    packed = pack({**container.metadata, **fields}, list(tensors.items()))
    return memoryview(b"".join(bytes(memoryview(part).cast("B")) for part in packed.buffers))


def test_a_manifest_comes_back() -> None:
    data = memoryview(file_of(MANIFEST))
    check_file_digest(data)
    assert parse_manifest(data) == MANIFEST


def test_equal_manifests_give_equal_bytes() -> None:
    assert file_of(MANIFEST) == file_of(replace(MANIFEST))


def test_the_file_is_laid_out_so() -> None:
    """What other readers rely on: see docs/format.md."""
    data = file_of(MANIFEST)
    end = header_size(data[:8])
    header = json.loads(data[8:end])
    assert end % 64 == 0
    assert header["__metadata__"] == {
        "block_size": "16",
        "created": "1700000000",
        "creator": "alice@laptop",
        "fidelity": "exact",
        "file": header["__metadata__"]["file"],
        "kind": "manifest",
        "kvsnap": "1",
        "model": "SmolLM2-135M",
        "name": "alice/42",
        "revision": "3",
        "root_id": "ab" * 32,
        "tenant_id": "default",
        "tokens": "40",
    }
    tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
    assert {name: (entry["dtype"], entry["shape"]) for name, entry in tensors.items()} == {
        "sizes": ("U64", [5]),
        "positions": ("U64", [5]),
        "names": ("U8", [5, 32]),
        "files": ("U8", [5, 32]),
        "contents": ("U8", [5, 32]),
        "kinds": ("U8", [5]),
    }
    begin, stop = tensors["kinds"]["data_offsets"]
    assert data[end + begin : end + stop] == bytes([0, 0, 1, 2, 3])
    assert len(data) == end + 5 * (8 + 8 + 3 * 32 + 1)


def test_what_it_tells_of_its_items() -> None:
    assert [found.name[0] for found in MANIFEST.of_kind(BLOCK)] == [1, 2]
    assert MANIFEST.session.name[0] == 5
    assert MANIFEST.size == 5000 + 15


def test_every_item_has_a_key_that_a_remote_takes() -> None:
    keys = [MANIFEST.item_key(found) for found in MANIFEST.items]
    assert keys[0] == block_key(bytes([1]) * 32) == f"blocks/01/{'01' * 32}.safetensors"
    assert keys[2].startswith("blocks/03/")
    assert keys[3] == f"calibrations/{'04' * 32}.safetensors"
    assert keys[4] == f"sessions/default/{'05' * 32}.safetensors"
    assert (
        manifest_key(MANIFEST.tenant_id, MANIFEST.name)
        == manifest_key("default", "alice/42")
        == "manifests/default/alice%2f42.safetensors"
    )
    for name in ("..", "../x", "A" * 900, "con", "…", " "):
        assert is_key(manifest_key("default", name))
    assert all(map(is_key, keys))


REFUSED: dict[str, tuple[str, memoryview]] = {
    "another kind": ("kind", changed(kind="session")),
    "no name": ("name", changed(name="")),
    "a name of control characters": ("name", changed(name="a\0b")),
    "a long name": ("name", changed(name="x" * 5000)),
    "a tenant that is a path": ("tenant", changed(tenant_id="../..")),
    "a tenant in upper case": ("tenant", changed(tenant_id="AB" * 32)),
    "a short root": ("root_id", changed(root_id="ab")),
    "a block size of nothing": ("block size", changed(block_size="0")),
    "a huge block size": ("block size", changed(block_size="65537")),
    "a negative revision": ("revision", changed(revision="-1")),
    "a revision of words": ("revision", changed(revision="three")),
    "tokens of 19 digits": ("tokens", changed(tokens="9" * 19)),
    "too few tokens": ("items", changed(tokens="31")),
    "more tokens than any session has": ("tokens", changed(tokens="9" * 18)),
    "a tensor too few": ("tensors", changed(lambda found: found.pop("files"))),
    "a tensor too many": (
        "tensors",
        changed(lambda found: found.update(more=Tensor("U8", (1,), b"x"))),
    ),
    "sizes of another type": (
        "sizes",
        changed(lambda found: found.update(sizes=Tensor("U32", (5,), np.zeros(5, "<u4")))),
    ),
    "fewer sizes than items": (
        "sizes",
        changed(lambda found: found.update(sizes=Tensor("U64", (4,), np.zeros(4, "<u8")))),
    ),
    "digests of 16 bytes": (
        "digests",
        changed(lambda found: found.update(names=Tensor("U8", (5, 16), np.zeros(80, "u1")))),
    ),
    "digests in one row": (
        "digests",
        changed(lambda found: found.update(names=Tensor("U8", (160,), np.zeros(160, "u1")))),
    ),
    "a kind that is not known": (
        "kind",
        changed(lambda found: found.update(kinds=Tensor("U8", (5,), bytes([0, 0, 1, 2, 4])))),
    ),
    "kinds of another shape": (
        "sizes",
        changed(lambda found: found.update(kinds=Tensor("U8", (5, 1), bytes([0, 0, 1, 2, 3])))),
    ),
    "no session": (
        "items",
        changed(lambda found: found.update(kinds=Tensor("U8", (5,), bytes([0, 0, 1, 2, 2])))),
    ),
    "a file twice": (
        "twice",
        changed(lambda found: found.update(names=Tensor("U8", (5, 32), bytes(160)))),
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_no_writer_gives_is_refused(kind: str) -> None:
    match, data = REFUSED[kind]
    check_file_digest(data)
    with pytest.raises(Damaged, match=match) as caught:
        parse_manifest(data)
    assert "\n" not in caught.value.what
    assert len(caught.value.what) < 300


@pytest.mark.parametrize("field", ["name", "tenant_id", "root_id", "fidelity", "tokens", "creator"])
def test_a_missing_field_is_refused(field: str) -> None:
    container = parse(memoryview(file_of(MANIFEST)))
    metadata = {key: value for key, value in container.metadata.items() if key != field}
    packed = pack(metadata, list(container.tensors.items()))
    data = memoryview(b"".join(bytes(memoryview(part).cast("B")) for part in packed.buffers))
    with pytest.raises(Damaged, match=field):
        parse_manifest(data)


def test_a_later_version_is_refused_by_name() -> None:
    with pytest.raises(Unsupported, match="version '2'"):
        parse_manifest(changed(kvsnap="2"))


def test_more_items_than_any_session_has_are_refused() -> None:
    count = MAX_ITEMS + 1

    def grow(found: dict[str, Tensor]) -> None:
        found["kinds"] = Tensor("U8", (count,), bytes(count))

    with pytest.raises(Damaged, match=f"{count} files"):
        parse_manifest(changed(grow))


@pytest.mark.parametrize(
    "items",
    [
        (),
        (item(BLOCK, 1),),
        (item(SESSION, 1), item(SESSION, 2)),
        (item(SESSION, 1), item(BLOCK, 1)),
    ],
)
def test_one_that_makes_no_sense_cannot_be_made(items: tuple[Item, ...]) -> None:
    with pytest.raises(Damaged):
        replace(MANIFEST, items=items)
