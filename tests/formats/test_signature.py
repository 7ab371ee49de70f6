"""What a signature covers, what it does not, and what is refused as one."""

from __future__ import annotations

import builtins
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives import serialization as form
from cryptography.hazmat.primitives.asymmetric import ed448, ed25519, rsa, x25519

from kvsnap.formats.block import BlockRecord, pack_block, parse_block, sign_block
from kvsnap.formats.codecs import get_codec
from kvsnap.formats.container import Packed, check_file_digest, pack, parse
from kvsnap.formats.errors import Damaged, Unsupported, UsageError
from kvsnap.formats.identity import Identity, root_of
from kvsnap.formats.layout import Group, Layout, Plane
from kvsnap.formats.manifest import SESSION, Item, Manifest, pack_manifest, parse_manifest
from kvsnap.formats.names import ZERO_PARENT, block_name, token_array
from kvsnap.formats.signature import (
    SigningKey,
    block_message,
    manifest_message,
    new_signing_key,
    parse_signing_key,
    public_key,
    session_message,
    signature_of,
)

PLANE = Plane(name="k", kind="elements", dtype="F16", row=(1, 4), source_type="f16")
LAYOUT = Layout(groups=(Group(name="all", layers=2, planes=(PLANE,)),))
ROOT = root_of(
    Identity(family="f", weights="w", architecture="a", layout=LAYOUT, rope=None, block_size=4)
)
IDS = token_array([1, 2, 3, 4])
RECORD = BlockRecord(
    block_name(ROOT.key, ZERO_PARENT, IDS), ZERO_PARENT, ROOT.root_id, 0, IDS, ROOT.identity
)
KEY = new_signing_key()
MESSAGES: list[bytes] = [
    block_message(b"\1" * 32, "02" * 32, "03" * 32),
    session_message("02" * 32, "03" * 32),
    manifest_message("03" * 32),
]


def fixed_key(number: int) -> SigningKey:
    """From RFC 8032's way to make one of 32 bytes."""
    private = ed25519.Ed25519PrivateKey.from_private_bytes(bytes([number] * 32))
    return parse_signing_key(pem_of(private))


def pem_of(private: Any, password: bytes | None = None) -> bytes:
    locked = form.BestAvailableEncryption(password) if password else form.NoEncryption()
    found: bytes = private.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, locked)
    return found


def rows(seed: int = 0) -> dict[str, np.ndarray]:
    found = LAYOUT.empty(4)
    for array in found.values():
        array[...] = np.random.default_rng(seed).integers(0, 2**10, array.shape)
    return dict(found)


def joined(packed: Packed) -> memoryview:
    return memoryview(b"".join(bytes(memoryview(part).cast("B")) for part in packed.buffers))


def signed_block(codec: str = "raw", key: SigningKey | None = KEY) -> memoryview:
    return joined(pack_block(RECORD, get_codec(codec), LAYOUT, rows(), key))


def changed(data: memoryview, **fields: str) -> memoryview:
    container = parse(data)
    return joined(pack({**container.metadata, **fields}, list(container.tensors.items())))


def test_messages_are_what_the_format_page_says() -> None:
    assert MESSAGES == [
        b"kvsnap block signature\0" + b"\1" * 32 + b"\2" * 32 + b"\3" * 32,
        b"kvsnap session signature\0" + b"\2" * 32 + b"\3" * 32,
        b"kvsnap manifest signature\0" + b"\3" * 32,
    ]


def test_a_signature_is_the_same_on_every_machine() -> None:
    """Ed25519 takes no random numbers. Made by another implementation: Go's crypto/ed25519 agrees
    with RFC 8032, whose first test is a key and the signature of nothing."""
    seed = bytes.fromhex("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60")
    key = parse_signing_key(pem_of(ed25519.Ed25519PrivateKey.from_private_bytes(seed)))
    assert key.public == "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a"
    assert key.sign(b"").value == (
        "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e065224901555fb8821590a33bac"
        "c61e39701cf9b46bd25bf5f0595bbe24655141438e7a100b"
    )


def test_a_signature_covers_its_message_and_no_other() -> None:
    for one in MESSAGES:
        signature = KEY.sign(one)
        for other in [*MESSAGES, b"", one[:-1], one + b"\0"]:
            assert signature.covers(other) == (one == other)
        assert not replace(signature, signer=new_signing_key().public).covers(one)


@pytest.mark.parametrize("at", [0, 31, 32, 63])
def test_a_changed_bit_of_a_signature_makes_it_none(at: int) -> None:
    signature = KEY.sign(MESSAGES[0])
    value = bytearray.fromhex(signature.value)
    value[at] ^= 1
    assert not replace(signature, value=value.hex()).covers(MESSAGES[0])


