"""Sealed files: what goes in comes out, and nothing of it is to be seen meanwhile."""

from __future__ import annotations

import subprocess
import sys
import tracemalloc
from dataclasses import replace

import pytest
from blake3 import blake3
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load

from kvsnap.formats.container import Container, check_file_digest, parse
from kvsnap.formats.errors import Unsupported, UsageError
from kvsnap.formats.sealed import (
    clear_of,
    parse_sealed,
    seal,
    sealed_name,
    sealed_size,
)
from tests.formats.sealing import (
    CLEAR,
    GOLDEN,
    NAME,
    OTHER,
    PARENT,
    SALT,
    STRANGER,
    TENANT,
    TEXT,
    golden,
    joined,
    numbers,
    opened,
    packed,
    sealed,
)

GOLDEN_FILE = "e0af39960fd5e62c8e977f70d275d600c8e021f9c2465654f16456b93d7ebc1b"
GOLDEN_TAG = "bfb802ae21b3cfcaf64401d5100ef3b6"


@pytest.mark.parametrize("name", GOLDEN)
def test_a_file_of_every_kind_comes_out_as_it_went_in(name: str) -> None:
    plain, clear = golden(name)
    file = joined(seal(packed(plain), clear, TENANT))
    found = parse_sealed(memoryview(file))
    assert (found.clear, found.tensors) == (clear, {})
    assert opened(file) == plain
    assert check_file_digest(found.open(TENANT)) == check_file_digest(memoryview(plain))
    assert len(file) == sealed_size(len(plain), clear)


def test_the_golden_names_are_of_every_kind() -> None:
    kinds = {golden(name)[1].kind for name in GOLDEN}
    assert kinds == {"block", "state", "session", "manifest", "calibration", "pin"}


def test_a_fixed_key_and_salt_give_the_recorded_file() -> None:
    made = seal(packed(TEXT), CLEAR, TENANT, [("sizes", numbers(5, 6, 7))], salt=SALT)
    assert made.file_digest == GOLDEN_FILE
    assert bytes(parse(memoryview(joined(made))).tensors["sealed"].data[-16:]).hex() == GOLDEN_TAG


def test_the_sealed_part_is_aes_gcm_by_the_formula() -> None:
    sealing = blake3(TENANT.key, derive_key_context="kvsnap sealing key").digest()
    assert TENANT.sealing_key == sealing
    key = blake3(sealing + SALT + NAME, derive_key_context="kvsnap file key").digest()
    data = (
        '[{"cipher":"aes-256-gcm","holds":"block","kind":"sealed","kvsnap":"%s","last":"",'
        '"name":"%s","parent":"%s","root_id":"%s","salt":"%s","signer":"","start":"64",'
        '"tenant_id":"%s","tokens":"16"},{"sizes":["U64",[3],"%s"]}]'
    )
    container = parse(memoryview(sealed()))
    sizes = blake3(numbers(5, 6, 7).data.tobytes()).hexdigest()
    version = container.metadata["kvsnap"]
    names = (NAME.hex(), PARENT.hex(), CLEAR.root_id, SALT.hex(), TENANT.tenant_id)
    bound = (data % (version, *names, sizes)).encode()
    part = bytes(container.tensors["sealed"].data)
    assert AESGCM(key).decrypt(bytes(12), part, bound) == TEXT


@given(
    st.lists(st.binary(max_size=1700), max_size=4),
    st.integers(0, 10**18 - 1),
    st.integers(0, 2**16),
    st.lists(st.lists(st.integers(0, 2**64 - 1), max_size=40), max_size=3),
)
def test_any_file_in_any_pieces_comes_back_and_has_the_size_foretold(
    parts: list[bytes], start: int, tokens: int, tables: list[list[int]]
) -> None:
    clear = replace(CLEAR, start=start, tokens=tokens)
    tensors = [(f"table{n}", numbers(*table)) for n, table in enumerate(tables)]
    file = joined(seal(packed(*parts), clear, TENANT, tensors))
    plain = b"".join(parts)
    assert opened(file) == plain
    assert len(file) == sealed_size(len(plain), clear, tensors)
    found = parse_sealed(memoryview(file))
    assert found.clear == clear
    data = {name: bytes(tensor.data) for name, tensor in found.tensors.items()}
    assert data == {name: tensor.data.tobytes() for name, tensor in tensors}


def test_the_size_is_foretold_at_every_length() -> None:
    for size in range(5001):
        assert seal(packed(bytes(size)), CLEAR, TENANT).size == sealed_size(size, CLEAR)


def test_one_salt_gives_one_file_and_another_shares_no_byte_block_with_it() -> None:
    zeros = bytes(4096)
    first, again, other = (sealed(zeros, salt=salt) for salt in (SALT, SALT, OTHER))
    assert first == again
    one, two = (parse(memoryview(file)) for file in (first, other))
    differing = {key for key in one.metadata if one.metadata[key] != two.metadata[key]}
    assert differing == {"salt", "file"}
    parts = [bytes(container.tensors["sealed"].data) for container in (one, two)]
    pieces = {part[at : at + 16] for part in parts for at in range(0, 4112, 16)}
    assert len(pieces) == 2 * 257


def test_each_file_gets_a_salt_of_its_own() -> None:
    salts = {parse(memoryview(sealed(salt=None))).metadata["salt"] for _ in range(100)}
    assert len(salts) == 100


def test_one_salt_under_two_names_is_two_keys() -> None:
    one, two = sealed(), sealed(clear=replace(CLEAR, name=OTHER))
    parts = [bytes(parse(memoryview(file)).tensors["sealed"].data[:16]) for file in (one, two)]
    assert parts[0] != parts[1]


