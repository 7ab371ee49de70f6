"""Sealed files: a whole kvsnap file, encrypted, inside another; what a store needs to know of it
without a key stands in the clear around it.

    safetensors { metadata in the clear, sealed: U8 [n + 16], tensors in the clear }

Token ids, session names, the identity, notes and digests of rows are inside. What is outside is the
additional data of the cipher, so that no sealed file can stand for another. See docs/format.md,
"Sealed file". The 32 random bytes of a file come from the operating system by way of the package
cryptography, which is loaded when something is sealed or opened, not before.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from blake3 import blake3

from kvsnap.formats.container import ALIGNMENT, Container, Packed, Tensor, header_size, pack, parse
from kvsnap.formats.errors import Damaged, Sealed, Unsupported, UsageError
from kvsnap.formats.fields import (
    FORMAT_VERSION,
    check_version,
    digest_field,
    hex_field,
    number_field,
)
from kvsnap.formats.manifest import BLOCK, ITEM_KINDS, STATE
from kvsnap.formats.manifest import KIND as MANIFEST
from kvsnap.formats.pin import KIND as PIN
from kvsnap.formats.session_name import MAX_NAME, check_session_name
from kvsnap.formats.tenant import Tenant

KIND = "sealed"
CIPHER = "aes-256-gcm"
MAX_PLAIN = (2**39 - 256) // 8
"""Bytes that one key and nonce may encrypt (NIST SP 800-38D, section 5.2.1.1)."""
_NONCE = bytes(12)
"""One key encrypts one file, and GCM asks only that no nonce occurs twice under a key (NIST SP 800-38D,
section 8). 32 random bytes make the key; 12 bytes of nonce would leave less room, were they random."""
_TAG = 16
_SALT = 32
_KINDS = (*ITEM_KINDS, MANIFEST, PIN)
_TENSOR = "sealed"
_MARK = b'"kind":"sealed"'
"""Quotes inside of values are escaped, so only the field itself can match."""


@dataclass(frozen=True)
class Clear:
    """What a sealed file says in the clear. `name` and `parent`: 32 bytes of blocks and state
    checkpoints, else empty. `root_id`: 64 hex digits, or empty where the file inside has none."""

    kind: str
    """Of the file inside."""
    tenant_id: str
    name: bytes = b""
    parent: bytes = b""
    root_id: str = ""
    start: int = 0
    tokens: int = 0
    """How many token ids a block or state checkpoint has; else 0."""
    last: bytes = b""
    """Of a session: the deepest block or state checkpoint that it stands on; empty for none."""
    signer: str = ""
    """Whose signature the file inside has, 64 hex digits; empty for none. An index asks for it."""

    def __post_init__(self) -> None:
        width = 32 if self.kind in (BLOCK, STATE) else 0
        if self.kind not in _KINDS:
            raise Damaged("a sealed file of a kind that is not known")
        if (len(self.name), len(self.parent)) != (width, width) or (width and not self.root_id):
            raise Damaged(f"a sealed {self.kind} has other names than it should")
        if len(self.root_id) not in (0, 64) or len(self.last) not in (0, 32):
            raise Damaged(f"a sealed {self.kind} with a root id or last block that can be none")
        if len(self.signer) not in (0, 64):
            raise Damaged(f"a sealed {self.kind} with a signer that can be none")
        if self.tokens > 2**16 or (self.tokens and not width):
            raise Damaged(f"a sealed {self.kind} of {self.tokens} token ids")


@dataclass(frozen=True)
class SealedFile:
    """A parsed sealed file over the buffer it was parsed from."""

    clear: Clear
    tensors: Mapping[str, Tensor]
    """Those that stand in the clear. Not to be believed before `open`."""
    _metadata: Mapping[str, str]
    _sealed: memoryview

    def open(self, tenant: Tenant | None) -> memoryview:
        """The file inside, each byte of it as it was sealed, with this very header and these tensors.
        Its `file` digest needs no check; its name must still be compared, as that of any file.

        Raises `Sealed` without the tenant's key, `Damaged` where anything was changed."""
        if tenant is None or tenant.tenant_id != self.clear.tenant_id:
            which = "no tenant key was given" if tenant is None else "by another tenant's key"
            raise Sealed(
                f"the file is sealed, {which}",
                "give the key that it was saved with: --tenant-key-file",
            )
        salt = bytes.fromhex(self._metadata["salt"])
        tag = bytes(self._sealed[-_TAG:])
        size = len(self._sealed) - _TAG
        decryptor = _cipher(_file_key(tenant, salt, self.clear.name), tag).decryptor()
        decryptor.authenticate_additional_data(_bound(self._metadata, self.tensors.items()))
        plain = np.empty(size + _TAG, np.uint8).data  # update_into asks for room to spare
        decryptor.update_into(self._sealed[:size], plain)
        from cryptography.exceptions import InvalidTag

        try:
            decryptor.finalize()
        except InvalidTag:
            # Nothing of `plain` may be looked at: it is whatever somebody else wrote.
            raise Damaged(
                "the sealed part does not open: it, or what goes with it, was changed"
            ) from None
        return plain[:size]


