"""Measuring computing against restoring: what is measured, what is said, and what is left behind."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvsnap.engines.base import Landing
from kvsnap.formats.errors import DoesNotFit, KvsnapError, UsageError
from kvsnap.formats.identity import Identity
from kvsnap.formats.names import TokenIds
from kvsnap.kvstore.break_even import Record, key_of, this_machine
from kvsnap.kvstore.curve import curve
from kvsnap.kvstore.measure import crossover, page_cache
from kvsnap.kvstore.measure.crossover import Crossover, measure
from kvsnap.kvstore.session import Session
from kvsnap.kvstore.store import Store
from kvsnap.testing.stamped import StampedEngine
from kvsnap.testing.turns import some_ids, turn


@pytest.fixture(autouse=True)
def cold_disk(monkeypatch: pytest.MonkeyPatch) -> list[list[Path]]:
    """Tests may run in memory, where no file can be cold: what is dropped is written down."""
    dropped: list[list[Path]] = []

    def drop(paths: object) -> str:
        dropped.append(list(paths))  # type: ignore[call-overload]
        return ""

    monkeypatch.setattr(page_cache, "drop", drop)
    return dropped


def test_every_length_is_computed_and_restored_from_every_tier(store: Store) -> None:
    engine = StampedEngine()
    found = measure(store, engine, some_ids(100), [16, 48, 90], model="m", codec="raw")
    assert found.tokens == (16, 48, 96), "rounded up to blocks of 16"
    assert set(found.record.restore) == {"memory", "disk", "cold"}
    for known in found.record.restore.values():
        assert [tokens for tokens, _ in known.points] == [16, 48, 96]
    assert [tokens for tokens, _ in found.record.prefill.points] == [1, 16, 48, 96]
    assert engine.evaluated == 1 + 3 * (1 + 16 + 48 + 96), "once to set the engine up, then rounds"
    assert (found.record.model, found.record.codec) == ("m", "raw")
    assert found.record.machine == this_machine()
    assert found.notes == ()


def test_the_record_stands_under_the_key_that_a_session_looks_for(store: Store) -> None:
    engine = StampedEngine()
    found = measure(store, engine, some_ids(32), [16], rounds=1)
    assert found.key == key_of(Session(store, engine).root.identity)


def test_what_is_cold_is_dropped_and_only_that(store: Store, cold_disk: list[list[Path]]) -> None:
    measure(store, StampedEngine(), some_ids(48), [16, 48], rounds=2)
    assert [len(files) for files in cold_disk] == 2 * ([1] * 3 + [3] * 3)
    assert all(path.suffix == ".safetensors" for files in cold_disk for path in files)


def test_restored_rows_are_the_engines_own(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = StampedEngine()
    loads = 0
    load = engine.load

    def checked(landing: Landing, token_ids: TokenIds) -> None:
        nonlocal loads
        load(landing, token_ids)
        engine.check_rows()
        loads += 1

    monkeypatch.setattr(engine, "load", checked)
    measure(store, engine, some_ids(48), [16, 48], rounds=2)
    assert loads == 1 + 2 * 2 * 3 * 3


def test_the_users_store_is_as_it_was_and_the_engine_is_empty(store: Store) -> None:
    turn(store, StampedEngine(), some_ids(40, seed=1), "chat")
    before = {path: path.read_bytes() for path in store.path.rglob("*.safetensors")}
    used = store.index.query("SELECT name, used FROM blocks ORDER BY name")
    engine = StampedEngine()
    measure(store, engine, some_ids(48), [48], rounds=1)
    after = {path: path.read_bytes() for path in store.path.rglob("*.safetensors")}
    assert before == after
    assert used == store.index.query("SELECT name, used FROM blocks ORDER BY name")
    assert not list(store.path.glob("tmp/kvsnap-bench-*"))
    assert engine.held == 0


def test_a_store_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    with Store(tmp_path / "none" / "store") as store:
        measure(store, StampedEngine(), some_ids(64), [64], rounds=1)
    assert list(tmp_path.iterdir()) == []


def test_a_models_file_is_not_hashed_anew(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Path] = []

    class FromFile(StampedEngine):
        def identity(self, block_size: int, file_digest: Callable[[Path], str]) -> Identity:
            return replace(super().identity(block_size, file_digest), weights=file_digest(tmp_path))

    def remembered(path: Path) -> str:
        asked.append(path)
        return "blake3:00"

    monkeypatch.setattr(store, "file_digest", remembered)
    measure(store, FromFile(), some_ids(16), [16], rounds=1)
    assert asked == [tmp_path]


def test_nothing_is_left_behind_where_the_engine_fails(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    turn(store, StampedEngine(), some_ids(40), "chat")
    engine = StampedEngine()

    def load(landing: Landing, token_ids: TokenIds) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(engine, "load", load)
    with pytest.raises(KeyboardInterrupt):
        measure(store, engine, some_ids(48), [48])
    assert not list(store.path.glob("tmp/kvsnap-bench-*"))


def test_what_a_killed_measurement_left_goes_after_a_day(store: Store) -> None:
    turn(store, StampedEngine(), some_ids(40), "chat")
    for name, age in (("kvsnap-bench-old", 2), ("kvsnap-bench-new", 0), ("mine", 2)):
        (store.place.temporary / name / "blocks").mkdir(parents=True)
        then = time.time() - age * 86400
        os.utime(store.place.temporary / name, (then, then))
    measure(store, StampedEngine(), some_ids(48), [48], rounds=1)
    left = {path.name for path in store.place.temporary.iterdir() if path.is_dir()}
    assert left == {"kvsnap-bench-new", "mine"}


def test_lengths_that_take_too_long_are_left_out_and_named(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = 0.0

    class Slow(StampedEngine):
        """A tenth of a second a token, by the clock that the measurement looks at."""

        def _compute(self, token: int) -> None:
            nonlocal clock
            clock += 0.1
            super()._compute(token)

    monkeypatch.setattr(crossover.time, "perf_counter", lambda: clock)
    engine = Slow()
    found = measure(store, engine, some_ids(160), [16, 48, 96, 160], rounds=1, within=10)
    assert found.tokens == (16, 48)
    (note,) = found.notes
    assert note.startswith("left out: 96, 160 tokens; with 96 it would take about 16 s")
    assert engine.evaluated == 1 + 1 + 16 + 48
    assert measure(store, Slow(), some_ids(96), [96], rounds=1, within=1).tokens == (96,)


def test_a_tier_that_cannot_be_measured_is_left_out_and_named(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_cache, "drop", lambda paths: "no such call")
    found = measure(store, StampedEngine(), some_ids(48), [16, 48], rounds=2)
    assert set(found.record.restore) == {"memory", "disk"}
    assert found.notes == ("cold is not measured: no such call",)
    assert found.cheaper_from("cold") is None


def test_a_restore_that_brings_less_is_an_error_not_a_figure(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut(paths: object) -> str:
        for path in paths:  # type: ignore[attr-defined]
            path.write_bytes(path.read_bytes()[:-1])
        return ""

    monkeypatch.setattr(page_cache, "drop", cut)
    with pytest.raises(KvsnapError, match="only 0 of 48 tokens came back: damaged"):
        measure(store, StampedEngine(), some_ids(48), [48])


@pytest.mark.parametrize(
    ("lengths", "error"),
    [([], UsageError), ([0], UsageError), ([-5], UsageError), ([49], DoesNotFit)],
)
def test_lengths_that_make_no_sense_are_refused(
    store: Store, lengths: list[int], error: type[KvsnapError]
) -> None:
    engine = StampedEngine()
    with pytest.raises(error):
        measure(store, engine, some_ids(48), lengths)
    assert engine.evaluated == 0


def test_progress_never_goes_back_and_ends_at_its_total(store: Store) -> None:
    seen: list[tuple[int, int]] = []
    measure(store, StampedEngine(), some_ids(48), [16, 48], step=lambda *s: seen.append(s))
    done = [done for done, _ in seen]
    assert done == sorted(done)
    assert done[-1] == seen[-1][1]
    assert all(done <= total for done, total in seen)


def found_with(restore: list[tuple[int, float]]) -> Crossover:
    record = Record(
        prefill=curve([(1, 0.010), (64, 0.074), (1024, 1.034)]),
        restore={"disk": curve(restore)},
        model="",
        codec="raw",
        measured=1,
        machine="",
    )
    return Crossover(key="", record=record, block_size=64, rounds=1, notes=())


def test_restoring_is_cheaper_from_where_the_lines_cross() -> None:
    """Computing takes 1 ms a token besides 10 ms that are paid either way."""
    found = found_with([(64, 0.2), (1024, 0.2)])
    assert abs((found.cheaper_from("disk") or 0) - 200) <= 2
    assert found_with([(64, 0.01), (1024, 0.1)]).cheaper_from("disk") == 64, "always"
    assert found_with([(64, 0.1), (1024, 5.0)]).cheaper_from("disk") is None, "never"
    assert found_with([(64, 0.01), (1024, 5.0)]).cheaper_from("disk") is None, "not at the end"


def test_a_tier_that_does_not_hold_what_it_should_is_no_figure(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crossover.Ram, "keep", lambda *args: None)
    found = measure(store, StampedEngine(), some_ids(48), [48], rounds=1)
    assert set(found.record.restore) == {"disk", "cold"}
    assert found.notes == ("memory is not measured: the blocks did not come from it",)


def test_ids_beyond_the_longest_length_change_nothing(store: Store) -> None:
    ids = np.concatenate([some_ids(48), some_ids(100, seed=3)])
    found = measure(store, StampedEngine(), ids, [48], rounds=1)
    assert found.tokens == (48,)
