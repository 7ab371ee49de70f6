"""Manifests: what a session consists of elsewhere. See docs/format.md, section "Manifest".

A manifest is the commit point of a pushed session: it is written last, and names every file that the
session needs by name, size and digests. It holds no rows and no token ids; the session's own file,
which has them, is one of the items. Whoever pulls believes none of it: names are computed from the
session's token ids again, and each file is compared with its item and with itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvsnap.formats.container import Container, Packed, Tensor, pack, parse
from kvsnap.formats.errors import Damaged, UsageError
from kvsnap.formats.fields import FORMAT_VERSION, check_version, digest_field, number_field
from kvsnap.formats.names import ZERO_PARENT
from kvsnap.formats.session_name import (
    MAX_NAME,
    SUFFIX,
    check_session_name,
    session_file_name,
)
from kvsnap.formats.signature import Signature, SigningKey, manifest_message, signature_of
from kvsnap.formats.tenant import is_tenant_id

KIND = "manifest"
BLOCK, STATE, CALIBRATION, SESSION = "block", "state", "calibration", "session"
ITEM_KINDS = (BLOCK, STATE, CALIBRATION, SESSION)
"""In the file a kind is its place in this tuple."""
MAX_ITEMS = 2**17
"""8 million tokens in blocks of 64. Bounds what a hostile manifest makes its reader allocate."""
MAX_TOKENS = 2**24
MAX_MANIFEST = MAX_ITEMS * 128 + 2**20
NO_CONTENT = bytes(32)
"""Of a file that is no block, or whose digest of rows must not be known to those without a key."""


@dataclass(frozen=True, slots=True)
class Item:
    """One file. `name`: a block's, or the file digest of a calibration or a session's file, which
    have no other name (sealed sessions: a keyed digest of that). `position`: the token after the last that a block or checkpoint holds, else 0.
    `file`, `content`: its two digests (of a session the plain file's; `content` zeros where the kind has none)."""

    kind: str
    name: bytes
    position: int
    size: int
    file: bytes
    content: bytes = NO_CONTENT


def content_of(item: Item) -> str | None:
    """The digest of its rows, 64 hex digits, where the manifest says it."""
    return item.content.hex() if item.content != NO_CONTENT else None


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """`items`: blocks in chain order, then state checkpoints, calibrations, and the session's file.

    `blocks` of the chain's length, or fewer: a session whose end was evicted is pushed as it is.
    `creator` and `model` are words for people, and prove nothing."""

    name: str
    tenant_id: str
    root_id: str
    fidelity: str
    block_size: int
    revision: int
    tokens: int
    created: int
    """Unix seconds."""
    creator: str = ""
    model: str = ""
    signature: Signature | None = None
    sealed: bool = False
    """Whether it stands sealed in its remote, and so all that it names; not in the file."""
    items: tuple[Item, ...]

    def __post_init__(self) -> None:
        try:
            check_session_name(self.name, MAX_NAME)
        except UsageError as error:
            raise Damaged(f"the manifest's name is none: {error.what}") from error
        if self.tokens >= (MAX_ITEMS + 1) * self.block_size or self.tokens > MAX_TOKENS:
            raise Damaged(f"{self.tokens} tokens are more than any session has")
        counts = Counter(item.kind for item in self.items)
        if counts[SESSION] != 1 or counts[BLOCK] > self.tokens // self.block_size:
            raise Damaged("the manifest's items are not those of a session")
        if len({item.name for item in self.items}) != len(self.items):
            raise Damaged("the manifest names a file twice")

    def of_kind(self, kind: str) -> list[Item]:
        return [item for item in self.items if item.kind == kind]

    @property
    def session(self) -> Item:
        return self.of_kind(SESSION)[0]

    @property
    def size(self) -> int:
        """Bytes of all its files."""
        return sum(item.size for item in self.items)

    @property
    def signed(self) -> bool:
        """Whether the signer signed all of this, and so the session's file, which it names by digest."""
        return self.signature is not None and self.signature.covers(self._message())

    def sign(self, key: SigningKey) -> Manifest:
        """The same, with this key's signature in place of another, or of none."""
        return replace(self, signature=key.sign(self._message()))

    def _message(self) -> bytes:
        return manifest_message(pack_manifest(replace(self, signature=None)).file_digest)

    def item_key(self, item: Item) -> str:
        """Where the item's file stands in a remote."""
        return item_key(item.kind, item.name, self.tenant_id)


def item_key(kind: str, name: bytes, tenant_id: str) -> str:
    """Where a file stands in a remote. Blocks of all sessions stand together."""
    text = name.hex()
    if kind in (BLOCK, STATE):
        return block_key(name)
    if kind == SESSION:
        return f"sessions/{tenant_id}/{text}{SUFFIX}"
    return f"calibrations/{text}{SUFFIX}"


def block_key(name: bytes) -> str:
    text = name.hex()
    return f"blocks/{text[:2]}/{text}{SUFFIX}"


def manifest_key(tenant_id: str, name: str) -> str:
    return f"manifests/{tenant_id}/{session_file_name(name)}"


def pack_manifest(manifest: Manifest) -> Packed:
    """The bytes of a manifest file."""
    items = manifest.items
    metadata = {
        "block_size": str(manifest.block_size),
        "created": str(manifest.created),
        "creator": manifest.creator,
        "fidelity": manifest.fidelity,
        "kind": KIND,
        "kvsnap": FORMAT_VERSION,
        "model": manifest.model,
        "name": manifest.name,
        "revision": str(manifest.revision),
        "root_id": manifest.root_id,
        "tenant_id": manifest.tenant_id,
        "tokens": str(manifest.tokens),
        **(manifest.signature.fields() if manifest.signature is not None else {}),
    }
    kinds = np.array([ITEM_KINDS.index(item.kind) for item in items], np.uint8)
    sizes = np.array([item.size for item in items], "<u8")
    positions = np.array([item.position for item in items], "<u8")
    return pack(
        metadata,
        [
            ("sizes", Tensor("U64", sizes.shape, sizes)),
            ("positions", Tensor("U64", positions.shape, positions)),
            ("names", _digests([item.name for item in items])),
            ("files", _digests([item.file for item in items])),
            ("contents", _digests([item.content for item in items])),
            ("kinds", Tensor("U8", kinds.shape, kinds)),
        ],
    )


def parse_manifest(buffer: memoryview) -> Manifest:
    """Parse a whole manifest. The caller checks the `file` digest first. Raises `Damaged`."""
    container = parse(buffer)
    check_version(container, KIND)
    tensors = container.tensors
    if set(tensors) != {"sizes", "positions", "names", "files", "contents", "kinds"}:
        raise Damaged("the manifest has other tensors than a manifest has")
    count = len(tensors["kinds"].data)
    if count > MAX_ITEMS:
        raise Damaged(f"the manifest names {count} files, more than any session has")
    kinds = _numbers(tensors["kinds"], "U8", np.dtype("u1"), count)
    if count and int(kinds.max()) >= len(ITEM_KINDS):
        raise Damaged("the manifest names files of a kind that is not known")
    sizes = _numbers(tensors["sizes"], "U64", np.dtype("<u8"), count)
    positions = _numbers(tensors["positions"], "U64", np.dtype("<u8"), count)
    names, file_digests, contents = (
        _read_digests(tensors[key], count) for key in ("names", "files", "contents")
    )
    block_size = number_field(container, "block_size")
    if not 1 <= block_size <= 2**16:
        raise Damaged(f"impossible block size {block_size}")
    return Manifest(
        name=container.field("name"),
        tenant_id=_tenant_field(container),
        root_id=digest_field(container, "root_id").hex(),
        fidelity=container.field("fidelity"),
        block_size=block_size,
        revision=number_field(container, "revision"),
        tokens=number_field(container, "tokens"),
        created=number_field(container, "created"),
        creator=container.field("creator"),
        model=container.field("model"),
        signature=signature_of(container.metadata),
        items=tuple(
            Item(ITEM_KINDS[kinds[n]], names[n], int(positions[n]), int(sizes[n]), file, content)
            for n, (file, content) in enumerate(zip(file_digests, contents, strict=True))
        ),
    )


def _tenant_field(container: Container) -> str:
    text = container.field("tenant_id")
    if not is_tenant_id(text):
        raise Damaged("the manifest's tenant id is none")
    return text


def _digests(values: Sequence[bytes]) -> Tensor:
    array = np.frombuffer(b"".join(values), np.uint8).reshape(-1, len(ZERO_PARENT))
    return Tensor("U8", array.shape, array)


def _read_digests(tensor: Tensor, count: int) -> list[bytes]:
    if (tensor.dtype, tensor.shape) != ("U8", (count, 32)):
        raise Damaged("the manifest's digests do not go with its files")
    data = bytes(tensor.data)
    return [data[at : at + 32] for at in range(0, len(data), 32)]


def _numbers(tensor: Tensor, dtype: str, kind: np.dtype, count: int) -> np.ndarray:
    if (tensor.dtype, tensor.shape) != (dtype, (count,)):
        raise Damaged("the manifest's sizes do not go with its files")
    return np.frombuffer(tensor.data, kind)
