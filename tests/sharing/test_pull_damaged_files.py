"""Damaged, missing and exchanged files in a remote: never a wrong row, a shorter session with a reason."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvsnap.formats.block import pack_block, parse_block
from kvsnap.formats.codecs import get_codec
from kvsnap.formats.errors import Damaged, KvsnapError, PartlyDone
from kvsnap.kvstore.remotes.counted import Counted
from kvsnap.kvstore.sharing.pull import PullReport, pull
from kvsnap.kvstore.sharing.push import push
from kvsnap.kvstore.store import Store
from kvsnap.testing.aftermath import assert_clean, assert_saved
from kvsnap.testing.stamped import StampedEngine
from kvsnap.testing.turns import some_ids, turn
from tests.sharing.objects import ME, block_files, joined, only, resume, rewrite, save_and_push

Machine = Callable[..., Store]
IDS = some_ids(57)


def packed_anew(path: Path, codec: str, change: Callable[[np.ndarray], None]) -> bytes:
    """A block with other rows or another codec, right by every digest in it."""
    block = parse_block(memoryview(path.read_bytes()))
    layout = block.layout()
    rows = layout.empty(16)
    block.decode_into(layout, rows)
    for array in rows.values():
        change(array)
    return joined(pack_block(block.record, get_codec(codec), layout, rows))


def one_row_off(array: np.ndarray) -> None:
    array[0, 3] += 1


def nothing(array: np.ndarray) -> None:
    pass


def missing(path: Path, other: Path) -> None:
    path.unlink()


def linked(path: Path, other: Path) -> None:
    path.unlink()
    path.symlink_to(other)


DAMAGE: dict[str, Callable[[Path, Path], object]] = {
    "missing": missing,
    "empty": lambda path, other: path.write_bytes(b""),
    "cut": lambda path, other: os.truncate(path, path.stat().st_size - 1),
    "longer": lambda path, other: path.write_bytes(path.read_bytes() + b"\0"),
    "far too long": lambda path, other: os.truncate(path, 2**40),
    "a bit of the header": lambda path, other: flip(path, 40),
    "a bit of the rows": lambda path, other: flip(path, -1),
    "another block": lambda path, other: path.write_bytes(other.read_bytes()),
    "a link": linked,
    "a folder": lambda path, other: (path.unlink(), path.mkdir()),
    "other rows": lambda path, other: path.write_bytes(packed_anew(path, "zstd", one_row_off)),
    "other token ids": lambda path, other: rewrite(path, lambda tensors: exchange(tensors, other)),
    "another place": lambda path, other: rewrite(path, start="48"),
    "another parent": lambda path, other: rewrite(path, parent="1" * 64),
    "another root": lambda path, other: rewrite(path, root_id="0" * 64),
    "a session": lambda path, other: path.write_bytes(
        only(path.parent.parent.parent, "sessions").read_bytes()
    ),
    "a newer version": lambda path, other: rewrite(path, kvsnap="9"),
    "a codec that is not here": lambda path, other: rewrite(path, codec="fp8"),
}


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def exchange(tensors: dict, other: Path) -> None:
    parsed = parse_block(memoryview(other.read_bytes()))
    found = tensors["token_ids"]
    ids = parsed.record.token_ids.astype("<u4")
    tensors["token_ids"] = type(found)("U32", ids.shape, ids)


@pytest.fixture
def pushed(machine: Machine, remote: Counted) -> Store:
    store = machine("a")
    save_and_push(store, remote, IDS, "chat")
    return store


@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_bad_block_makes_the_session_shorter(
    pushed: Store, machine: Machine, remote: Counted, there: Path, kind: str, number: int
) -> None:
    files = block_files(there)
    DAMAGE[kind](files[number], files[(number + 1) % 3])
    b = machine("b")
    with pytest.raises(PartlyDone) as caught:
        pull(b, remote, "chat")
    report = caught.value.report
    assert isinstance(report, PullReport)
    assert report.stored_blocks == report.moved_files == number
    assert "\n" not in caught.value.what
    assert files[number].stem[:12] in caught.value.what
    assert resume(b, IDS, "chat").positions == list(range(16 * number, 57))
    assert_clean(b)


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_push_by_force_mends_what_is_bad_there(
    pushed: Store, machine: Machine, remote: Counted, there: Path, kind: str
) -> None:
    files = block_files(there)
    DAMAGE[kind](files[1], files[2])
    if kind == "a folder":
        files[1].rmdir()  # a folder remote cannot hold both
    push(pushed, remote, ME, "chat", force=True)
    b = machine("b")
    pull(b, remote, "chat")
    assert_saved(b, IDS, "chat")


def test_what_was_bad_is_fetched_when_it_is_good_again(
    pushed: Store, machine: Machine, remote: Counted, there: Path
) -> None:
    path, b = block_files(there)[1], machine("b")
    good = path.read_bytes()
    flip(path, -1)
    with pytest.raises(PartlyDone):
        pull(b, remote, "chat")
    path.write_bytes(good)
    assert pull(b, remote, "chat").moved_files == 2
    assert_saved(b, IDS, "chat")


def test_another_lossless_coding_is_as_good(
    pushed: Store, machine: Machine, remote: Counted, there: Path
) -> None:
    path = block_files(there)[1]
    path.write_bytes(packed_anew(path, "raw", nothing))
    b = machine("b")
    assert pull(b, remote, "chat").stored_blocks == 3
    assert_saved(b, IDS, "chat")


SESSION_DAMAGE = {
    name: DAMAGE[name]
    for name in DAMAGE
    if not name.startswith(("other ", "another p"))
    and name not in ("a session", "a codec that is not here")
}
"""What is one of a manifest and a session's file, too."""


