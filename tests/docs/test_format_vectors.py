"""docs/format.md: its vectors, computed again from the text alone with blake3, json and struct."""

from __future__ import annotations

import json
import re
import runpy
import struct
from pathlib import Path

import pytest
import safetensors
from blake3 import blake3
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

PAGE = (Path(__file__).parents[2] / "docs" / "format.md").read_text(encoding="utf-8")
BLOCKS = dict(re.findall(r"<!-- vector: ([a-z-]+) -->\n```[a-z]*\n(.*?)```", PAGE, re.DOTALL))
ZERO = bytes(32)


def _table(name: str) -> dict[str, str]:
    return dict(line.split(maxsplit=1) for line in BLOCKS[name].splitlines())


def _canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _ids(ids: list[int]) -> bytes:
    return struct.pack(f"<{len(ids)}I", *ids)


def _name(root: bytes, parent: bytes, ids: list[int]) -> bytes:
    return blake3(parent + struct.pack("<I", len(ids)) + _ids(ids), key=root).digest()


def _rows(tokens: int, first: int) -> bytes:
    """One layer, one head of two elements: K counts from 0x3c00 + first, V from 0x4000 + first."""
    counts = range(first, first + tokens * 2)
    return b"".join(struct.pack("<H", at + n) for at in (0x3C00, 0x4000) for n in counts)


def _content(fields: dict[str, str], ids: list[int], tokens: int, rows: bytes) -> str:
    shapes = {"full.k": ["uint16", 1, tokens, 2], "full.v": ["uint16", 1, tokens, 2]}
    record = _canonical([fields, shapes])
    return blake3(struct.pack("<I", len(record)) + record + _ids(ids) + rows).hexdigest()


IDENTITY = BLOCKS["identity"].rstrip("\n")
ROOT = blake3(IDENTITY.encode()).digest()
ROOT_ID = blake3(ROOT, derive_key_context="kvsnap root id").hexdigest()
IDS: list[int] = json.loads(_table("names")["token_ids"])
NAMES = [_name(ROOT, ZERO, IDS[:4])]
NAMES.append(_name(ROOT, NAMES[0], IDS[4:8]))
FIELDS = {
    "extras": "",
    "fidelity": "exact",
    "kind": "block",
    "name": NAMES[0].hex(),
    "parent": ZERO.hex(),
    "root_id": ROOT_ID,
    "start": "0",
}


def _file(metadata: dict[str, str], tensors: list[tuple[str, str, list[int], bytes]]) -> bytes:
    header: dict[str, object] = {"__metadata__": {**metadata, "file": "0" * 64}}
    at = 0
    for name, dtype, shape, data in tensors:
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = _canonical(header)
    text += b" " * (-(8 + len(text)) % 64)
    whole = struct.pack("<Q", len(text)) + text + b"".join(data for *_, data in tensors)
    digest = blake3(whole).hexdigest().encode()
    return whole.replace(b'"file":"' + b"0" * 64, b'"file":"' + digest)


def test_the_identity_is_canonical_json():
    assert _canonical(json.loads(IDENTITY)).decode() == IDENTITY


def test_root_and_root_id_follow_from_the_identity():
    assert _table("root") == {"root": ROOT.hex(), "root_id": ROOT_ID}


def test_names_follow_from_the_messages_that_the_page_spells_out():
    table = _table("names")
    assert table["message_0"] == (ZERO + b"\4\0\0\0" + _ids(IDS[:4])).hex()
    assert table["message_1"] == (NAMES[0] + b"\4\0\0\0" + _ids(IDS[4:8])).hex()
    for number in range(2):
        message = bytes.fromhex(table[f"message_{number}"])
        assert blake3(message, key=ROOT).hexdigest() == table[f"name_{number}"]


def test_a_tenants_key_changes_root_id_and_names():
    table = _table("tenant")
    key = bytes.fromhex(table["key"])
    naming = blake3(key, derive_key_context="kvsnap naming key").digest()
    root = blake3(IDENTITY.encode(), key=naming).digest()
    assert table["tenant_id"] == blake3(key, derive_key_context="kvsnap tenant id").hexdigest()
    assert table["root_id"] == blake3(root, derive_key_context="kvsnap root id").hexdigest()
    assert table["name_0"] == _name(root, ZERO, IDS[:4]).hex()


def test_an_extra_is_two_length_prefixed_strings():
    table = _table("extra")
    tag, payload = table["tag"].encode(), bytes.fromhex(table["payload"])
    record = struct.pack("<I", len(tag)) + tag + struct.pack("<I", len(payload)) + payload
    assert table["record"] == record.hex()


