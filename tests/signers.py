"""Machines with signing keys of their own, in one process."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from kvsnap.formats.signature import SigningKey, new_signing_key
from kvsnap.kvstore.signing_key import VARIABLE, require_signing_key
from kvsnap.kvstore.store import Store

STRANGER = new_signing_key()
"""Somebody's key whom nobody trusts."""


class Signers:
    """`folder` holds one key file a machine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @contextlib.contextmanager
    def machine(self, name: str) -> Iterator[None]:
        """What runs in the block signs with this machine's key."""
        with mock.patch.dict(os.environ, {VARIABLE: str(self.folder / f"{name}.pem")}):
            yield

    def key(self, name: str) -> SigningKey:
        with self.machine(name):
            return require_signing_key()

    def public(self, name: str) -> str:
        return self.key(name).public

    def trusting(
        self, open_it: Callable[..., Store], name: str, *others: str, **options: Any
    ) -> Store:
        """A store of that machine which trusts the others; its key is fixed from now on."""
        with self.machine(name):
            store = open_it(name, trust=[self.public(other) for other in others], **options)
            assert store.trust is not None
            assert store.trust.key.public == self.public(name)
        return store
