"""Manifests that lie, right by their own digest: refused whole, or what they lie about is not believed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvsnap.formats.container import Tensor
from kvsnap.formats.errors import Damaged, PartlyDone
from kvsnap.formats.manifest import (
    BLOCK,
    CALIBRATION,
    ITEM_KINDS,
    SESSION,
    STATE,
    Item,
    manifest_key,
)
from kvsnap.kvstore.remotes.counted import Counted
from kvsnap.kvstore.sharing.pull import PullReport, pull
from kvsnap.kvstore.sharing.push import push
from kvsnap.kvstore.store import Store
from kvsnap.testing.aftermath import assert_saved
from kvsnap.testing.stamped import StampedEngine
from kvsnap.testing.turns import some_ids, turn
from tests.sharing.objects import (
    ME,
    change_manifest,
    manifest_there,
    only,
    put_manifest,
    rewrite,
    save_and_push,
)

Machine = Callable[..., Store]
IDS, OTHER = some_ids(57), some_ids(57, 5)
Items = list[Item]


def state_of(items: Items, position: int) -> Item:
    return replace(items[-1], kind=STATE, name=b"s" * 32, position=position)


LIES: dict[str, Callable[[Items, Items], Items]] = {
    "foreign blocks": lambda own, other: [*other[:3], own[3]],
    "one foreign block": lambda own, other: [*own[:2], other[2], own[3]],
    "another order": lambda own, other: [own[1], own[0], *own[2:]],
    "a hole": lambda own, other: [own[0], *own[2:]],
    "its front missing": lambda own, other: own[1:],
    "a state of nothing": lambda own, other: [*own, state_of(own, 40)],
    "a state beyond the end": lambda own, other: [*own, state_of(own, 2**63)],
    "a block as a state": lambda own, other: [*own[:2], replace(own[2], kind=STATE), own[3]],
    "a calibration of nothing": lambda own, other: [
        *own,
        replace(own[3], kind=CALIBRATION, name=b"c" * 32),
    ],
    "another session's file": lambda own, other: [*own[:3], other[3]],
}
FIELDS = {
    "another name": {"name": "other"},
    "another root": {"root_id": "0" * 64},
    "another fidelity": {"fidelity": "q8"},
    "another block size": {"block_size": 8},
    "another revision": {"revision": 7},
    "more tokens": {"tokens": 10**6},
}


@pytest.fixture
def pushed(machine: Machine, remote: Counted) -> Store:
    store = machine("a")
    save_and_push(store, remote, IDS, "chat")
    save_and_push(store, remote, OTHER, "other")
    return store


def refused(machine: Machine, remote: Counted, match: str | None = None) -> None:
    b = machine("b")
    with pytest.raises(Damaged, match=match) as caught:
        pull(b, remote, "chat")
    assert "\n" not in caught.value.what
    assert not b.place.blocks.exists()
    assert not b.place.sessions.exists()
    assert not b.place.calibrations.exists()


@pytest.mark.parametrize("lie", LIES)
def test_what_is_not_the_sessions_is_refused(
    pushed: Store, machine: Machine, remote: Counted, lie: str
) -> None:
    other = list(manifest_there(remote, "other").items)
    change_manifest(remote, "chat", lambda own: LIES[lie](own, other))
    refused(machine, remote)


@pytest.mark.parametrize("lie", FIELDS)
def test_fields_that_are_not_the_sessions_are_refused(
    pushed: Store, machine: Machine, remote: Counted, lie: str
) -> None:
    manifest = manifest_there(remote, "chat")
    key = manifest_key(manifest.tenant_id, manifest.name)
    put_manifest(remote, replace(manifest, **FIELDS[lie]))
    changed = replace(manifest, **FIELDS[lie])
    there = manifest_key(changed.tenant_id, changed.name)
    if there != key:
        remote.put(key, remote.get(there, 2**20).data)
    refused(machine, remote)


def tensors(kinds: list[int], names: list[bytes], sizes: list[int]) -> Callable[[dict], None]:
    def change(found: dict[str, Tensor]) -> None:
        count = len(kinds)
        digests = np.frombuffer(b"".join(names), np.uint8).reshape(-1, 32)
        number = {"sizes": np.array(sizes, "<u8"), "positions": np.zeros(count, "<u8")}
        for key, array in number.items():
            found[key] = Tensor("U64", array.shape, array)
        for key in ("names", "files", "contents"):
            found[key] = Tensor("U8", digests.shape, digests)
        found["kinds"] = Tensor("U8", (count,), np.array(kinds, np.uint8))

    return change


@pytest.mark.parametrize(
    ("kinds", "names"),
    [
        ([0, 0, 0, 0, 3], [bytes([n]) * 32 for n in range(5)]),  # more blocks than tokens have
        ([0, 0, 0, 3], [b"a" * 32, b"a" * 32, b"b" * 32, b"c" * 32]),  # one twice
        ([0, 0, 0], [bytes([n]) * 32 for n in range(3)]),  # no session
        ([3, 3], [b"a" * 32, b"b" * 32]),  # two sessions
        ([9, 3], [b"a" * 32, b"b" * 32]),  # of an unknown kind
        ([], []),
    ],
    ids=["too many", "twice", "no session", "two sessions", "unknown kind", "nothing"],
)
def test_no_session_consists_of_that(
    pushed: Store,
    machine: Machine,
    remote: Counted,
    there: Path,
    kinds: list[int],
    names: list[bytes],
) -> None:
    path = there / "manifests" / ME / "chat.safetensors"
    rewrite(path, tensors(kinds, names, [1] * len(kinds)))
    refused(machine, remote, "damaged")
    assert ITEM_KINDS == (BLOCK, STATE, CALIBRATION, SESSION)


def test_wrong_positions_of_blocks_change_nothing(
    pushed: Store, machine: Machine, remote: Counted
) -> None:
    """They follow from the session's tokens."""
    change_manifest(remote, "chat", lambda own: [replace(item, position=7) for item in own])
    b = machine("b")
    pull(b, remote, "chat")
    assert_saved(b, IDS, "chat")