@pytest.mark.parametrize("short", ["", "00" * 31, "0" * 63, "zz" * 32])
def test_what_is_no_digest_is_not_signed(short: str) -> None:
    """Parts of one length each: no two records make one message."""
    with pytest.raises(Damaged):
        manifest_message(short)
    with pytest.raises(Damaged):
        session_message("03" * 32, short)
    with pytest.raises(Damaged):
        block_message(b"\1" * 32, "02" * 32, short)


@pytest.mark.parametrize("codec", ["raw", "zstd", "q8"])
def test_a_signed_block_is_read_and_its_signature_covers_its_rows(codec: str) -> None:
    record, root = RECORD, ROOT
    fidelity = get_codec(codec).fidelity
    if codec == "q8":
        identity = Identity(
            family="f", weights="w", architecture="a", layout=LAYOUT, rope=None, block_size=4,
            fidelity=fidelity,
        )  # fmt: skip
        root = root_of(identity)
        record = replace(
            RECORD,
            root_id=root.root_id,
            identity=root.identity,
            fidelity=fidelity,
            name=block_name(root.key, ZERO_PARENT, IDS),
        )
    data = joined(pack_block(record, get_codec(codec), LAYOUT, rows(), KEY))
    check_file_digest(data)
    block = parse_block(data)
    block.check_content()
    assert block.signer == KEY.public
    assert block.signed
    assert block.file_digest == check_file_digest(data)


def test_it_is_kept_by_another_lossless_codec() -> None:
    raw, zstd = parse_block(signed_block("raw")), parse_block(signed_block("zstd"))
    assert raw.signature == zstd.signature
    assert raw.file_digest != zstd.file_digest


def test_a_block_without_a_key_has_none() -> None:
    block = parse_block(signed_block(key=None))
    assert (block.signature, block.signer, block.signed) == (None, "", False)


@pytest.mark.parametrize("field", ["name", "root_id", "content"])
def test_another_name_root_or_content_is_not_what_was_signed(field: str) -> None:
    block = parse_block(changed(signed_block(), **{field: "12" * 32}))
    assert block.signer == KEY.public
    assert not block.signed


@pytest.mark.parametrize("field", ["start", "parent", "fidelity"])
def test_the_rest_of_the_record_is_covered_by_the_content(field: str) -> None:
    value = {"start": "4", "parent": "12" * 32, "fidelity": "none"}[field]
    block = parse_block(changed(signed_block(), **{field: value}))
    with pytest.raises(Damaged, match="content digest"):
        block.check_content()


def test_other_token_ids_are_covered_by_the_content() -> None:
    container = parse(signed_block())
    tensors = dict(container.tensors)
    ids = token_array([9, 2, 3, 4]).astype("<u4")
    tensors["token_ids"] = replace(tensors["token_ids"], data=ids)
    block = parse_block(joined(pack(container.metadata, list(tensors.items()))))
    with pytest.raises(Damaged, match="content digest"):
        block.check_content()


def test_signing_a_block_again_changes_only_who_signed_it() -> None:
    other = new_signing_key()
    plain, theirs = signed_block(key=None), signed_block(key=other)
    assert joined(sign_block(plain, KEY)) == signed_block()
    assert joined(sign_block(theirs, KEY)) == signed_block()
    assert joined(sign_block(signed_block("zstd", None), KEY)) == signed_block("zstd")


def test_how_much_longer_a_signed_file_is() -> None:
    """Two header fields; the data starts at a multiple of 64."""
    assert len(signed_block()) - len(signed_block(key=None)) in (192, 256)


BAD: list[dict[str, str]] = [
    {"signer": "ab" * 32},
    {"signature": "cd" * 64},
    {"signer": "ab" * 31, "signature": "cd" * 64},
    {"signer": "AB" * 32, "signature": "cd" * 64},
    {"signer": "ab" * 32, "signature": "cd" * 63},
    {"signer": "ab" * 32, "signature": "cd" * 64 + "\n"},
    {"signer": "", "signature": ""},
    {"signer": "ab" * 32 + "\n", "signature": "cd" * 64},
]


@pytest.mark.parametrize("fields", BAD, ids=str)
def test_fields_that_cannot_be_a_signature_are_damage(fields: dict[str, str]) -> None:
    with pytest.raises(Damaged, match="signature"):
        signature_of(fields)
    with pytest.raises(Damaged, match="signature"):
        parse_block(changed(signed_block(key=None), **fields))


