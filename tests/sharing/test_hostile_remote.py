"""What a remote of somebody who means harm may hold: refused in little memory, nothing written outside."""

from __future__ import annotations

import json
import re
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import zstandard
from blake3 import blake3

from kvsnap.formats.container import Tensor
from kvsnap.formats.errors import Damaged, KvsnapError, PartlyDone
from kvsnap.formats.manifest import SESSION, Item
from kvsnap.kvstore.keyring import Keyring
from kvsnap.kvstore.remotes.base import Entry, Object, Remote
from kvsnap.kvstore.remotes.counted import Counted
from kvsnap.kvstore.remotes.wrapped import Wrapped
from kvsnap.kvstore.sharing.manifests import every
from kvsnap.kvstore.sharing.pull import pull
from kvsnap.kvstore.sharing.sweep import sweep
from kvsnap.kvstore.sharing.verify_remote import verify_remote
from kvsnap.kvstore.store import Store
from kvsnap.testing.aftermath import assert_clean
from kvsnap.testing.turns import some_ids
from tests.sharing.objects import block_files, change_manifest, only, resume, rewrite, save_and_push

Machine = Callable[..., Store]
IDS = some_ids(57)
MOST = 64 * 2**20
UNSIGNED = "0" * 64
HOSTILE_KEYS = [
    "manifests/../../outside/mine",
    "/etc/passwd",
    "manifests/default/a\0b.safetensors",
    "manifests/default/" + "a" * 5000,
    "manifests/default/UPPER.safetensors",
    "manifests/default/UPPER",
    "manifests//x",
    "",
    "blocks/../../outside/" + "a" * 64 + ".safetensors",
]


@pytest.fixture
def pushed(machine: Machine, remote: Counted) -> None:
    save_and_push(machine("a"), remote, IDS, "chat")


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[Path]:
    """A folder beside store and remote, in which nothing may change."""
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "mine").write_text("mine")
    (folder / f"{'a' * 64}.safetensors").write_text("mine")
    yield folder
    assert sorted(path.name for path in folder.iterdir()) == [f"{'a' * 64}.safetensors", "mine"]
    assert {path.read_text() for path in folder.iterdir()} == {"mine"}