@pytest.mark.parametrize("size", [0, 1, 2**40, 2**64 - 1])
def test_wrong_sizes_of_blocks_change_nothing(
    pushed: Store, machine: Machine, remote: Counted, size: int
) -> None:
    def change(own: Items) -> Items:
        return [replace(item, size=size) if item.kind == BLOCK else item for item in own]

    change_manifest(remote, "chat", change)
    b = machine("b")
    report = pull(b, remote, "chat")
    assert_saved(b, IDS, "chat")
    assert report.moved_bytes == sum(path.stat().st_size for path in b.place.blocks.glob("*/*"))


def test_a_checkpoint_of_another_chain_is_refused(machine: Machine, remote: Counted) -> None:
    store = machine("a")
    for name, ids in (("chat", IDS), ("other", OTHER)):
        turn(store, StampedEngine(recurrent=64), ids, name)
        push(store, remote, ME, name)
    foreign = manifest_there(remote, "other").of_kind(STATE)
    assert foreign
    change_manifest(
        remote,
        "chat",
        lambda own: [item for item in own if item.kind != STATE] + foreign,
    )
    refused(machine, remote, "state checkpoint")


def test_a_manifest_that_is_short_of_blocks_is_a_shorter_session(
    pushed: Store, machine: Machine, remote: Counted, there: Path
) -> None:
    change_manifest(remote, "chat", lambda own: [own[0], own[3]])
    b = machine("b")
    with pytest.raises(PartlyDone, match="the front of 'chat', 1 of 3 blocks") as raised:
        pull(b, remote, "chat")
    report = raised.value.report
    assert isinstance(report, PullReport)
    assert (report.blocks, report.stored_blocks) == (3, 1)
    engine = StampedEngine()
    turn(b, engine, IDS, "chat", save=False)
    assert engine.positions == list(range(16, 57))
    engine.check_rows()
    assert only(b.path, "sessions").name == "chat.safetensors"
