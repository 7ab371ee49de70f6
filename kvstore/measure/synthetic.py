"""A store of any number of tiny blocks, in the shape of chat traffic: what scale is measured on.

Block and session files are packed by the code that packs real ones, and pass verify. They are
written under their final names, with neither sync nor index: one rebuild makes that from all files.
The same number of blocks gives the same files.
"""

from __future__ import annotations

import os
import shutil
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.random import PCG64, Generator

from kvsnap.formats.block import BlockRecord, pack_block
from kvsnap.formats.codecs import get_codec
from kvsnap.formats.errors import StoreFull, UsageError
from kvsnap.formats.identity import Identity, root_of
from kvsnap.formats.layout import Array, Group, Layout, Plane
from kvsnap.formats.names import ZERO_PARENT, TokenIds, block_name
from kvsnap.formats.session import SessionRecord, pack_session
from kvsnap.formats.session_name import session_file_name
from kvsnap.formats.tenant import NO_TENANT_ID
from kvsnap.kvstore import files
from kvsnap.kvstore.place import Place, write_settings

BLOCK_SIZE = 64
LONG_CHAIN = 2000
"""Blocks: 128k tokens."""
MOST_SESSIONS = 2000
SYSTEM_BLOCKS = (4, 40)
CHAT_BLOCKS = (6, 1500)
CHAT_MEDIAN, CHAT_SIGMA = 20, 1.1
"""Log-normal: most chats are short and a few are long; 37 blocks on average."""
BRANCHING = 0.2
"""Of the chats that go on from within another one, as an edited question does."""
BYTES_A_BLOCK = 4096 + 1500
"""Of disk: most file systems give a file whole blocks of 4 KiB; its inode and the index, with the log
that it is made through, take the rest."""
_VOCABULARY = 50_000
CODEC = get_codec("raw")
LAYOUT = Layout(
    groups=(
        Group(
            name="full",
            layers=1,
            planes=tuple(
                Plane(name=n, kind="elements", dtype="F16", row=(1, 1), source_type="f16")
                for n in ("k", "v")
            ),
        ),
    )
)
ROOT = root_of(
    Identity(
        family="synthetic",
        weights="none",
        architecture="synthetic",
        layout=LAYOUT,
        rope=None,
        block_size=BLOCK_SIZE,
    )
)


@dataclass
class Built:
    """What was written. `long_chain`: blocks of the longest chain."""

    blocks: int = 0
    sessions: int = 0
    long_chain: int = 0
    bytes: int = 0


@dataclass
class _Chain:
    """A chain as far as others may go on from it."""

    names: list[bytes] = field(default_factory=list)
    ids: list[TokenIds] = field(default_factory=list)

    def front(self, count: int) -> _Chain:
        return _Chain(self.names[:count], self.ids[:count])


