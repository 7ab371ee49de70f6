"""Encrypted stores of tests, and all that must not be told by the files of one, or of a sealed remote."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3

from kvsnap.formats.container import Packed, parse
from kvsnap.formats.fields import FORMAT_VERSION
from kvsnap.formats.names import TokenIds
from kvsnap.formats.sealed import parse_sealed, seal
from kvsnap.formats.session_name import SUFFIX
from kvsnap.formats.tenant import Tenant
from kvsnap.kvstore.session import Session
from kvsnap.kvstore.store import Store
from kvsnap.testing.stamped import StampedEngine
from kvsnap.testing.turns import some_ids

BLOCK = 16
NAME = "alice/what-she-asked"
MODEL = "secret-model.gguf"
NOTES = {"model": MODEL, "text": "tell me of the merger with Initech", "kind": "kind-of-its-own"}
WEIGHTS = "blake3:weights-of-a-model-nobody-knows"
ARCHITECTURE = "unheard-of-architecture"
RUN = 8
"""Bytes of token ids that are enough to be a leak: two ids."""


def secret_ids(count: int, seed: int = 0) -> TokenIds:
    """Ids no two of which stand in a file by chance, as two small ones and zeros may."""
    return (some_ids(count, seed, 2**31 - 2**24) + np.uint32(2**24)).astype(np.uint32)


def engine(**options: Any) -> StampedEngine:
    """One whose identity has words in it that can be looked for."""
    return StampedEngine(weights=WEIGHTS, architecture=ARCHITECTURE, **options)


def open_encrypted(path: Path, encrypt: bool = True, **options: Any) -> Store:
    """A store with blocks of 16 tokens at `path`, made where it is not there."""
    if not (path / "kvsnap.json").exists():
        path.mkdir(mode=0o700, exist_ok=True)
        settings = {"block_size": BLOCK, "created": 1, "format": FORMAT_VERSION}
        (path / "kvsnap.json").write_text(json.dumps(settings))
    return Store(path, encrypt=encrypt, min_free="0", **options)


def save(
    store: Store,
    ids: Sequence[int] | TokenIds,
    name: str | None,
    tenant: Tenant | None,
    **options: Any,
) -> Session:
    """A turn whose session has notes, as a chat has them; every row is compared."""
    session = Session(store, engine(), name, tenant=tenant, **options)
    found = session.resume(ids)
    assert isinstance(session.engine, StampedEngine)
    session.engine.evaluate(np.asarray(ids, np.uint32)[found.reused_tokens :])
    if not session.codec.lossy:
        session.engine.check_rows()
    session.save(NOTES)
    return session


def restored(
    store: Store, ids: Sequence[int] | TokenIds, name: str | None = None, **how: Any
) -> int:
    """How many tokens of `ids` come from the store into a new engine, each row compared."""
    new = engine()
    report = Session(store, new, name, **how).resume(ids, leave=0)
    new.check_rows()
    assert new.held == report.reused_tokens
    return report.reused_tokens


@dataclass
class Told:
    """What must not be found: `texts` as UTF-8, `raw` bytes, `digests` raw and as hex, and any two
    neighbours of `ids` in either order of bytes."""

    texts: list[str] = field(default_factory=lambda: [NAME, *map(str, NOTES.values())])
    ids: list[TokenIds] = field(default_factory=list)
    digests: set[bytes] = field(default_factory=set)
    raw: list[bytes] = field(default_factory=list)

    def patterns(self) -> dict[bytes, str]:
        found = {text.encode(): f"the text {text!r}" for text in self.texts}
        found |= {text.encode("utf-16-le"): f"the text {text!r}" for text in self.texts}
        found |= {part.encode(): f"part of {t!r}" for t in self.texts for part in t.split("/")[1:]}
        found |= dict.fromkeys(self.raw, "rows")
        # A digest without a key confirms a guess, as of a session's name.
        of_texts = {blake3(text.encode()).digest() for text in self.texts}
        for digest in self.digests | of_texts:
            forms = (digest, digest.hex().encode(), digest[:8], digest.hex()[:16].encode())
            found |= dict.fromkeys(forms, f"the digest {digest.hex()}")
        for ids in self.ids:
            for at in range(len(ids) - 1):
                two = ids[at : at + 2]
                what = f"ids {at} and {at + 1}: {two.tolist()}"
                found |= {two.astype(kind).tobytes(): what for kind in ("<u4", ">u4", "<u8", ">u8")}
                found[", ".join(map(str, two.tolist())).encode()] = what
        return found

    def add_plain(self, path: Path) -> None:
        """A plain store's digests: of its files and of their rows, and what its sessions have."""
        for file in path.rglob(f"*{SUFFIX}"):
            metadata = parse(memoryview(file.read_bytes())).metadata
            for key in ("file", "content", "talk"):
                if key in metadata:
                    self.digests.add(bytes.fromhex(metadata[key]))

    def add_rows(self, ids: TokenIds) -> None:
        """Runs of the rows that an engine has of these ids."""
        for array in engine().expected(ids).values():
            data = np.ascontiguousarray(array).tobytes()
            self.raw += [data[at : at + 16] for at in range(0, len(data) - 16, 512)]


def everything(*folders: Path) -> Iterator[tuple[str, bytes]]:
    """What stands in all files below, whatever they are, and how they and their folders are called."""
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            name = str(path.relative_to(folder))
            yield f"the name of {name}", name.encode()
            if path.is_file():
                yield name, path.read_bytes()


def leaks(told: Told, parts: Iterable[tuple[str, bytes]]) -> list[str]:
    """Where something of it stands. Patterns are looked up by their first 8 bytes, at all places at
    once: thousands of them are looked for in each file."""
    wanted = told.patterns()
    starts = dict[int, list[bytes]]()
    for pattern in wanted:
        assert len(pattern) >= RUN, f"{pattern!r} would be found by chance"
        starts.setdefault(int.from_bytes(pattern[:RUN], "little"), []).append(pattern)
    known = np.array(sorted(starts), "<u8")
    found = []
    for where, data in parts:
        for shift in range(min(RUN, max(0, len(data) - RUN + 1))):
            numbers = np.frombuffer(data, "<u8", (len(data) - shift) // RUN, shift)
            for at in np.flatnonzero(np.isin(numbers, known)):
                for pattern in starts[int(numbers[at])]:
                    if data.startswith(pattern, shift + RUN * int(at)):
                        found.append(f"{wanted[pattern]} in {where}, at {shift + RUN * int(at)}")
    return found


def assert_nothing_told(told: Told, *folders: Path) -> None:
    found = leaks(told, everything(*folders))
    assert not found, found[:20]


def assert_told(told: Told, *folders: Path) -> None:
    """That the same look finds each of it in a place that is not encrypted."""
    found = leaks(told, everything(*folders))
    kinds = ("ids ", "the digest", *(["rows"] if told.raw else []))
    for what in (*(f"the text {text!r}" for text in told.texts), *kinds):
        assert any(line.startswith(what) for line in found), f"{what} was not found"


def reseal(data: bytes, of: Tenant, by: Tenant, change: Callable[[bytes], bytes]) -> bytes:
    """A sealed block's file with another one inside, sealed by the same tenant or by another, as who
    has the keys can make it; right by all digests, and of the same clear fields."""
    sealed = parse_sealed(memoryview(data))
    inside = change(bytes(sealed.open(of)))
    packed = Packed((inside,), len(inside), "")
    made = seal(packed, replace(sealed.clear, tenant_id=by.tenant_id), by)
    return b"".join(bytes(memoryview(part).cast("B")) for part in made.buffers)