def _dumped(name: str) -> bytes:
    return b"".join(bytes.fromhex(line[6:77].strip()) for line in BLOCKS[name].splitlines())


def test_the_dumped_block_file_follows_from_the_specification():
    rows = _rows(4, 0)
    metadata = {
        **FIELDS,
        "codec": "raw",
        "content": _content(FIELDS, IDS[:4], 4, rows),
        "identity": IDENTITY,
        "kvsnap": "1",
    }
    tensors = [
        ("token_ids", "U32", [4], _ids(IDS[:4])),
        ("full.k", "F16", [1, 4, 1, 2], rows[:16]),
        ("full.v", "F16", [1, 4, 1, 2], rows[16:]),
    ]
    assert _dumped("block") == _file(metadata, tensors)


def test_the_safetensors_library_opens_the_dumped_file(tmp_path):
    path = tmp_path / "block.safetensors"
    path.write_bytes(_dumped("block"))
    with safetensors.safe_open(path, framework="np") as file:
        assert file.metadata()["name"] == NAMES[0].hex()
        assert file.get_tensor("token_ids").tolist() == IDS[:4]


def test_zstd_splits_elements_by_byte_and_keeps_the_content_digest():
    table, rows = _table("block-zstd"), _rows(4, 0)
    for plane, data in (("k", rows[:16]), ("v", rows[16:])):
        for number in range(2):
            assert table[f"full.{plane}.b{number}"] == data[number::2].hex()
    assert table["content"] == _content(FIELDS, IDS[:4], 4, rows)


def test_the_state_checkpoint_follows_from_the_specification():
    table, identity = _table("state"), BLOCKS["state-identity"].rstrip("\n")
    assert _canonical(json.loads(identity)).decode() == identity
    root = blake3(identity.encode()).digest()
    parent, ids = _name(root, ZERO, IDS[:4]), IDS[4:6]
    extras = struct.pack("<I", 5) + b"state" + struct.pack("<I", 0)
    message = parent + struct.pack("<I", 2) + _ids(ids) + extras
    fields = {
        "extras": extras.hex(),
        "fidelity": "exact",
        "kind": "state",
        "name": blake3(message, key=root).hexdigest(),
        "parent": parent.hex(),
        "root_id": blake3(root, derive_key_context="kvsnap root id").hexdigest(),
        "start": "4",
    }
    planes = [
        ("full.k", "F16", "uint16", [1, 2, 1, 2], _rows(2, 8)[:8]),
        ("full.v", "F16", "uint16", [1, 2, 1, 2], _rows(2, 8)[8:]),
        ("recurrent.r", "U8", "uint8", [2, 4], bytes(range(8))),
        ("window.k", "F16", "uint16", [1, 3, 1, 2], _rows(3, 6)[:12]),
    ]
    shapes = {name: [kind, *shape[:2], *shape[3:]] for name, _, kind, shape, _ in planes}
    record = _canonical([fields, shapes])
    content = blake3(struct.pack("<I", len(record)) + record + _ids(ids))
    content.update(b"".join(data for *_, data in planes))
    metadata = {
        **fields,
        "codec": "raw",
        "content": content.hexdigest(),
        "identity": identity,
        "kvsnap": "1",
    }
    tensors = [("token_ids", "U32", [2], _ids(ids))]
    tensors += [(name, dtype, shape, data) for name, dtype, _, shape, data in planes]
    assert f'"file":"{table.pop("file")}"'.encode() in _file(metadata, tensors)
    for key in ("root_id", "parent", "extras", "name", "content"):
        assert table.pop(key) == metadata[key]
    assert table == {name: json.dumps(shape) for name, _, shape, _ in tensors}


def test_the_session_file_follows_from_the_specification():
    table, rows = _table("session"), _rows(1, 16)
    fields = {
        "block_size": "4",
        "fidelity": "exact",
        "kind": "session",
        "name": "support",
        "revision": "1",
        "root_id": ROOT_ID,
        "state": "",
        "tenant_id": "default",
    }
    content = _content(fields, IDS, 1, rows)
    record = _canonical([fields, IDENTITY, table["notes"]])
    chain = b"".join(NAMES)
    talk = blake3(struct.pack("<I", len(record)) + record + chain + _ids(IDS)).hexdigest()
    assert (table["content"], table["talk"]) == (content, talk)
    metadata = {
        **fields,
        "codec": "raw",
        "content": content,
        "identity": IDENTITY,
        "kvsnap": "1",
        "notes": table["notes"],
        "talk": talk,
    }
    tensors = [
        ("token_ids", "U32", [9], _ids(IDS)),
        ("chain", "U8", [2, 32], chain),
        ("full.k", "F16", [1, 1, 1, 2], rows[:4]),
        ("full.v", "F16", [1, 1, 1, 2], rows[4:]),
    ]
    assert f'"file":"{table["file"]}"'.encode() in _file(metadata, tensors)