def seal(
    packed: Packed,
    clear: Clear,
    tenant: Tenant,
    tensors: Sequence[tuple[str, Tensor]] = (),
    *,
    salt: bytes | None = None,
) -> Packed:
    """The sealed file of a plain one; `tensors` stand in the clear, behind it. `salt`: for tests and
    golden files only. Two files of one salt and name give away what differs between them.

    Raises `Unsupported` without the package cryptography, and `UsageError` for a file that is too long.
    """
    if packed.size > MAX_PLAIN:
        raise UsageError(
            f"a file of {packed.size} bytes cannot be sealed; {MAX_PLAIN} are the most",
            "save shorter sessions, or in smaller blocks",
        )
    if clear.tenant_id != tenant.tenant_id:
        raise UsageError("the file belongs to another tenant than the key it is to be sealed by")
    salt = _random() if salt is None else salt
    metadata = _metadata(clear, salt)
    encryptor = _cipher(_file_key(tenant, salt, clear.name)).encryptor()
    encryptor.authenticate_additional_data(_bound(metadata, tensors))
    sealed = np.empty(packed.size + _TAG, np.uint8).data
    at = 0
    for part in packed.buffers:
        at += encryptor.update_into(part, sealed[at:])
    encryptor.finalize()
    sealed[at:] = encryptor.tag
    return pack(metadata, [(_TENSOR, Tensor("U8", (len(sealed),), sealed)), *tensors])


def is_sealed(buffer: memoryview) -> bool:
    """Whether a file says that it is sealed; True says nothing about whether it is a good one.
    Looks for the field in the header, without parsing it."""
    try:
        end = header_size(bytes(buffer[:8]))
    except Damaged:
        return False
    return _MARK in bytes(buffer[8:end])


def parse_sealed(buffer: memoryview) -> SealedFile:
    """Parse a whole sealed file. The caller checks the `file` digest first; no key is needed for
    either. Raises `Damaged`, and `Unsupported` for another version or cipher."""
    container = parse(buffer)
    clear = clear_of(container)
    tensors = dict(container.tensors)
    sealed = tensors.pop(_TENSOR, None)
    if sealed is None or sealed.dtype != "U8" or len(sealed.shape) != 1:
        raise Damaged("the file has no sealed part")
    if not _TAG <= len(sealed.data) <= MAX_PLAIN + _TAG:
        raise Damaged(f"a sealed part of {len(sealed.data)} bytes")
    return SealedFile(clear, tensors, container.metadata, sealed.data)


