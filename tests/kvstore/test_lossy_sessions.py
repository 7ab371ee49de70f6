"""Exact and lossy never mix: not in files, not in the engine, not by accident (cases A06, A54)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvsnap.engines.base import Landing
from kvsnap.formats.codecs import Stretch, get_codec
from kvsnap.formats.errors import Unsupported, UsageError
from kvsnap.formats.identity import EXACT
from kvsnap.formats.names import TokenIds
from kvsnap.kvstore.session import Session
from kvsnap.kvstore.store import Store
from kvsnap.kvstore.verify import verify_store
from kvsnap.testing.stamped import StampedEngine
from kvsnap.testing.turns import some_ids, turn

Opener = Callable[[], Store]
IDS = some_ids(57)
Q8 = get_codec("q8").fidelity


def chains(store: Store) -> dict[str, int]:
    """Fidelity → blocks that are stored of it."""
    rows = store.index.query(
        "SELECT r.identity, COUNT(*) FROM blocks b JOIN roots r ON r.id = b.root GROUP BY r.id"
    )
    return {identity.split('"fidelity":"')[1].split('"')[0]: n for identity, n in rows}


def assert_within_the_bound(engine: StampedEngine, codec: str, blocks: int) -> int:
    """Rows of the first blocks are what was evaluated, give or take the declared loss; how many
    elements differ."""
    differing = 0
    for name, expected in engine.expected(engine.token_ids()).items():
        plane = engine.layout.planes()[name][1]
        held = engine.export(0, engine.held)[name]
        for start in range(0, blocks * 16, 16):
            own = slice(start, start + 16)
            source = np.ascontiguousarray(expected[:, own])
            got = np.ascontiguousarray(held[:, own])
            bound = get_codec(codec).max_error(Stretch(name, plane, start), source)
            error = np.abs(source.view("<f2").astype("f4") - got.view("<f2").astype("f4"))
            assert (error <= bound).all()
            differing += int((source != got).sum())
        assert np.array_equal(held[:, blocks * 16 :], expected[:, blocks * 16 :])
    return differing


def test_an_exact_session_never_gets_lossy_blocks(open_store: Opener) -> None:
    turn(open_store(), StampedEngine(), IDS, codec="q8")
    engine = StampedEngine()
    done = turn(open_store(), engine, IDS)
    assert engine.positions == list(range(57))
    assert done.resumed.fidelity == EXACT
    assert done.resumed.stopped_by == (
        f'identity: fidelity is "exact" here, "{Q8}" in the stored blocks'
    )
    engine.check_rows()
    assert chains(open_store()) == {Q8: 3, EXACT: 3}


def test_a_session_saved_lossy_uses_its_blocks_and_says_so(open_store: Opener) -> None:
    saved = turn(open_store(), StampedEngine(), IDS, "chat", codec="q8").saved
    assert saved is not None
    assert (saved.codec, saved.fidelity) == ("q8", Q8)
    engine = StampedEngine()
    done = turn(open_store(), engine, IDS, "chat")
    assert engine.positions == [56]
    assert done.resumed.fidelity == Q8
    assert done.session.codec == get_codec("q8")
    assert assert_within_the_bound(engine, "q8", 3)
    report = verify_store(open_store())
    assert (report.bad, report.unreachable) == ([], [])


def test_the_tail_of_a_lossy_session_stays_exact_until_it_fills_a_block(open_store: Opener) -> None:
    turn(open_store(), StampedEngine(), IDS, "chat", codec="q8")
    engine = StampedEngine()
    turn(open_store(), engine, np.concatenate([IDS, some_ids(9, 5)]), "chat")
    assert engine.positions == list(range(57, 66))
    assert_within_the_bound(engine, "q8", 3)


def test_another_process_may_ask_for_a_lossy_prompt_by_name_of_the_codec(
    open_store: Opener,
) -> None:
    turn(open_store(), StampedEngine(), IDS, codec="q8")
    engine = StampedEngine()
    assert turn(open_store(), engine, IDS, codec="q8").resumed.reused_tokens == 48
    assert chains(open_store()) == {Q8: 3}


def test_an_exact_session_that_allows_it_becomes_lossy(open_store: Opener) -> None:
    turn(open_store(), StampedEngine(), IDS, codec="q8")
    engine, longer = StampedEngine(), np.concatenate([IDS, some_ids(16, 7)])
    done = turn(open_store(), engine, longer, "chat", allow_lossy=True)
    assert done.resumed.reused_tokens == 48
    assert (done.resumed.fidelity, done.session.root.fidelity) == (Q8, Q8)
    # What was computed on top of lossy rows stays in their chain.
    assert chains(open_store()) == {Q8: 4}
    again = turn(open_store(), StampedEngine(), longer, "chat")
    assert (again.resumed.reused_tokens, again.resumed.fidelity) == (72, Q8)


def test_where_both_are_stored_the_exact_ones_are_taken(open_store: Opener) -> None:
    turn(open_store(), StampedEngine(), IDS)
    turn(open_store(), StampedEngine(), IDS, codec="q8")
    for more in ({"allow_lossy": True}, {"codec": "q8"}):
        engine = StampedEngine()
        done = turn(open_store(), engine, IDS, save=False, **more)
        assert (done.resumed.reused_tokens, done.resumed.fidelity) == (48, EXACT)
        engine.check_rows()


def test_a_lossy_save_of_what_is_stored_exact_computes_nothing(open_store: Opener) -> None:
    turn(open_store(), StampedEngine(), IDS, "chat")
    engine = StampedEngine()
    done = turn(open_store(), engine, IDS, "chat", codec="q8")
    assert engine.positions == [56]
    assert done.saved is not None
    assert done.saved.blocks_written == 3
    assert chains(open_store()) == {EXACT: 3, Q8: 3}
    engine.check_rows()


def test_lossy_rows_in_the_engine_do_not_serve_an_exact_session(open_store: Opener) -> None:
    turn(open_store(), StampedEngine(), IDS, codec="q8")
    engine = StampedEngine()
    turn(open_store(), engine, IDS, codec="q8")
    engine.positions.clear()
    done = turn(open_store(), engine, IDS)
    assert engine.positions == list(range(4, 57))  # the first four are exact in every codec
    assert done.resumed.fidelity == EXACT
    engine.check_rows()


def test_only_what_stands_before_lossy_rows_serves_an_exact_session(open_store: Opener) -> None:
    turn(open_store(), StampedEngine(), IDS, codec="q8")
    engine = StampedEngine()
    engine.evaluate(IDS[:20])
    turn(open_store(), engine, IDS, codec="q8", save=False)
    engine.positions.clear()
    turn(open_store(), engine, IDS, save=False)
    assert engine.positions == list(range(20, 57))
    engine.check_rows()


def test_lossy_rows_cannot_be_saved_as_exact_ones(open_store: Opener) -> None:
    turn(open_store(), StampedEngine(), IDS, codec="q8")
    engine, store = StampedEngine(), open_store()
    turn(store, engine, IDS, codec="q8", save=False)
    for session in (Session(store, engine, "other"), Session(store, engine)):
        with pytest.raises(UsageError, match="not coded again"):
            session.save()
        with pytest.raises(UsageError, match="not coded again"):
            session.put_filled()
    assert chains(store) == {Q8: 3}


def test_a_lossy_session_asked_for_exactly_is_computed_anew(open_store: Opener) -> None:
    turn(open_store(), StampedEngine(), IDS, "chat", codec="q8")
    engine = StampedEngine()
    done = turn(open_store(), engine, IDS, "chat", codec="zstd")
    assert engine.positions == list(range(57))
    assert done.resumed.stopped_by == f'identity: fidelity is "exact" here, "{Q8}" in the session'
    engine.check_rows()
    assert turn(open_store(), StampedEngine(), IDS, "chat").resumed.fidelity == EXACT


def test_a_damaged_lossy_block_is_a_miss_and_stored_again(open_store: Opener) -> None:
    turn(open_store(), StampedEngine(), IDS, "chat", codec="q8")
    store = open_store()
    name = store.index.query("SELECT name FROM blocks WHERE start = 16")[0][0]
    path = store.place.block(name)
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)
    engine = StampedEngine()
    done = turn(open_store(), engine, IDS, "chat")
    assert done.resumed.reused_tokens == 16
    assert done.resumed.damage
    assert chains(open_store()) == {Q8: 3}
    assert turn(open_store(), StampedEngine(), IDS, "chat").resumed.reused_tokens == 56


def test_lossy_rows_of_another_conversation_do_not_make_a_session_lossy(open_store: Opener) -> None:
    turn(open_store(), StampedEngine(), IDS, codec="q8")
    engine = StampedEngine()
    turn(open_store(), engine, IDS, codec="q8")
    other = some_ids(57, 9)
    done = turn(open_store(), engine, other, "b", allow_lossy=True)
    assert (done.resumed.reused_tokens, done.session.root.fidelity) == (0, EXACT)
    assert chains(open_store()) == {Q8: 3, EXACT: 3}
    engine.check_rows()


def test_edits_within_a_block_do_not_add_one_loss_to_another(open_store: Opener) -> None:
    # The front of a block that parts from the prompt is not used in a lossy chain: its rows would
    # be coded again in the prompt's own block, and again with the next edit.
    ids = IDS.copy()
    for edit in range(6):
        ids[30 - edit] = 400 + edit
        engine = StampedEngine()
        turn(open_store(), engine, ids, codec="q4")
        assert_within_the_bound(engine, "q4", 0 if edit == 0 else 1)
    engine = StampedEngine()
    done = turn(open_store(), engine, ids, codec="q4")
    assert done.resumed.reused_tokens == 48
    assert_within_the_bound(engine, "q4", 3)


def test_the_front_of_the_prompts_own_block_is_used(open_store: Opener) -> None:
    turn(open_store(), StampedEngine(), IDS[:48], codec="q8")
    engine = StampedEngine()
    turn(open_store(), engine, IDS[:48], codec="q8")
    assert engine.positions == [47]


class Interrupted(StampedEngine):
    """Ctrl-C as the rows are in the engine, before the caller hears of it."""

    def load(self, landing: Landing, token_ids: TokenIds) -> None:
        super().load(landing, token_ids)
        raise KeyboardInterrupt


def test_an_interrupted_restore_leaves_no_lossy_row_unmarked(open_store: Opener) -> None:
    turn(open_store(), StampedEngine(), IDS, codec="q8")
    engine = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        turn(open_store(), engine, IDS, codec="q8")
    assert engine.held_fidelity() == Q8
    with pytest.raises(UsageError, match="not coded again"):
        Session(open_store(), engine, "exact").save()


def test_a_codec_that_cannot_take_the_rows_is_refused_before_the_prefill(
    open_store: Opener,
) -> None:
    engine = StampedEngine(element="rows")
    with pytest.raises(Unsupported, match="q8"):
        turn(open_store(), engine, IDS, codec="q8")
    assert engine.evaluated == 0


def test_a_lossy_session_resumed_with_rows_it_cannot_take_goes_on_exactly(
    open_store: Opener,
) -> None:
    turn(open_store(), StampedEngine(), IDS, "chat", codec="q8")
    engine = StampedEngine(element="rows")
    done = turn(open_store(), engine, IDS, "chat")
    assert done.resumed.reused_tokens == 0
    assert (done.session.root.fidelity, done.resumed.fidelity) == (EXACT, EXACT)


def test_lossy_rows_that_an_application_puts_back_are_recognised(open_store: Opener) -> None:
    # llama-cpp-python's own caches take a whole state out of a context and put it back later.
    turn(open_store(), StampedEngine(), IDS, codec="q8")
    engine, store = StampedEngine(), open_store()
    turn(store, engine, IDS, codec="q8", save=False)
    ids, rows = engine.token_ids(), engine.export(0, engine.held)
    turn(store, engine, some_ids(57, 9))
    assert engine.held_fidelity() == EXACT
    engine.truncate(0)
    landing = engine.landing(len(ids))
    for name, array in landing.rows.items():
        array[...] = rows[name]
    engine.load(landing, ids)
    assert engine.held_fidelity() == Q8
    with pytest.raises(UsageError, match="not coded again"):
        Session(store, engine, "stolen").save()


def test_rows_computed_anew_behind_our_back_are_no_false_alarm(open_store: Opener) -> None:
    turn(open_store(), StampedEngine(), IDS, codec="q8")
    engine, store = StampedEngine(), open_store()
    turn(store, engine, IDS, codec="q8", save=False)
    engine.truncate(0)
    engine.evaluate(IDS)
    assert engine.held_fidelity() == EXACT
    Session(store, engine, "exact").save()
    fresh = StampedEngine()
    turn(open_store(), fresh, IDS, "exact")
    fresh.check_rows()


@pytest.mark.parametrize("kept", [5, 8, 16, 30])
def test_a_few_lossy_rows_are_as_bad_as_many(open_store: Opener, kept: int) -> None:
    turn(open_store(), StampedEngine(), IDS, codec="q8")
    engine, store = StampedEngine(), open_store()
    turn(store, engine, IDS, codec="q8", save=False)
    engine.truncate(kept)
    engine.evaluate(IDS[kept:])
    with pytest.raises(UsageError, match="not coded again"):
        Session(store, engine, "exact").save()


def test_memory_and_disk_give_the_same_lossy_rows(store_path: Path) -> None:
    found = []
    with Store(store_path, ram="10MB") as store:
        turn(store, StampedEngine(), IDS, codec="q8")
        for _ in range(
            2
        ):  # from what the save left in memory, if anything; then from what a read did
            engine = StampedEngine()
            turn(store, engine, IDS, codec="q8", save=False)
            found.append(engine.export(0, 48))
    with Store(store_path) as store:
        engine = StampedEngine()
        turn(store, engine, IDS, codec="q8", save=False)
        found.append(engine.export(0, 48))
    for rows in found[1:]:
        assert all(np.array_equal(rows[name], found[0][name]) for name in rows)
    assert assert_within_the_bound(engine, "q8", 3)


def test_what_is_allowed_is_loss_not_another_model(open_store: Opener) -> None:
    turn(open_store(), StampedEngine(weights="other"), IDS, codec="q8")
    engine = StampedEngine()
    done = turn(open_store(), engine, IDS, allow_lossy=True)
    assert (done.resumed.reused_tokens, done.resumed.fidelity) == (0, EXACT)
    engine.check_rows()
