"""The test vectors of docs/format.md, made by kvsnap itself.

`python tests/docs/format_vectors.py` writes them into the page; test_format_vectors.py computes
them again from the text of the specification, without kvsnap's code.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from kvsnap.formats import names
from kvsnap.formats.block import STATE, BlockRecord, pack_block, parse_block, sign_block
from kvsnap.formats.codecs import get_codec
from kvsnap.formats.container import Packed, parse
from kvsnap.formats.identity import Identity, root_of
from kvsnap.formats.layout import Group, Layout, Plane
from kvsnap.formats.pin import SESSION, PinRecord, pack_pin
from kvsnap.formats.sealed import Clear, seal, sealed_name
from kvsnap.formats.session import SessionRecord, pack_session
from kvsnap.formats.session_name import session_file_name
from kvsnap.formats.signature import SigningKey, block_message, parse_signing_key
from kvsnap.formats.tenant import Tenant

PAGE = Path(__file__).parents[2] / "docs" / "format.md"
LAYOUT = Layout(
    groups=(
        Group(
            name="full",
            layers=1,
            planes=tuple(
                Plane(name=name, kind="elements", dtype="F16", row=(1, 2), source_type="f16")
                for name in ("k", "v")
            ),
        ),
    )
)
IDENTITY = Identity(
    family="example",
    weights="blake3:" + "5a" * 32,
    architecture="tiny",
    layout=LAYOUT,
    rope=None,
    block_size=4,
)
SPANS = Layout(
    groups=(
        LAYOUT.groups[0],
        Group(
            name="window",
            layers=1,
            span=3,
            planes=(Plane(name="k", kind="elements", dtype="F16", row=(1, 2), source_type="f16"),),
        ),
        Group(
            name="recurrent",
            layers=2,
            span=0,
            planes=(Plane(name="r", kind="pages", dtype="U8", row=(4,), source_type="f32"),),
        ),
    )
)
IDS = [1, 504, 2365, 7, 42, 0, 65535, 4294967295, 99]
KEY = bytes(range(32))
SALT = bytes(range(32, 64))
SESSION_NAMES = ["support", "alice/42", "Ärger", "con", ".hidden", "a.", "x" * 201]
BLOCK = re.compile(r"(<!-- vector: ([a-z-]+) -->\n```[a-z]*\n)(.*?)(```)", re.DOTALL)


def rows(first: int, tokens: int) -> dict[str, np.ndarray]:
    """Rows whose elements count upwards: K from 0x3c00 (1.0), V from 0x4000 (2.0)."""
    counts = np.arange(first * 2, (first + tokens) * 2, dtype="<u2").reshape(1, tokens, 2)
    return {"full.k": counts + np.uint16(0x3C00), "full.v": counts + np.uint16(0x4000)}


def block(codec: str, tenant: Tenant | None = None) -> Packed:
    root = root_of(IDENTITY, tenant)
    ids = names.token_array(IDS[:4])
    name = names.block_name(root.key, names.ZERO_PARENT, ids)
    record = BlockRecord(name, names.ZERO_PARENT, root.root_id, 0, ids, root.identity)
    return pack_block(record, get_codec(codec), LAYOUT, rows(0, 4))


def state() -> Packed:
    """The checkpoint at position 6, in the second block; its window begins in the first."""
    root = root_of(replace(IDENTITY, layout=SPANS))
    ids = names.token_array(IDS[:6])
    (parent,) = names.chain_names(root.key, ids, 4)
    name = names.block_name(root.key, parent, ids[4:], STATE)
    record = BlockRecord(name, parent, root.root_id, 4, ids[4:], root.identity, STATE)
    made = rows(4, 2) | {
        "window.k": rows(3, 3)["full.k"],
        "recurrent.r": np.arange(8, dtype=np.uint8).reshape(2, 4),
    }
    return pack_block(record, get_codec("raw"), SPANS, made)


def session() -> Packed:
    root = root_of(IDENTITY)
    ids = names.token_array(IDS)
    record = SessionRecord(
        name="support",
        tenant_id="default",
        root_id=root.root_id,
        identity=root.identity,
        block_size=4,
        revision=1,
        token_ids=ids,
        chain=tuple(names.chain_names(root.key, ids, 4)),
        notes={"kind": "raw", "model": "tiny.gguf"},
    )
    return pack_session(record, get_codec("raw"), LAYOUT, rows(8, 1))


def pin() -> Packed:
    return pack_pin(PinRecord(SESSION, "default", "support"))


def signing_key() -> SigningKey:
    private = Ed25519PrivateKey.from_private_bytes(KEY)
    pem = private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return parse_signing_key(pem)


def sealed(plain: Packed, tenant: Tenant) -> Packed:
    """The tenant's first block."""
    record = parse_block(memoryview(joined(plain))).record
    place = (record.name, record.parent, record.root_id, record.start, len(record.token_ids))
    return seal(plain, Clear("block", tenant.tenant_id, *place), tenant, salt=SALT)