def peak(work: Callable[[], object]) -> int:
    """The most bytes that were allocated meanwhile."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def signed(header: str, data: bytes = b"") -> bytes:
    """A file right by its own digest, whatever its header says."""
    text = header.replace("SIGNED", f'"file":"{UNSIGNED}"').encode()
    head = struct.pack("<Q", len(text)) + text
    digest = blake3(head + data).hexdigest().encode()
    return head.replace(UNSIGNED.encode(), digest, 1) + data


def listed(count: int, what: str) -> str:
    return ",".join([what] * count)


def tensor(shape: list[int], end: int) -> str:
    return json.dumps({"data_offsets": [0, end], "dtype": "U8", "shape": shape})


HEADERS: dict[str, Callable[[], bytes]] = {
    "a length of 2^63": lambda: struct.pack("<Q", 2**63) + b"{}",
    "a length just too long": lambda: struct.pack("<Q", 16 * 2**20 + 1) + b"{}",
    "16 MB of numbers": lambda: signed(
        '{"__metadata__":{SIGNED},"x":[' + listed(7_900_000, "0") + "]}"
    ),
    "16 MB of tables": lambda: signed(
        '{"__metadata__":{SIGNED},"x":[' + listed(5_000_000, "{}") + "]}"
    ),
    "4 MB of tables": lambda: signed(
        '{"__metadata__":{SIGNED},"x":[' + listed(1_380_000, "{}") + "]}"
    ),
    "10,000 deep": lambda: signed(
        '{"__metadata__":{SIGNED},"x":' + "[" * 10_000 + "]" * 10_000 + "}"
    ),
    "10,000 deep tables": lambda: signed(
        '{"__metadata__":{SIGNED},"x":' + '{"a":' * 10_000 + "1" + "}" * 10_001
    ),
    "a product that overflows": lambda: signed(
        '{"__metadata__":{SIGNED},"kinds":' + tensor([2**32, 2**32], 0) + "}"
    ),
    "a product that wraps to the data": lambda: signed(
        '{"__metadata__":{SIGNED},"kinds":' + tensor([2**62, 4, 1], 16) + "}", bytes(16)
    ),
    "many dimensions": lambda: signed(
        '{"__metadata__":{SIGNED},"kinds":' + tensor([2**31] * 2000, 0) + "}"
    ),
    "a number of 200,000 digits": lambda: signed(
        '{"__metadata__":{SIGNED},"kinds":{"shape":[' + "9" * 200_000 + "]}}"
    ),
    "metadata of 200,000 keys": lambda: signed(
        '{"__metadata__":{SIGNED,' + ",".join(f'"{n}":""' for n in range(200_000)) + "}}"
    ),
}


@pytest.mark.parametrize("kind", HEADERS)
@pytest.mark.parametrize("place", ["manifests", "sessions", "blocks"])
def test_a_hostile_header_is_refused_in_little_memory(
    pushed: None,
    machine: Machine,
    remote: Counted,
    there: Path,
    outside: Path,
    kind: str,
    place: str,
) -> None:
    data, b = HEADERS[kind](), machine("b")
    path = block_files(there)[0] if place == "blocks" else only(there, place)
    path.write_bytes(data)
    del data

    def refused() -> None:
        with pytest.raises((Damaged, PartlyDone)):
            pull(b, remote, "chat")
        report = verify_remote(remote)
        assert [bad.path for bad in report.bad] in (
            [str(path.relative_to(there))],
            ["manifests/default/chat.safetensors"],
        )

    assert peak(refused) < MOST
    assert resume(b, IDS, "chat").positions == list(range(57))
    assert_clean(b)


@pytest.mark.parametrize("kind", HEADERS)
def test_a_session_with_a_hostile_header_that_its_manifest_vouches_for(
    pushed: None, machine: Machine, remote: Counted, kind: str
) -> None:
    data = HEADERS[kind]()
    found = re.search(rb'"file":"([0-9a-f]{64})"', data)
    digest = bytes.fromhex(found[1].decode()) if found else bytes(32)
    item = Item(SESSION, digest, 0, len(data), digest)
    change_manifest(remote, "chat", lambda own: [*own[:-1], item])
    remote.put(f"sessions/default/{digest.hex()}.safetensors", data)
    del data

    def refused() -> None:
        with pytest.raises(Damaged):
            pull(machine("b"), remote, "chat")

    assert peak(refused) < MOST


def bomb(size: int) -> bytes:
    """A zstd frame that expands to so many zeros, and does not say so."""
    packer = zstandard.ZstdCompressor(level=1, write_content_size=False).compressobj()
    chunk, parts = bytes(2**22), []
    for _ in range(size // len(chunk)):
        parts.append(packer.compress(chunk))
    return b"".join([*parts, packer.flush()])


def explode(found: dict[str, Tensor]) -> None:
    frame = bomb(2**30)
    name = next(key for key in sorted(found) if key.endswith(".b1"))
    found[name] = Tensor("U8", (len(frame),), np.frombuffer(frame, np.uint8))


def test_a_frame_that_expands_without_end_is_refused(
    pushed: None, machine: Machine, remote: Counted, there: Path
) -> None:
    rewrite(block_files(there)[0], explode)
    b = machine("b")

    def refused() -> None:
        with pytest.raises(PartlyDone):
            pull(b, remote, "chat")

    assert peak(refused) < MOST
    assert resume(b, IDS, "chat").positions == list(range(57))


def test_a_tail_that_expands_without_end_is_refused(
    pushed: None, machine: Machine, remote: Counted, there: Path
) -> None:
    path = only(there, "sessions")
    rewrite(path, explode)
    b = machine("b")

    def refused() -> None:
        with pytest.raises(Damaged):
            pull(b, remote, "chat")

    assert peak(refused) < MOST


class Limits(Wrapped):
    """What the caller was ready to take of each object."""

    def __init__(self, remote: Remote) -> None:
        super().__init__(remote)
        self.limits: dict[str, int] = {}

    def get(self, key: str, limit: int) -> Object:
        self.limits[key] = limit
        return super().get(key, limit)


def test_no_more_is_taken_than_such_a_session_can_need(
    pushed: None, machine: Machine, remote: Counted, there: Path
) -> None:
    """A manifest that claims giants does not open the door for them."""
    huge = np.full(4, 2**63, "<u8")

    def grow(found: dict[str, Tensor]) -> None:
        found["sizes"] = Tensor("U64", huge.shape, huge)

    rewrite(only(there, "manifests"), grow)
    looked = Limits(remote)
    pull(machine("b"), looked, "chat")
    blocks = [limit for key, limit in looked.limits.items() if key.startswith("blocks/")]
    others = [limit for key, limit in looked.limits.items() if not key.startswith("blocks/")]
    assert max(blocks) < 2**20
    assert max(others) < 2**29


def test_a_session_of_more_tokens_than_any_is_refused_unread(
    pushed: None, machine: Machine, remote: Counted, there: Path
) -> None:
    rewrite(only(there, "manifests"), lambda found: None, tokens=str(10**17))
    looked = Limits(remote)
    with pytest.raises(Damaged):
        pull(machine("b"), looked, "chat")
    assert max(looked.limits.values()) < 2**32


class Lies(Wrapped):
    """Lists keys that nobody of us wrote."""

    def list(self, prefix: str) -> Iterator[Entry]:
        yield from super().list(prefix)
        for key in HOSTILE_KEYS:
            yield Entry(key, 5, 1.0)


def test_keys_that_lead_outside_are_not_followed(
    pushed: None, machine: Machine, remote: Counted, outside: Path
) -> None:
    lies = Lies(remote)
    for pushed_one in every(lies, Keyring()):
        assert pushed_one.manifest is None or pushed_one.manifest.name == "chat"
    with pytest.raises(KvsnapError):
        sweep(lies, grace_days=0)
    verify_remote(lies)
    assert pull(machine("b"), lies, "chat").stored_blocks == 3


@pytest.mark.parametrize(
    "name", ["../../outside/mine", "/etc/passwd", "..", "UPPER", "con", "a" * 900]
)
def test_odd_names_of_sessions_stay_in_their_folders(
    machine: Machine, remote: Counted, outside: Path, tmp_path: Path, name: str
) -> None:
    before = {path.name for path in tmp_path.iterdir()}
    save_and_push(machine("a"), remote, IDS, name)
    b = machine("b")
    pull(b, remote, name)
    assert resume(b, IDS, name).positions == [56]
    (file,) = b.place.sessions.glob("*/*.safetensors")
    assert file.parent.parent == b.place.sessions
    assert {path.name for path in tmp_path.iterdir()} - before == {"a", "b", "remote"}


@pytest.mark.parametrize("name", ["a\0b", "x" * 5000, "", "two\nlines", "\ud800"])
def test_names_that_no_session_has_are_refused(
    pushed: None, machine: Machine, remote: Counted, there: Path, name: str
) -> None:
    rewrite(only(there, "manifests"), name=name)
    (found,) = every(remote, Keyring())
    assert found.manifest is None
    with pytest.raises(Damaged):
        pull(machine("b"), remote, "chat")


@pytest.mark.parametrize("folder", ["blocks", "sessions", "manifests"])
def test_links_in_a_folder_remote_lead_nowhere(
    pushed: None, machine: Machine, remote: Counted, there: Path, folder: str
) -> None:
    """A link to good files is no better: whoever planted it may change where it leads."""
    elsewhere = there.parent / "elsewhere"
    (there / folder).rename(elsewhere)
    (there / folder).symlink_to(elsewhere, target_is_directory=True)
    b = machine("b")
    with pytest.raises(KvsnapError):
        pull(b, remote, "chat")
    assert resume(b, IDS, "chat").positions == list(range(57))


def test_a_sweep_does_not_delete_through_links(
    pushed: None, remote: Counted, there: Path, outside: Path
) -> None:
    (there / "blocks" / "aa").mkdir(exist_ok=True)
    (there / "blocks" / "aa" / "folder").symlink_to(outside, target_is_directory=True)
    (there / "blocks" / "aa" / f"{'a' * 64}.safetensors").symlink_to(
        outside / f"{'a' * 64}.safetensors"
    )
    sweep(remote, grace_days=-1)
