"""verify of a remote with a trust list, and what read-through and a session's own look-up take."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvsnap.formats.codecs import calibration as registry
from kvsnap.formats.errors import Damaged, PartlyDone
from kvsnap.kvstore.remotes.counted import Counted
from kvsnap.kvstore.session import Session
from kvsnap.kvstore.sharing.pull import pull
from kvsnap.kvstore.sharing.push import push
from kvsnap.kvstore.sharing.verify_remote import verify_remote
from kvsnap.kvstore.store import Store
from kvsnap.kvstore.trust import Trust
from kvsnap.kvstore.verify import verify_session, verify_store
from kvsnap.testing.aftermath import assert_saved
from kvsnap.testing.stamped import StampedEngine
from kvsnap.testing.turns import some_ids, turn
from kvsnap.testing.untaught import untaught
from tests.planting import PLANTS, chain_files, plant
from tests.sharing.objects import ME
from tests.signers import Signers

Machine = Callable[..., Store]
IDS = some_ids(57)
MORE = [*IDS.tolist(), 1, 2, 3]
REASONS = (
    "no trusted key signed it",
    "the content digest differs: the rows are not the ones that were named",
)


@pytest.fixture
def keys(tmp_path: Path) -> Signers:
    return Signers(tmp_path / "keys")


def push_signed(store: Store, remote: Counted, keys: Signers, name: str = "chat") -> None:
    with keys.machine("a"):
        push(store, remote, ME, name, sign=True)


@pytest.mark.parametrize("how", PLANTS)
def test_verify_of_a_remote_names_what_no_trusted_key_signed(
    machine: Machine, remote: Counted, there: Path, keys: Signers, how: str
) -> None:
    a = machine("a")
    turn(a, StampedEngine(), IDS, "chat")
    push_signed(a, remote, keys)
    trust = keys.trusting(machine, "b", "a").trust
    assert verify_remote(remote, trust=trust).bad == []
    files = chain_files(there)
    plant(files[1], files[0], PLANTS[how])
    for report in (
        verify_remote(remote, trust=trust),
        verify_remote(remote, name="chat", trust=trust),
    ):
        (bad,) = report.bad
        assert bad.path == str(files[1].relative_to(there))
        assert bad.reason in REASONS


def test_verify_of_a_remote_names_sessions_of_others(
    machine: Machine, remote: Counted, keys: Signers
) -> None:
    a = machine("a")
    turn(a, StampedEngine(), IDS, "mine")
    turn(a, StampedEngine(), some_ids(40, 3), "plain")
    push_signed(a, remote, keys, "mine")
    push(a, remote, ME, "plain")
    report = verify_remote(remote, trust=Trust({keys.public("a"): ""}))
    (bad,) = report.bad
    assert bad.name == "plain"
    assert "nobody signed it" in bad.reason
    report = verify_remote(remote, trust=Trust({keys.public("z"): ""}))
    assert len(report.bad) == 2
    assert verify_remote(remote).bad == []


@pytest.mark.parametrize("how", PLANTS)
def test_verify_of_a_store_names_it_and_changes_nothing(
    machine: Machine, keys: Signers, how: str
) -> None:
    a = keys.trusting(machine, "a", "z")
    turn(a, StampedEngine(), IDS, "chat", codec="raw")
    files = chain_files(a.path)
    plant(files[1], files[0], PLANTS[how])
    planted = files[1].read_bytes()
    for report in (verify_store(a), verify_session(a, ME, "chat")):
        assert [bad.path for bad in report.bad] == [str(files[1])]
        assert report.bad[0].reason in REASONS
    assert files[1].read_bytes() == planted
    assert not a.place.quarantine.exists()


def test_a_session_is_not_brought_from_a_remote_that_nobody_trusted_pushed_to(
    machine: Machine, remote: Counted, keys: Signers
) -> None:
    """It is a new one here, and nothing of what is there is used."""
    a = machine("a")
    turn(a, StampedEngine(), IDS, "chat")
    push(a, remote, ME, "chat")
    b = keys.trusting(machine, "b", "a", remote=remote)
    with pytest.raises(Damaged, match=r"cannot be used: .* is not signed by a key"):
        b.find_session("chat", None)
    engine = StampedEngine()
    done = turn(b, engine, MORE, "chat", save=False)
    assert engine.positions == list(range(60))
    assert any("not signed" in line for line in done.resumed.damage)
    push_signed(a, remote, keys)
    c = keys.trusting(machine, "c", "a", remote=remote)
    engine = StampedEngine()
    turn(c, engine, MORE, "chat", save=False)
    assert engine.positions == [57, 58, 59]
    engine.check_rows()
    assert Session(c, engine, "chat").stored_token_ids().tolist() == IDS.tolist()


@pytest.mark.parametrize("where", ["remote", "store"])
def test_a_calibration_in_anothers_place_decodes_nothing(
    machine: Machine,
    remote: Counted,
    there: Path,
    keys: Signers,
    monkeypatch: pytest.MonkeyPatch,
    where: str,
) -> None:
    """Its digest is part of every block's name: another one, right by its own digest, gives no rows."""
    monkeypatch.setattr(registry, "_REGISTERED", {})
    a, engine = machine("a"), StampedEngine()
    weights = engine.identity(16, lambda path: "").weights
    genuine = a.calibrations.put(untaught(engine.layout, weights))
    other = machine("other").calibrations
    forged = other.path(other.put(untaught(engine.layout, weights, finest=0.5))).read_bytes()
    turn(a, StampedEngine(), IDS, "chat", codec="kvtc")
    push_signed(a, remote, keys)
    b = keys.trusting(machine, "b", "a")
    monkeypatch.setattr(registry, "_REGISTERED", {})
    if where == "remote":
        (there / "calibrations" / f"{genuine}.safetensors").write_bytes(forged)
        with pytest.raises(PartlyDone, match="another calibration"):
            pull(b, remote, "chat")
    else:
        pull(b, remote, "chat")
        b.calibrations.path(genuine).write_bytes(forged)
        monkeypatch.setattr(registry, "_REGISTERED", {})
    engine = StampedEngine()
    turn(b, engine, MORE, "chat", save=False)
    assert engine.positions == list(range(60))
    engine.check_rows()


def test_a_lossy_block_of_a_trusted_key_is_used_as_it_was_coded(
    machine: Machine, remote: Counted, keys: Signers
) -> None:
    a = machine("a")
    turn(a, StampedEngine(), IDS, "chat", codec="q4")
    push_signed(a, remote, keys)
    b = keys.trusting(machine, "b", "a")
    pull(b, remote, "chat")
    rows = []
    for store in (a, b):
        engine = StampedEngine()
        turn(store, engine, MORE, "chat", save=False)
        assert engine.positions == [57, 58, 59]
        rows.append(engine.export(0, 57))
    assert all((rows[0][name] == rows[1][name]).all() for name in rows[0])


def test_trusting_a_machine_later_makes_its_sessions_usable(
    machine: Machine, remote: Counted, keys: Signers
) -> None:
    a = machine("a")
    turn(a, StampedEngine(), IDS, "chat")
    push_signed(a, remote, keys)
    b = keys.trusting(machine, "b", "z")
    with pytest.raises(Damaged, match="not signed by a key that this store trusts"):
        pull(b, remote, "chat")
    b = keys.trusting(machine, "b", "z", "a")
    pull(b, remote, "chat")
    assert_saved(b, IDS, "chat")
