"""A planted session file with other tail rows: the conversation is read, the rows are computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from kvsnap.formats.codecs import get_codec
from kvsnap.formats.container import parse
from kvsnap.formats.errors import Damaged, SessionMoved, Unsupported, Untrusted
from kvsnap.formats.session import parse_session
from kvsnap.kvstore.recompress import recompress
from kvsnap.kvstore.session import Session
from kvsnap.kvstore.store import Store
from kvsnap.kvstore.verify import verify_session, verify_store
from kvsnap.testing.aftermath import assert_saved
from kvsnap.testing.stamped import StampedEngine
from kvsnap.testing.turns import some_ids, turn
from tests.planting import session_with, session_with_other_tail, with_header
from tests.signers import STRANGER

IDS = some_ids(57)
SOMEBODY = "ab" * 32
UNTRUSTED = "tail of session 'chat': no trusted key signed it"
WRONG = "tail of session 'chat': the content digest differs"
Opener = Callable[..., Store]


def by_a_stranger(data: bytes, beside: bytes) -> bytes:
    return session_with_other_tail(data, STRANGER)


def unsigned(data: bytes, beside: bytes) -> bytes:
    return session_with_other_tail(data)


def quoting(data: bytes, beside: bytes) -> bytes:
    told = parse(memoryview(data)).metadata
    fields = ("content", "talk", "signer", "signature")
    return with_header(session_with_other_tail(data), **{key: told[key] for key in fields})


def with_anothers_signature(data: bytes, beside: bytes) -> bytes:
    signature = parse_session(memoryview(beside)).signature
    assert signature is not None
    return with_header(session_with_other_tail(data), **signature.fields())


PLANTS = {
    unsigned: UNTRUSTED,
    by_a_stranger: UNTRUSTED,
    with_anothers_signature: UNTRUSTED,
    quoting: WRONG,
}
"""A plant, and why its rows are not used."""
plants = pytest.mark.parametrize("how", PLANTS, ids=lambda how: how.__name__)
Plant = Callable[[bytes, bytes], bytes]


@pytest.fixture
def opened(store_path: Path) -> Iterator[Opener]:
    stores: list[Store] = []

    def open_it(*trust: str) -> Store:
        stores.append(Store(store_path, trust=trust))
        return stores[-1]

    yield open_it
    for store in stores:
        store.close()


@pytest.fixture
def planted(opened: Opener) -> Callable[[Plant], Path]:
    """Saves sessions "chat" and "beside", and plants a file in place of the first."""

    def do(how: Plant) -> Path:
        with opened(SOMEBODY) as store:
            turn(store, StampedEngine(), IDS, "chat")
            turn(store, StampedEngine(), IDS[:55], "beside")
            path = store.sessions.path("default", "chat")
            beside = store.sessions.path("default", "beside").read_bytes()
        path.write_bytes(how(path.read_bytes(), beside))
        return path

    return do


@plants
def test_its_rows_are_never_used_and_replaced(
    opened: Opener, planted: Callable[[Plant], Path], how: Plant
) -> None:
    path = planted(how)
    store, engine = opened(SOMEBODY), StampedEngine()
    assert [bad.path for bad in verify_store(store).bad] == [str(path)]
    assert [bad.path for bad in verify_session(store, "default", "chat").bad] == [str(path)]
    done = turn(store, engine, [*IDS, 7], "chat")
    assert engine.positions == list(range(48, 58)), "the blocks are used, the tail is computed"
    engine.check_rows()
    (reason,) = done.resumed.damage
    assert reason.startswith(PLANTS[how])
    assert done.session.name == "chat", "the conversation itself was read, and went on"
    stored = parse_session(memoryview(path.read_bytes()))
    assert stored.signed
    assert stored.record.revision == 2
    assert_saved(store, [*IDS.tolist(), 7], "chat")
    assert verify_store(store).bad == []


@plants
def test_without_a_trust_list_what_is_right_by_its_digests_is_used(
    opened: Opener, planted: Callable[[Plant], Path], how: Plant
) -> None:
    planted(how)
    engine = StampedEngine()
    turn(opened(), engine, [*IDS, 7], "chat", save=False)
    if how is quoting:  # the tail's digest is compared in any case
        assert engine.positions == list(range(48, 58))
        engine.check_rows()
        return
    assert engine.positions == [57]
    with pytest.raises(AssertionError, match="wrong elements"):
        engine.check_rows()


@plants
def test_nothing_takes_them_over_and_signs_them(
    opened: Opener, planted: Callable[[Plant], Path], how: Plant
) -> None:
    """Branching and recompressing write a session's tail anew, signed by this machine."""
    planted(how)
    store = opened(SOMEBODY)
    session = Session(store, StampedEngine(), "chat")
    with pytest.raises(Unsupported, match="cannot be had"):
        session.branch("new")
    for codec in ("raw", "q8"):
        with pytest.raises(Damaged):
            recompress(store, "chat", get_codec(codec))
    session.branch("front", 48)
    assert_saved(store, IDS[:48], "front")


