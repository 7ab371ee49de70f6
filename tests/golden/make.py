"""Wrote the files in v1/. Tests only read them, and files are only added.

.venv/bin/python tests/golden/make.py FOLDER
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from kvsnap.formats.archive import END, pack_header, padding
from kvsnap.formats.block import STATE, BlockRecord, pack_block, parse_block, sign_block
from kvsnap.formats.codecs import get_codec
from kvsnap.formats.codecs.calibration import pack_calibration, parse_calibration, register
from kvsnap.formats.container import Packed, Tensor
from kvsnap.formats.identity import EXACT, Adapter, Identity, Rope, root_of
from kvsnap.formats.layout import Group, Layout, Plane, PlaneRope
from kvsnap.formats.manifest import (
    BLOCK,
    ITEM_KINDS,
    Item,
    Manifest,
    manifest_key,
    pack_manifest,
    parse_manifest,
)
from kvsnap.formats.manifest import SESSION as SESSION_FILE
from kvsnap.formats.names import ZERO_PARENT, block_name, chain_names, token_array
from kvsnap.formats.pin import SESSION, PinRecord, pack_pin
from kvsnap.formats.sealed import Clear, seal
from kvsnap.formats.session import SessionRecord, pack_session, parse_session
from kvsnap.formats.signature import SigningKey, parse_signing_key
from kvsnap.formats.tenant import Tenant
from kvsnap.testing.untaught import untaught

ROPE = PlaneRope(pairing="interleaved", dims=8, base=10000.0)
LAYOUT = Layout(
    groups=(
        Group(
            name="full",
            layers=2,
            planes=(
                Plane(
                    name="k", kind="elements", dtype="F16", row=(2, 8), source_type="f16", rope=ROPE
                ),
                Plane(name="v", kind="elements", dtype="BF16", row=(2, 8), source_type="bf16"),
            ),
        ),
        Group(
            name="packed",
            layers=1,
            planes=(
                Plane(name="k", kind="rows", dtype="U8", row=(34,), source_type="q8_0"),
                Plane(name="v", kind="elements", dtype="F32", row=(1, 8), source_type="f32"),
            ),
        ),
    )
)
LOSSY = Layout(groups=(LAYOUT.groups[0],))
HYBRID = Layout(
    groups=(
        LAYOUT.groups[0],
        Group(
            name="window",
            layers=1,
            span=5,
            planes=(
                Plane(name="k", kind="elements", dtype="F16", row=(1, 4), source_type="f16"),
                Plane(name="v", kind="rows", dtype="U8", row=(18,), source_type="q4_0"),
            ),
        ),
        Group(
            name="recurrent",
            layers=3,
            span=0,
            planes=(Plane(name="state", kind="pages", dtype="U8", row=(40,), source_type="f32"),),
        ),
    )
)
IDENTITY = Identity(
    family="llama.cpp",
    weights="blake3:" + "0123456789abcdef" * 4,
    architecture="llama",
    layout=LAYOUT,
    rope=Rope(
        type="norm",
        base=10000.0,
        scale=1.0,
        scaling="none",
        original_context=2048,
        extension_factor=None,
        attention_factor=None,
        beta_fast=None,
        beta_slow=None,
        long_context=False,
    ),
    block_size=16,
    adapters=(Adapter(kind="lora", digest="blake3:" + "fe" * 32, scale=0.5),),
    overrides=(("llama.rope.freq_base", "10000.0"),),
)
TENANT = Tenant(bytes(range(32)))
SALT = bytes(range(32, 64))
IDS = token_array([(n * n * 40503 + 7) % 2**32 for n in range(37)])


def rows(start: int, stop: int) -> dict[str, np.ndarray]:
    return filled(LAYOUT.empty(stop - start), start)


def filled(made: dict[str, np.ndarray], start: int) -> dict[str, np.ndarray]:
    """Numbers near one, whose high byte compresses, and noise below."""
    for array in made.values():
        bits = 8 * array.itemsize
        at = np.arange(array.size, dtype=np.uint64).reshape(array.shape) + np.uint64(start)
        noise = at * np.uint64(2654435761) % np.uint64(2 ** (bits - 6))
        array[...] = (noise + np.uint64(0b001111 << (bits - 6))).astype(array.dtype)
    return made


def block(codec: str) -> Packed:
    """The second block of the chain: its parent is a real one."""
    root = root_of(IDENTITY, TENANT)
    parent, name = chain_names(root.key, IDS, 16)
    record = BlockRecord(name, parent, root.root_id, 16, IDS[16:32], root.identity)
    return pack_block(record, get_codec(codec), LAYOUT, rows(16, 32))


def state(codec: str) -> Packed:
    """The checkpoint at position 35: three tokens after the second block, and a window that begins
    two tokens before them."""
    root = root_of(replace(IDENTITY, layout=HYBRID), TENANT)
    parent, ids = chain_names(root.key, IDS, 16)[1], IDS[32:35]
    name = block_name(root.key, parent, ids, STATE)
    record = BlockRecord(name, parent, root.root_id, 32, ids, root.identity, STATE)
    made = filled(HYBRID.empty(record.ranges(HYBRID)), 32)
    return pack_block(record, get_codec(codec), HYBRID, made)


def calibration() -> Packed:
    """Its components are the channels themselves, so that products are exact on every machine."""
    packed = pack_calibration(untaught(LOSSY, IDENTITY.weights))
    register(parse_calibration(memoryview(b"".join(bytes(memoryview(b)) for b in packed.buffers))))
    return packed


def lossy_block(codec: str) -> Packed:
    """The first block of a chain in a lossy codec: sinks, an outlier channel, a token that is no
    number."""
    chosen, layout = get_codec(codec), LOSSY
    root = root_of(replace(IDENTITY, layout=layout, fidelity=chosen.fidelity), TENANT)
    (name,) = chain_names(root.key, IDS[:16], 16)
    made = layout.empty(16)
    for number, array in enumerate(made.values()):
        at = np.arange(array.size, dtype=np.float64).reshape(array.shape)
        values = (at * 0.6180339887498949 + number) % 1.0 * 4 - 2  # exact arithmetic, no libm
        values[..., 3] *= 64
        if array.dtype == np.uint16 and number == 0:
            array[...] = values.astype("<f2").view("<u2")
        else:
            array[...] = values.astype("<f4").view("<u4") >> np.uint32(16)
        array[1, 9, 5] = 0x7F80 if number else 0x7C00
    record = BlockRecord(
        name, ZERO_PARENT, root.root_id, 0, IDS[:16], root.identity, fidelity=root.fidelity
    )
    return pack_block(record, chosen, layout, made)


def session(codec: str) -> Packed:
    root = root_of(IDENTITY, TENANT)
    record = SessionRecord(
        name="Alice/42",
        tenant_id=TENANT.tenant_id,
        root_id=root.root_id,
        identity=root.identity,
        block_size=16,
        revision=7,
        token_ids=IDS,
        chain=tuple(chain_names(root.key, IDS, 16)),
        notes={"messages": [{"role": "user", "content": "Grüße"}]},
    )
    return pack_session(record, get_codec(codec), LAYOUT, rows(32, 37))


def pin() -> Packed:
    return pack_pin(PinRecord(SESSION, TENANT.tenant_id, "%41lice%2f42", 1_900_000_000))


def manifest() -> Packed:
    """Of the session above, with the block that is golden and one before it that is made up."""
    root, made, own = root_of(IDENTITY, TENANT), block("zstd"), session("zstd")
    first, second = chain_names(root.key, IDS, 16)
    content = parse_block(memoryview(b"".join(map(bytes, made.buffers)))).content
    digests = bytes.fromhex(made.file_digest), bytes.fromhex(content)
    digest = bytes.fromhex(own.file_digest)
    return pack_manifest(
        Manifest(
            name="Alice/42",
            tenant_id=TENANT.tenant_id,
            root_id=root.root_id,
            fidelity=EXACT,
            block_size=16,
            revision=7,
            tokens=len(IDS),
            created=1_900_000_000,
            creator="alice@example",
            model="tiny.gguf",
            items=(
                Item(BLOCK, first, 16, 4711, bytes(range(32)), bytes(range(32, 64))),
                Item(BLOCK, second, 32, made.size, *digests),
                Item(SESSION_FILE, digest, 0, own.size, digest),
            ),
        )
    )


def signing_key() -> SigningKey:
    private = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
    return parse_signing_key(
        private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    )


def joined(packed: Packed) -> bytes:
    return b"".join(bytes(memoryview(part).cast("B")) for part in packed.buffers)


def signed() -> dict[str, Packed]:
    """The block, session and manifest above with a signature."""
    record = parse_session(memoryview(joined(session("raw")))).record
    named = parse_manifest(memoryview(joined(manifest())))
    return {
        "block-signed": sign_block(memoryview(joined(block("raw"))), signing_key()),
        "session-signed": pack_session(
            record, get_codec("raw"), LAYOUT, rows(32, 37), signing_key()
        ),
        "manifest-signed": pack_manifest(named.sign(signing_key())),
    }


def sealed() -> dict[str, Packed]:
    """One of each kind, in the clear what index, eviction and sweep need."""
    found = {}
    for name, plain in (("block", signed()["block-signed"]), ("state", state("zstd"))):
        parsed = parse_block(memoryview(joined(plain)))
        record = parsed.record
        clear = Clear(
            kind=name,
            tenant_id=TENANT.tenant_id,
            name=record.name,
            parent=record.parent,
            root_id=record.root_id,
            start=record.start,
            tokens=len(record.token_ids),
            signer=parsed.signer,
        )
        found[f"sealed-{name}"] = seal(plain, clear, TENANT, salt=SALT)
    own = parse_session(memoryview(joined(session("zstd")))).record
    clear = Clear(
        kind="session", tenant_id=TENANT.tenant_id, root_id=own.root_id, last=own.chain[-1]
    )
    found["sealed-session"] = seal(session("zstd"), clear, TENANT, salt=SALT)
    items = parse_manifest(memoryview(joined(manifest()))).items
    names = np.frombuffer(b"".join(item.name for item in items), np.uint8).reshape(-1, 32)
    kinds = np.array([ITEM_KINDS.index(item.kind) for item in items], np.uint8)
    found["sealed-manifest"] = seal(
        manifest(),
        Clear(kind="manifest", tenant_id=TENANT.tenant_id),
        TENANT,
        [("names", Tensor("U8", names.shape, names)), ("kinds", Tensor("U8", kinds.shape, kinds))],
        salt=SALT,
    )
    return found


def portable() -> bytes:
    """A portable file of the block, the session and their manifest."""
    own, name = parse_manifest(memoryview(joined(manifest()))), "Alice/42"
    parts = []
    for key, packed in (
        (own.item_key(own.items[1]), block("zstd")),
        (own.item_key(own.session), session("zstd")),
        (manifest_key(TENANT.tenant_id, name), manifest()),
    ):
        data = joined(packed)
        parts += [pack_header(key, len(data)), data, bytes(padding(len(data)))]
    return b"".join(parts) + END


def made() -> dict[str, bytes]:
    """File name → bytes."""
    taught = calibration()
    found = {"calibration": taught, "manifest": manifest(), "pin": pin(), **signed(), **sealed()}
    for codec in ("raw", "zstd"):
        found |= {f"block-{codec}": block(codec), f"session-{codec}": session(codec)}
        found[f"state-{codec}"] = state(codec)
    for codec in ("q8", "q4", f"kvtc;calibration={taught.file_digest}"):
        found[f"block-{codec.partition(';')[0]}"] = lossy_block(codec)
    files = {f"{name}.safetensors": joined(packed) for name, packed in found.items()}
    return files | {"portable.kvsnap": portable()}


if __name__ == "__main__":
    for name, data in made().items():
        (Path(sys.argv[1]) / name).write_bytes(data)
