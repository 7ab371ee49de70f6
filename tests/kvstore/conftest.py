"""A store with room for so many blocks, opened as often as a test likes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvsnap.kvstore.store import Store

BYTES = 3712
"""Of a block file of 16 tokens of the stamped engine, uncompressed."""


@pytest.fixture
def opened(store_path: Path) -> Iterator[Callable[..., Store]]:
    """Open the test's store (or the one at `path`) with room for `blocks` blocks, or for `capacity`
    bytes; whatever the disk has free."""
    stores: list[Store] = []

    def open_it(blocks: float = 100, capacity: int = 0, path: Path = store_path) -> Store:
        stores.append(Store(path, capacity=capacity or int(blocks * BYTES), min_free="0"))
        return stores[-1]

    yield open_it
    for store in stores:
        store.close()