@plants
def test_a_live_session_meets_it_as_a_file_of_somebody_else(
    opened: Opener, planted: Callable[[Plant], Path], how: Plant
) -> None:
    path = planted(how)
    path.unlink()
    store, engine = opened(SOMEBODY), StampedEngine()
    live = turn(store, engine, IDS, "chat").session
    beside = store.sessions.path("default", "beside").read_bytes()
    path.write_bytes(how(path.read_bytes(), beside))
    live.resume([*IDS, 7])
    engine.evaluate(np.array([7], np.uint32))
    engine.check_rows()
    with pytest.raises(SessionMoved) as moved:
        live.save()
    assert_saved(store, [*IDS.tolist(), 7], moved.value.stored_as)


def test_a_signature_covers_name_tenant_revision_ids_and_notes(
    opened: Opener, planted: Callable[[Plant], Path]
) -> None:
    with opened(SOMEBODY) as store:
        turn(store, StampedEngine(), IDS, "chat").session.save({"text": "hello"})
        genuine = store.sessions.path("default", "chat").read_bytes()
        trust = store.trust
    assert trust is not None
    signature = parse_session(memoryview(genuine)).signature
    assert signature is not None
    trust.check_session(parse_session(memoryview(genuine)))
    other = IDS.copy()
    other[-1] ^= 1
    changes: list[dict] = [
        {"name": "other"},
        {"tenant_id": "0" * 64},
        {"revision": 3},
        {"token_ids": other},
        {"notes": {"text": "hallo"}},
        {"chain": tuple(reversed(parse_session(memoryview(genuine)).record.chain))},
        {"root_id": "0" * 64},
    ]
    for change in changes:
        forged = with_header(session_with(genuine, **change), **signature.fields())
        with pytest.raises(Untrusted):
            trust.check_session(parse_session(memoryview(forged)))


@pytest.mark.parametrize("change", ["notes", "chain"])
def test_digests_that_are_signed_are_compared_with_what_is_there(
    opened: Opener, change: str
) -> None:
    """A header can quote the digests and the signature of the genuine file over other words."""
    with opened(SOMEBODY) as store:
        turn(store, StampedEngine(), IDS, "chat").session.save({"text": "hello"})
        path = store.sessions.path("default", "chat")
    genuine = path.read_bytes()
    told = parse(memoryview(genuine)).metadata
    record = parse_session(memoryview(genuine)).record
    forged = session_with(
        genuine,
        **{"notes": {"text": "obey"}} if change == "notes" else {"chain": record.chain[::-1]},
    )
    fields = ("content", "talk", "signer", "signature")
    path.write_bytes(with_header(forged, **{key: told[key] for key in fields}))
    store = opened(SOMEBODY)
    assert store.trust is not None
    session = store.sessions.load("default", "chat")
    with pytest.raises(Damaged):
        store.trust.check_session(session)
    assert [bad.path for bad in verify_store(store).bad] == [str(path)]


def test_a_session_without_a_tail_needs_no_signature_to_be_read(opened: Opener) -> None:
    """There are no rows in it. But `verify` tells of it, since nobody may push it."""
    with opened() as store:
        turn(store, StampedEngine(), IDS[:48], "chat")
    store = opened(SOMEBODY)
    engine = StampedEngine()
    turn(store, engine, [*IDS[:48], 7], "chat", save=False)
    engine.check_rows()
    assert engine.evaluated == 49, "its blocks are unsigned"
    path = store.sessions.path("default", "chat")
    assert str(path) in [bad.path for bad in verify_store(store).bad]


def test_sessions_are_signed_where_a_list_is_and_only_there(opened: Opener) -> None:
    for trust, signed in (((), False), ((SOMEBODY,), True)):
        with opened(*trust) as store:
            name = f"chat {signed}"
            turn(store, StampedEngine(), IDS, name)
            assert store.sessions.load("default", name).signed == signed
