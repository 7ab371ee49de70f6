"""Signed, sealed and portable files that an earlier kvsnap wrote: believed, opened and read for ever."""

from __future__ import annotations

import dataclasses
import runpy
from pathlib import Path

import pytest

from kvsnap.formats.archive import members
from kvsnap.formats.block import parse_block, sign_block
from kvsnap.formats.container import check_file_digest
from kvsnap.formats.errors import Sealed, Unsupported
from kvsnap.formats.manifest import parse_manifest
from kvsnap.formats.sealed import parse_sealed
from kvsnap.formats.session import parse_session
from kvsnap.formats.signature import Signature
from kvsnap.formats.tenant import Tenant

GOLDEN = Path(__file__).parents[1] / "golden"
TENANT, STRANGER = Tenant(bytes(range(32))), Tenant(bytes(32))
SIGNER = "03a107bff3ce10be1d70dd18e74bc09967e4d6309ba50d5f1ddc8664125531b8"
PARSERS = {"block": parse_block, "session": parse_session, "manifest": parse_manifest}
PLAIN = {"block": "block-signed", "state": "state-zstd", "session": "session-zstd"}


def read(name: str, version: str = "v1") -> memoryview:
    return memoryview((GOLDEN / version / f"{name}.safetensors").read_bytes())


@pytest.mark.parametrize("kind", PARSERS)
def test_a_signed_file_is_signed_by_the_recorded_key(kind: str) -> None:
    found = PARSERS[kind](read(f"{kind}-signed"))
    assert found.signature is not None
    assert found.signature.signer == SIGNER
    assert found.signed


@pytest.mark.parametrize("kind", PARSERS)
def test_no_bit_of_a_signature_may_differ(kind: str) -> None:
    found = PARSERS[kind](read(f"{kind}-signed"))
    value = bytes.fromhex(found.signature.value)
    for at in (0, 31, 32, 63):
        other = bytearray(value)
        other[at] ^= 1
        forged = Signature(SIGNER, other.hex())
        assert not dataclasses.replace(found, signature=forged).signed


def test_signing_the_plain_block_again_gives_the_signed_one() -> None:
    make = runpy.run_path(str(GOLDEN / "make.py"))
    signed = sign_block(read("block-raw"), make["signing_key"]())
    assert b"".join(bytes(part) for part in signed.buffers) == read("block-signed")


@pytest.mark.parametrize("kind", [*PLAIN, "manifest"])
def test_a_sealed_file_opens_to_the_very_file(kind: str) -> None:
    buffer = read(f"sealed-{kind}")
    check_file_digest(buffer)
    found = parse_sealed(buffer)
    assert found.clear.kind == kind
    assert found.open(TENANT) == read(PLAIN.get(kind, "manifest"))
    for wrong in (None, STRANGER):
        with pytest.raises(Sealed):
            found.open(wrong)


def test_all_that_is_golden_is_what_is_written_today() -> None:
    # Of zstd only what decodes is fixed: another release of it may compress otherwise.
    made = runpy.run_path(str(GOLDEN / "make.py"))["made"]()
    stored = {path.name for path in (GOLDEN / "v1").iterdir()}
    assert stored == made.keys()
    for name in ("block-raw", "block-signed", "session-raw", "session-signed", "state-raw", "pin"):
        assert made[f"{name}.safetensors"] == read(name)


def test_the_portable_file_holds_three_files_in_their_order() -> None:
    data = memoryview((GOLDEN / "v1" / "portable.kvsnap").read_bytes())
    found = list(members(lambda start, count: bytes(data[start : start + count]), len(data)))
    kinds = [member.name.partition("/")[0] for member in found]
    assert kinds == ["blocks", "sessions", "manifests"]
    for member in found:
        check_file_digest(data[member.start : member.start + member.size])


@pytest.mark.parametrize("name", ["block-zstd", "session-zstd"])
def test_a_file_of_version_0_is_refused_by_name(name: str) -> None:
    with pytest.raises(Unsupported, match="format version '0'; this kvsnap reads version 1"):
        PARSERS[name.partition("-")[0]](read(name, "v0"))