def joined(packed: Packed) -> bytes:
    return b"".join(bytes(buffer) for buffer in packed.buffers)


def vectors() -> dict[str, str]:
    """Name → text of the code block."""
    root, tenant = root_of(IDENTITY), Tenant(KEY)
    secret = root_of(IDENTITY, tenant)
    ids = names.token_array(IDS)
    chain = names.chain_names(root.key, ids, 4)
    file = joined(block("raw"))
    zstd = parse(memoryview(joined(block("zstd"))))
    saved = parse(memoryview(joined(session()))).metadata
    kept = parse(memoryview(joined(state())))
    signed = parse(memoryview(joined(sign_block(memoryview(file), signing_key()))))
    inside = block("raw", tenant)
    hidden = parse(memoryview(joined(sealed(inside, tenant))))
    bound = [{key: text for key, text in hidden.metadata.items() if key != "file"}, {}]
    told = ("root_id", "parent", "extras", "name", "content", "file")
    return {
        "identity": root.identity + "\n",
        "root": _lines(root=root.key.hex(), root_id=root.root_id),
        "names": _lines(
            token_ids=json.dumps(IDS),
            message_0=(bytes(32) + b"\x04\0\0\0" + ids[:4].tobytes()).hex(),
            name_0=chain[0].hex(),
            message_1=(chain[0] + b"\x04\0\0\0" + ids[4:8].tobytes()).hex(),
            name_1=chain[1].hex(),
        ),
        "tenant": _lines(
            key=KEY.hex(),
            tenant_id=tenant.tenant_id,
            root_id=secret.root_id,
            name_0=names.chain_names(secret.key, ids, 4)[0].hex(),
        ),
        "extra": _lines(tag="state", payload="0102", record=names.extra("state", b"\1\2").hex()),
        "block": _dump(file),
        "block-zstd": _lines(
            **{name: bytes(t.data).hex() for name, t in zstd.tensors.items() if "." in name},
            content=zstd.metadata["content"],
        ),
        "state-identity": kept.metadata["identity"] + "\n",
        "state": _lines(
            **{key: kept.metadata[key] for key in told},
            **{name: json.dumps(list(tensor.shape)) for name, tensor in kept.tensors.items()},
        ),
        "session": _lines(**{key: saved[key] for key in ("notes", "content", "talk", "file")}),
        "sealed-data": json.dumps(bound, sort_keys=True, separators=(",", ":")) + "\n",
        "sealed": _lines(
            key=KEY.hex(),
            salt=SALT.hex(),
            plain=inside.file_digest,
            tag=bytes(hidden.tensors["sealed"].data[-16:]).hex(),
            file=hidden.metadata["file"],
            support=sealed_name(tenant, "support"),
        ),
        "signature": _lines(
            message=block_message(chain[0], root.root_id, signed.metadata["content"]).hex(),
            signer=signed.metadata["signer"],
            signature=signed.metadata["signature"],
        ),
        "pin": _dump(joined(pin())),
        "session-names": "".join(
            f"{name if len(name) < 99 else '201 times x':12} {session_file_name(name)}\n"
            for name in SESSION_NAMES
        ),
    }


def _lines(**values: str) -> str:
    return "".join(f"{name:10} {value}\n" for name, value in values.items())


def _dump(data: bytes) -> str:
    lines = []
    for at in range(0, len(data), 32):
        row = data[at : at + 32]
        groups = " ".join(row[n : n + 4].hex() for n in range(0, len(row), 4))
        text = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in row)
        lines.append(f"{at:04x}: {groups:71}  {text}".rstrip())
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    found = vectors()
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(BLOCK.sub(lambda m: m[1] + found[m[2]] + m[4], text), encoding="utf-8")
