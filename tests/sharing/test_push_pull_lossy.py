"""Lossy sessions: the same lossy rows elsewhere, the calibration with them, never mixed with exact ones."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kvsnap.formats.codecs import calibration as registry
from kvsnap.formats.codecs import get_codec
from kvsnap.formats.errors import PartlyDone
from kvsnap.formats.identity import EXACT
from kvsnap.kvstore.remotes.counted import Counted
from kvsnap.kvstore.sharing.pull import pull
from kvsnap.kvstore.store import Store
from kvsnap.testing.aftermath import assert_clean
from kvsnap.testing.stamped import StampedEngine
from kvsnap.testing.turns import some_ids, turn
from kvsnap.testing.untaught import untaught
from tests.sharing.objects import resume, save_and_push

Machine = Callable[..., Store]
IDS = some_ids(57)


@pytest.fixture(autouse=True)
def _nothing_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_REGISTERED", {})


def calibrated(store: Store) -> str:
    engine = StampedEngine()
    return store.calibrations.put(
        untaught(engine.layout, engine.identity(16, lambda path: "").weights)
    )


def rows(store: Store) -> tuple[list[int], str, dict[str, np.ndarray]]:
    """Positions computed, fidelity, and the rows of all positions but the last."""
    engine = StampedEngine()
    done = turn(store, engine, IDS, "chat", save=False)
    return engine.positions, done.resumed.fidelity, engine.export(0, 56)


@pytest.mark.parametrize("codec", ["q8", "q4", "kvtc"])
def test_the_same_lossy_rows_are_restored_elsewhere(
    machine: Machine, remote: Counted, monkeypatch: pytest.MonkeyPatch, codec: str
) -> None:
    a, b = machine("a"), machine("b")
    digest = calibrated(a) if codec == "kvtc" else ""
    save_and_push(a, remote, IDS, "chat", codec=codec)
    here = rows(a)
    monkeypatch.setattr(registry, "_REGISTERED", {})  # as a process that never saw it
    pull(b, remote, "chat")
    elsewhere = rows(b)
    assert here[:2] == elsewhere[:2]
    assert here[0] == [56]
    assert here[1].startswith(codec)
    assert all(np.array_equal(here[2][name], elsewhere[2][name]) for name in here[2])
    assert_clean(b)
    if digest:
        assert b.calibrations.path(digest).exists()


def test_an_exact_session_does_not_use_pulled_lossy_blocks(
    machine: Machine, remote: Counted
) -> None:
    save_and_push(machine("a"), remote, IDS, "chat", codec="q8")
    b = machine("b")
    pull(b, remote, "chat")
    assert resume(b, IDS).positions == list(range(57))


def test_without_its_calibration_a_session_is_short_and_says_so(
    machine: Machine, remote: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = machine("a"), machine("b")
    digest = calibrated(a)
    save_and_push(a, remote, IDS, "chat", codec="kvtc")
    remote.delete(f"calibrations/{digest}.safetensors")
    monkeypatch.setattr(registry, "_REGISTERED", {})
    with pytest.raises(PartlyDone, match="calibration"):
        pull(b, remote, "chat")
    engine = StampedEngine()
    done = turn(b, engine, IDS, "chat", save=False)
    assert engine.positions == list(range(57))
    assert done.resumed.fidelity == EXACT
    engine.check_rows()


def test_a_wrong_calibration_under_the_right_name_is_not_taken(
    machine: Machine, remote: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = machine("a"), machine("b")
    digest = calibrated(a)
    save_and_push(a, remote, IDS, "chat", codec="kvtc")
    engine = StampedEngine()
    weights = engine.identity(16, lambda path: "").weights
    other = registry.pack_calibration(untaught(engine.layout, weights, finest=0.5))
    data = b"".join(bytes(memoryview(part).cast("B")) for part in other.buffers)
    remote.put(f"calibrations/{digest}.safetensors", data)
    monkeypatch.setattr(registry, "_REGISTERED", {})
    with pytest.raises(PartlyDone, match="another calibration"):
        pull(b, remote, "chat")
    assert not b.place.calibrations.exists() or not list(b.place.calibrations.iterdir())


def test_a_calibration_that_two_sessions_share_moves_once(
    machine: Machine, remote: Counted
) -> None:
    a, b = machine("a"), machine("b")
    calibrated(a)
    save_and_push(a, remote, IDS, "chat", codec="kvtc")
    pull(b, remote, "chat")
    save_and_push(a, remote, IDS, "again", codec="kvtc")
    assert get_codec(a.sessions.load("default", "again").record.fidelity).id == "kvtc"
    assert pull(b, remote, "again").moved_files == 0