def clear_of(container: Container) -> Clear:
    """What a sealed file says in the clear, from its header's metadata alone. Raises as
    `parse_sealed` does."""
    check_version(container, KIND)
    if container.field("cipher") != CIPHER:
        raise Unsupported(
            "a sealed file of another cipher than this kvsnap has",
            "read it with the kvsnap that wrote it, or a newer one",
        )
    digest_field(container, "salt")
    return Clear(
        kind=container.field("holds"),
        tenant_id=digest_field(container, "tenant_id").hex(),
        name=hex_field(container, "name"),
        parent=hex_field(container, "parent"),
        root_id=hex_field(container, "root_id").hex(),
        start=number_field(container, "start"),
        tokens=number_field(container, "tokens"),
        last=hex_field(container, "last"),
        signer=hex_field(container, "signer").hex(),
    )


def sealed_size(plain: int, clear: Clear, tensors: Sequence[tuple[str, Tensor]] = ()) -> int:
    """Bytes of the file that `seal` makes of a plain file of so many."""
    data = plain + _TAG
    parts: list[tuple[str, str, tuple[int, ...], int]] = [(_TENSOR, "U8", (data,), data)]
    parts += [(name, t.dtype, t.shape, memoryview(t.data).nbytes) for name, t in tensors]
    header: dict[str, Any] = {"__metadata__": {**_metadata(clear, bytes(_SALT)), "file": "0" * 64}}
    end = 0
    for name, dtype, shape, size in parts:
        header[name] = {"data_offsets": [end, end + size], "dtype": dtype, "shape": list(shape)}
        end += size
    head = 8 + len(json.dumps(header, separators=(",", ":")))
    return head + -head % ALIGNMENT + end


def sealed_name(tenant: Tenant, session: str) -> str:
    """The stem of the file name of a sealed session or manifest, 64 hex digits. Keyed, because the
    names that people give can be guessed: whoever lists the folder could try them on a plain digest."""
    check_session_name(session, MAX_NAME)
    return blake3(session.encode("utf-8"), key=tenant.session_key).hexdigest()


def _metadata(clear: Clear, salt: bytes) -> dict[str, str]:
    return {
        "cipher": CIPHER,
        "holds": clear.kind,
        "kind": KIND,
        "kvsnap": FORMAT_VERSION,
        "last": clear.last.hex(),
        "name": clear.name.hex(),
        "parent": clear.parent.hex(),
        "root_id": clear.root_id,
        "salt": salt.hex(),
        "signer": clear.signer,
        "start": str(clear.start),
        "tenant_id": clear.tenant_id,
        "tokens": str(clear.tokens),
    }


def _bound(metadata: Mapping[str, str], tensors: Iterable[tuple[str, Tensor]]) -> bytes:
    """The cipher's additional data: all that stands in the clear but the `file` digest, which covers
    the ciphertext."""
    fields = {key: value for key, value in metadata.items() if key != "file"}
    described = {name: [t.dtype, list(t.shape), _digest(t)] for name, t in tensors}
    return json.dumps([fields, described], sort_keys=True, separators=(",", ":")).encode("ascii")


def _digest(tensor: Tensor) -> str:
    view = memoryview(tensor.data)
    return blake3(view.cast("B") if view.nbytes else b"").hexdigest()


def _file_key(tenant: Tenant, salt: bytes, name: bytes) -> bytes:
    return blake3(tenant.sealing_key + salt + name, derive_key_context="kvsnap file key").digest()


def _cipher(key: bytes, tag: bytes | None = None) -> Any:
    """Not the one-shot AESGCM: that takes one buffer, and a file to seal is several."""
    try:
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
    except ImportError as error:
        raise _missing() from error
    return Cipher(algorithms.AES(key), modes.GCM(_NONCE, tag))


def _random() -> bytes:
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError as error:
        raise _missing() from error
    return AESGCM.generate_key(bit_length=8 * _SALT)


def _missing() -> Unsupported:
    return Unsupported("sealed files need the package cryptography", "pip install 'kvsnap[remote]'")
