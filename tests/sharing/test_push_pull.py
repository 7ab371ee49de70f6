"""A session goes from one machine to another: equal rows, nothing computed, only what is missing moved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvsnap.formats.errors import NotFound, Unsupported
from kvsnap.kvstore.remotes.counted import Counted
from kvsnap.kvstore.session import Session
from kvsnap.kvstore.sharing.pull import pull
from kvsnap.kvstore.sharing.pull_plan import PullPlan
from kvsnap.kvstore.sharing.push import push
from kvsnap.kvstore.store import Store
from kvsnap.testing.aftermath import assert_clean, assert_saved
from kvsnap.testing.stamped import StampedEngine
from kvsnap.testing.turns import some_ids, turn
from tests.sharing.objects import ME, block_files, only, resume, save_and_push

Machine = Callable[..., Store]
IDS = some_ids(57)
"""Three blocks and a tail."""


def test_a_pulled_session_resumes_with_equal_rows_and_computes_nothing(
    machine: Machine, remote: Counted
) -> None:
    save_and_push(machine("a"), remote, IDS, "chat")
    b = machine("b")
    report = pull(b, remote, "chat")
    assert_saved(b, IDS, "chat")
    assert_clean(b)
    assert (report.moved_files, report.blocks, report.stored_blocks) == (3, 3, 3)


def test_another_process_resumes_what_was_pulled(
    machine: Machine, remote: Counted, child: Callable[..., list[dict]]
) -> None:
    save_and_push(machine("a"), remote, IDS, "chat")
    b = machine("b")
    pull(b, remote, "chat")
    (done,) = child("turn", b.path, 57, 0, "chat")
    assert (done["positions"], done["error"]) == ([56], "")


@pytest.mark.parametrize("count", [0, 1, 15, 16, 17])
def test_sessions_of_any_length_arrive(machine: Machine, remote: Counted, count: int) -> None:
    save_and_push(machine("a"), remote, IDS[:count], "chat")
    b = machine("b")
    pull(b, remote, "chat")
    assert_saved(b, IDS[:count], "chat")


def test_notes_and_revision_come_along(machine: Machine, remote: Counted) -> None:
    a, b = machine("a"), machine("b")
    engine = StampedEngine()
    session = turn(a, engine, IDS, "chat").session
    session.save({"model": "some model", "messages": ["hello"]})
    push(a, remote, ME, "chat")
    plans: list[PullPlan] = []
    pull(b, remote, "chat", show=plans.append)
    record = b.sessions.load(ME, "chat").record
    assert (record.revision, record.notes["messages"]) == (2, ["hello"])
    assert plans[0].manifest.model == "some model"


def test_what_is_there_already_does_not_move(machine: Machine, remote: Counted) -> None:
    a, b = machine("a"), machine("b")
    save_and_push(a, remote, IDS, "chat")
    sent = remote.bytes_out, remote.calls("put"), remote.calls("replace")
    report = push(a, remote, ME, "chat")
    assert (report.moved_files, report.moved_bytes) == (0, 0)
    assert (remote.bytes_out, remote.calls("put"), remote.calls("replace")) == sent
    pull(b, remote, "chat")
    assert pull(b, remote, "chat").moved_files == 0


def test_a_session_that_shares_a_prefix_moves_its_own_blocks_only(
    machine: Machine, remote: Counted, there: Path
) -> None:
    a, b = machine("a"), machine("b")
    longer = np.concatenate([IDS[:32], some_ids(40, 3)])
    save_and_push(a, remote, IDS, "first")
    pull(b, remote, "first")
    shared, sent = set(block_files(there)), remote.bytes_out
    turn(a, StampedEngine(), longer, "second")
    report = push(a, remote, ME, "second")
    own = [path for path in block_files(there) if path not in shared]
    assert len(own) == 2
    files = sum(path.stat().st_size for path in own)
    assert report.moved_files == 3
    (manifest,) = (path.stat().st_size for path in there.glob("manifests/*/second*"))
    assert remote.bytes_out - sent == report.moved_bytes + manifest
    got = pull(b, remote, "second")
    assert (got.moved_files, got.moved_bytes) == (2, files)
    assert_saved(b, longer, "second")


def test_a_dry_run_moves_nothing_and_says_what_would(
    machine: Machine, remote: Counted, there: Path
) -> None:
    a, b = machine("a"), machine("b")
    turn(a, StampedEngine(), IDS, "chat")
    planned = push(a, remote, ME, "chat", dry_run=True)
    assert not there.exists()
    done = push(a, remote, ME, "chat")
    assert (planned.moved_files, planned.moved_bytes) == (done.moved_files, done.moved_bytes)
    wanted = pull(b, remote, "chat", dry_run=True)
    assert not b.place.blocks.exists()
    assert not list(b.listing)
    came = pull(b, remote, "chat")
    assert (wanted.moved_files, wanted.moved_bytes) == (came.moved_files, came.moved_bytes)


def test_a_session_pulled_under_another_name_keeps_its_tail(
    machine: Machine, remote: Counted
) -> None:
    save_and_push(machine("a"), remote, IDS, "chat")
    b = machine("b")
    report = pull(b, remote, "chat", new_name="of the team")
    assert report.session == "of the team"
    assert_saved(b, IDS, "of the team")
    with pytest.raises(NotFound):
        b.sessions.load(ME, "chat")
    assert pull(b, remote, "chat", new_name="of the team").moved_files == 0


def test_a_pulled_session_goes_on_and_goes_back(machine: Machine, remote: Counted) -> None:
    a, b = machine("a"), machine("b")
    save_and_push(a, remote, IDS, "chat")
    pull(b, remote, "chat")
    longer = np.concatenate([IDS, some_ids(30, 4)])
    engine = StampedEngine()
    turn(b, engine, longer, "chat")
    assert engine.positions == list(range(57, 87))
    push(b, remote, ME, "chat")
    assert pull(a, remote, "chat").moved_files == 2
    assert_saved(a, longer, "chat")


def test_a_prompt_without_the_session_finds_the_pulled_blocks(
    machine: Machine, remote: Counted
) -> None:
    save_and_push(machine("a"), remote, IDS, "chat")
    b = machine("b")
    pull(b, remote, "chat")
    assert resume(b, np.concatenate([IDS[:50], some_ids(9, 2)])).positions == list(range(48, 59))


def test_other_block_sizes_are_refused_with_the_way_out(machine: Machine, remote: Counted) -> None:
    save_and_push(machine("a"), remote, IDS, "chat")
    with pytest.raises(Unsupported, match="blocks have 16 tokens") as caught:
        pull(machine("b", block_size=32), remote, "chat")
    assert '"block_size": 16' in caught.value.hint


def test_what_is_not_there_is_not_found(machine: Machine, remote: Counted) -> None:
    a = machine("a")
    for work in (lambda: pull(a, remote, "chat"), lambda: push(a, remote, ME, "chat")):
        with pytest.raises(NotFound, match="chat"):
            work()


def test_another_lossless_coding_of_a_block_that_is_there_stays(
    machine: Machine, remote: Counted, there: Path
) -> None:
    a, b = machine("a"), machine("b")
    save_and_push(a, remote, IDS, "chat", codec="raw")
    turn(b, StampedEngine(), IDS, "other", codec="zstd")
    before = [path.stat().st_size for path in block_files(there)]
    assert push(b, remote, ME, "other").moved_files == 1
    assert [path.stat().st_size for path in block_files(there)] == before
    c = machine("c")
    for name in ("chat", "other"):
        pull(c, remote, name)
        assert_saved(c, IDS, name)


def test_a_remote_of_one_session_holds_these_files(
    machine: Machine, remote: Counted, there: Path
) -> None:
    store = machine("a")
    session = turn(store, StampedEngine(), IDS, "Alice/42").session
    assert isinstance(session, Session)
    push(store, remote, ME, "Alice/42")
    assert only(there, "manifests").name == "%41lice%2f42.safetensors"
    assert [len(path.stem) for path in block_files(there)] == [64] * 3
    assert only(there, "sessions").parent.name == ME
    local = {path.name: path.read_bytes() for path in store.place.blocks.glob("*/*")}
    assert {path.name: path.read_bytes() for path in block_files(there)} == local
