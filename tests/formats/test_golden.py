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
from kvsnap.formats.manifest import manifest_key, pack_manifest, parse_manifest
from kvsnap.formats.names import block_name, chain_names, token_array
from kvsnap.formats.pin import PinRecord, pack_pin, parse_pin
from kvsnap.formats.session import SessionFile, pack_session, parse_session
from kvsnap.formats.tenant import Tenant

FOLDER = Path(__file__).parents[1] / "golden" / "v1"
TENANT = Tenant(bytes(range(32)))
IDS = [(n * n * 40503 + 7) % 2**32 for n in range(37)]
FILE = {
    "block-raw": "73a7507dd435721a6faed0ff4a004b9fef4128c6d9ee00ea33dbcf56f7d7db27",
    "block-zstd": "fb4485832d1e9b25a0fac5b94952a09f455a8fdcd7bfce5cefd28ce84c92f3cd",
    "session-raw": "e79eaeb358eaca465e3e5bef7440f6d03022fa85c2857e00b24aa484ddfd3963",
    "session-zstd": "fe8101e473424e7ce526dab1e545c7a932710a3c3b494bb05ecc2b416e13f381",
    "state-raw": "c8a7b1c9451c0189163fd73682eed08c3943821d56291ffcfef9b14e49dd6df6",
    "state-zstd": "559d0c9f22ba58fc825924a912c3b94aa97cc6d0e9ddd11288751028e3c800e0",
    "manifest": "c6c502d2c44018af4034d940116bc45a0fab2ec6edabba483c03b3c09d88fa59",
    "pin": "5af48d0758366054727be6fb712633e0e7a34c524314f3dffeea8e5659673657",
    "block-signed": "49c27b5577e44219c59a3def27e98ed076648b20fa953eceb44c90550e8f9448",
    "session-signed": "0dc1eb848db4e060e6c2fcc93dfc8b2ff6b63798cbddc95b34de85633e3176c7",
    "manifest-signed": "fe8c166886530c2b801b1ca71dae514c6bfcf7cfa8f4818a3def5eb52530628b",
    "sealed-block": "08c785eb8975f824c7ab40898ec291e12c52ffc27d1a56618ffa05c529071eda",
    "sealed-state": "fd8c5923290117863de05156b9d8b3ba40393763d0e96bdfef1931f1ce1473bf",
    "sealed-session": "e23d75da62a06ad2610e36d2082f5297c2358e46d04894f1fc3bb80c438bc8d6",
    "sealed-manifest": "ac8bbf84b264c37aaf27765063e07d67abc7745fbc9b5278625d726ddf1e839d",
}
ROOT_ID = "4c38e45a288a862766a0f77515a1f6e92b9d0e9719ce4de47d603dd4477f8406"
PARENT = "89a841558d17d57749b3a26f61fa5b76ed4aec2058e0135dc70cde7f78d3da11"
NAME = "1b516f72b6abaf1061c10eea44a1c5ff02e187f08f7c8cd11779698c89eca987"
BLOCK_CONTENT = "11760df7e46f735617569dfad6bf79e0bb7b32097cd50124ac51728af8d6d035"
SESSION_CONTENT = "f3c3064a78d17cfc29e7abadbcec81601d5a11e3fabe8d4ac24ecd6a422b93d1"
TALK = "c63c44cf0af1c6fe16e0f36064b0582f72898caa763649e3015fe25648967121"
TENANT_ID = "2f37fbab93f0d1ad23e06fdd6813056a600eb8f5811517df784563650779728f"
BLOCK_ROWS = "0d7a59343191bd91822232e202ae8b9342f928f0871295d6a1de083b9e6a38ef"
TAIL_ROWS = "784ab038c4dd5c078ac2b4741bc4de8e1369e8da2c7cbb55d3614ebec460b288"
STATE_ROOT_ID = "b315b1c5e5f61ecf9f7ee63c3a592e6c5e13e521590e740a55e78c8808c763ca"
STATE_PARENT = "a88e5d2e208e85d2f96b4a301e1ec6757a863f6a8ace467cffc64aa8e50e4a4d"
STATE_NAME = "eb0851244d8126947209fcdaa3de5c83924c8f5d72dee2ce5213b7fb1d49b5e8"
STATE_CONTENT = "136b53800a80d053ab507d8be085e6940a1015da7cab1f3d07190df3b1e9bb29"
STATE_ROWS = "d12d4825dbb670edab0d5107926f86c2cf391d242e5204c9f55c692f53c10ae5"
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