def manifest() -> Manifest:
    return Manifest(
        name="chat", tenant_id="default", root_id="02" * 32, fidelity="exact", block_size=4,
        revision=3, tokens=2, created=5, creator="me", model="m",
        items=(Item(SESSION, b"\1" * 32, 0, 100, b"\1" * 32),),
    )  # fmt: skip


def test_a_manifest_is_signed_over_all_that_it_says() -> None:
    signed = parse_manifest(joined(pack_manifest(manifest().sign(KEY))))
    assert signed == manifest().sign(KEY)
    assert signed.signed
    assert not manifest().signed
    changes: list[dict[str, Any]] = [
        {"name": "other"}, {"tenant_id": "0" * 64}, {"root_id": "03" * 32}, {"fidelity": "q8@1"},
        {"block_size": 8}, {"revision": 4}, {"tokens": 3}, {"created": 6}, {"creator": "you"},
        {"model": "n"}, {"items": (Item(SESSION, b"\2" * 32, 0, 100, b"\2" * 32),)},
        {"items": (Item(SESSION, b"\1" * 32, 0, 101, b"\1" * 32),)},
    ]  # fmt: skip
    for change in changes:
        assert not replace(signed, **change).signed, change
    other = new_signing_key()
    assert signed.sign(other).signature != signed.signature
    assert signed.sign(other).sign(KEY) == signed, "a signature takes the place of another"


def test_a_key_survives_its_file() -> None:
    key = parse_signing_key(KEY.pem())
    assert (key.public, key.sign(b"x")) == (KEY.public, KEY.sign(b"x"))
    assert KEY.pem().startswith(b"-----BEGIN PRIVATE KEY-----\n")


def test_a_key_is_shown_by_nothing_but_its_file() -> None:
    key = fixed_key(7)
    private = "".join(key.pem().decode().splitlines()[1:-1])
    for text in (repr(key), str(key), f"{key!r}", repr([key]), repr(vars(key))):
        assert "07" * 8 not in text
        assert private[:16] not in text


NO_KEYS: dict[str, Callable[[], bytes]] = {
    "empty": lambda: b"",
    "text": lambda: b"secret words that nobody may see",
    "hexadecimal": lambda: b"07" * 32,
    "cut": lambda: KEY.pem()[:60],
    "a public key": lambda: (
        ed25519.Ed25519PrivateKey.generate()
        .public_key()
        .public_bytes(form.Encoding.PEM, form.PublicFormat.SubjectPublicKeyInfo)
    ),
    "RSA": lambda: pem_of(rsa.generate_private_key(65537, 2048)),
    "Ed448": lambda: pem_of(ed448.Ed448PrivateKey.generate()),
    "X25519": lambda: pem_of(x25519.X25519PrivateKey.generate()),
    "with a password": lambda: pem_of(ed25519.Ed25519PrivateKey.generate(), b"pass"),
    "zeros": lambda: bytes(5000),
}


@pytest.mark.parametrize("kind", NO_KEYS)
def test_what_is_no_signing_key_is_refused_in_one_line_that_quotes_nothing(kind: str) -> None:
    data = NO_KEYS[kind]()
    with pytest.raises(UsageError) as caught:
        parse_signing_key(data)
    text = f"{caught.value.what} {caught.value.hint}"
    assert "\n" not in text
    assert "keygen --signing" in text
    assert "secret" not in text
    assert caught.value.__cause__ is None, "its text may quote what it read"


def test_public_keys_are_taken_as_people_paste_them() -> None:
    assert public_key(f"  {'AB' * 32}\n") == "ab" * 32
    for text in ("", "ab" * 31, "0x" + "ab" * 32, "zz" * 32, "ab" * 32 + " " + "ab" * 32, "é" * 64):
        with pytest.raises(UsageError, match="64 hexadecimal digits"):
            public_key(text)


def test_without_cryptography_a_hint_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    signature = KEY.sign(MESSAGES[0])
    for name in [name for name in sys.modules if name.split(".")[0] == "cryptography"]:
        monkeypatch.delitem(sys.modules, name)
    real = builtins.__import__

    def without(name: str, *args: Any, **options: Any) -> Any:
        if name.split(".")[0] == "cryptography":
            raise ImportError(name)
        return real(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    works: list[Callable[[], object]] = [
        new_signing_key,
        lambda: parse_signing_key(b"x"),
        lambda: signature.covers(MESSAGES[0]),
    ]
    for work in works:
        with pytest.raises(Unsupported, match="package cryptography") as caught:
            work()
        assert caught.value.hint == "pip install 'kvsnap[remote]'"
    block = parse_block(signed_block(key=None))
    assert not block.signed, "what is unsigned is read without it"
