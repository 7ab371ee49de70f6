"""What a reader does with a safetensors file of each kind, down to the rows: functions for the table of
targets.

`*_past` tell whether an input got past what stops most random changes: a digest, a header that is JSON.
The others take the bytes, or what was parsed of them, and raise what refuses them.
"""

from __future__ import annotations

import contextlib
import functools

import numpy as np

from kvsnap.formats.block import BlockFile, parse_block
from kvsnap.formats.codecs import Stretch, calibration, uniform
from kvsnap.formats.codecs.kvtc import Kvtc
from kvsnap.formats.container import (
    Tensor,
    check_file_digest,
    described_size,
    header_size,
    parse_header,
)
from kvsnap.formats.errors import Damaged, KvsnapError
from kvsnap.formats.identity import differences, parse_identity, root_behind
from kvsnap.formats.manifest import Manifest, manifest_key, parse_manifest
from kvsnap.formats.names import block_name, chain_names
from kvsnap.formats.pin import PinRecord, parse_pin
from kvsnap.formats.rowset import rows_of_file
from kvsnap.formats.sealed import SealedFile, is_sealed, parse_sealed
from kvsnap.formats.session import SessionFile, parse_session
from kvsnap.kvstore.rebuild import Found, read_record
from kvsnap.kvstore.sharing.sealing import keys_named
from tests.fuzz import seeds
from tests.fuzz.inputs import as_buffer, as_file, passes


def digest_past(data: bytes) -> bool:
    return passes(lambda: check_file_digest(as_buffer(data)))


def header_past(data: bytes) -> bool:
    return passes(lambda: parse_header(data[8 : header_size(data[:8])]))


def block(data: bytes) -> BlockFile:
    seeds.calibrations()
    check_file_digest(as_buffer(data))
    return parse_block(as_buffer(data))


def block_content(found: BlockFile) -> None:
    found.check_content()


def block_cut(found: BlockFile) -> None:
    """The rows of some tokens only, as where a prompt ends inside of a block."""
    record, layout = found.record, found.layout().in_blocks
    count = len(record.token_ids)
    if record.is_state or count < 2 or not layout.can_cut:
        return
    rows_of_file(layout, count)  # refuses what is too large
    found.decode_into(layout, layout.empty(count - 1), slice(0, count - 1))


def block_on_device(found: BlockFile) -> None:
    """Into tensors of torch, as an engine on a device asks for it: one that knows its own layout, and has
    compared the identity."""
    if found.record.identity not in _identities() or len(found.record.token_ids) != seeds.SIZE:
        return
    import torch

    from kvsnap.formats.codecs.on_device import ELEMENTS

    layout, count = found.layout(), seeds.SIZE
    out = {
        name: torch.empty(plane.file_shape(layers, count), dtype=ELEMENTS[plane.dtype])
        for name, (layers, plane) in layout.planes().items()
    }
    found.decode_into(layout, out)


@functools.cache
def _identities() -> set[str]:
    return {parse_block(as_buffer(data)).record.identity for data in seeds.plain_blocks()}


def named(found: BlockFile) -> None:
    """Whether the name follows from the record, as `verify` asks."""
    record = found.record
    known = root_behind(record.identity, record.root_id, seeds.TENANT)
    if known is not None:
        block_name(known.key, record.parent, record.token_ids, record.extras)
    parse_identity(record.identity).get("fidelity")


def signed(found: BlockFile | SessionFile | Manifest) -> None:
    assert found.signed in (True, False)


def explained(found: BlockFile | SessionFile) -> None:
    """What differs from another model's identity, as `explain` tells it."""
    differences(found.record.identity, _other_identity())


@functools.cache
def _other_identity() -> str:
    return seeds.root(seeds.LAYOUT).identity


def session(data: bytes) -> SessionFile:
    """Also where the digest differs: a conversation whose tail is damaged is still read."""
    with contextlib.suppress(Damaged):
        check_file_digest(as_buffer(data))
    return parse_session(as_buffer(data))


def tail(found: SessionFile) -> None:
    found.tail_rows()


def talk(found: SessionFile) -> None:
    found.check_talk()


def chain(found: SessionFile) -> None:
    record = found.record
    known = root_behind(record.identity, record.root_id, None)
    if known is not None:
        chain_names(known.key, record.token_ids, record.block_size)


def manifest(data: bytes) -> Manifest:
    check_file_digest(as_buffer(data))
    return parse_manifest(as_buffer(data))


def manifest_keys(found: Manifest) -> None:
    assert found.session.kind == "session"
    assert found.size >= 0
    keys = [manifest_key(found.tenant_id, found.name), *map(found.item_key, found.items)]
    for key in keys:
        assert key.isascii()


def pin(data: bytes) -> PinRecord:
    check_file_digest(as_buffer(data))
    return parse_pin(as_buffer(data))


def sealed(data: bytes) -> SealedFile:
    assert is_sealed(as_buffer(data)) in (True, False)
    check_file_digest(as_buffer(data))
    return parse_sealed(as_buffer(data))


def opened(found: SealedFile) -> None:
    """With the tenant's key, and down to what is inside."""
    plain, kind = found.open(seeds.TENANT), found.clear.kind
    if kind in ("block", "state"):
        parse_block(plain).check_content()
    elif kind == "session":
        inside = parse_session(plain)
        inside.check_talk()
        inside.tail_rows()
    elif kind == "manifest":
        parse_manifest(plain)
    else:
        parse_pin(plain)


def named_in_the_clear(found: SealedFile) -> None:
    """What a sealed manifest names, told without its key."""
    if found.clear.kind == "manifest":
        keys_named(found)


def size_described(data: bytes) -> int:
    return described_size(data)


def record(data: bytes) -> Found:
    """As a rebuild of the index reads it: header and ids, no digest."""
    return read_record(as_file(data))


def calibrated(data: bytes) -> calibration.Calibration:
    return calibration.parse_calibration(as_buffer(data))


def _decodes(codec: Kvtc, at: Stretch, stored: dict[str, Tensor], rows: np.ndarray) -> None:
    """What was encoded must come back, and as near as is declared, whatever the calibration."""
    found = np.empty_like(rows)
    try:
        codec.decode(at, stored, found)
    except KvsnapError as error:
        raise AssertionError(f"cannot be decoded: {error.what}") from error
    was, now = (uniform.widen(at.plane.dtype, one).astype(float) for one in (rows, found))
    assert (np.abs(now - was) <= codec.max_error(at, rows)).all(), "farther off than declared"


def calibration_used(found: calibration.Calibration) -> None:
    """Rows coded and decoded by it, where it is of the layout of the seeds."""
    for name, (layers, plane) in seeds.LAYOUT.planes().items():
        own = found.planes.get(name)
        if own is None or (own.row, own.layers) != (plane.row, layers):
            continue
        known = found.digest in calibration._REGISTERED
        calibration.register(found)
        try:
            codec = Kvtc(calibration=found.digest, step=max(0.01, found.finest))
            rows = seeds.rows(seeds.LAYOUT, 16)[name]
            at = Stretch(name, plane, 16)
            stored = codec.encode(at, rows)
            _decodes(codec, at, stored, rows)
        finally:
            if not known:
                calibration._REGISTERED.pop(found.digest)
