"""A store within a budget against a plain model: the files that are there, and what must be."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvsnap.formats.errors import NotAllStored, NotFound, StoreFull
from kvsnap.formats.names import chain_names
from kvsnap.kvstore import holds, pins
from kvsnap.kvstore.gc import gc
from kvsnap.kvstore.holds import LEASE_SECONDS
from kvsnap.kvstore.rebuild import read_record
from kvsnap.kvstore.session import Session
from kvsnap.kvstore.store import Store
from kvsnap.kvstore.verify import verify_store
from kvsnap.testing.killed import die, killed_between_rename_and_row
from kvsnap.testing.recount import assert_closed, assert_counts, disk_bytes, stored_blocks
from kvsnap.testing.stamped import StampedEngine

pytestmark = pytest.mark.slow

BLOCK = 4
CAPACITY = 27_000
"""Some nine blocks and three session files."""
LARGEST = 5_000
"""No file of these tests is larger."""
# Two ids, in runs: prompts share prefixes, branch inside blocks and come back together.
PROMPTS = st.lists(st.tuples(st.integers(0, 1), st.integers(1, 6)), min_size=2, max_size=8).map(
    lambda runs: [token for token, length in runs for _ in range(length)]
)
NAMES = st.sampled_from(["a", "b", "c", None])
SESSIONS = st.sampled_from(["a", "b", "c"])
SECONDS = st.sampled_from([None, None, 50, 500])
NUMBERS = st.integers(0, 10**6)
CAPACITIES = st.sampled_from([1, 6_000, 10_000, 14_000, 18_000])


class EvictionMachine(RuleBasedStateMachine):
    """The disk says which blocks are there; `put` are those that ever were stored.

    `pinned` and `leased` are blocks that must not go, with the time until which that holds.
    """

    def __init__(self) -> None:
        super().__init__()
        where = os.environ.get("PYTEST_DEBUG_TEMPROOT")
        self.folder = Path(tempfile.mkdtemp(prefix="kvsnap-test-", dir=where))
        text = json.dumps({"block_size": BLOCK, "created": 1, "format": "1"})
        (self.folder / "kvsnap.json").write_text(text)
        self.clock = mock.Mock(now=1_000_000.0)
        self.clock.time.side_effect = lambda: self.clock.now
        self.patches = contextlib.ExitStack()
        for module in (holds, pins):
            self.patches.enter_context(mock.patch.object(module, "time", self.clock))
        self.crashed: list[Store] = []
        self.engine = StampedEngine(capacity=64, batch=5)
        self.put: dict[bytes, tuple[int, ...]] = {}
        self.sessions: dict[str, list[int]] = {}
        self.pinned: dict[object, tuple[set[bytes], float]] = {}
        self.leased: list[tuple[Any, set[bytes], float]] = []
        self.uncounted: set[bytes] = set()
        """Files without a row, as a writer was killed between the two. The next one deletes them."""
        self.going: set[bytes] = set()
        """Files whose row went, as an evictor was killed between the two; they are counted."""
        self.evicted_before = 0
        """By indexes that are gone."""
        self.store = self._open()
        self.root = Session(self.store, self.engine).root

    def teardown(self) -> None:
        report = verify_store(self.store)
        assert (report.bad, report.unreachable) == ([], [])
        for context, *_ in self.leased:
            context.__exit__(None, None, None)
        self.store.close()
        self.patches.close()
        shutil.rmtree(self.folder)

    @initialize(prompts=st.lists(PROMPTS, min_size=2, max_size=3))
    def begin_with_some_sessions(self, prompts: list[list[int]]) -> None:
        for name, prompt in zip("abc", prompts, strict=False):
            self.take_a_turn(prompt, name, True)

    @rule(prompt=PROMPTS, name=NAMES, save=st.sampled_from([True, True, False]))
    def take_a_turn(self, prompt: list[int], name: str | None, save: bool) -> None:
        self.engine = StampedEngine(capacity=64, batch=5)
        session = Session(self.store, self.engine, name, codec="raw")
        expected = self._expected(prompt, name)
        report = session.resume(prompt)
        assert (report.reused_tokens, report.damage) == (expected, ())
        self.engine.evaluate(np.array(prompt[report.reused_tokens :], np.uint32))
        self.engine.check_rows()
        assert self.engine.token_ids().tolist() == prompt
        assert self.engine.evaluated == len(prompt) - expected
        if save:
            self._save(session, prompt)

    @precondition(lambda self: self.sessions)
    @rule(name=SESSIONS, more=PROMPTS)
    def go_on_with_a_session(self, name: str, more: list[int]) -> None:
        """Its blocks may have gone; its ids have not, and what is recomputed is stored again."""
        ids = self.sessions.get(name, [])
        if ids:
            stored = Session(self.store, self.engine, name).stored_token_ids()
            assert stored.tolist() == ids
            self.take_a_turn((ids + more)[:40], name, True)

    @precondition(lambda self: self.sessions)
    @rule(name=SESSIONS, seconds=SECONDS)
    def pin_a_session(self, name: str, seconds: float | None) -> None:
        if name in self.sessions:
            chain = self._stored_chain(self.sessions[name])
            with self._room_or_full(chain):
                self.store.pins.pin_session(self._tenant(), name, seconds)
                self.pinned[name] = (set(chain), self.clock.now + (seconds or 10**9))

    @precondition(lambda self: self._usable())
    @rule(number=NUMBERS, seconds=SECONDS)
    def pin_a_block(self, number: int, seconds: float | None) -> None:
        name, chain = self._some_block(number)
        with self._room_or_full(chain):
            self.store.pins.pin_block(name, seconds)
            self.pinned[name] = (set(chain), self.clock.now + (seconds or 10**9))

    @precondition(lambda self: self.pinned)
    @rule(number=NUMBERS)
    def unpin(self, number: int) -> None:
        what = sorted(self.pinned, key=str)[number % len(self.pinned)]
        expired = self.pinned[what][1] <= self.clock.now
        with contextlib.suppress(NotFound) if expired else contextlib.nullcontext():  # gc took it
            if isinstance(what, bytes):
                self.store.pins.unpin_block(what)
            else:
                self.store.pins.unpin_session(self._tenant(), str(what))
        del self.pinned[what]

    @precondition(lambda self: self._usable())
    @rule(number=NUMBERS)
    def take_a_lease(self, number: int) -> None:
        name, chain = self._some_block(number)
        context = self.store.holds.lease()
        assert context.__enter__().keep(name)
        self.leased.append((context, set(chain), self.clock.now + LEASE_SECONDS))

    @precondition(lambda self: self.leased)
    @rule(number=NUMBERS)
    def end_a_lease(self, number: int) -> None:
        context, *_ = self.leased.pop(number % len(self.leased))
        context.__exit__(None, None, None)

    @precondition(lambda self: self.pinned or self.leased)
    @rule(seconds=st.sampled_from([10, 100, 1000]))
    def let_time_pass(self, seconds: int) -> None:
        self.clock.now += seconds
        self._forget_expired()

    @rule(capacity=CAPACITIES)
    def collect(self, capacity: int) -> None:
        """What a dry run says is what then happens, to the byte."""
        self._forget_tidied()
        before, held = self._files(), self._held()
        was_going = len(self.going) + len(self.uncounted)
        with self._open(capacity) as store:
            planned = gc(store, dry_run=True)
            assert self._files() == before
            done = gc(store)
            assert vars(planned) == {**vars(done), "dry_run": True}
        assert not (self.uncounted | self.going) & set(stored_blocks(self.store.place))
        self._forget_tidied()
        after = self._files()
        gone = {path: size for path, size in before.items() if path not in after}
        assert done.freed_bytes == sum(gone.values())
        assert done.kept_bytes == sum(after.values()) == disk_bytes(self.store.place)
        assert done.evicted + was_going == sum(path.parts[0] == "blocks" for path in gone)
        assert done.short_bytes == max(0, done.kept_bytes - capacity)
        if done.short_bytes:
            assert set(stored_blocks(self.store.place)) == held, "all that may go went"

    @precondition(lambda self: len(self.sessions) > 1)
    @rule(name=SESSIONS)
    def remove_a_session(self, name: str) -> None:
        if name in self.sessions:
            self.store.sessions.remove(self._tenant(), name)
            del self.sessions[name]
            self.pinned.pop(name, None)

    @rule(how=st.sampled_from(["idle", "writing", "evicting"]), number=NUMBERS)
    def crash(self, how: str, number: int) -> None:
        """The process is gone: its lock with it, its rows not; another one goes on."""
        if how == "writing":
            with contextlib.suppress(StoreFull):
                room = self.store.space._reserve(3_000)
                room.path.write_bytes(bytes(3_000))
        elif how == "evicting":
            eviction = self.store.space.eviction
            plan = eviction.plan(number % 9_000)
            with self.store.index.transaction() as db:
                self.going |= {v.name for v in plan.blocks if eviction._let_go(db, v)}
        self._die()

    @rule(prompt=PROMPTS)
    def crash_while_a_block_is_published(self, prompt: list[int]) -> None:
        engine = StampedEngine(capacity=64)
        engine.evaluate(np.array(prompt, np.uint32))
        with killed_between_rename_and_row() as renamed, contextlib.suppress(StoreFull):
            Session(self.store, engine, codec="raw").put_filled()
        self._forget_tidied()
        for path in renamed:
            record = read_record(path).record
            self.put[record.name] = tuple(prompt[: record.start + BLOCK])
            self.uncounted.add(record.name)
        self._die()

    def _die(self) -> None:
        die(self.store)
        self._forget_tidied()
        self.leased.clear()
        self.store = self._open()

    @rule()
    def reopen(self) -> None:
        for context, *_ in self.leased:
            context.__exit__(None, None, None)
        self.leased.clear()
        self.store.close()
        self.store = self._open()

    @rule()
    def delete_the_index(self) -> None:
        """It is built anew from the files. Leases end with it, as they stand nowhere else."""
        self.evicted_before += self._evicted_blocks()
        self.store.index.close()
        for file in self.folder.glob("index.sqlite3*"):
            file.unlink()
        self.leased.clear()
        self.uncounted.clear()
        self.going.clear()

    @invariant()
    def nothing_stands_without_what_it_stands_on(self) -> None:
        assert_closed(self.store)

    @invariant()
    def every_count_is_what_a_recount_gives(self) -> None:
        if not self.uncounted:
            assert_counts(self.store)

    @invariant()
    def the_budget_is_kept(self) -> None:
        there = stored_blocks(self.store.place)
        more = sum(size for name, (_, size) in there.items() if name in self.uncounted)
        assert disk_bytes(self.store.place) <= CAPACITY + more

    @invariant()
    def what_is_held_is_there(self) -> None:
        assert self._held() <= set(stored_blocks(self.store.place))

    @invariant()
    def every_session_that_was_saved_is_listed_with_what_is_left_of_it(self) -> None:
        listed = {entry.facts.name: entry for entry in self.store.listing}
        assert sorted(listed) == sorted(self.sessions)
        for name, ids in self.sessions.items():
            assert listed[name].facts.tokens == len(ids)
            assert listed[name].facts.blocks == len(ids) // BLOCK
            assert listed[name].stored_blocks == len(self._stored_chain(ids))

    @invariant()
    def while_nothing_was_evicted_all_that_was_put_is_there(self) -> None:
        there = set(stored_blocks(self.store.place))
        assert there <= set(self.put)
        if not self.evicted_before + self._evicted_blocks():
            assert there == set(self.put)

    def _open(self, capacity: int = CAPACITY) -> Store:
        return Store(self.folder, capacity=capacity, min_free="0")

    def _save(self, session: Session, ids: list[int]) -> None:
        names = self._names(ids)
        self._forget_expired()
        before = self._usable()
        stored = len(names)
        with self._room_or_full(names):
            try:
                report = session.save()
                assert (report.blocks, report.blocks_stored) == (stored, stored)
                assert report.blocks_written == len(set(names) - before)
            except NotAllStored as partly:
                self._assert_full(names)
                stored = partly.report.blocks_stored  # type: ignore[attr-defined]
                assert stored < len(names)
            if session.name is not None:
                self.sessions[session.name] = ids
                if session.name in self.pinned:
                    _, until = self.pinned[session.name]
                    self.pinned[session.name] = (set(names[:stored]), until)
        there = stored_blocks(self.store.place)
        for n, name in enumerate(names):
            if name in there:
                self.put[name] = tuple(ids[: (n + 1) * BLOCK])
                self.uncounted.discard(name)
                self.going.discard(name)

    @contextlib.contextmanager
    def _room_or_full(self, chain: list[bytes]) -> Any:
        """`StoreFull` is right only where all else is held, by others or by this very call."""
        try:
            yield
        except StoreFull:
            self._assert_full(chain)
        self._forget_tidied()

    def _assert_full(self, chain: list[bytes]) -> None:
        held = self._held() | set(chain)
        blocks = stored_blocks(self.store.place)
        may_go = sum(size for name, (_, size) in blocks.items() if name not in held)
        assert disk_bytes(self.store.place) - may_go + LARGEST > CAPACITY

    def _expected(self, prompt: list[int], name: str | None) -> int:
        """How many tokens the files on the disk, and the session's own tail, must give."""
        there = [self.put[name] for name in self._usable()]
        front = max((_common(ids, prompt) for ids in there), default=0)
        own = self.sessions.get(name or "", [])
        tail = _common(own, prompt)
        start = len(own) // BLOCK * BLOCK
        if tail > start and front >= start:
            front = max(front, tail)
        return min(front, len(prompt) - 1)

    def _forget_tidied(self) -> None:
        """Whoever writes first deletes what killed processes left without a row."""
        there = set(stored_blocks(self.store.place))
        for name in self.uncounted - there:
            del self.put[name]
        self.uncounted &= there
        self.going &= there

    def _usable(self) -> set[bytes]:
        return set(stored_blocks(self.store.place)) - self.uncounted - self.going

    def _names(self, ids: list[int]) -> list[bytes]:
        return chain_names(self.root.key, np.array(ids, np.uint32), BLOCK)

    def _stored_chain(self, ids: list[int]) -> list[bytes]:
        there = self._usable()
        names = self._names(ids)
        return names[: next((n for n, name in enumerate(names) if name not in there), len(names))]

    def _some_block(self, number: int) -> tuple[bytes, list[bytes]]:
        """One of them, and the chain that ends with it."""
        names = sorted(self._usable())
        name = names[number % len(names)]
        return name, self._names(list(self.put[name]))

    def _held(self) -> set[bytes]:
        self._forget_expired()
        held = [blocks for blocks, _ in self.pinned.values()]
        held += [blocks for _, blocks, _ in self.leased]
        return set().union(*held)

    def _forget_expired(self) -> None:
        """An expired pin keeps its file until it is removed; here it is as if there were none."""
        for what, (_, until) in list(self.pinned.items()):
            if until < self.clock.now:
                self.pinned[what] = (set(), until)
        for entry in [entry for entry in self.leased if entry[2] < self.clock.now]:
            self.leased.remove(entry)

    def _evicted_blocks(self) -> int:
        sql = "SELECT value FROM counters WHERE name = 'evicted_blocks'"
        return int(self.store.index.query(sql)[0][0])

    def _tenant(self) -> str:
        return Session(self.store, self.engine).tenant_id

    def _files(self) -> dict[Path, int]:
        """All files that the budget counts, but for locks."""
        kinds = ("blocks", "sessions", "tmp", "quarantine")
        files = [path for kind in kinds for path in (self.folder / kind).rglob("*.*")]
        return {p.relative_to(self.folder): p.stat().st_size for p in files if p.suffix != ".owner"}


def _common(one: Any, other: Any) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(one), len(other)))


TestEviction = EvictionMachine.TestCase
TestEviction.settings = settings(max_examples=300, stateful_step_count=12, deadline=None)
