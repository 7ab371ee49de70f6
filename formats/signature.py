"""Ed25519 signatures: who says that these rows are what a model computed.

A block's signature covers its name (and so every token id up to its end), its root id (model, settings,
tenant) and its `content` digest (the rows), whatever codec they are stored by. It proves nothing about
the rows in the same file until `content` has been compared with them. See docs/format.md, "Signatures".
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvsnap.formats.errors import Damaged, Unsupported, UsageError

SIGNER, SIGNATURE = "signer", "signature"
"""Header fields, hexadecimal; both or neither."""
_KEY = re.compile(r"[0-9a-f]{64}")
_VALUE = re.compile(r"[0-9a-f]{128}")


@dataclass(frozen=True)
class Signature:
    """`signer`: a public key, 64 hex digits. `value`: 128 hex digits."""

    signer: str
    value: str

    def covers(self, message: bytes) -> bool:
        """Whether the signer signed this very message."""
        crypto = _ed25519()
        try:
            public = crypto.Ed25519PublicKey.from_public_bytes(bytes.fromhex(self.signer))
            public.verify(bytes.fromhex(self.value), message)
        except (_invalid(), ValueError):
            return False
        return True

    def fields(self) -> dict[str, str]:
        return {SIGNER: self.signer, SIGNATURE: self.value}


@dataclass(frozen=True)
class SigningKey:
    """A private key; `repr` and errors never show it."""

    public: str
    """64 hex digits."""
    _private: Any = field(repr=False)

    def sign(self, message: bytes) -> Signature:
        return Signature(self.public, self._private.sign(message).hex())

    def pem(self) -> bytes:
        """PKCS #8, not encrypted: what a key file holds."""
        from cryptography.hazmat.primitives import serialization as form

        pem: bytes = self._private.private_bytes(
            form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption()
        )
        return pem


def block_message(name: bytes, root_id: str, content: str) -> bytes:
    """What is signed of a block or state checkpoint. All parts have 32 bytes."""
    return b"kvsnap block signature\0" + name + bytes.fromhex(root_id) + _digest(content)


def session_message(content: str, talk: str) -> bytes:
    """Of a session's file: `talk` covers its name, tenant, revision, chain, ids and notes."""
    return b"kvsnap session signature\0" + _digest(content) + _digest(talk)


def manifest_message(digest: str) -> bytes:
    """Of a manifest: the file digest that it has without a signature."""
    return b"kvsnap manifest signature\0" + _digest(digest)


def require() -> None:
    """Raise `Unsupported` where signatures cannot be checked."""
    _ed25519()


def new_signing_key() -> SigningKey:
    return _signing_key(_ed25519().Ed25519PrivateKey.generate())


def parse_signing_key(pem: bytes) -> SigningKey:
    """Raises `UsageError` for what is no Ed25519 key in PEM form."""
    crypto = _ed25519()
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        private = load_pem_private_key(pem, None)
    except (ValueError, TypeError, UnsupportedAlgorithm):  # their texts may quote what they read
        private = None
    if not isinstance(private, crypto.Ed25519PrivateKey):
        raise UsageError(
            "this is no signing key", "kvsnap keygen --signing makes one: Ed25519, PEM, no password"
        )
    return _signing_key(private)


def is_public_key(text: str) -> bool:
    return _KEY.fullmatch(text) is not None


def public_key(text: str) -> str:
    """A public key as a person gives it, as 64 hex digits. Raises `UsageError`."""
    found = text.strip().lower()
    if not _KEY.fullmatch(found):
        raise UsageError(
            "a public key has 64 hexadecimal digits",
            "kvsnap trust ls shows it on the machine that signs",
        )
    return found


def signature_of(metadata: Mapping[str, str]) -> Signature | None:
    """The signature in a header; None where there is none. Raises `Damaged` for what cannot be one."""
    signer, value = metadata.get(SIGNER), metadata.get(SIGNATURE)
    if signer is None and value is None:
        return None
    if not _KEY.fullmatch(signer or "") or not _VALUE.fullmatch(value or ""):
        raise Damaged("the header's signature cannot be one")
    return Signature(str(signer), str(value))


def _digest(text: str) -> bytes:
    if not _KEY.fullmatch(text):
        raise Damaged("a digest that is signed is not 64 hexadecimal digits")
    return bytes.fromhex(text)


def _signing_key(private: Any) -> SigningKey:
    return SigningKey(private.public_key().public_bytes_raw().hex(), private)


def _ed25519() -> Any:
    try:
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as error:
        raise Unsupported(
            "signatures need the package cryptography", "pip install 'kvsnap[remote]'"
        ) from error
    return ed25519


def _invalid() -> type[Exception]:
    from cryptography.exceptions import InvalidSignature

    return InvalidSignature