@pytest.mark.parametrize("codec", CODECS)
def test_the_state_checkpoint_says_what_was_recorded(codec: str) -> None:
    found = parse_block(read(f"state-{codec}"))
    record = found.record
    assert (record.name.hex(), record.parent.hex()) == (STATE_NAME, STATE_PARENT)
    assert (record.root_id, record.start, record.stop) == (STATE_ROOT_ID, 32, 35)
    assert record.is_state
    assert record.token_ids.tolist() == IDS[32:35]
    assert (found.codec.id, found.content) == (codec, STATE_CONTENT)
    found.check_content()
    root = root_of(record.identity, TENANT)
    chain = chain_names(root.key, token_array(IDS), 16)
    own = block_name(root.key, chain[1], token_array(IDS[32:35]), record.extras)
    assert (chain[1].hex(), own.hex()) == (STATE_PARENT, STATE_NAME)


@pytest.mark.parametrize("codec", CODECS)
def test_the_rows_of_the_state_checkpoint_are_the_recorded_ones(codec: str) -> None:
    found = parse_block(read(f"state-{codec}"))
    rows = found.layout().empty(found.record.ranges(found.layout()))
    found.decode_into(found.layout(), rows)
    assert sha256(rows) == STATE_ROWS
    shapes = {name: array.shape for name, array in rows.items()}
    assert shapes == {
        "full.k": (2, 3, 16),  # the tokens after the last block
        "full.v": (2, 3, 16),
        "recurrent.state": (3, 40),  # one page a layer
        "window.k": (1, 5, 4),  # five tokens back, two of them before these
        "window.v": (1, 5, 18),
    }


def test_the_pin_says_what_was_recorded() -> None:
    record = parse_pin(read("pin"))
    assert record == PinRecord("session", TENANT_ID, "%41lice%2f42", 1_900_000_000)
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
    state = parse_block(read("state-zstd"))
    rows = state.layout().empty(state.record.ranges(state.layout()))
    state.decode_into(state.layout(), rows)
    packed = pack_block(state.record, get_codec("raw"), state.layout(), rows)
    assert b"".join(bytes(part) for part in packed.buffers) == read("state-raw")
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


def test_the_manifest_says_what_was_recorded() -> None:
    found = parse_manifest(read("manifest"))
    assert (found.name, found.tenant_id, found.root_id) == ("Alice/42", TENANT_ID, ROOT_ID)
    assert (found.block_size, found.revision, found.tokens) == (16, 7, 37)
    assert (found.created, found.creator, found.model) == (
        1_900_000_000,
        "alice@example",
        "tiny.gguf",
    )
    first, second, own = found.items
    assert (first.kind, first.name.hex(), first.position, first.size) == ("block", PARENT, 16, 4711)
    assert (first.file, first.content) == (bytes(range(32)), bytes(range(32, 64)))
    assert (second.name.hex(), second.position) == (NAME, 32)
    assert (second.file.hex(), second.content.hex()) == (FILE["block-zstd"], BLOCK_CONTENT)
    assert (own.kind, own.name.hex(), own.position) == ("session", FILE["session-zstd"], 0)
    assert own.size == len(read("session-zstd"))
    assert (
        manifest_key(found.tenant_id, found.name)
        == f"manifests/{TENANT_ID}/%41lice%2f42.safetensors"
    )
    assert found.item_key(own) == f"sessions/{TENANT_ID}/{own.name.hex()}.safetensors"
    assert found.item_key(second) == f"blocks/{NAME[:2]}/{NAME}.safetensors"
    assert b"".join(map(bytes, pack_manifest(found).buffers)) == read("manifest")
