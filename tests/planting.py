"""Files under the right name, right by their digests, whose rows are not what a model computed.

What somebody can make who may write to a store or a remote and knows the token ids. A stamped engine's
rows tell them from the genuine ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from kvsnap.formats.block import BlockFile, pack_block, parse_block
from kvsnap.formats.container import Packed, Tensor, pack, parse
from kvsnap.formats.identity import layout_of
from kvsnap.formats.layout import Array
from kvsnap.formats.session import pack_session, parse_session
from kvsnap.formats.signature import SIGNATURE, SIGNER, Signature, SigningKey
from kvsnap.kvstore.rebuild import read_record
from tests.signers import STRANGER

Rows = dict[str, Array]
Plant = Callable[[bytes, bytes], bytes]
"""(a genuine file, a genuine one beside it) → the planted one."""
_SIGNED = (SIGNER, SIGNATURE, "content", "file")


def joined(packed: Packed) -> bytes:
    return b"".join(bytes(memoryview(part).cast("B")) for part in packed.buffers)


def block_of(data: bytes) -> BlockFile:
    return parse_block(memoryview(data))


def rows_of(data: bytes) -> Rows:
    """What an engine would be given."""
    block = block_of(data)
    rows = block.record.part(block.layout()).empty(block.record.ranges(block.layout()))
    block.decode_into(block.layout(), rows)
    return rows


def with_header(data: bytes, **fields: str) -> bytes:
    """The same file with other header fields, right by its own digest."""
    container = parse(memoryview(data))
    return joined(pack({**container.metadata, **fields}, list(container.tensors.items())))


def with_tensors(data: bytes, change: Callable[[dict[str, Tensor]], None]) -> bytes:
    container = parse(memoryview(data))
    tensors = dict(container.tensors)
    change(tensors)
    return joined(pack(container.metadata, list(tensors.items())))


def other_rows(data: bytes, key: SigningKey | None = None) -> bytes:
    """The same block, its rows turned round, right by both digests."""
    block = block_of(data)
    rows = {name: np.ascontiguousarray(np.flip(array)) for name, array in rows_of(data).items()}
    assert any(not np.array_equal(rows[name], array) for name, array in rows_of(data).items())
    return joined(pack_block(block.record, block.codec, block.layout(), rows, key))


def unsigned(data: bytes, beside: bytes) -> bytes:
    return other_rows(data)


def by_a_stranger(data: bytes, beside: bytes) -> bytes:
    """Signed in order, by a key that nobody listed."""
    return other_rows(data, STRANGER)


def quoting(data: bytes, beside: bytes) -> bytes:
    """The header of the genuine file, over other rows."""
    told = parse(memoryview(data)).metadata
    return with_header(other_rows(data), **{key: told[key] for key in _SIGNED if key in told})


def with_anothers_signature(data: bytes, beside: bytes) -> bytes:
    """A genuine signature, of another block."""
    signature = block_of(beside).signature
    fields = signature.fields() if signature is not None else {}
    return with_header(other_rows(data), **fields)


def as_if_signed(data: bytes, beside: bytes) -> bytes:
    """The right signer's name over a signature that somebody made up."""
    signer = block_of(data).signer or STRANGER.public
    return with_header(other_rows(data), **Signature(signer, "5" * 128).fields())


PLANTS: dict[str, Plant] = {
    "unsigned": unsigned,
    "signed by a stranger": by_a_stranger,
    "quoting the genuine header": quoting,
    "with the signature of another block": with_anothers_signature,
    "with a made-up signature": as_if_signed,
}
"""Without a trust list each of them is used."""


def plant(path: Path, beside: Path, how: Plant) -> bytes:
    """Put a planted file in a genuine one's place; returns the genuine one."""
    genuine = path.read_bytes()
    planted = how(genuine, beside.read_bytes())
    assert block_of(planted).record.name == block_of(genuine).record.name
    path.unlink()
    path.write_bytes(planted)
    return genuine


def chain_files(folder: Path) -> list[Path]:
    """The blocks (and state checkpoints) below a store's or a remote's folder, in order."""
    found = folder.glob("blocks/*/*.safetensors")
    return sorted(found, key=lambda path: read_record(path).record.start)


def session_with_other_tail(data: bytes, key: SigningKey | None = None) -> bytes:
    """The same session's file, the rows of its tail turned round, right by its digests."""
    session = parse_session(memoryview(data))
    rows = {name: np.ascontiguousarray(np.flip(a)) for name, a in session.tail_rows().items()}
    layout = layout_of(session.record.identity)
    return joined(pack_session(session.record, session.codec, layout, rows, key))


def session_with(data: bytes, key: SigningKey | None = None, **changes: Any) -> bytes:
    """The same with other fields of its record, right by its digests."""
    session = parse_session(memoryview(data))
    record, layout = (
        dataclasses.replace(session.record, **changes),
        layout_of(session.record.identity),
    )
    return joined(pack_session(record, session.codec, layout, session.tail_rows(), key))
