"""Files that an earlier kvsnap wrote stay readable, and what is written today equals them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load

from kvsnap.formats.block import BlockFile, pack_block, parse_block
from kvsnap.formats.codecs import get_codec
from kvsnap.formats.container import check_file_digest
from kvsnap.formats.identity import layout_of, root_of
from kvsnap.formats.names import block_name, chain_names, token_array
from kvsnap.formats.pin import PinRecord, pack_pin, parse_pin
from kvsnap.formats.session import SessionFile, pack_session, parse_session
from kvsnap.formats.tenant import Tenant

FOLDER = Path(__file__).parents[1] / "golden" / "v0"
TENANT = Tenant(bytes(range(32)))
IDS = [(n * n * 40503 + 7) % 2**32 for n in range(37)]
FILE = {
    "block-raw": "74b782cd6807f50480764a598042ede306d30f8a4ea3035ab758a3e789a2471c",
    "block-zstd": "c15afc92784706a52df1572e3c83209f29441c75a31facc962c9aa49ba7937d1",
    "session-raw": "37f556965a1d21848a8674d207fefc57f97bb646a35cd93e988d4d61ace13231",
    "session-zstd": "1c5c9b0bc9cf659e766dd4f1fd4a2185b00623d32da719191a5d92de046fd682",
    "pin": "00f35d1eb8489b4ea1af2138081dcae3971e06ad664ccce705f2974dbcf805ce",
}
ROOT_ID = "68c2e622116df3875b043bcafce3a7d443c5d05db0b3b6cd6b741631f1ecbe90"
PARENT = "7f8ab90faa71b6434012574c6363a208b62e2bb0dc727fdbce25fc2281de66a0"
NAME = "35f1d5f8cfceee6a72350fe4b1a817a24224f27a21ba9ce6fae52ce2a4bb5978"
BLOCK_CONTENT = "ee5eb1056572ade7b3e504657ba9ee08e146292844f5c29817c14c97dee2d5bc"
SESSION_CONTENT = "4743d193a10b6bf01af01aeceb2582d2c66d4b8fe6dfb1e4b44aceefdba8d701"
TALK = "99cdfc54553cb161166baf6ee7ae2623ebab3be13d0613bee7301ffda2fd8fba"
TENANT_ID = "2f37fbab93f0d1ad23e06fdd6813056a600eb8f5811517df784563650779728f"
BLOCK_ROWS = "0d7a59343191bd91822232e202ae8b9342f928f0871295d6a1de083b9e6a38ef"
TAIL_ROWS = "784ab038c4dd5c078ac2b4741bc4de8e1369e8da2c7cbb55d3614ebec460b288"
CODECS = ["raw", "zstd"]


def read(name: str) -> memoryview:
    return memoryview((FOLDER / f"{name}.safetensors").read_bytes())


def block(codec: str) -> BlockFile:
    return parse_block(read(f"block-{codec}"))


def session(codec: str) -> SessionFile:
    return parse_session(read(f"session-{codec}"))


def block_rows(codec: str) -> dict[str, np.ndarray]:
    layout = layout_of(block(codec).record.identity)
    rows = layout.empty(16)
    block(codec).decode_into(layout, rows)
    return rows


def sha256(rows: Mapping[str, np.ndarray]) -> str:
    return hashlib.sha256(b"".join(rows[name].tobytes() for name in sorted(rows))).hexdigest()


@pytest.mark.parametrize("name", FILE)
def test_the_file_digest_is_the_recorded_one(name: str) -> None:
    assert check_file_digest(read(name)) == FILE[name]


@pytest.mark.parametrize("codec", CODECS)
def test_the_block_says_what_was_recorded(codec: str) -> None:
    record = block(codec).record
    assert record.name.hex() == NAME
    assert record.parent.hex() == PARENT
    assert record.root_id == ROOT_ID
    assert record.start == 16
    assert record.token_ids.tolist() == IDS[16:32]
    assert record.extras == b""
    assert block(codec).codec.id == codec
    assert block(codec).content == BLOCK_CONTENT
    block(codec).check_content()


@pytest.mark.parametrize("codec", CODECS)
def test_the_rows_are_the_recorded_ones(codec: str) -> None:
    assert sha256(block_rows(codec)) == BLOCK_ROWS
    assert sha256(session(codec).tail_rows()) == TAIL_ROWS


@pytest.mark.parametrize("codec", CODECS)
def test_the_session_says_what_was_recorded(codec: str) -> None:
    found = session(codec)
    found.check_talk()
    assert (found.content, found.talk) == (SESSION_CONTENT, TALK)
    record = found.record
    assert [name.hex() for name in record.chain] == [PARENT, NAME]
    assert (record.name, record.revision) == ("Alice/42", 7)
    assert (record.tenant_id, record.root_id) == (TENANT_ID, ROOT_ID)
    assert record.block_size == 16
    assert record.token_ids.tolist() == IDS
    assert record.notes == {"messages": [{"role": "user", "content": "Grüße"}]}


def test_the_pin_says_what_was_recorded() -> None:
    record = parse_pin(read("pin"))
    assert record == PinRecord("session", TENANT_ID, "Alice/42", 1_900_000_000)
    assert bytes(pack_pin(record).buffers[0]) == read("pin")


def test_root_and_names_still_follow_from_what_is_in_the_files() -> None:
    record = block("raw").record
    root = root_of(record.identity, TENANT)
    assert root.root_id == ROOT_ID
    assert TENANT.tenant_id == TENANT_ID
    assert block_name(root.key, record.parent, record.token_ids).hex() == NAME
    assert [n.hex() for n in chain_names(root.key, token_array(IDS), 16)] == [PARENT, NAME]


def test_packing_the_same_again_gives_the_same_bytes() -> None:
    # Of zstd only what decodes is fixed: another version of the library may compress better.
    record = block("raw").record
    packed = pack_block(record, get_codec("raw"), layout_of(record.identity), block_rows("zstd"))
    assert b"".join(bytes(part) for part in packed.buffers) == read("block-raw")
    found = session("zstd")
    layout = layout_of(found.record.identity)
    tail = pack_session(found.record, get_codec("raw"), layout, found.tail_rows())
    assert b"".join(bytes(part) for part in tail.buffers) == read("session-raw")


@pytest.mark.parametrize("codec", CODECS)
def test_what_today_writes_is_read_back_the_same(codec: str) -> None:
    record = block(codec).record
    layout = layout_of(record.identity)
    packed = pack_block(record, get_codec(codec), layout, block_rows(codec))
    again = parse_block(memoryview(b"".join(bytes(part) for part in packed.buffers)))
    assert again.content == BLOCK_CONTENT


def test_the_zstd_file_really_holds_frames() -> None:
    # Else it would prove nothing about decoding them.
    tensors = load(bytes(read("block-zstd")))
    assert tensors["full.k.b1"].tobytes()[:4] == b"\x28\xb5\x2f\xfd"
    assert tensors["full.k.b0"].nbytes == 2 * 16 * 16