@pytest.mark.parametrize(
    ("folder", "kind"),
    [("manifests", "a session"), *itertools.product(["manifests", "sessions"], SESSION_DAMAGE)],
)
def test_without_its_manifest_or_file_nothing_of_a_session_comes(
    pushed: Store, machine: Machine, remote: Counted, there: Path, kind: str, folder: str
) -> None:
    path = only(there, folder)
    DAMAGE[kind](path, block_files(there)[0])
    b = machine("b")
    with pytest.raises(KvsnapError) as caught:
        pull(b, remote, "chat")
    assert "\n" not in caught.value.what
    assert not b.place.blocks.exists()
    assert not list(b.listing)
    assert resume(b, IDS, "chat").positions == list(range(57))


def test_the_file_of_another_session_is_refused(
    pushed: Store, machine: Machine, remote: Counted, there: Path
) -> None:
    mine = only(there, "sessions")
    save_and_push(pushed, remote, some_ids(57, 5), "other")
    (other,) = (path for path in mine.parent.iterdir() if path != mine)
    mine.write_bytes(other.read_bytes())
    with pytest.raises(Damaged, match="not the one that its manifest names"):
        pull(machine("b"), remote, "chat")


def test_the_manifest_of_another_session_is_refused(
    pushed: Store, machine: Machine, remote: Counted, there: Path
) -> None:
    mine = only(there, "manifests")
    save_and_push(pushed, remote, some_ids(57, 5), "other")
    mine.write_bytes((mine.parent / "other.safetensors").read_bytes())
    with pytest.raises(Damaged, match="another session's"):
        pull(machine("b"), remote, "chat")


def test_rows_of_another_model_under_the_same_tokens_are_refused(
    pushed: Store, machine: Machine, remote: Counted, there: Path
) -> None:
    """The same token ids computed by other weights: nothing but the identity tells them apart."""
    first, *_ = block_files(there)
    c = machine("c")
    turn(c, StampedEngine(weights="other"), IDS, "chat")
    (name,) = c.index.query("SELECT name FROM blocks WHERE start = 0")[0]
    first.write_bytes(c.place.block(name).read_bytes())
    b = machine("b")
    with pytest.raises(PartlyDone):
        pull(b, remote, "chat")
    assert resume(b, IDS, "chat").positions == list(range(57))
