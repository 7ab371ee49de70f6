"""Damaged session files: a conversation whose tail rows alone are wrong goes on; others refuse."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from kvsnap.formats.container import header_size
from kvsnap.formats.errors import NotFound
from kvsnap.kvstore.session import Session
from kvsnap.kvstore.store import Store
from kvsnap.kvstore.verify import verify_store
from kvsnap.testing.faults import cut, flip
from kvsnap.testing.stamped import StampedEngine
from kvsnap.testing.turns import some_ids, turn

Opener = Callable[[], Store]
IDS = some_ids(41)


def tensor_start(path: Path, name: str) -> int:
    data = path.read_bytes()
    end = header_size(data[:8])
    return int(end + json.loads(data[8:end])[name]["data_offsets"][0])


def saved(open_store: Opener) -> Path:
    """2 blocks and a tail of 8."""
    store = open_store()
    session = turn(store, StampedEngine(), IDS[:40], "chat", codec="raw", save=False).session
    session.save({"text": "hello"})
    return store.sessions.path("default", "chat")


def text_at(path: Path, text: bytes) -> int:
    return path.read_bytes().index(text) + len(text)


def _replaced(path: Path, make: Callable[[], object]) -> None:
    path.unlink()
    make()


TAIL_ONLY: dict[str, Callable[[Path], None]] = {
    "first row": lambda p: flip(p, tensor_start(p, "all.k")),
    "last row": lambda p: flip(p, -1, 0x80),
    "content digest": lambda p: flip(p, text_at(p, b'"content":"')),
    "file digest": lambda p: flip(p, text_at(p, b'"file":"')),
}
MORE: dict[str, Callable[[Path], None]] = {
    "token ids": lambda p: flip(p, tensor_start(p, "token_ids")),
    "last token id": lambda p: flip(p, tensor_start(p, "token_ids") + 4 * 39),
    "chain": lambda p: flip(p, tensor_start(p, "chain") + 40),
    "notes": lambda p: flip(p, text_at(p, b'"notes":"{\\"text\\":\\"')),
    "name": lambda p: flip(p, text_at(p, b'"name":"')),
    "revision": lambda p: flip(p, text_at(p, b'"revision":"')),
    "identity": lambda p: flip(p, text_at(p, b"weights")),
    "tenant id": lambda p: flip(p, text_at(p, b'"tenant_id":"')),
    "talk digest": lambda p: flip(p, text_at(p, b'"talk":"')),
    "version": lambda p: flip(p, text_at(p, b'"kvsnap":"')),
    "codec": lambda p: flip(p, text_at(p, b'"codec":"')),
    "header length": lambda p: flip(p, 0),
    "cut to half": lambda p: cut(p, p.stat().st_size // 2),
    "cut by one": lambda p: cut(p, p.stat().st_size - 1),
    "longer": lambda p: cut(p, p.stat().st_size + 1),
    "empty": lambda p: cut(p, 0),
    "a folder": lambda p: _replaced(p, p.mkdir),
    "a link": lambda p: _replaced(p, lambda: p.symlink_to("/etc/passwd")),
    "text": lambda p: _replaced(p, lambda: p.write_text("no session at all")),
}
every_damage = pytest.mark.parametrize("kind", [*TAIL_ONLY, *MORE])
DAMAGE = TAIL_ONLY | MORE


@pytest.mark.parametrize("kind", TAIL_ONLY)
def test_a_conversation_with_damaged_tail_rows_goes_on(open_store: Opener, kind: str) -> None:
    DAMAGE[kind](saved(open_store))
    engine = StampedEngine()
    session = Session(open_store(), engine, "chat")
    assert session.stored_token_ids().tolist() == IDS[:40].tolist()
    assert session.stored is not None
    assert session.stored.record.notes == {"text": "hello"}
    done = session.resume(IDS)
    # A wrong file digest alone says nothing against rows that their own digest confirms.
    assert done.reused_tokens == (40 if kind == "file digest" else 32)
    assert bool(done.damage) == (kind != "file digest")
    engine.evaluate(IDS[done.reused_tokens :])
    engine.check_rows()
    assert session.save().revision == 2


@pytest.mark.parametrize("kind", MORE)
def test_a_session_whose_words_are_damaged_cannot_be_continued(
    open_store: Opener, kind: str
) -> None:
    DAMAGE[kind](saved(open_store))
    engine = StampedEngine()
    engine.evaluate(some_ids(20, seed=3))
    with pytest.raises(NotFound) as refusal:
        Session(open_store(), engine, "chat").stored_token_ids()
    assert "session 'chat' is damaged" in refusal.value.hint
    assert engine.held == 20
    engine.check_rows()


@every_damage
def test_the_blocks_of_a_damaged_session_are_reused(open_store: Opener, kind: str) -> None:
    DAMAGE[kind](saved(open_store))
    engine = StampedEngine()
    done = turn(open_store(), engine, IDS, "chat", save=False).resumed
    reused = 40 if kind == "file digest" else 32
    assert engine.positions == list(range(reused, 41))
    assert bool(done.damage) == (reused == 32)
    engine.check_rows()


@every_damage
def test_verify_finds_it_and_a_save_mends_it(open_store: Opener, kind: str) -> None:
    path = saved(open_store)
    DAMAGE[kind](path)
    report = verify_store(open_store(), progress=lambda done, total: None)
    assert [bad.path for bad in report.bad] == [str(path)]
    store = open_store()
    session = turn(store, StampedEngine(), IDS, "chat").session
    report = verify_store(open_store(), progress=lambda done, total: None)
    assert (report.bad, report.checked) == ([], 3)
    session.engine.truncate(0)
    assert session.resume([*IDS, 7]).damage == ()
    again = StampedEngine()
    turn(open_store(), again, [*IDS, 7], "chat")
    assert again.positions == [41]
    again.check_rows()


@every_damage
def test_a_listing_shows_the_others_and_says_what_is_wrong(open_store: Opener, kind: str) -> None:
    DAMAGE[kind](saved(open_store))
    turn(open_store(), StampedEngine(), IDS[:5], "other")
    listed = list(open_store().listing)
    assert len(listed) == 2
    damaged = [item for item in listed if item.facts.name is None]
    assert len(damaged) == (kind in MORE)
    assert all(item.facts.problem for item in damaged)


def test_a_session_file_under_another_name_is_not_that_session(open_store: Opener) -> None:
    path = saved(open_store)
    other = open_store().sessions.path("default", "other")
    other.write_bytes(path.read_bytes())
    with pytest.raises(NotFound):
        Session(open_store(), StampedEngine(), "other").stored_token_ids()
    report = verify_store(open_store(), progress=lambda done, total: None)
    assert [bad.path for bad in report.bad] == [str(other)]


def test_flips_all_over_a_session_file_never_give_a_wrong_row(
    open_store: Opener, store_path: Path
) -> None:
    path = saved(open_store)
    good = path.read_bytes()
    store = open_store()
    for offset in range(0, len(good), 23):
        flip(path, offset, 1 << offset % 8)
        engine = StampedEngine()
        session = Session(store, engine, "chat")
        if session.stored is not None:
            assert session.stored_token_ids().tolist() == IDS[:40].tolist()
        session.resume(IDS)
        assert engine.held in (32, 40)
        engine.check_rows()
        path.write_bytes(good)
