"""Any order of turns, plants, damage and changes of the list: while there is one, rows are genuine."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from kvsnap.formats.errors import KvsnapError
from kvsnap.formats.fields import FORMAT_VERSION
from kvsnap.formats.names import token_array
from kvsnap.formats.signature import new_signing_key
from kvsnap.kvstore.gc import gc
from kvsnap.kvstore.session import Session
from kvsnap.kvstore.signing_key import VARIABLE, write_key_file
from kvsnap.kvstore.store import Store
from kvsnap.kvstore.trust_list import add, remove
from kvsnap.kvstore.verify import verify_store
from kvsnap.testing.faults import flip
from kvsnap.testing.stamped import StampedEngine
from tests.planting import PLANTS, block_of, session_with_other_tail
from tests.signers import STRANGER

BLOCK = 4
PROMPTS = st.lists(st.tuples(st.integers(0, 1), st.integers(1, 5)), min_size=1, max_size=5).map(
    lambda runs: [token for token, length in runs for _ in range(length)]
)
NAMES = st.sampled_from(["a", "b", None])
MACHINES = ["here", "elsewhere"]
KEYS = {name: new_signing_key() for name in MACHINES}


class TrustMachine(RuleBasedStateMachine):
    """Two machines write to one folder. `listed`: whose keys the list has now. `tainted`: rows in the
    store may be wrong, and nobody may vouch for them."""

    def __init__(self) -> None:
        super().__init__()
        where = os.environ.get("PYTEST_DEBUG_TEMPROOT")
        self.folder = Path(tempfile.mkdtemp(prefix="kvsnap-test-", dir=where))
        text = json.dumps({"block_size": BLOCK, "created": 1, "format": FORMAT_VERSION})
        (self.folder / "kvsnap.json").write_text(text)
        self.keys = Path(tempfile.mkdtemp(prefix="kvsnap-keys-", dir=where))
        for name, key in KEYS.items():
            write_key_file(self.keys / name, key.pem())
        self.listed: set[str] = set()
        self.tainted = self.spoilt = False
        self.saved: list[tuple[str | None, list[int]]] = []
        self.stores: dict[str, Store] = {}
        for name in MACHINES:
            self.open(name)

    @initialize(prompt=PROMPTS, listed=st.sampled_from([MACHINES, MACHINES[:1], []]))
    def begin(self, prompt: list[int], listed: list[str]) -> None:
        """With a list, or none, and one session."""
        for whose in listed:
            self.trust(whose, whose, vouch=True)
        self._turn(prompt * 2, "a", "here", True, "raw")

    def open(self, name: str) -> None:
        """As a new process of that machine does."""
        if name in self.stores:
            self.stores.pop(name).close()
        with self.signing_as(name):
            store = self.stores[name] = Store(self.folder)
            assert (store.trust is not None) == bool(self.listed)
            if store.trust is not None:
                assert store.trust.key.public == KEYS[name].public

    @contextlib.contextmanager
    def signing_as(self, name: str) -> Iterator[None]:
        with mock.patch.dict(os.environ, {VARIABLE: str(self.keys / name)}):
            yield

    def teardown(self) -> None:
        for store in self.stores.values():
            store.close()
        shutil.rmtree(self.folder)
        shutil.rmtree(self.keys)

    @rule(
        prompt=PROMPTS,
        name=NAMES,
        machine=st.sampled_from(MACHINES),
        save=st.booleans(),
        codec=st.sampled_from(["raw", "zstd"]),
    )
    def take_a_turn(
        self, prompt: list[int], name: str | None, machine: str, save: bool, codec: str
    ) -> None:
        self._turn(prompt, name, machine, save, codec)

    @precondition(lambda self: self.saved)
    @rule(which=st.integers(0, 99), machine=st.sampled_from(MACHINES), save=st.booleans())
    def go_on(self, which: int, machine: str, save: bool) -> None:
        """With a prompt that was saved before."""
        name, prompt = self.saved[which % len(self.saved)]
        self._turn([*prompt, 1], name, machine, save, "raw")

    def _turn(
        self, prompt: list[int], name: str | None, machine: str, save: bool, codec: str
    ) -> None:
        store, engine = self.stores[machine], StampedEngine(capacity=64, batch=3)
        session = Session(store, engine, name, codec=codec)
        report = session.resume(prompt)
        if self.listed or not self.tainted:
            engine.check_rows()
        assert report.reused_tokens + len(prompt[engine.held :]) == len(prompt)
        engine.evaluate(token_array(prompt[engine.held :]))
        if not save:
            return
        session.save()
        self.saved.append((session.name, prompt))
        if self.listed and machine not in self.listed:
            self.spoilt = True  # the other machine does not believe this one
        again = StampedEngine(capacity=64)
        found = Session(store, again, session.name).resume(prompt, leave=0)
        whole = len(prompt) if session.name else len(prompt) // BLOCK * BLOCK
        assert found.reused_tokens >= whole, (
            "what was planted is replaced, and what was saved is there"
        )
        if self.listed or not self.tainted:
            again.check_rows()

    def files(self) -> list[Path]:
        return sorted(self.folder.glob("blocks/*/*.safetensors"))

    @precondition(lambda self: self.files())
    @rule(which=st.integers(0, 99), beside=st.integers(0, 99), how=st.sampled_from(sorted(PLANTS)))
    def plant(self, which: int, beside: int, how: str) -> None:
        files = self.files()
        path, other = files[which % len(files)], files[beside % len(files)]
        genuine = path.read_bytes()
        try:
            planted = PLANTS[how](genuine, other.read_bytes())
        except (
            KvsnapError,
            AssertionError,
        ):  # a damaged one, or rows that are the same turned round
            return
        path.unlink()
        path.write_bytes(planted)
        self.tainted = self.spoilt = True
        self._look_at_all()

    def _look_at_all(self) -> None:
        for name, prompt in self.saved[-4:]:
            for machine in MACHINES:
                self._turn([*prompt, 1], name, machine, False, "raw")

    @rule(name=st.sampled_from(["a", "b"]), stranger=st.booleans())
    def plant_a_tail(self, name: str, stranger: bool) -> None:
        path = self.folder / "sessions" / "default" / f"{name}.safetensors"
        if not path.exists():
            return
        path.write_bytes(session_with_other_tail(path.read_bytes(), STRANGER if stranger else None))
        self.tainted = self.spoilt = True
        self._look_at_all()

    @rule(whose=st.sampled_from(MACHINES), by=st.sampled_from(MACHINES), vouch=st.booleans())
    def trust(self, whose: str, by: str, vouch: bool) -> None:
        vouch = vouch and not self.tainted
        with self.signing_as(by):
            add(self.stores[by], KEYS[whose].public, whose, vouch=vouch)
        self.listed.add(whose)
        if not vouch or by not in self.listed:
            self.spoilt = True  # sessions stay, and verify tells of them
        for name in MACHINES:
            self.open(name)

    @precondition(lambda self: self.listed)
    @rule(by=st.sampled_from(MACHINES), last=st.booleans())
    def trust_no_more(self, by: str, last: bool) -> None:
        whose = sorted(self.listed)[-1 if last else 0]
        with self.signing_as(by):
            remove(self.stores[by], whose)
        self.listed.remove(whose)
        self.spoilt = True
        for name in MACHINES:
            self.open(name)

    @rule(
        machine=st.sampled_from(MACHINES),
        what=st.sampled_from(["reopen", "gc", "index", "damage"]),
        which=st.integers(0, 99),
    )
    def something_happens(self, machine: str, what: str, which: int) -> None:
        if what == "reopen":
            self.open(machine)
        elif what == "gc":
            gc(self.stores[machine])
        elif what == "index":
            for store in self.stores.values():
                store.index.close()
            for path in self.folder.glob("index.sqlite3*"):
                path.unlink()
            for name in MACHINES:
                self.open(name)
        elif files := self.files():
            flip(files[which % len(files)], -1 - which % 30)
            self.spoilt = True

    @precondition(lambda self: self.listed)
    @rule(machine=st.sampled_from(MACHINES))
    def what_verify_finds_nothing_against_is_signed_and_right(self, machine: str) -> None:
        store = self.stores[machine]
        report = verify_store(store)
        bad = {bad.path for bad in report.bad}
        assert store.trust is not None
        believed = {store.trust.own, *store.trust.listed}
        for path in self.files():
            if str(path) in bad:
                continue
            block = block_of(path.read_bytes())
            assert block.signer in believed
            assert block.signed
            block.check_content()
        if not self.spoilt:
            assert report.bad == []


TestTrustMachine = TrustMachine.TestCase
TestTrustMachine.settings = settings(max_examples=40, stateful_step_count=12)
