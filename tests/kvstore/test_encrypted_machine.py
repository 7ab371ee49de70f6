"""An encrypted store of two tenants against a dict: any order of saves, resumes, damage, eviction, lost
indexes, and of processes that have one key, both or none."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvsnap.formats.sealed import is_sealed
from kvsnap.formats.tenant import Tenant
from kvsnap.kvstore.gc import gc
from kvsnap.kvstore.session import Session
from kvsnap.kvstore.verify import verify_store
from kvsnap.testing.faults import flip
from kvsnap.testing.recount import assert_closed, assert_counts
from tests.sealed_places import engine, open_encrypted
from tests.tenants import ALICE, BOB

BLOCK = 16
IDS = st.lists(st.tuples(st.integers(0, 1), st.integers(5, 30)), min_size=1, max_size=4).map(
    lambda runs: [token + 2**20 for token, length in runs for _ in range(length)]
)
"""Two ids, in runs: prompts share blocks, and leave one another inside of them."""
TENANTS = st.sampled_from([ALICE, BOB])
NAMES = st.sampled_from(["a", "b", None])
Key = tuple[Tenant, str]


class EncryptedStore(RuleBasedStateMachine):
    """`stored`: the sequences whose blocks a tenant has, `sessions`: what was saved by name. Blocks of
    `lossy` histories (damaged, or evicted) may be missing: rows are compared in any case."""

    def __init__(self) -> None:
        super().__init__()
        where = os.environ.get("PYTEST_DEBUG_TEMPROOT")
        self.folder = Path(tempfile.mkdtemp(prefix="kvsnap-test-", dir=where))
        self.path = self.folder / "s"
        self.store = open_encrypted(self.path)
        self.stored: dict[Tenant, list[list[int]]] = {ALICE: [], BOB: []}
        self.sessions: dict[Key, list[int]] = {}
        self.missing = False
        self.broken = False
        self.model = engine(capacity=256, batch=16)

    def teardown(self) -> None:
        self.store.close()
        shutil.rmtree(self.folder)

    @rule(ids=IDS, tenant=TENANTS, name=NAMES, fresh=st.booleans(), codec=st.booleans())
    def take_a_turn(
        self, ids: list[int], tenant: Tenant, name: str | None, fresh: bool, codec: bool
    ) -> None:
        if fresh:
            self.model = engine(capacity=256, batch=16)
        held = _common(self.model.token_ids().tolist(), ids) if not fresh else 0
        session = Session(
            self.store, self.model, name, tenant=tenant, codec="raw" if codec else "zstd"
        )
        report = session.resume(ids)
        self.model.check_rows()
        known = self._known(ids, tenant, name)
        limit = len(ids) - 1
        if not self.missing and not self.broken:
            assert report.reused_tokens >= min(known, limit)
            assert report.damage == ()
        most = max(held, known, _common_blocks(self.stored[tenant], ids))
        assert report.reused_tokens <= min(most, limit), "of this tenant's own, and no more"
        self.model.evaluate(np.array(ids[report.reused_tokens :], np.uint32))
        session.save()
        self.stored[tenant].append(ids[: len(ids) // BLOCK * BLOCK])
        if name is not None:
            self.sessions[tenant, name] = ids

    @rule(keys=st.lists(TENANTS, max_size=2))
    def reopen(self, keys: list[Tenant]) -> None:
        self.store.close()
        self.store = open_encrypted(self.path)
        for tenant in keys:
            self.store.keys.add(tenant)

    @rule()
    def build_the_index_anew(self) -> None:
        self.store.close()
        for file in self.path.glob("index.sqlite3*"):
            file.unlink()
        self.store = open_encrypted(self.path)

    @rule(number=st.integers(1, 6))
    def evict(self, number: int) -> None:
        """By a process that has no key."""
        self.store.close()
        with open_encrypted(self.path) as store:
            used = store.space.used()
        with open_encrypted(self.path, capacity=max(1, used - number * 4000)) as store:
            if gc(store).evicted:
                self.missing = True
        self.store = open_encrypted(self.path)

    @precondition(lambda self: any(self.stored.values()))
    @rule(number=st.integers(0, 99), at=st.integers(0, 10**6), how=st.sampled_from("fcu"))
    def damage_a_block(self, number: int, at: int, how: str) -> None:
        files = sorted(self.path.glob("blocks/*/*"))
        if not files:
            return
        path = files[number % len(files)]
        self.broken = True
        size = path.stat().st_size
        if how == "u":
            path.unlink()
        elif how == "f" and size:
            flip(path, at % size, 1 << at % 8)
        else:
            path.write_bytes(path.read_bytes()[: at % (size or 1)])

    @precondition(lambda self: self.broken or self.missing)
    @rule()
    def mend(self) -> None:
        """Save all of it again until nothing is written any more."""
        self.store.close()
        self.store = open_encrypted(self.path)
        for _ in range(20):
            written = sum(
                self._saved_again(tenant, name, ids)
                for tenant, name, ids in (
                    *((tenant, name, ids) for (tenant, name), ids in self.sessions.items()),
                    *(
                        (tenant, None, ids)
                        for tenant, all_of in self.stored.items()
                        for ids in all_of
                    ),
                )
            )
            if not written:
                break
        self.missing = self.broken = False
        for tenant in (ALICE, BOB):
            assert verify_store(self.store, tenant).bad == []

    @invariant()
    def every_session_is_the_one_that_was_saved(self) -> None:
        with open_encrypted(self.path) as store:
            for (tenant, name), ids in self.sessions.items():
                session = Session(store, engine(capacity=256), name, tenant=tenant)
                assert session.stored_token_ids().tolist() == ids
            assert len(list(store.listing)) == len(self.sessions)

    @invariant()
    def all_that_is_stored_is_sealed(self) -> None:
        for path in (*self.path.glob("blocks/*/*"), *self.path.glob("sessions/*/*")):
            data = memoryview(path.read_bytes())
            assert self.broken or is_sealed(data)

    @invariant()
    def the_index_is_right_without_any_key(self) -> None:
        with open_encrypted(self.path) as store:
            report = verify_store(store)
            if not self.broken:
                assert (report.bad, report.unreachable) == ([], [])
                assert report.sealed == report.checked
                assert_closed(store)
                assert_counts(store)

    def _known(self, ids: list[int], tenant: Tenant, name: str | None) -> int:
        """What must be there: whole blocks, and the tail of the session's own file."""
        found = _common_blocks(self.stored[tenant], ids)
        own = self.sessions.get((tenant, name or ""), [])
        common = _common(own, ids)
        return max(found, common if common >= len(own) // BLOCK * BLOCK else 0)

    def _saved_again(self, tenant: Tenant, name: str | None, ids: list[int]) -> int:
        model = engine(capacity=256, batch=16)
        session = Session(self.store, model, name, tenant=tenant)
        report = session.resume(ids, leave=0)
        model.check_rows()
        model.evaluate(np.array(ids[report.reused_tokens :], np.uint32))
        return session.save().blocks_written + len(report.damage)


def _common(one: list[int], other: list[int]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(one), len(other)))


def _common_blocks(stored: list[list[int]], ids: list[int]) -> int:
    return max((_common(one, ids) // BLOCK * BLOCK for one in stored), default=0)


TestEncryptedStore = EncryptedStore.TestCase
TestEncryptedStore.settings = settings(max_examples=15, stateful_step_count=12, deadline=None)
