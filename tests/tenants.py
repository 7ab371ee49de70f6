"""Tenants of tests, the places that they share, and the forms in which a key could get out."""

from __future__ import annotations

import base64
import json
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kvsnap.formats.tenant import Tenant
from kvsnap.kvstore.store import Store

ALICE, BOB = Tenant(bytes(range(200, 232))), Tenant(bytes(range(40, 72)))


def open_shared(path: Path, block_size: int = 16, encrypt: bool = True, **options: Any) -> Store:
    """A store that several tenants use; made where it is not there yet. Two with keys need an
    encrypted one; who has no key can only look into it."""
    path.mkdir(mode=0o700, exist_ok=True)
    settings = path / "kvsnap.json"
    if not settings.exists():
        settings.write_text(json.dumps({"block_size": block_size, "created": 1, "format": "1"}))
    return Store(path, encrypt=encrypt, **options)


def forms(key: bytes) -> list[bytes]:
    """A key raw, as hex, base64 and Python writes it, and the first half of each."""
    texts = [key.hex(), key.hex().upper(), base64.b64encode(key).decode(), repr(key)[2:-1]]
    whole = [key, *(text.encode() for text in texts), base64.urlsafe_b64encode(key)]
    return [form[:size] for form in whole for size in (len(form), len(form) // 2)]


def assert_not_in(key: bytes, data: Iterable[bytes | str]) -> None:
    for part in data:
        text = part.encode("utf-8", "surrogateescape") if isinstance(part, str) else part
        found = [form for form in forms(key) if form in text]
        assert not found, f"the key is in {text[:200]!r}"


def written(*folders: Path) -> Iterable[bytes]:
    """What stands in all files below, and how they are called."""
    for folder in folders:
        for path in folder.rglob("*"):
            yield str(path.relative_to(folder)).encode()
            if path.is_file():
                yield path.read_bytes()


def shown(error: BaseException) -> str:
    """An error as the most talkative of tools show it: with the variables of each frame, but those of
    the test itself, and with its notes and causes."""
    assert error.__traceback__ is not None
    told = traceback.TracebackException(
        type(error), error, error.__traceback__.tb_next, capture_locals=True
    )
    return "".join(told.format())
