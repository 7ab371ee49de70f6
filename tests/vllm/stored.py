"""What is in a store whose blocks are stamped: every file's rows against what its token ids must have."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from kvsnap.formats.block import BlockFile, BlockRecord, parse_block
from kvsnap.formats.extras import salt_extra
from kvsnap.formats.names import ZERO_PARENT
from kvsnap.kvstore.place import Place
from tests.vllm.stamps import LAYERS, STATE, Right


class Stored:
    """Of one store; `salts`: all that requests may have. Files are looked at once each."""

    def __init__(self, folder: Path, right: Right, salts: tuple[str, ...]) -> None:
        self.place, self.right = Place(folder), right
        self.damaged: set[Path] = set()
        """Files that were damaged on purpose and may be there still."""
        self._salts = {salt_extra(salt): salt for salt in salts}
        self._before: dict[bytes, tuple[str | None, list[int]]] = {ZERO_PARENT: (None, [])}
        """Name of a block → the salt and all token ids up to its end."""
        self._checked: dict[Path, int] = {}

    def __len__(self) -> int:
        return len(self._before) - 1

    def files(self) -> list[Path]:
        return sorted(path for path in self.place.blocks.rglob("*") if path.is_file())

    def check(self) -> None:
        """Raises `AssertionError` for a block whose rows are not those of its tokens and its rank."""
        new = dict[bytes, tuple[Path, BlockFile]]()
        for path in self.files():
            changed = path.stat().st_mtime_ns
            if path in self.damaged and self._checked.get(path) == changed:
                continue
            if self._checked.get(path) != changed:
                block = parse_block(memoryview(path.read_bytes()))
                new[block.record.name] = path, block
                self._checked[path] = changed
                self.damaged.discard(path)
        for path, block in sorted(new.values(), key=lambda found: found[1].record.start):
            self._check(path, block)

    def is_block(self, path: Path, *, start: int, rank: int) -> bool:
        record = parse_block(memoryview(path.read_bytes())).record
        return record.start == start and _rank(record) == rank

    def damage(self, path: Path) -> None:
        """Change one bit of what is stored; who reads it later must not use it."""
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        self.damaged.add(path)
        self._checked[path] = path.stat().st_mtime_ns

    def _check(self, path: Path, block: BlockFile) -> None:
        record = block.record
        salt, before = self._before[record.parent]
        assert len(before) == record.start, "a block's parent was never stored"
        if record.extras:
            salt = self._salts[record.extras]
        tokens = [*before, *(int(token) for token in record.token_ids)]
        self._before[record.name] = salt, tokens
        rank = _rank(record)
        layout = block.layout()
        rows = layout.empty(record.ranges(layout))
        block.decode_into(layout, rows)
        (found,) = rows.values()
        right = self.right.states(salt, tokens, rank)[:, record.start :]
        assert np.array_equal(np.asarray(found).reshape(LAYERS, -1, STATE), right), (
            f"the stored block of tokens {record.start} to {len(tokens)} of {tokens}"
            f" (rank {rank}, salt {salt!r}) has rows of something else"
        )


def _rank(record: BlockRecord) -> int:
    return int(json.loads(record.identity)["shard"]["tensor_rank"])