def long_chain(blocks: int) -> int:
    """How many blocks the longest chain of a store of `blocks` has."""
    return min(LONG_CHAIN, max(1, blocks // 2))


def long_ids(count: int) -> TokenIds:
    """The token ids of the first `count` blocks of the longest chain."""
    return some_ids(Generator(PCG64(1)), count * BLOCK_SIZE)


def some_ids(random: Generator, count: int) -> TokenIds:
    return random.integers(0, _VOCABULARY, count, dtype=np.uint32)


def rows_of(tokens: int) -> dict[str, Array]:
    """Rows that nobody will compute with."""
    return {name: np.zeros_like(array) for name, array in LAYOUT.empty(tokens).items()}


def build(
    folder: Path, blocks: int, progress: Callable[[int, int], None] = lambda done, total: None
) -> Built:
    """Write the files of a store of so many blocks to a new or empty folder. Raises `UsageError`
    for another folder, `StoreFull` where the disk has no room, before anything is written."""
    if blocks < 1:
        raise UsageError(f"a store of {blocks} blocks cannot be built", "give 1 or more")
    if files.stands(folder) and (not files.is_folder(folder) or any(folder.iterdir())):
        raise UsageError(f"{folder} is not an empty folder", "give an empty one, or a new one")
    _check_room(folder, blocks)
    place = Place(folder, BLOCK_SIZE)
    write_settings(place)
    for byte in range(256):
        files.make_dir(place.blocks / f"{byte:02x}")
    writer = _Writer(place, blocks, progress)
    for number, chain in enumerate(_chains(writer)):
        if number and writer.built.sessions < MOST_SESSIONS:
            writer.session(f"chat-{writer.built.sessions}", chain)
    progress(blocks, blocks)
    return writer.built


def _chains(writer: _Writer) -> Iterator[_Chain]:
    """The chains that end somewhere: the long one, then chats until all blocks are there."""
    random = Generator(PCG64(0))
    blocks = writer.blocks
    count = long_chain(blocks)
    writer.built.long_chain = count
    ids = long_ids(count)
    yield writer.extend(_Chain(), [ids[n : n + BLOCK_SIZE] for n in range(0, len(ids), BLOCK_SIZE)])
    # A tenth of a small store at most; the popular ones are those of most chats.
    systems = [
        writer.extend(_Chain(), _random_blocks(random, int(random.integers(*SYSTEM_BLOCKS))))
        for _ in range(min(64, max(1, blocks // 500)))
    ]
    weights = 1 / np.arange(1, len(systems) + 1)
    recent: deque[_Chain] = deque(maxlen=64)
    while writer.built.blocks < blocks:
        if recent and random.random() < BRANCHING:
            other = recent[int(random.integers(len(recent)))]
            start = other.front(int(random.integers(1, len(other.names) + 1)))
        else:
            start = systems[int(random.choice(len(systems), p=weights / weights.sum()))]
        length = int(np.clip(CHAT_MEDIAN * random.lognormal(0, CHAT_SIGMA), *CHAT_BLOCKS))
        chain = writer.extend(start, _random_blocks(random, length))
        recent.append(chain)
        yield chain


def _random_blocks(random: Generator, count: int) -> list[TokenIds]:
    ids = some_ids(random, count * BLOCK_SIZE)
    return [ids[n : n + BLOCK_SIZE] for n in range(0, len(ids), BLOCK_SIZE)]


class _Writer:
    """Writes files until there are enough blocks."""

    def __init__(self, place: Place, blocks: int, progress: Callable[[int, int], None]) -> None:
        self.place, self.blocks, self.progress = place, blocks, progress
        self.built = Built()

    def extend(self, start: _Chain, ids: list[TokenIds]) -> _Chain:
        """A chain that goes on from another one, as far as blocks are left to write."""
        chain = _Chain(start.names[:], start.ids[:])
        rows = rows_of(BLOCK_SIZE)
        for own in ids[: self.blocks - self.built.blocks]:
            parent = chain.names[-1] if chain.names else ZERO_PARENT
            name = block_name(ROOT.key, parent, own)
            position = len(chain.names) * BLOCK_SIZE
            record = BlockRecord(name, parent, ROOT.root_id, position, own, ROOT.identity)
            packed = pack_block(record, CODEC, LAYOUT, rows)
            files.write_file(self.place.block(name), packed)
            chain.names.append(name)
            chain.ids.append(own)
            self.built.blocks += 1
            self.built.bytes += packed.size
            if self.built.blocks % 256 == 0:
                self.progress(self.built.blocks, self.blocks)
        return chain

    def session(self, name: str, chain: _Chain) -> None:
        tail = some_ids(Generator(PCG64(self.built.sessions)), self.built.sessions % BLOCK_SIZE)
        record = SessionRecord(
            name=name,
            tenant_id=NO_TENANT_ID,
            root_id=ROOT.root_id,
            identity=ROOT.identity,
            block_size=BLOCK_SIZE,
            revision=1,
            token_ids=np.concatenate([*chain.ids, tail]),
            chain=tuple(chain.names),
            notes={"model": "synthetic", "kind": "raw"},
        )
        packed = pack_session(record, CODEC, LAYOUT, rows_of(len(tail)) if len(tail) else {})
        path = self.place.sessions / NO_TENANT_ID / session_file_name(name)
        files.write_file(path, packed)
        self.built.sessions += 1
        self.built.bytes += packed.size


def _check_room(folder: Path, blocks: int) -> None:
    there = next(path for path in (folder, *folder.parents) if path.exists())
    need, free = blocks * BYTES_A_BLOCK, shutil.disk_usage(there).free
    if need > free:
        raise StoreFull(
            f"{blocks} blocks take about {need / 1e9:.1f} GB; {free / 1e9:.1f} GB are free there",
            "ask for fewer --blocks, or give --keep a folder on another disk",
        )
    if hasattr(os, "statvfs"):
        status = os.statvfs(there)
        if status.f_files and status.f_favail < blocks:  # 0 files: a file system without a limit
            raise StoreFull(
                f"{blocks} files are more than the {status.f_favail} that the disk can still hold",
                "ask for fewer --blocks, or give --keep a folder on another disk",
            )
