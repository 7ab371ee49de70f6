"""Why what is stored of one model under one root is not used under another: the fields that differ."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvsnap.formats.errors import Damaged
from kvsnap.formats.identity import differences, parse_identity
from kvsnap.kvstore.store import Store

MOST_ROOTS = 20
"""The ones that were used last."""
_MOST_FIELDS = 4
_ROOTS = (
    "SELECT r.root_id, r.identity, COUNT(b.id) FROM roots r JOIN blocks b ON b.root = r.id"
    " WHERE r.identity != '' AND b.lost IS NULL GROUP BY r.id ORDER BY MAX(b.used) DESC LIMIT ?"
)


@dataclass(frozen=True)
class Apart:
    """Blocks of one architecture under two roots; `fields` in which their identities differ."""

    architecture: str
    engines: tuple[str, str]
    root_ids: tuple[str, str]
    blocks: int
    fields: tuple[str, ...]

    def __str__(self) -> str:
        ours, others = (
            f"{engine} root {root_id[:12]}"
            for engine, root_id in zip(self.engines, self.root_ids, strict=True)
        )
        more = len(self.fields) - _MOST_FIELDS
        told = ", ".join(self.fields[:_MOST_FIELDS]) or "the tenant"
        told += f" and {more} more" if more > 0 else ""
        if self.engines[0] != self.engines[1]:
            told = "one engine's rows are not another's"
        return f"{self.blocks} blocks of {self.architecture} ({ours}) do not serve {others}: {told}"


def roots_apart(store: Store) -> Iterator[Apart]:
    """Of each architecture: the root that was used last, and why each other one is none with it.
    Encrypted blocks' identities are not known here."""
    latest: dict[str, tuple[str, str, str]] = {}
    for root_id, identity, blocks in store.index.query(_ROOTS, [MOST_ROOTS]):
        try:
            record = parse_identity(identity)
            architecture, engine = str(record.get("architecture")), str(record.get("family"))
            if architecture not in latest:
                latest[architecture] = (root_id, identity, engine)
                continue
            first, its_identity, its_engine = latest[architecture]
            fields = tuple(name for name, _, _ in differences(identity, its_identity))
        except Damaged:
            continue
        yield Apart(architecture, (engine, its_engine), (root_id, first), blocks, fields)
