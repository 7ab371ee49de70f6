"""Valid inputs that fuzzing starts from: the golden files, and small ones packed here by every codec."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from kvsnap.formats.block import STATE, BlockRecord, pack_block
from kvsnap.formats.codecs import get_codec
from kvsnap.formats.codecs.calibration import (
    Calibration,
    PlaneCalibration,
    pack_calibration,
    parse_calibration,
    register,
)
from kvsnap.formats.container import Packed
from kvsnap.formats.identity import Identity, Root, root_of
from kvsnap.formats.layout import Group, Layout, Plane, PlaneRope
from kvsnap.formats.manifest import (
    BLOCK,
    CALIBRATION,
    SESSION,
    Item,
    Manifest,
    pack_manifest,
)
from kvsnap.formats.manifest import STATE as STATE_ITEM
from kvsnap.formats.names import ZERO_PARENT, block_name, chain_names, token_array
from kvsnap.formats.pin import PinRecord, pack_pin
from kvsnap.formats.sealed import parse_sealed, seal
from kvsnap.formats.session import SessionRecord, pack_session
from kvsnap.formats.signature import SigningKey
from kvsnap.formats.tenant import Tenant
from kvsnap.testing.untaught import untaught

GOLDEN = Path(__file__).parents[1] / "golden"
SIZE = 16
TENANT = Tenant(bytes(range(32)))
_IDS = token_array([n * 7919 % 50_000 for n in range(40)])
_ROPE = PlaneRope(pairing="halves", dims=4, base=10000.0)
LAYOUT = Layout(
    groups=(
        Group(
            name="full",
            layers=2,
            planes=(
                Plane(name="k", kind="elements", dtype="F16", row=(1, 8), rope=_ROPE),
                Plane(name="v", kind="elements", dtype="F32", row=(1, 4)),
                Plane(name="w", kind="elements", dtype="BF16", row=(2, 2)),
            ),
        ),
    )
)
_PACKED = Layout(
    groups=(
        *LAYOUT.groups,
        Group(name="q", layers=1, planes=(Plane(name="k", kind="rows", dtype="U8", row=(18,)),)),
    )
)
_HYBRID = Layout(
    groups=(
        LAYOUT.groups[0],
        Group(
            name="window",
            layers=1,
            span=5,
            planes=(Plane(name="k", kind="elements", dtype="F16", row=(1, 4)),),
        ),
        Group(
            name="recurrent",
            layers=2,
            span=0,
            planes=(Plane(name="r", kind="pages", dtype="U8", row=(24,)),),
        ),
    )
)


def _key() -> SigningKey:
    """The same one in every run."""
    private = Ed25519PrivateKey.from_private_bytes(bytes(32))
    return SigningKey(private.public_key().public_bytes_raw().hex(), private)


def joined(packed: Packed) -> bytes:
    return b"".join(bytes(memoryview(part)) for part in packed.buffers)


def golden(pattern: str) -> list[bytes]:
    return [path.read_bytes() for path in sorted((GOLDEN / "v1").glob(pattern))]


def rows(layout: Layout, ranges: int | dict[str, range]) -> dict[str, np.ndarray]:
    """Numbers around one, and one channel that is larger."""
    made, source = layout.empty(ranges), np.random.default_rng(3)
    for name, array in made.items():
        plane = layout.planes()[name][1]
        if plane.kind != "elements":
            array[...] = source.integers(0, 4, array.shape)
            continue
        values = source.standard_normal(array.shape).astype(np.float32)
        values[..., :1] *= 64
        kinds = {"F16": "<f2", "F32": "<f4"}
        if plane.dtype in kinds:
            array[...] = values.astype(kinds[plane.dtype]).view(array.dtype)
        else:
            array[...] = values.view("<u4") >> np.uint32(16)
    return made


@functools.cache
def calibrations() -> list[bytes]:
    """The golden one, which is registered, too: the golden block of codec kvtc needs it."""
    made = untaught(LAYOUT, "w")
    halves = {
        name: PlaneCalibration(plane.row, _two_groups(plane)) for name, plane in made.planes.items()
    }
    packed = [made, Calibration("w", 0.001, halves)]
    files = [*golden("calibration.*"), *(joined(pack_calibration(one)) for one in packed)]
    for file in files:
        register(parse_calibration(memoryview(file)))
    return files


def _two_groups(plane: PlaneCalibration) -> tuple:
    (whole,) = plane.groups
    half = whole.basis.shape[1] // 2
    blocks = len(whole.metric) // 2
    one = replace(
        whole,
        layers=1,
        basis=whole.basis[:half, :half],
        mean=whole.mean[:half],
        spread=np.linspace(40, 0.01, half, dtype=np.float32),
        metric=whole.metric[:blocks],
    )
    return one, one


@functools.cache
def codecs() -> list[str]:
    digests = [parse_calibration(memoryview(file)).digest for file in calibrations()[1:]]
    return ["raw", "zstd", "q8", "q4", *(f"kvtc;calibration={digest}" for digest in digests)]


def root(layout: Layout, fidelity: str = "exact") -> Root:
    identity = Identity(
        family="f", weights="w", architecture="a", layout=layout, rope=None, block_size=SIZE,
        fidelity=fidelity,
    )  # fmt: skip
    return root_of(identity)


@functools.cache
def blocks() -> list[bytes]:
    """First and second blocks, by every codec; one of them signed, one of many layers of one group."""
    found = golden("block-*")
    for text in codecs():
        codec = get_codec(text)
        layout = LAYOUT if codec.lossy else _PACKED
        own = root(layout, codec.fidelity)
        names = chain_names(own.key, _IDS, SIZE)
        for start in (0, SIZE):
            parent = names[start // SIZE - 1] if start else ZERO_PARENT
            record = BlockRecord(
                names[start // SIZE], parent, own.root_id, start, _IDS[start : start + SIZE],
                own.identity, fidelity=codec.fidelity,
            )  # fmt: skip
            key = _key() if start and text == "raw" else None
            made = pack_block(record, codec, layout, rows(layout, record.ranges(layout)), key)
            found.append(joined(made))
    return found


@functools.cache
def plain_blocks() -> list[bytes]:
    """Those whose planes are all elements, which an engine may take as tensors."""
    return [*golden("block-q?.*"), *golden("block-kvtc.*"), *blocks()[-2 * len(codecs()) + 4 :]]


@functools.cache
def states() -> list[bytes]:
    own, found = root(_HYBRID), golden("state-*")
    parent = chain_names(own.key, _IDS, SIZE)[0]
    for codec in ("raw", "zstd"):
        ids = _IDS[SIZE : SIZE + 3]
        name = block_name(own.key, parent, ids, STATE)
        record = BlockRecord(name, parent, own.root_id, SIZE, ids, own.identity, STATE)
        made = pack_block(record, get_codec(codec), _HYBRID, rows(_HYBRID, record.ranges(_HYBRID)))
        found.append(joined(made))
    return found


@functools.cache
def sessions() -> list[bytes]:
    """With a tail, without one, with a state checkpoint in its place, without tokens, signed."""
    found, key = golden("session-*"), _key()
    for codec, count, layout in [
        ("raw", 20, _PACKED), ("zstd", 38, _PACKED), ("zstd", 32, LAYOUT), ("zstd", 19, _HYBRID),
        ("zstd", 0, LAYOUT),
    ]:  # fmt: skip
        own, ids = root(layout), _IDS[:count]
        record = SessionRecord(
            name="alice/1",
            tenant_id="default",
            root_id=own.root_id,
            identity=own.identity,
            block_size=SIZE,
            revision=3,
            token_ids=ids,
            chain=tuple(chain_names(own.key, ids, SIZE)),
            state=bytes(range(32)) if layout is _HYBRID else b"",
            notes={"kind": "chat", "messages": [{"role": "user", "content": "é"}], "n": 1.5},
        )
        tail = rows(layout, count % SIZE) if count % SIZE and layout is not _HYBRID else {}
        found.append(joined(pack_session(record, get_codec(codec), layout, tail, key)))
    return found


@functools.cache
def manifests() -> list[bytes]:
    own = root(LAYOUT)
    first, second = chain_names(own.key, _IDS, SIZE)
    digests = [bytes([n]) * 32 for n in range(4)]
    made = Manifest(
        name="alice/1",
        tenant_id="default",
        root_id=own.root_id,
        fidelity="exact",
        block_size=SIZE,
        revision=2,
        tokens=len(_IDS),
        created=1_900_000_000,
        creator="alice@example",
        model="tiny.gguf",
        items=(
            Item(BLOCK, first, SIZE, 4000, digests[0], digests[1]),
            Item(BLOCK, second, 2 * SIZE, 4000, digests[1], digests[2]),
            Item(STATE_ITEM, digests[2], 40, 4000, digests[2], digests[3]),
            Item(CALIBRATION, digests[0], 0, 90_000, digests[0]),
            Item(SESSION, digests[3], 0, 3000, digests[3]),
        ),
    )
    signed = made.sign(_key())
    return [*golden("manifest.*"), *(joined(pack_manifest(one)) for one in (made, signed))]


@functools.cache
def sealed() -> list[bytes]:
    """Blocks, a checkpoint, a session, a manifest with what it names; by this tenant's key."""
    return golden("sealed-*")


@functools.cache
def stored() -> list[bytes]:
    """What may stand where blocks stand."""
    return [*blocks(), *states(), *golden("sealed-block.*"), *golden("sealed-state.*")]


@functools.cache
def opened(file: bytes) -> bytes:
    return bytes(parse_sealed(memoryview(file)).open(TENANT))


def seal_again(file: bytes, inside: bytes) -> bytes:
    """Something else under the names that a sealed file has in the clear."""
    old = parse_sealed(memoryview(file))
    packed = Packed((inside,), len(inside), "")
    return joined(seal(packed, old.clear, TENANT, list(old.tensors.items()), salt=bytes(32)))


@functools.cache
def pins() -> list[bytes]:
    own = [PinRecord("block", "", "ab" * 32, 0), PinRecord("session", "default", "alice/1", 7)]
    return [*golden("pin.*"), *(joined(pack_pin(pin)) for pin in own)]
