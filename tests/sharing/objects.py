"""What stands in a folder remote, found by what it is, and files made by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvsnap.formats.container import Packed, Tensor, pack, parse
from kvsnap.formats.manifest import Item, Manifest, manifest_key, pack_manifest
from kvsnap.formats.names import TokenIds
from kvsnap.kvstore.keyring import Keyring
from kvsnap.kvstore.rebuild import read_record
from kvsnap.kvstore.remotes.base import Remote
from kvsnap.kvstore.session import Session
from kvsnap.kvstore.sharing.manifests import require
from kvsnap.kvstore.sharing.push import push
from kvsnap.kvstore.store import Store
from kvsnap.testing.stamped import StampedEngine
from kvsnap.testing.turns import turn

ME = "default"
"""The tenant of those who give no key."""


def save_and_push(
    store: Store, remote: Remote, ids: Sequence[int] | TokenIds, name: str, **options: Any
) -> None:
    turn(store, StampedEngine(), ids, name, **options)
    push(store, remote, ME, name)


def resume(store: Store, ids: Sequence[int] | TokenIds, name: str | None = None) -> StampedEngine:
    """An engine with a resumed prompt, all computed that was not stored, every row checked."""
    engine = StampedEngine()
    turn(store, engine, ids, name, save=False)
    engine.check_rows()
    return engine


def block_files(there: Path) -> list[Path]:
    """Blocks (and state checkpoints) of a remote, the front of a chain first."""
    found = there.glob("blocks/*/*.safetensors")
    return sorted(found, key=lambda path: read_record(path).record.start)


def only(there: Path, folder: str) -> Path:
    """The one file below a folder of the remote."""
    (path,) = (
        path for path in there.glob(f"{folder}/**/*") if path.is_file() and "+" not in path.name
    )
    return path


def joined(packed: Packed) -> bytes:
    return b"".join(bytes(memoryview(part).cast("B")) for part in packed.buffers)


def rewrite(
    path: Path, change: Callable[[dict[str, Tensor]], None] | None = None, **fields: str
) -> None:
    """The same file with other header fields or tensors, right by its own digest."""
    container = parse(memoryview(path.read_bytes()))
    tensors = dict(container.tensors)
    if change is not None:
        change(tensors)
    path.write_bytes(joined(pack({**container.metadata, **fields}, list(tensors.items()))))


def put_manifest(remote: Remote, manifest: Manifest) -> None:
    remote.put(manifest_key(manifest.tenant_id, manifest.name), joined(pack_manifest(manifest)))


def manifest_there(remote: Remote, name: str) -> Manifest:
    manifest = require(remote, Keyring(), ME, name).manifest
    assert manifest is not None
    return manifest


def change_manifest(
    remote: Remote, name: str, change: Callable[[list[Item]], list[Item]], **fields: Any
) -> None:
    """Another list of items, or other fields, in a manifest that is right otherwise."""
    manifest = manifest_there(remote, name)
    items = tuple(change(list(manifest.items)))
    put_manifest(remote, replace(manifest, items=items, **fields))


def files_of(there: Path) -> dict[str, bytes]:
    """Every object of a remote, by key."""
    return {
        str(path.relative_to(there)): path.read_bytes()
        for path in there.rglob("*")
        if path.is_file() and "+" not in path.name
    }


def ids_there(store: Store, name: str) -> list[int]:
    """The token ids that a stored session holds."""
    return list(Session(store, StampedEngine(), name).stored_token_ids().tolist())
