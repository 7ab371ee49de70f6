"""Manifests of any content come back; whatever else stands in their place raises one of our errors."""

from __future__ import annotations

import json
import struct
from typing import Any

from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from kvsnap.formats.container import check_file_digest, header_size
from kvsnap.formats.errors import Damaged, Unsupported
from kvsnap.formats.manifest import (
    BLOCK,
    CALIBRATION,
    MAX_ITEMS,
    MAX_TOKENS,
    SESSION,
    STATE,
    Item,
    Manifest,
    manifest_key,
    pack_manifest,
    parse_manifest,
)
from kvsnap.formats.session_name import MAX_NAME
from kvsnap.kvstore.remotes.base import is_key

numbers = st.integers(0, 2**64 - 1)
counts = st.integers(0, 10**18 - 1)
digests = st.binary(min_size=32, max_size=32)
tenants = st.just("default") | digests.map(bytes.hex)
names = st.text(min_size=1, max_size=60).filter(
    lambda name: name.isprintable() and len(name.encode("utf-8", "surrogatepass")) <= MAX_NAME
)


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    block_size = draw(st.integers(1, 2**16))
    most = min(MAX_ITEMS * block_size, MAX_TOKENS)
    distinct = draw(st.lists(digests, min_size=1, max_size=8, unique=True))
    kinds = draw(st.lists(st.sampled_from([BLOCK, STATE, CALIBRATION]), max_size=len(distinct) - 1))
    items = tuple(
        Item(kind, name, draw(numbers), draw(numbers), draw(digests), draw(digests))
        for kind, name in zip([*kinds, SESSION], distinct, strict=False)
    )
    return Manifest(
        name=draw(names),
        tenant_id=draw(tenants),
        root_id=draw(digests).hex(),
        fidelity=draw(st.text(max_size=20)),
        block_size=block_size,
        revision=draw(counts),
        tokens=draw(st.integers(8 * block_size, most)),
        created=draw(counts),
        creator=draw(st.text(max_size=20)),
        model=draw(st.text(max_size=20)),
        items=items,
    )


def file_of(manifest: Manifest) -> bytes:
    return b"".join(bytes(memoryview(part).cast("B")) for part in pack_manifest(manifest).buffers)


def read(data: bytes) -> Manifest | None:
    """As a remote's reader does; None for what is refused, any other error is the test's."""
    try:
        check_file_digest(memoryview(data))
        return parse_manifest(memoryview(data))
    except (Damaged, Unsupported):
        return None


def sign(data: bytes) -> bytes:
    """Give a changed file the digest of what it holds now, where it still has the field."""
    at = data.find(b'"file":"')
    if at < 0 or len(data) < at + 72:
        return data
    head, tail = data[: at + 8], data[at + 72 :]
    digest = blake3(head + b"0" * 64 + tail).hexdigest()
    return head + digest.encode() + tail


@given(manifest=manifests())
def test_any_manifest_comes_back(manifest: Manifest) -> None:
    data = file_of(manifest)
    assert read(data) == manifest
    assert file_of(manifest) == data
    assert is_key(manifest_key(manifest.tenant_id, manifest.name))
    assert all(is_key(manifest.item_key(item)) for item in manifest.items)


@given(data=st.binary(max_size=300))
def test_arbitrary_bytes_are_refused(data: bytes) -> None:
    assert read(data) is None
    assert read(struct.pack("<Q", len(data)) + data) is None


@given(manifest=manifests(), at=st.integers(0, 2**16), bits=st.integers(1, 255))
def test_a_changed_byte_is_noticed(manifest: Manifest, at: int, bits: int) -> None:
    data = bytearray(file_of(manifest))
    data[at % len(data)] ^= bits
    assert read(bytes(data)) is None


@given(
    manifest=manifests(),
    at=st.integers(0, 2**16),
    new=st.binary(max_size=12),
    cut=st.integers(0, 12),
)
def test_a_change_that_was_signed_gives_a_manifest_or_one_of_our_errors(
    manifest: Manifest, at: int, new: bytes, cut: int
) -> None:
    data = file_of(manifest)
    at %= len(data)
    found = read(sign(data[:at] + new + data[at + cut :]))
    assert found is None or all(is_key(found.item_key(item)) for item in found.items)


json_values: Any = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 2**70) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4)
    ),
    max_leaves=6,
)


@given(
    manifest=manifests(),
    key=st.sampled_from(
        ["sizes", "positions", "names", "files", "contents", "kinds", "__metadata__"]
    ),
    inner=st.sampled_from(["", "dtype", "shape", "data_offsets", "name", "tenant_id", "tokens"]),
    value=json_values,
)
def test_any_value_anywhere_in_the_header_gives_a_manifest_or_one_of_our_errors(
    manifest: Manifest, key: str, inner: str, value: Any
) -> None:
    data = file_of(manifest)
    end = header_size(data[:8])
    header = json.loads(data[8:end])
    if inner:
        header[key][inner] = value
    else:
        header[key] = value
    text = json.dumps(header, separators=(",", ":")).encode()
    found = read(sign(struct.pack("<Q", len(text)) + text + data[end:]))
    assert found is None or is_key(manifest_key(found.tenant_id, found.name))
