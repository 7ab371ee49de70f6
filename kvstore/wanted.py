"""What a prompt asks the store for, and why it does not get it."""

from __future__ import annotations

from dataclasses import dataclass

from kvsnap.formats.block import BlockRecord
from kvsnap.formats.identity import Root
from kvsnap.formats.names import TokenIds


class Miss(Exception):
    """This block cannot be used. `reason` is one line; the engine computes instead."""

    def __init__(self, name: bytes, reason: str) -> None:
        super().__init__(f"block {name.hex()[:12]}: {reason}")
        self.name, self.reason = name, reason


@dataclass(frozen=True)
class Wanted:
    """A block that a prompt needs: its place in the chain and what it must say of itself."""

    name: bytes
    parent: bytes
    start: int
    token_ids: TokenIds
    extras: bytes = b""

    @property
    def stop(self) -> int:
        return self.start + len(self.token_ids)

    def record(self, root: Root) -> BlockRecord:
        """What its file says, stored under `root`."""
        return BlockRecord(
            self.name,
            self.parent,
            root.root_id,
            self.start,
            self.token_ids,
            root.identity,
            self.extras,
            root.fidelity,
        )
