"""kvsnap.json damaged, with a trust list in it: an error, and never a store that believes everybody."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from kvsnap.formats.errors import KvsnapError, StoreError, Unsupported
from kvsnap.kvstore.doctor import examine
from kvsnap.kvstore.place import Place, change_settings, read_settings
from kvsnap.kvstore.signing_key import require_signing_key
from kvsnap.kvstore.store import Store
from kvsnap.kvstore.trust_list import add, remove
from kvsnap.testing.stamped import StampedEngine
from kvsnap.testing.turns import some_ids, turn
from tests.planting import chain_files, unsigned

IDS = some_ids(57)
A, B = "ab" * 32, "0123456789abcdef" * 4


@pytest.fixture
def listed(store_path: Path) -> Path:
    """The settings of a store with two keys; its second block is a plant."""
    with Store(store_path) as store:
        add(store, A, "alice")
    with Store(store_path) as store:
        add(store, B, "bob's machine")
    with Store(store_path) as store:
        turn(store, StampedEngine(), IDS, "chat")
    path = chain_files(store_path)[1]
    path.write_bytes(unsigned(path.read_bytes(), b""))
    return store_path / "kvsnap.json"


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "half": lambda text: text[: len(text) // 2],
    "rubbish in front": lambda text: b"\xff\xfe" + text,
    "rubbish at the end": lambda text: text + b"}",
    "a key too short": lambda text: text.replace(A.encode(), A[:-1].encode()),
    "a key in capitals": lambda text: text.replace(A.encode(), A.upper().encode()),
    "a list of keys": lambda text: json.dumps({**json.loads(text), "trust": [A, B]}).encode(),
    "null": lambda text: json.dumps({**json.loads(text), "trust": None}).encode(),
    "text": lambda text: json.dumps({**json.loads(text), "trust": A}).encode(),
    "names that are none": lambda text: text.replace(b'"alice"', b"7"),
    "no format": lambda text: text.replace(b'"format"', b'"formit"'),
    "a block size of 0": lambda text: text.replace(b'"block_size": 16', b'"block_size": 0'),
    "not in quotes": lambda text: text.replace(b'"trust"', b"trust"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_nothing_opens_the_store_and_nothing_writes_a_new_file(listed: Path, kind: str) -> None:
    damaged = DAMAGE[kind](listed.read_bytes())
    assert damaged != listed.read_bytes()
    listed.write_bytes(damaged)
    with pytest.raises(StoreError, match="holds a trust list") as caught:
        Store(listed.parent)
    assert str(listed) in caught.value.what
    assert caught.value.hint
    with pytest.raises(StoreError, match="holds a trust list"):
        Store(listed.parent, trust=[A])  # what was in it may have been more
    findings = list(examine(listed.parent))
    assert any("holds a trust list" in finding.what for finding in findings)
    assert listed.read_bytes() == damaged
    assert not listed.with_name("kvsnap.json.damaged").exists()


def test_it_is_not_replaced_under_a_process_that_has_the_store_open(listed: Path) -> None:
    with Store(listed.parent) as store:
        damaged = listed.read_bytes()[:-30]
        listed.write_bytes(damaged)
        engine = StampedEngine()
        with pytest.raises(StoreError, match="holds a trust list"):
            turn(store, engine, IDS, "chat")
        engine.check_rows()
    assert listed.read_bytes() == damaged


def test_mended_it_is_as_before(listed: Path) -> None:
    whole = listed.read_bytes()
    listed.write_bytes(whole[:-30])
    with pytest.raises(StoreError):
        Store(listed.parent)
    listed.write_bytes(whole)
    engine = StampedEngine()
    with Store(listed.parent) as store:
        turn(store, engine, IDS, "chat")
        assert store.trust is not None
    engine.check_rows()
    assert engine.positions == list(range(16, 57))


def opens_without_a_list(place: Path) -> bool:
    try:
        return not read_settings(Place(place)).trust
    except KvsnapError:
        return False


def test_wherever_the_file_is_cut_the_list_is_missed(listed: Path) -> None:
    """It stands in front, so that a file that lost its end still shows that there was one."""
    whole = listed.read_bytes()
    shown = whole.index(b"trust") + len(b'trust"')
    assert shown < 16
    found = []
    for length in range(shown, len(whole) - 1):
        listed.write_bytes(whole[:length])
        if opens_without_a_list(listed.parent):
            found.append(length)
    assert found == []


def test_whichever_bit_of_it_changes_the_list_is_missed(listed: Path) -> None:
    whole, found = listed.read_bytes(), []
    for at in range(len(whole)):
        for bit in range(8):
            data = bytearray(whole)
            data[at] ^= 1 << bit
            listed.write_bytes(data)
            if opens_without_a_list(listed.parent):
                found.append(bytes(data[at - 4 : at + 5]))
    assert found == []


def test_after_the_last_key_is_gone_damage_is_no_error_again(listed: Path) -> None:
    for key in (A, B):
        with Store(listed.parent) as store:
            remove(store, key)
    listed.write_bytes(listed.read_bytes()[:-4])
    with Store(listed.parent) as store:
        assert store.trust is None
        assert "is damaged" in store.problem


def test_other_settings_are_changed_without_touching_the_list(listed: Path) -> None:
    change_settings(Place(listed.parent), "capacity", lambda old: "1GB")
    settings = read_settings(Place(listed.parent))
    assert settings.trust == {A: "alice", B: "bob's machine"}
    assert settings.capacity == "1GB"


def test_a_file_that_somebody_wrote_by_hand_keeps_its_list_and_capacity(tmp_path: Path) -> None:
    """Without the time when the store was made, which a first save adds."""
    path = tmp_path / "kvsnap.json"
    text = {"format": "1", "block_size": 16, "capacity": "1GB", "trust": {A: "alice"}}
    path.write_text(json.dumps(text))
    with Store(tmp_path) as store:
        turn(store, StampedEngine(), IDS, "chat")
    written = json.loads(path.read_text())
    assert written.pop("created") > 0
    assert written == text


def test_a_newer_version_is_refused_by_name_before_its_list_is_read(listed: Path) -> None:
    text = json.loads(listed.read_bytes()) | {"format": "9", "trust": "of another form"}
    listed.write_text(json.dumps(text))
    with pytest.raises(Unsupported, match="'9'"):
        Store(listed.parent)


def test_the_stores_own_key_is_not_in_its_settings(listed: Path) -> None:
    assert require_signing_key().public.encode() not in listed.read_bytes()
