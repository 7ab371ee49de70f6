"""What a sealed remote has: the same files, each sealed by its tenant's key.

Names of blocks are keyed already. A session's object is named by a keyed digest of its file instead of
the digest itself, its manifest by a keyed digest of its name; the manifest's items keep their names and
kinds in the clear, so that a sweep needs no key.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from blake3 import blake3

from kvsnap.formats.block import parse_block
from kvsnap.formats.container import Packed, Tensor, check_file_digest
from kvsnap.formats.errors import Damaged
from kvsnap.formats.manifest import (
    BLOCK,
    ITEM_KINDS,
    KIND,
    SESSION,
    STATE,
    Item,
    Manifest,
    item_key,
    pack_manifest,
    parse_manifest,
)
from kvsnap.formats.sealed import (
    Clear,
    SealedFile,
    is_sealed,
    parse_sealed,
    seal,
    sealed_name,
    sealed_size,
)
from kvsnap.formats.session import SessionFile
from kvsnap.formats.session_name import SUFFIX
from kvsnap.formats.tenant import Tenant
from kvsnap.kvstore.opener import clear_of_block
from kvsnap.kvstore.rebuild import Found
from kvsnap.kvstore.session_file import clear_of_session

_NAMES, _KINDS = "names", "kinds"


def sealed_manifest_key(tenant: Tenant, name: str) -> str:
    return f"manifests/{tenant.tenant_id}/{sealed_name(tenant, name)}{SUFFIX}"


def sealed_session_name(tenant: Tenant, file_digest: bytes) -> bytes:
    """The name of a session's object: who guesses the file must not be able to see that it is there."""
    return blake3(b"file" + file_digest, key=tenant.session_key).digest()


def size_of_block(found: Found, tenant: Tenant) -> int:
    """Bytes that a stored block has in a sealed remote."""
    if found.sealed_for:
        return found.size
    return sealed_size(found.size, clear_of_block(found.record, tenant.tenant_id, found.signer))


def size_of_session(session: SessionFile, plain: int) -> int:
    """The same of a session whose plain file has so many bytes."""
    return sealed_size(plain, clear_of_session(session.record))


def sealed_item(
    manifest_item: Item, data: memoryview, session: SessionFile, tenant: Tenant
) -> Packed:
    """A stored file as a sealed remote gets it; calibrations, which hold nobody's text, as they are."""
    plain = Packed((data,), len(data), "")
    if is_sealed(data) or manifest_item.kind not in (BLOCK, STATE, SESSION):
        return plain
    if manifest_item.kind == SESSION:
        return seal(plain, clear_of_session(session.record), tenant)
    block = parse_block(data)
    return seal(plain, clear_of_block(block.record, tenant.tenant_id, block.signer), tenant)


def seal_manifest(manifest: Manifest, tenant: Tenant) -> Packed:
    names = np.frombuffer(b"".join(i.name for i in manifest.items), np.uint8).reshape(-1, 32)
    kinds = np.array([ITEM_KINDS.index(item.kind) for item in manifest.items], np.uint8)
    return seal(
        pack_manifest(manifest),
        Clear(KIND, manifest.tenant_id),
        tenant,
        [(_NAMES, Tensor("U8", names.shape, names)), (_KINDS, Tensor("U8", kinds.shape, kinds))],
    )


def open_manifest(sealed: SealedFile, tenant: Tenant | None) -> Manifest:
    """Raises `Sealed` without the tenant's key, `Damaged`."""
    if sealed.clear.kind != KIND:
        raise Damaged(f"a sealed {sealed.clear.kind} where a manifest belongs")
    manifest = parse_manifest(sealed.open(tenant))
    if manifest.tenant_id != sealed.clear.tenant_id:
        raise Damaged("the sealed file holds another tenant's manifest")
    return dataclasses.replace(manifest, sealed=True)


def keys_named(sealed: SealedFile) -> list[str]:
    """The objects that a sealed manifest names, told without its key. Who can write there can change
    them, as he can remove them. Raises `Damaged`."""
    names, kinds = sealed.tensors.get(_NAMES), sealed.tensors.get(_KINDS)
    if sealed.clear.kind != KIND or names is None or kinds is None:
        raise Damaged("the sealed file names no files")
    count = len(kinds.data)
    if (names.dtype, names.shape, kinds.dtype, kinds.shape) != ("U8", (count, 32), "U8", (count,)):
        raise Damaged("the sealed manifest's names do not go with its files")
    data, numbers = bytes(names.data), bytes(kinds.data)
    if count and max(numbers) >= len(ITEM_KINDS):
        raise Damaged("the sealed manifest names files of a kind that is not known")
    tenant_id = sealed.clear.tenant_id
    return [
        item_key(ITEM_KINDS[numbers[n]], data[32 * n : 32 * n + 32], tenant_id)
        for n in range(count)
    ]


def read_manifest(data: memoryview) -> Manifest | SealedFile:
    """A manifest's file, the digest compared; a sealed one is not opened. Raises `Damaged`."""
    check_file_digest(data)
    return parse_sealed(data) if is_sealed(data) else parse_manifest(data)
