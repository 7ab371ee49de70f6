"""One small identity, its rows, and the two files made of them; each test bends one thing."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from blake3 import blake3

from kvsnap.formats.block import BlockRecord, pack_block
from kvsnap.formats.codecs import get_codec
from kvsnap.formats.container import Packed
from kvsnap.formats.identity import Identity, Root, Rope, root_of
from kvsnap.formats.layout import Group, Layout, Plane
from kvsnap.formats.names import ZERO_PARENT, block_name, chain_names, token_array
from kvsnap.formats.session import SessionRecord, pack_session

BLOCK_SIZE = 4


@pytest.fixture(scope="session")
def layout() -> Layout:
    """Every kind of plane that can be cut, two groups, shapes small enough to flip each byte."""
    k = Plane(name="k", kind="elements", dtype="F16", row=(2, 4), source_type="f16")
    v = Plane(name="v", kind="elements", dtype="BF16", row=(2, 2), source_type="bf16")
    packed = Plane(name="k", kind="rows", dtype="U8", row=(18,), source_type="q4_0")
    return Layout(
        groups=(
            Group(name="full", layers=2, planes=(k, v)),
            Group(name="quantized", layers=1, planes=(packed,)),
        )
    )


@pytest.fixture(scope="session")
def identity(layout: Layout) -> Identity:
    rope = Rope(
        type="norm",
        base=10000.0,
        scale=1.0,
        scaling="none",
        original_context=2048,
        extension_factor=None,
        attention_factor=None,
        beta_fast=None,
        beta_slow=None,
        long_context=None,
    )
    return Identity(
        family="llama.cpp",
        weights="blake3:" + "ab" * 32,
        architecture="llama",
        layout=layout,
        rope=rope,
        block_size=BLOCK_SIZE,
    )


@pytest.fixture(scope="session")
def root(identity: Identity) -> Root:
    return root_of(identity)


@pytest.fixture(scope="session")
def random_rows(layout: Layout) -> Callable[..., dict[str, np.ndarray]]:
    """Rows of any bits at all: NaN, infinities and subnormals included."""

    def make(tokens: int = BLOCK_SIZE, shape: Layout = layout, seed: int = 7) -> dict[str, Any]:
        source = np.random.default_rng(seed)
        rows = shape.empty(tokens)
        for array in rows.values():
            array[...] = source.integers(0, 2 ** (8 * array.itemsize), array.shape, array.dtype)
        return rows

    return make


@pytest.fixture(scope="session")
def block_record(root: Root) -> BlockRecord:
    ids = token_array([5, 6, 7, 2**32 - 1])
    name = block_name(root.key, ZERO_PARENT, ids)
    return BlockRecord(name, ZERO_PARENT, root.root_id, 0, ids, root.identity)


@pytest.fixture(scope="session")
def whole() -> Callable[[Packed], bytes]:
    """A packed file as one bytes object."""
    return lambda packed: b"".join(bytes(part) for part in packed.buffers)


@pytest.fixture(scope="session")
def block_bytes(
    block_record: BlockRecord,
    layout: Layout,
    random_rows: Callable[..., dict[str, np.ndarray]],
    whole: Callable[[Packed], bytes],
) -> Callable[..., bytes]:
    def make(codec: str = "raw", rows: Mapping[str, np.ndarray] | None = None) -> bytes:
        chosen = random_rows() if rows is None else rows
        return whole(pack_block(block_record, get_codec(codec), layout, chosen))

    return make


@pytest.fixture(scope="session")
def session_record(root: Root) -> Callable[..., SessionRecord]:
    def make(tokens: int = 10, **changes: Any) -> SessionRecord:
        ids = token_array(range(100, 100 + tokens))
        fields: dict[str, Any] = {
            "name": "alice/42",
            "tenant_id": "default",
            "root_id": root.root_id,
            "identity": root.identity,
            "block_size": BLOCK_SIZE,
            "revision": 3,
            "token_ids": ids,
            "chain": tuple(chain_names(root.key, ids, BLOCK_SIZE)),
            "notes": {"messages": [{"role": "user", "content": "héllo"}]},
        }
        return SessionRecord(**(fields | changes))

    return make


@pytest.fixture(scope="session")
def session_bytes(
    layout: Layout,
    random_rows: Callable[..., dict[str, np.ndarray]],
    whole: Callable[[Packed], bytes],
) -> Callable[..., bytes]:
    def make(record: SessionRecord, codec: str = "raw") -> bytes:
        tail = random_rows(record.tail_tokens) if record.tail_tokens else {}
        return whole(pack_session(record, get_codec(codec), layout, tail))

    return make


@pytest.fixture(scope="session")
def sign() -> Callable[..., bytes]:
    """A file whose `file` digest is right whatever its header says: what an attacker can write."""

    def make(header: Mapping[str, Any], data: bytes = b"") -> bytes:
        text = json.dumps(header, separators=(",", ":")).encode("ascii")
        length = struct.pack("<Q", len(text))
        digest = blake3(length + text + data).hexdigest().encode("ascii")
        return length + text.replace(b'"file":"%b' % (b"0" * 64), b'"file":"%b' % digest) + data

    return make


@pytest.fixture(scope="session")
def resign(sign: Callable[..., bytes]) -> Callable[..., bytes]:
    """The same file after `change(header, data)`, its digest made right again."""

    def make(file: bytes, change: Callable[[dict[str, Any], bytearray], None]) -> bytes:
        (size,) = struct.unpack_from("<Q", file)
        header, data = json.loads(file[8 : 8 + size]), bytearray(file[8 + size :])
        header["__metadata__"]["file"] = "0" * 64
        change(header, data)
        return sign(header, bytes(data))

    return make