def runs(data: bytes | memoryview, size: int = 8) -> set[bytes]:
    return {bytes(data[at : at + size]) for at in range(len(data) - size + 1)}


@pytest.mark.parametrize("salt", [SALT, None])
@pytest.mark.parametrize("name", GOLDEN)
def test_nothing_of_the_file_inside_is_to_be_seen(name: str, salt: bytes | None) -> None:
    plain, clear = golden(name)
    file = joined(seal(packed(plain), clear, TENANT, salt=salt))
    container = parse(memoryview(file))
    assert not runs(plain) & runs(container.tensors["sealed"].data)
    assert container.metadata == {
        "cipher": "aes-256-gcm",
        "file": container.metadata["file"],
        "holds": clear.kind,
        "kind": "sealed",
        "kvsnap": parse(memoryview(plain)).metadata["kvsnap"],
        "last": clear.last.hex(),
        "name": clear.name.hex(),
        "parent": clear.parent.hex(),
        "root_id": clear.root_id,
        "salt": container.metadata["salt"],
        "signer": clear.signer,
        "start": str(clear.start),
        "tenant_id": TENANT.tenant_id,
        "tokens": str(clear.tokens),
    }


@pytest.mark.parametrize("name", GOLDEN)
def test_ids_identity_digests_and_names_are_not_in_the_sealed_file(name: str) -> None:
    plain, clear = golden(name)
    inside = parse(memoryview(plain))
    shown = runs(joined(seal(packed(plain), clear, TENANT)))
    for tensor in inside.tensors.values():
        assert not runs(tensor.data) & shown
    for key in ("file", "content", "talk"):
        digest = inside.metadata.get(key, inside.metadata["file"])
        assert not runs(digest.encode()) & shown
        assert not runs(bytes.fromhex(digest)) & shown
    if clear.kind in ("session", "manifest", "pin"):
        name = inside.metadata["name"].encode()
        assert name in (b"Alice/42", b"%41lice%2f42")
        assert name not in shown
    for key in ("identity", "notes"):
        text = inside.metadata.get(key, "")
        assert not runs(text.encode(), 16) & runs(joined(seal(packed(plain), clear, TENANT)), 16)


@pytest.mark.parametrize("secret", [TENANT.key, TENANT.sealing_key, TENANT.session_key])
def test_no_key_stands_in_a_sealed_file_or_a_text_of_one(secret: bytes) -> None:
    file = sealed()
    assert secret not in file
    assert secret.hex().encode() not in file
    assert secret.hex() not in repr(parse_sealed(memoryview(file))) + repr(TENANT)


def test_the_header_alone_tells_what_stands_in_the_clear() -> None:
    metadata = parse(memoryview(sealed())).metadata
    assert clear_of(Container(metadata, {})) == CLEAR


def test_sealing_and_opening_hold_one_copy_of_the_file() -> None:
    size = 8 * 2**20
    halves = [bytes(size // 2), bytes(size // 2)]
    tracemalloc.start()
    try:
        made = seal(packed(*halves), CLEAR, TENANT)
        assert tracemalloc.get_traced_memory()[1] < 1.1 * size
        file = memoryview(joined(made))
        del made
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        parse_sealed(file).open(TENANT)
        assert tracemalloc.get_traced_memory()[1] - before < 1.1 * size
    finally:
        tracemalloc.stop()


def test_the_safetensors_library_opens_a_sealed_file() -> None:
    tensors = load(sealed())
    assert tensors["sealed"].shape == (len(TEXT) + 16,)
    assert tensors["sizes"].tolist() == [5, 6, 7]


def test_without_the_package_sealing_and_opening_say_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = memoryview(sealed())
    for module in ("cryptography.hazmat.primitives.ciphers", "cryptography.exceptions"):
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers.aead", None)
    found = parse_sealed(file)  # needs neither the key nor the package
    for attempt in (
        lambda: seal(packed(TEXT), CLEAR, TENANT),
        lambda: seal(packed(TEXT), CLEAR, TENANT, salt=SALT),
        lambda: found.open(TENANT),
    ):
        with pytest.raises(Unsupported, match="cryptography") as caught:
            attempt()
        assert caught.value.hint == "pip install 'kvsnap[remote]'"


def test_looking_at_a_sealed_file_does_not_load_the_package() -> None:
    program = (
        "import sys, kvsnap, kvsnap.formats.sealed as s\n"
        "data = memoryview(sys.stdin.buffer.read())\n"
        "print(s.is_sealed(data), s.parse_sealed(data).clear.tokens, 'cryptography' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], input=sealed(), capture_output=True, check=True
    )
    assert done.stdout.split() == [b"True", b"16", b"False"]


def test_a_sessions_file_name_is_keyed_by_the_tenant() -> None:
    key = blake3(TENANT.key, derive_key_context="kvsnap session names").digest()
    assert TENANT.session_key == key
    name = sealed_name(TENANT, "Ärger/42")
    assert name == blake3("Ärger/42".encode(), key=key).hexdigest()
    assert sealed_name(STRANGER, "Ärger/42") != name
    assert sealed_name(TENANT, "ärger/42") != name


@pytest.mark.parametrize("name", ["", "a\nb", "\ud800", "x" * 1025])
def test_what_is_no_session_name_has_no_file_name(name: str) -> None:
    with pytest.raises(UsageError):
        sealed_name(TENANT, name)


def test_the_keys_of_a_tenant_are_all_different() -> None:
    keys = [TENANT.key, TENANT.naming_key, TENANT.sealing_key, TENANT.session_key]
    assert len({*keys, bytes.fromhex(TENANT.tenant_id)}) == 5
