"""Machines, each with a store of its own, and one folder remote between them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvsnap.kvstore.remotes.counted import Counted
from kvsnap.kvstore.remotes.folder import Folder
from kvsnap.kvstore.store import Store


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Callable[..., Store]]:
    """Opens the store of a machine by its name, as often as it is called; blocks of 16 tokens."""
    opened: list[Store] = []

    def open_it(name: str = "a", block_size: int = 16, **options: Any) -> Store:
        path = tmp_path / name
        path.mkdir(mode=0o700, exist_ok=True)
        settings = path / "kvsnap.json"
        if not settings.exists():
            text = json.dumps({"block_size": block_size, "created": 1, "format": "1"})
            settings.write_text(text)
        opened.append(Store(path, **options))
        return opened[-1]

    yield open_it
    for store in opened:
        store.behind = None  # a test that sends in the background has waited for it
        store.close()


@pytest.fixture
def there(tmp_path: Path) -> Path:
    """The remote's folder, for tests that change what stands in it."""
    return tmp_path / "remote"


@pytest.fixture
def remote(there: Path) -> Counted:
    return Counted(Folder(f"file://{there}", 5.0))
