"""A store against a dict: any order of turns, damage, truncation, reopening and lost indexes."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvsnap.kvstore.session import Session
from kvsnap.kvstore.store import Store
from kvsnap.kvstore.verify import verify_store
from kvsnap.testing.faults import flip
from kvsnap.testing.stamped import StampedEngine

BLOCK = 4
# Two ids, in runs: prompts share prefixes, branch inside blocks and come back together.
PROMPTS = st.lists(st.tuples(st.integers(0, 1), st.integers(1, 5)), min_size=1, max_size=6).map(
    lambda runs: [token for token, length in runs for _ in range(length)]
)
NAMES = st.sampled_from(["a", "b", None])


class StoreMachine(RuleBasedStateMachine):
    """`stored` are the id sequences that blocks cover; `sessions` what was saved by name."""

    def __init__(self) -> None:
        super().__init__()
        # Not tmp_path: a machine is made for every example. The folder is conftest.py's choice.
        where = os.environ.get("PYTEST_DEBUG_TEMPROOT")
        self.folder = Path(tempfile.mkdtemp(prefix="kvsnap-test-", dir=where))
        text = json.dumps({"block_size": BLOCK, "created": 1, "format": "1"})
        (self.folder / "kvsnap.json").write_text(text)
        self.store = Store(self.folder)
        self.engine = StampedEngine(capacity=64, batch=3)
        self.stored: list[list[int]] = []
        self.sessions: dict[str, list[int]] = {}
        self.damaged = False

    def teardown(self) -> None:
        self.store.close()
        shutil.rmtree(self.folder)

    @rule(prompt=PROMPTS, name=NAMES, save=st.booleans(), other_codec=st.booleans())
    def take_a_turn(
        self, prompt: list[int], name: str | None, save: bool, other_codec: bool
    ) -> None:
        codec = "raw" if other_codec else "zstd"
        session = Session(self.store, self.engine, name, codec=codec)
        held, before = self.engine.token_ids().tolist(), self.engine.evaluated
        report = session.resume(prompt)
        assert self.engine.held == report.reused_tokens
        self.engine.check_rows()
        limit = len(prompt) - 1
        must = max(self._known(prompt, name), _common(held, prompt))
        if self.damaged:
            assert report.reused_tokens >= min(_common(held, prompt), limit)
            assert report.reused_tokens <= limit
        else:
            assert report.reused_tokens == min(must, limit), report
            assert report.damage == ()
        rest = prompt[report.reused_tokens :]
        self._evaluate(rest)
        assert self.engine.evaluated - before == report.computed_tokens == len(rest)
        assert report.reused_tokens + report.computed_tokens == len(prompt)
        assert self.engine.token_ids().tolist() == prompt
        if save:
            self._save(session, prompt)

    @rule(more=PROMPTS, name=NAMES)
    def go_on_and_save(self, more: list[int], name: str | None) -> None:
        if self.engine.held + len(more) > 40:
            self.engine.truncate(7)
        session = Session(self.store, self.engine, name)
        session.resume(self.engine.token_ids(), leave=0)  # this engine is this session's now
        self._evaluate(more)
        self._save(session, self.engine.token_ids().tolist())

    @rule(kept=st.integers(0, 30))
    def truncate(self, kept: int) -> None:
        self.engine.truncate(kept)

    @rule()
    def use_a_new_engine(self) -> None:
        self.engine = StampedEngine(capacity=64, batch=5)

    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.store = Store(self.folder)

    @rule(close=st.booleans())
    def delete_the_index(self, close: bool) -> None:
        if close:
            self.store.close()
        for file in self.folder.glob("index.sqlite3*"):
            file.unlink()

    @precondition(lambda self: self.stored or self.sessions)
    @rule(number=st.integers(0, 10**6), offset=st.integers(0, 10**6), how=st.sampled_from("fcu"))
    def damage_a_file(self, number: int, offset: int, how: str) -> None:
        files = [*self.folder.glob("blocks/*/*"), *self.folder.glob("sessions/*/*")]
        if not files:
            return
        path = sorted(files)[number % len(files)]
        self.damaged = True
        if how == "u":
            path.unlink()
        elif path.stat().st_size:
            if how == "f":
                flip(path, offset % path.stat().st_size, 1 << offset % 8)
            else:
                path.write_bytes(path.read_bytes()[: offset % path.stat().st_size])

    @precondition(lambda self: self.damaged)
    @rule()
    def mend(self) -> None:
        """Resuming and saving everything until nothing is found must heal whatever there was.

        More than once: a damaged block behind a missing one is read only when that one is back.
        """
        named = list(self.sessions.items())
        for _ in range(20):
            all_ids = [*named, *((None, ids) for ids in self.stored)]
            if not sum([self._mended(name, ids) for name, ids in all_ids]):
                break
        self.damaged = False
        report = verify_store(self.store, progress=lambda done, total: None)
        assert (report.bad, report.unreachable) == ([], [])

    @invariant()
    def rows_are_those_of_an_engine_that_was_never_interrupted(self) -> None:
        self.engine.check_rows()

    @invariant()
    def every_reachable_block_has_a_reachable_parent(self) -> None:
        rows = self.store.index.query(
            "SELECT b.start, b.parent, p.reachable, p.lost FROM blocks b"
            " LEFT JOIN blocks p ON p.id = b.parent WHERE b.reachable = 1"
        )
        for start, parent, reachable, lost in rows:
            assert (parent is None) == (start == 0)
            assert parent is None or (reachable == 1 and lost is None)

    @invariant()
    def undamaged_stores_verify_clean(self) -> None:
        if not self.damaged:
            report = verify_store(self.store, progress=lambda done, total: None)
            assert (report.bad, report.unreachable) == ([], [])
        assert not list(self.folder.glob("tmp/*.part"))

    def _evaluate(self, ids: list[int]) -> None:
        self.engine.evaluate(np.array(ids, np.uint32))

    def _save(self, session: Session, ids: list[int]) -> None:
        report = session.save()
        assert (report.tokens, report.blocks) == (len(ids), len(ids) // BLOCK)
        if not self.damaged:
            new = {tuple(b) for b in _blocks(ids)} - {b for s in self.stored for b in _blocks(s)}
            assert report.blocks_written == len(new)
        self.stored.append(ids[: len(ids) // BLOCK * BLOCK])
        if session.name is not None:
            self.sessions[session.name] = ids

    def _mended(self, name: str | None, ids: list[int]) -> int:
        """How much there was to mend."""
        engine = StampedEngine(capacity=64)
        session = Session(self.store, engine, name)
        found = session.resume(ids, leave=0)
        engine.evaluate(np.array(ids[found.reused_tokens :], np.uint32))
        return len(found.damage) + session.save().blocks_written

    def _known(self, prompt: list[int], name: str | None) -> int:
        """The longest front of the prompt that the store must give, to the token."""
        sequences = [*self.stored]
        if name in self.sessions:
            sequences.append(self.sessions[name])
        return max((_common(ids, prompt) for ids in sequences), default=0)


def _common(one: list[int], other: list[int]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(one), len(other)))


def _blocks(ids: list[int]) -> list[tuple[int, ...]]:
    """Each block with all ids before it, as its name has them."""
    return [tuple(ids[:stop]) for stop in range(BLOCK, len(ids) + 1, BLOCK)]


TestStore = StoreMachine.TestCase
TestStore.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)
