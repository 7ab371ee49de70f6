"""Whose signatures a store believes. Without a list nobody's are asked for.

A store with a trust list takes for stored only what a listed key, or this machine's own, signed over the
rows that are really there; all else is as good as damaged. See docs/design/0011-trust.md.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Iterable, Mapping

from kvsnap.formats.block import BlockFile
from kvsnap.formats.errors import Untrusted
from kvsnap.formats.manifest import Manifest
from kvsnap.formats.session import SessionFile
from kvsnap.formats.signature import SigningKey, public_key, require
from kvsnap.kvstore.signing_key import find_signing_key, require_signing_key

UNSIGNED = "no trusted key signed it"
WHO_SIGNED = (
    "kvsnap trust add KEY believes who signed it; kvsnap trust ls shows whom this store believes"
)
VARIABLE = "KVSNAP_TRUST"
_MOST_COMPARED = 100_000


def trust_of(stored: Mapping[str, str], given: Iterable[str]) -> Trust | None:
    """Of what a caller gives and of KVSNAP_TRUST (public keys with commas between them), and only
    where there is neither, of the store's own list: who may write to a store must not be able to add
    to what its user says. None where all are empty. Raises `UsageError`."""
    named = [text for text in os.environ.get(VARIABLE, "").split(",") if text.strip()]
    outside = {public_key(text): stored.get(public_key(text), "") for text in (*given, *named)}
    listed = outside or dict(stored)
    return Trust(listed, outside=bool(outside)) if listed else None


class Trust:
    """`listed`: public key → name of whom it is. Safe for threads. Raises `UsageError` for a signing
    key that cannot be read, and `Unsupported` where signatures cannot be checked: what this machine
    signed must not pass for what nobody did."""

    def __init__(self, listed: Mapping[str, str], *, outside: bool = False) -> None:
        require()
        self.listed, self.outside = dict(listed), outside
        self._own = ""
        self._look_for_own()
        self._compared: set[str] = set()
        """File digests of blocks whose rows were found to be what their signature says."""
        self._guard = threading.Lock()

    @property
    def own(self) -> str:
        """This machine's public key; empty where it has none yet. Another process may make it at any
        time, and what it signs then is to be believed."""
        if not self._own:
            self._look_for_own()
        return self._own

    def _look_for_own(self) -> None:
        key = find_signing_key()
        self._own = key.public if key is not None else ""

    @functools.cached_property
    def key(self) -> SigningKey:
        """This machine's signing key, made where there is none. Raises `UsageError` or `StoreError`
        where it cannot be had."""
        key = require_signing_key()
        self._own = key.public
        return key

    def lists(self, signer: str) -> bool:
        """Whether that key is believed, if it really signed."""
        return bool(signer) and (signer in self.listed or signer == self.own)

    def check_block(self, block: BlockFile, file_digest: str) -> None:
        """Raise `Untrusted` unless a trusted key signed the rows that the file holds. They are decoded
        for it once in a process: a header can quote the signature of other rows."""
        if file_digest in self._compared:
            return
        signature = block.signature
        if signature is None or not self.lists(signature.signer) or not block.signed:
            raise Untrusted(UNSIGNED)
        block.check_content()
        with self._guard:
            if len(self._compared) >= _MOST_COMPARED:
                self._compared.clear()
            self._compared.add(file_digest)

    def check_session(self, session: SessionFile) -> None:
        """Raise `Untrusted` unless a trusted key signed the session's digests, `Damaged` where they are
        not those of what the file says. `tail_rows` compares the rows."""
        signature = session.signature
        if signature is None or not self.lists(signature.signer) or not session.signed:
            raise Untrusted(UNSIGNED)
        session.check_talk()

    def believes_manifest(self, manifest: Manifest) -> bool:
        """Whether a trusted key signed what a remote says of a session."""
        signature = manifest.signature
        return signature is not None and self.lists(signature.signer) and manifest.signed

    def check_manifest(self, manifest: Manifest, url: str) -> None:
        """Raise `Untrusted` where none did, with who did."""
        if self.believes_manifest(manifest):
            return
        signature = manifest.signature
        who = "nobody signed it"
        if signature is not None:
            known = self.lists(signature.signer)
            who = "its signature is wrong" if known else f"it is signed by {signature.signer}"
        raise Untrusted(
            f"session {manifest.name!r} in {url} is not signed by a key that this store trusts: {who}",
            WHO_SIGNED,
        )
