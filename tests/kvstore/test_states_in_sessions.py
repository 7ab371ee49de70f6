"""Sessions of engines that need state checkpoints: lossy chains, recompressing, pins, room."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvsnap.formats.codecs import get_codec
from kvsnap.formats.errors import NotAllStored, Unsupported
from kvsnap.kvstore.gc import gc
from kvsnap.kvstore.recompress import recompress
from kvsnap.kvstore.session import Session
from kvsnap.kvstore.store import Store
from kvsnap.testing.stamped import StampedEngine
from kvsnap.testing.turns import some_ids

KINDS: list[dict[str, Any]] = [{"window": 40}, {"recurrent": 24}, {"window": 8, "recurrent": 16}]
kinds = pytest.mark.parametrize("kind", KINDS, ids=str)
IDS = some_ids(400, 3, 500)


def save(store: Store, kind: dict[str, Any], tokens: int, name: str, **how: Any) -> Session:
    engine = StampedEngine(**kind)
    session = Session(store, engine, name, **how)
    session.resume(IDS[:tokens])
    engine.evaluate(IDS[len(engine.token_ids()) : tokens])
    session.save()
    return session


def resumed(store: Store, kind: dict[str, Any], tokens: int, **how: Any) -> tuple[int, str]:
    report = Session(store, StampedEngine(**kind), **how).resume(IDS[:tokens])
    return report.reused_tokens, report.fidelity


@kinds
def test_a_lossy_session_goes_on_from_its_own_checkpoint(
    tmp_path: Path, kind: dict[str, Any]
) -> None:
    with Store(tmp_path) as store:
        save(store, kind, 200, "a", codec="q8")
        assert resumed(store, kind, 230) == (0, "exact")
        assert resumed(store, kind, 230, codec="q8") == (200, "q8@1")
        assert resumed(store, kind, 230, allow_lossy=True) == (200, "q8@1")


@kinds
def test_recompressing_takes_the_checkpoint_along(tmp_path: Path, kind: dict[str, Any]) -> None:
    with Store(tmp_path) as store:
        saved = save(store, kind, 150, "c").stored
        assert saved is not None
        exact = saved.record.chain
        report = recompress(store, "c", get_codec("q4"))
        assert (report.blocks, report.blocks_written) == (2, 2)
        session = Session(store, StampedEngine(**kind), "c")
        assert session.root.fidelity.startswith("q4@")
        assert session.stored is not None
        assert store.index.is_reachable(session.stored.record.state)
        assert resumed(store, kind, 170) == (150, "exact"), "the exact chain stays, and is better"
        for name in store.index.states(session.roots()[0].root_id, exact, IDS):
            store.blocks.set_aside(name.name, "for the test")
        assert session.resume(IDS[:170]).reused_tokens == 150
        assert session.engine.held_fidelity() == session.root.fidelity


def test_a_model_without_rows_of_every_token_takes_no_lossy_codec(tmp_path: Path) -> None:
    with Store(tmp_path) as store, pytest.raises(Unsupported, match="no rows of every token"):
        Session(store, StampedEngine(recurrent=8, full=False), "r", codec="q8")


@kinds
def test_a_pin_keeps_the_checkpoint_at_the_sessions_end(
    tmp_path: Path, kind: dict[str, Any]
) -> None:
    with Store(tmp_path) as store:
        pinned = save(store, kind, 150, "pinned")
        save(store, kind, 100, "other")
        store.pins.pin_session(pinned.tenant_id, "pinned")
    with Store(tmp_path, capacity=1, min_free="0") as store:
        gc(store)
        assert resumed(store, kind, 160)[0] == 150
        assert resumed(store, kind, 101)[0] == 0, "its checkpoint went"


@kinds
def test_a_full_store_saves_the_conversation_with_the_blocks_that_fit(
    tmp_path: Path, kind: dict[str, Any]
) -> None:
    with Store(tmp_path, capacity=16_000, min_free="0") as store:
        engine = StampedEngine(**kind)
        session = Session(store, engine, "a")
        session.resume(IDS[:300])
        engine.evaluate(IDS[:300])
        session.checkpoint()
        with pytest.raises(NotAllStored):
            session.save()
        assert session.stored_token_ids().tolist() == IDS[:300].tolist()
        again = StampedEngine(**kind)
        report = Session(store, again, "a").resume(np.append(IDS[:300], np.uint32(7)))
        assert (report.reused_tokens, report.damage) == (0, ())
        assert report.stopped_by.startswith("state checkpoint: there is none, blocks are stored")


@kinds
def test_what_waits_is_bounded_and_stored_in_order(tmp_path: Path, kind: dict[str, Any]) -> None:
    with Store(tmp_path) as store:
        engine = StampedEngine(**kind)
        session = Session(store, engine)
        for stop in range(20, 201, 20):
            engine.evaluate(IDS[stop - 20 : stop])
            session.checkpoint()
        session.put_filled()
        for stop in range(20, 201, 20):
            assert resumed(store, kind, stop + 1)[0] == stop


@kinds
@pytest.mark.parametrize("tokens", [40, 64, 100])
def test_a_session_whose_checkpoint_is_gone_is_computed_again(
    tmp_path: Path, kind: dict[str, Any], tokens: int
) -> None:
    """Also one that is shorter than a block: its file has no rows for the tail."""
    with Store(tmp_path) as store:
        saved = save(store, kind, tokens, "short").stored
        assert saved is not None
        store.place.block(saved.record.state).unlink()
        engine = StampedEngine(**kind)
        session = Session(store, engine, "short")
        assert session.resume(IDS[: tokens + 5]).reused_tokens == 0
        engine.evaluate(IDS[: tokens + 5])
        engine.check_rows()
        session.save()
        assert resumed(store, kind, tokens + 6)[0] == tokens + 5


@kinds
def test_a_checkpoint_of_a_conversation_that_was_left_does_not_stand_in_the_way(
    tmp_path: Path, kind: dict[str, Any]
) -> None:
    other = some_ids(300, 9, 500)
    with Store(tmp_path) as store:
        engine = StampedEngine(**kind)
        session = Session(store, engine, "a")
        engine.evaluate(IDS[:200])
        session.checkpoint()
        session.resume(other[:200])
        engine.evaluate(other[:200])
        session.save()
        assert resumed(store, kind, 201)[0] == 0
        report = Session(store, StampedEngine(**kind), "a").resume(other[:210])
        assert report.reused_tokens == 200
