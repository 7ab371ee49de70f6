"""Engines that cannot be cut anywhere against a plain model: the set of prefixes that have a state."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from kvsnap.kvstore.session import Session
from kvsnap.kvstore.store import Store
from kvsnap.kvstore.verify import verify_store
from kvsnap.testing.recount import assert_closed, assert_counts
from kvsnap.testing.stamped import StampedEngine

pytestmark = pytest.mark.slow

BLOCK = 4
# Two ids, in runs: prompts share prefixes, branch inside blocks and come back together.
PROMPTS = st.lists(st.tuples(st.integers(0, 1), st.integers(1, 6)), min_size=1, max_size=6).map(
    lambda runs: [token for token, length in runs for _ in range(length)]
)
PLACES = st.sets(st.integers(1, 35), max_size=3)
KINDS = st.sampled_from(
    [
        {"window": 6},
        {"window": 2},
        {"recurrent": 5},
        {"window": 6, "recurrent": 5},
        {"recurrent": 5, "full": False},
        {"window": 6, "full": False},
    ]
)


class StatesMachine(RuleBasedStateMachine):
    """`states` are the prefixes at which a checkpoint was stored."""

    def __init__(self) -> None:
        super().__init__()
        where = os.environ.get("PYTEST_DEBUG_TEMPROOT")
        self.folder = Path(tempfile.mkdtemp(prefix="kvsnap-test-", dir=where))
        text = json.dumps({"block_size": BLOCK, "created": 1, "format": "1"})
        (self.folder / "kvsnap.json").write_text(text)
        self.states: set[tuple[int, ...]] = set()
        self.store = Store(self.folder)

    @initialize(kind=KINDS)
    def begin(self, kind: dict[str, int]) -> None:
        self.kind = kind
        self.engine = self._engine()

    @rule(
        prompt=PROMPTS,
        places=PLACES,
        name=st.sampled_from(["a", "b", None]),
        new_engine=st.booleans(),
        save=st.sampled_from(["save", "save_soon", "put_filled"]),
    )
    def take_a_turn(
        self, prompt: list[int], places: set[int], name: str | None, new_engine: bool, save: str
    ) -> None:
        if new_engine:
            self.engine = self._engine()
        engine, before = self.engine, self.engine.evaluated
        session = Session(self.store, engine, name, codec="raw")
        held = self._held(engine, prompt)
        report = session.resume(prompt)
        expected = max(held, self._stored(prompt))
        assert (report.reused_tokens, report.damage) == (expected, ())
        engine.check_rows()
        stops = sorted(place for place in places if expected < place < len(prompt))
        done = expected
        for stop in (*stops, len(prompt)):
            engine.evaluate(np.array(prompt[done:stop], np.uint32))
            done = stop
            if stop < len(prompt):
                session.checkpoint()
        engine.check_rows()
        assert engine.evaluated - before == len(prompt) - expected
        if save == "put_filled":
            session.put_filled()
        else:
            getattr(session, save)()
            session.close()
            self.states.add(tuple(prompt))
        self.states |= {tuple(prompt[:stop]) for stop in stops}

    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.store = Store(self.folder)

    @rule()
    def delete_the_index(self) -> None:
        self.store.close()
        for file in self.folder.glob("index.sqlite3*"):
            file.unlink()
        self.store = Store(self.folder)

    def teardown(self) -> None:
        assert_closed(self.store)
        assert_counts(self.store)
        report = verify_store(self.store)
        assert (report.bad, report.unreachable) == ([], [])
        self.store.close()
        shutil.rmtree(self.folder)

    def _engine(self) -> StampedEngine:
        return StampedEngine(capacity=64, batch=5, **self.kind)  # type: ignore[arg-type]

    def _stored(self, prompt: list[int]) -> int:
        limit = len(prompt) - 1
        fits = [len(s) for s in self.states if len(s) <= limit and list(s) == prompt[: len(s)]]
        return max(fits, default=0)

    def _held(self, engine: StampedEngine, prompt: list[int]) -> int:
        held = engine.token_ids().tolist()
        common = next((n for n, (a, b) in enumerate(zip(held, prompt, strict=False)) if a != b), -1)
        common = min(len(held), len(prompt)) if common < 0 else common
        return engine.reach(min(common, len(prompt) - 1))


TestStates = StatesMachine.TestCase
TestStates.settings = settings(max_examples=120, stateful_step_count=12, deadline=None)
