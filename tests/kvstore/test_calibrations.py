"""Calibrations in a store: named by their digest, never evicted, missing ones a miss with a reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kvsnap.formats.codecs import calibration as registry
from kvsnap.formats.codecs import get_codec
from kvsnap.formats.errors import NotFound, Unsupported
from kvsnap.formats.identity import EXACT
from kvsnap.kvstore.doctor import examine
from kvsnap.kvstore.gc import gc
from kvsnap.kvstore.store import Store
from kvsnap.kvstore.verify import verify_store
from kvsnap.testing.recount import assert_counts
from kvsnap.testing.stamped import StampedEngine
from kvsnap.testing.turns import some_ids, turn
from kvsnap.testing.untaught import untaught

Opener = Callable[[], Store]
IDS = some_ids(57)
WEIGHTS = StampedEngine().identity(16, lambda path: "").weights


@pytest.fixture(autouse=True)
def _nothing_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has read no calibration yet."""
    monkeypatch.setattr(registry, "_REGISTERED", {})


def put(store: Store, **changes: object) -> str:
    made = untaught(StampedEngine().layout, WEIGHTS)
    return store.calibrations.put(replace(made, **changes))


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_REGISTERED", {})


def test_a_session_takes_the_models_newest_and_says_which(open_store: Opener) -> None:
    store = open_store()
    put(store, model="another model")
    digest = put(store)
    done = turn(store, StampedEngine(), IDS, "chat", codec="kvtc")
    assert done.session.root.fidelity == get_codec(f"kvtc;calibration={digest}").fidelity
    assert done.saved is not None
    assert (done.saved.codec, done.saved.fidelity) == ("kvtc", done.session.root.fidelity)


def test_a_new_process_reads_the_one_that_the_session_names(
    open_store: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = put(open_store())
    turn(open_store(), StampedEngine(), IDS, "chat", codec="kvtc")
    put(open_store(), finest=0.005)  # a newer one is no reason to read with it
    forget(monkeypatch)
    done = turn(open_store(), StampedEngine(), IDS, "chat")
    assert done.resumed.reused_tokens == 56
    assert digest in done.resumed.fidelity
    assert verify_store(open_store()).bad == []


def test_without_a_calibration_nothing_is_guessed(open_store: Opener) -> None:
    with pytest.raises(NotFound, match="needs a calibration") as caught:
        turn(open_store(), StampedEngine(), IDS, codec="kvtc")
    assert "kvsnap calibrate" in caught.value.hint
    with pytest.raises(Unsupported, match="is not in the store"):
        turn(open_store(), StampedEngine(), IDS, codec=f"kvtc;calibration={'0' * 64}")
    with pytest.raises(Unsupported, match="not the digest"):
        turn(open_store(), StampedEngine(), IDS, codec="kvtc;calibration=../../etc/passwd")


@pytest.mark.parametrize("how", ["gone", "damaged", "another's"])
def test_blocks_whose_calibration_cannot_be_used_are_a_miss_and_stay(
    open_store: Opener, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    store = open_store()
    path = store.calibrations.path(put(store))
    turn(store, StampedEngine(), IDS, "chat", codec="kvtc")
    if how == "gone":
        path.unlink()
    elif how == "damaged":
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    else:
        path.write_bytes(store.calibrations.path(put(store, finest=0.005)).read_bytes())
    forget(monkeypatch)
    engine = StampedEngine()
    done = turn(open_store(), engine, IDS, "chat", save=False)
    assert engine.positions == list(range(57))
    assert done.session.root.fidelity == EXACT
    assert any("calibration" in line for line in done.resumed.damage)
    engine.check_rows()
    forget(monkeypatch)
    report = verify_store(open_store())
    assert all("calibration" in bad.reason or bad.path == str(path) for bad in report.bad)
    assert len(report.bad) == 3 + (how != "gone")  # a wrong file is told of itself, too
    assert len(list(open_store().place.blocks.glob("*/*"))) == 3
    assert not list(open_store().place.quarantine.glob("*"))


def test_it_counts_in_the_budget_and_is_never_evicted(opened: Callable[..., Store]) -> None:
    store = opened(capacity=300_000)
    before = store.space.used()
    path = store.calibrations.path(put(store))
    assert store.space.used() - before == path.stat().st_size
    turn(store, StampedEngine(), some_ids(800), codec="raw")
    gc(store)
    assert path.is_file()
    assert store.space.used() <= 300_000
    assert_counts(store)


def test_storing_one_again_writes_nothing(open_store: Opener) -> None:
    digest = put(open_store())
    status = open_store().calibrations.path(digest).stat()
    assert put(open_store()) == digest
    assert open_store().calibrations.path(digest).stat().st_ino == status.st_ino


def test_another_layout_is_refused_before_anything_is_computed(open_store: Opener) -> None:
    put(open_store())
    engine = StampedEngine(layers=3)
    with pytest.raises(Unsupported, match="calibration has no plane"):
        turn(open_store(), engine, IDS, codec="kvtc")
    assert engine.evaluated == 0


def test_nothing_is_stored_whose_calibration_is_not_in_this_store(
    open_store: Opener, tmp_path: Path
) -> None:
    # That another store of this process has it, or that it was here once, reads nothing back later.
    with Store(tmp_path / "other") as other:
        digest = put(other)
        turn(other, StampedEngine(), IDS, codec="kvtc")
    with pytest.raises(Unsupported, match="is not in the store"):
        turn(open_store(), StampedEngine(), IDS, "chat", codec=f"kvtc;calibration={digest}")
    assert not list(open_store().place.blocks.glob("*/*"))
    store = open_store()
    path = store.calibrations.path(put(store))
    done = turn(store, StampedEngine(), IDS, "chat", codec="kvtc", save=False)
    path.rename(path.with_name("my-model.safetensors"))
    with pytest.raises(Unsupported, match="is not in the store"):
        done.session.save()
    assert store.calibrations.newest(WEIGHTS) is None


def test_calibrating_again_heals_a_damaged_file(open_store: Opener) -> None:
    store = open_store()
    path = store.calibrations.path(put(store))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert [bad.path for bad in verify_store(store).bad] == [str(path)]
    put(store)
    assert verify_store(store).bad == []


def test_another_models_calibration_is_not_used(open_store: Opener) -> None:
    store = open_store()
    digest = put(store, model="another model")
    with pytest.raises(Unsupported, match="another model's"):
        turn(store, StampedEngine(), IDS, codec=f"kvtc;calibration={digest}")
    own = put(store)
    turn(store, StampedEngine(), IDS, "chat", codec="kvtc")
    tuned = StampedEngine(weights="fine-tuned")
    done = turn(open_store(), tuned, IDS, "chat", save=False)
    assert done.session.root.fidelity == EXACT
    other = replace(untaught(tuned.layout, "fine-tuned"), finest=0.002)
    theirs = store.calibrations.put(other)
    done = turn(open_store(), StampedEngine(weights="fine-tuned"), IDS, "chat", save=False)
    assert theirs in done.session.root.fidelity
    assert own not in done.session.root.fidelity


def test_the_doctor_knows_the_folder_and_tells_of_strangers_in_it(open_store: Opener) -> None:
    store = open_store()
    path = store.calibrations.path(put(store))
    assert not [f for f in examine(store.path) if "not kvsnap's" in f.what]
    path.with_name("my-model.safetensors").write_bytes(path.read_bytes())
    (told,) = [f for f in examine(store.path) if "not kvsnap's" in f.what]
    assert "calibrations/my-model.safetensors" in told.what
