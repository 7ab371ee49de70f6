"""`gc` of a remote: what no manifest names goes, after its grace; everything else stays."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvsnap.formats.errors import Damaged, NotFound, PartlyDone, RemoteDown
from kvsnap.formats.tenant import Tenant, tenant_id
from kvsnap.kvstore.keyring import Keyring
from kvsnap.kvstore.remotes.counted import Counted
from kvsnap.kvstore.sharing.pull import pull
from kvsnap.kvstore.sharing.push import push
from kvsnap.kvstore.sharing.remove import remove
from kvsnap.kvstore.sharing.sweep import sweep
from kvsnap.kvstore.store import Store
from kvsnap.testing.aftermath import assert_saved
from kvsnap.testing.stamped import StampedEngine
from kvsnap.testing.turns import some_ids, turn
from tests.sharing.hooked import Hooked
from tests.sharing.objects import ME, block_files, files_of, only, save_and_push

Machine = Callable[..., Store]
IDS = some_ids(57)
OTHER = np.concatenate([IDS[:32], some_ids(40, 3)])
DAY = 24 * 3600.0


def age(there: Path, days: float) -> None:
    """Every object was written so long ago."""
    then = time.time() - days * DAY
    for path in there.rglob("*"):
        os.utime(path, (then, then))


@pytest.fixture
def two(machine: Machine, remote: Counted, there: Path) -> Store:
    """Two old sessions that share two blocks."""
    store = machine("a")
    save_and_push(store, remote, IDS, "one")
    save_and_push(store, remote, OTHER, "two")
    age(there, 30)
    return store


def test_what_sessions_name_stays(two: Store, remote: Counted, there: Path) -> None:
    before = files_of(there)
    report = sweep(remote)
    assert (report.sessions, report.removed_files, report.kept_files) == (2, 0, 7)
    assert files_of(there) == before


def test_what_only_a_removed_session_named_goes(
    two: Store, machine: Machine, remote: Counted, there: Path
) -> None:
    remove(remote, Keyring(), ME, ["one"])
    before = files_of(there)
    planned = sweep(remote, dry_run=True)
    assert files_of(there) == before
    report = sweep(remote)
    assert (planned.removed_files, planned.freed_bytes) == (2, report.freed_bytes)
    assert planned.dry_run
    gone = before.keys() - files_of(there).keys()
    assert sorted(key.split("/")[0] for key in gone) == ["blocks", "sessions"]
    assert report.freed_bytes == sum(len(before[key]) for key in gone)
    b = machine("b")
    pull(b, remote, "two")
    assert_saved(b, OTHER, "two")
    with pytest.raises(NotFound):
        pull(b, remote, "one")


def test_what_is_young_stays_for_its_grace(two: Store, remote: Counted, there: Path) -> None:
    remove(remote, Keyring(), ME, ["one"])
    for path in there.rglob("*"):
        os.utime(path)
    report = sweep(remote)
    assert (report.removed_files, report.young_files) == (0, 2)
    age(there, 6.9)
    assert sweep(remote).removed_files == 0
    age(there, 7.1)
    assert sweep(remote).removed_files == 2


def test_children_go_before_their_parents(machine: Machine, remote: Counted, there: Path) -> None:
    """A sweep that is cut off must leave prefixes."""
    ids = some_ids(16 * 30)
    save_and_push(machine("a"), remote, ids, "chat")
    chain = [path.stem for path in block_files(there)]
    remove(remote, Keyring(), ME, ["chat"])
    for number, path in enumerate(block_files(there)):
        then = time.time() - 30 * DAY + number
        os.utime(path, (then, then))
    deleted: list[str] = []

    def stop(operation: str, key: str) -> None:
        if operation == "delete" and key.startswith("blocks/"):
            if len(deleted) >= 10:
                raise RemoteDown("gone")
            deleted.append(key.rsplit("/", 1)[-1].removesuffix(".safetensors"))

    with pytest.raises(RemoteDown):
        sweep(Hooked(remote, stop))
    left = [path.stem for path in block_files(there)]
    assert left == chain[: len(left)] or set(chain[: len(left) - 16]) <= set(left)
    assert set(deleted) <= set(chain[-10 - 16 :])


@pytest.mark.parametrize("damage", ["cut", "flipped", "newer", "text", "empty"])
def test_a_manifest_that_cannot_be_read_stops_it(
    two: Store, remote: Counted, there: Path, damage: str
) -> None:
    """What it names is not known, and must not go."""
    path = there / "manifests" / ME / "one.safetensors"
    data = path.read_bytes()
    path.write_bytes(
        {
            "cut": data[:-1],
            "flipped": data[:-1] + bytes([data[-1] ^ 1]),
            "newer": data.replace(b'"kvsnap":"1"', b'"kvsnap":"9"'),
            "text": b"not a manifest",
            "empty": b"",
        }[damage]
    )
    before = files_of(there)
    with pytest.raises(Damaged, match=r"damaged manifest, manifests/default/one\.safetensors"):
        sweep(remote)
    assert files_of(there) == before


def test_what_is_not_ours_stays(two: Store, remote: Counted, there: Path) -> None:
    strange = {
        "blocks/readme.txt": b"mine",
        "blocks/ab/notes.safetensors": b"mine",
        "sessions/default/chat.safetensors": b"mine",
        "backup/blocks/ab/" + "a" * 64 + ".safetensors": b"mine",
        "top": b"mine",
    }
    for key, data in strange.items():
        remote.put(key, data)
    age(there, 30)
    assert sweep(remote, grace_days=0).foreign_files == 3
    assert strange.items() <= files_of(there).items()


def test_sessions_of_all_tenants_keep_their_files(
    machine: Machine, remote: Counted, there: Path
) -> None:
    """Whoever sweeps needs no key."""
    store, alice = machine("a"), Tenant(bytes(range(32)))
    for tenant in (alice, None):
        turn(store, StampedEngine(), IDS, "chat", tenant=tenant)
        push(store, remote, tenant_id(tenant), "chat")
    age(there, 30)
    assert sweep(remote).removed_files == 0
    remove(remote, Keyring(), ME, ["chat"])
    assert sweep(remote).removed_files == 4
    assert pull(machine("b"), remote, "chat", tenant=alice).stored_blocks == 3


def test_the_version_before_goes_with_the_tail_it_had(
    machine: Machine, remote: Counted, there: Path
) -> None:
    store = machine("a")
    save_and_push(store, remote, IDS, "chat")
    save_and_push(store, remote, np.concatenate([IDS, some_ids(3, 5)]), "chat")
    age(there, 30)
    assert sweep(remote).removed_files == 1
    only(there, "sessions")


@pytest.mark.parametrize("operation", ["list", "get", "delete"])
def test_a_sweep_that_fails_leaves_no_mark(
    two: Store, remote: Counted, there: Path, operation: str
) -> None:
    remove(remote, Keyring(), ME, ["one"])

    def fail(what: str, key: str) -> None:
        if what == operation and not key.startswith("sweeping/"):
            raise RemoteDown("gone")

    with pytest.raises(RemoteDown):
        sweep(Hooked(remote, fail))
    assert not list(remote.list("sweeping/"))


def test_a_sweep_that_fails_has_ended_when_its_mark_goes(
    machine: Machine, remote: Counted, there: Path
) -> None:
    """A push that finds no mark relies on it that nothing is deleted any more."""
    save_and_push(machine("a"), remote, IDS, "chat")
    remove(remote, Keyring(), ME, ["chat"])
    age(there, 30)
    failed, running, lock = threading.Event(), threading.Event(), threading.Lock()
    order: list[str] = []

    class Slow(Hooked):
        def delete(self, key: str) -> None:
            if key.startswith("sweeping/"):
                order.append("mark gone")
                super().delete(key)
                return
            with lock:
                order.append("begun")
                first = order.count("begun") == 1
            if first:
                assert running.wait(30)
                threading.Timer(0.2, failed.set).start()
                raise RemoteDown("gone")
            running.set()
            assert failed.wait(30)
            super().delete(key)
            order.append("deleted")

    with pytest.raises(RemoteDown):
        sweep(Slow(remote, lambda operation, key: None))
    assert failed.wait(30)
    assert "deleted" in order
    assert order[-1] == "mark gone"


def test_an_interrupted_sweep_leaves_no_mark(two: Store, remote: Counted) -> None:
    remove(remote, Keyring(), ME, ["one"])

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sweep(remote, progress=interrupt)
    assert not list(remote.list("sweeping/"))


def test_removing_is_all_or_nothing(two: Store, remote: Counted) -> None:
    with pytest.raises(NotFound, match="three"):
        remove(remote, Keyring(), ME, ["one", "three"])
    assert len(list(remote.list("manifests/"))) == 2


def test_blocks_that_a_short_manifest_leaves_out_are_swept_and_sent_again(
    machine: Machine, remote: Counted, there: Path
) -> None:
    """A session pushed again after its end came back names all of it again."""
    a, full = machine("a"), machine("full")
    turn(a, StampedEngine(), IDS, "one")
    for path in sorted(a.place.blocks.glob("*/*")):
        (start,) = a.index.query(
            "SELECT start FROM blocks WHERE name = ?", (bytes.fromhex(path.stem),)
        )[0]
        if start >= 16:
            path.unlink()
            a.blocks.set_aside(bytes.fromhex(path.stem), "lost for the test")
    with pytest.raises(PartlyDone, match="2 of 3 blocks were evicted"):
        push(a, remote, ME, "one")
    save_and_push(full, remote, IDS, "two")
    turn(a, StampedEngine(), IDS)
    push(a, remote, ME, "one")
    remove(remote, Keyring(), ME, ["two"])
    age(there, 30)
    sweep(remote)
    b = machine("b")
    pull(b, remote, "one")
    assert_saved(b, IDS, "one")