def test_the_sealed_file_follows_from_the_specification():
    table, tenant, rows = _table("sealed"), _table("tenant"), _rows(4, 0)
    key, salt, name = (
        bytes.fromhex(text) for text in (table["key"], table["salt"], tenant["name_0"])
    )
    fields = {**FIELDS, "name": tenant["name_0"], "root_id": tenant["root_id"]}
    metadata = {
        **fields,
        "codec": "raw",
        "content": _content(fields, IDS[:4], 4, rows),
        "identity": IDENTITY,
        "kvsnap": "1",
    }
    tensors = [
        ("token_ids", "U32", [4], _ids(IDS[:4])),
        ("full.k", "F16", [1, 4, 1, 2], rows[:16]),
        ("full.v", "F16", [1, 4, 1, 2], rows[16:]),
    ]
    plain = _file(metadata, tensors)
    assert f'"file":"{table["plain"]}"'.encode() in plain
    clear = {
        "cipher": "aes-256-gcm",
        "holds": "block",
        "kind": "sealed",
        "kvsnap": "1",
        "last": "",
        "name": tenant["name_0"],
        "parent": ZERO.hex(),
        "root_id": tenant["root_id"],
        "salt": table["salt"],
        "signer": "",
        "start": "0",
        "tenant_id": tenant["tenant_id"],
        "tokens": "4",
    }
    assert BLOCKS["sealed-data"] == _canonical([clear, {}]).decode() + "\n"
    sealing = blake3(key, derive_key_context="kvsnap sealing key").digest()
    file_key = blake3(sealing + salt + name, derive_key_context="kvsnap file key").digest()
    part = AESGCM(file_key).encrypt(bytes(12), plain, _canonical([clear, {}]))
    assert part[-16:].hex() == table["tag"]
    made = _file(clear, [("sealed", "U8", [len(part)], part)])
    assert f'"file":"{table["file"]}"'.encode() in made
    naming = blake3(key, derive_key_context="kvsnap session names").digest()
    assert table["support"] == blake3(b"support", key=naming).hexdigest()


def test_the_signature_follows_from_the_specification():
    table = _table("signature")
    content = re.search(r'"content":"([0-9a-f]{64})"', _dumped("block").decode("latin-1"))
    assert content is not None
    message = b"kvsnap block signature\0" + NAMES[0] + bytes.fromhex(ROOT_ID + content[1])
    assert table["message"] == message.hex()
    key = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
    assert table["signer"] == key.public_key().public_bytes_raw().hex()
    assert table["signature"] == key.sign(message).hex()


def test_the_pin_file_follows_from_the_specification():
    metadata = {
        "kind": "pin",
        "kvsnap": "1",
        "name": "support",
        "tenant_id": "default",
        "until": "0",
        "what": "session",
    }
    assert _dumped("pin") == _file(metadata, [])


def test_session_file_names_escape_as_the_page_says():
    for line in BLOCKS["session-names"].splitlines():
        name, file_name = line.rsplit(maxsplit=1)
        raw = name.strip().encode() if "times" not in name else b"x" * 201
        plain = re.compile(rb"[a-z0-9_.-]")
        parts = [chr(b) if plain.match(bytes([b])) else f"%{b:02x}" for b in raw]
        device = re.match(rb"(con|prn|aux|nul|com[0-9]|lpt[0-9])(\.|$)", raw)
        if raw.startswith(b".") or device:
            parts[0] = f"%{raw[0]:02x}"
        if parts[-1] == ".":
            parts[-1] = "%2e"
        escaped = "".join(parts)
        if len(escaped) > 200:
            escaped = "%~" + blake3(raw).hexdigest()
        assert file_name == escaped + ".safetensors"


@pytest.mark.parametrize("name", sorted(BLOCKS))
def test_the_code_still_gives_the_vectors_of_the_page(name):
    made = runpy.run_path(str(Path(__file__).with_name("format_vectors.py")))["vectors"]()
    assert made[name] == BLOCKS[name]
    assert made.keys() == BLOCKS.keys()
