"""Every codec with every kind of store: so many files, and read back in a new process (A20, A54).

A codec that silently stores nothing, or that a later process cannot read, is found here.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvsnap.formats.codecs import CODECS, get_codec
from kvsnap.formats.tenant import Tenant
from kvsnap.kvstore.store import Store
from kvsnap.testing.stamped import StampedEngine
from kvsnap.testing.turns import some_ids, turn
from kvsnap.testing.untaught import untaught

STORES: dict[str, dict[str, Any]] = {
    "plain": {},
    "with a tier in memory": {"ram": "10MB"},
    "with room for little more": {"capacity": "120kB", "min_free": 0},
}
Child = Callable[..., list[dict]]


def calibrate(store: Store) -> None:
    engine = StampedEngine()
    weights = engine.identity(16, lambda path: "").weights
    store.calibrations.put(untaught(engine.layout, weights))


@pytest.mark.parametrize("options", STORES.values(), ids=STORES)
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("tenant", [None, Tenant(bytes(32))], ids=["no key", "a tenant's key"])
def test_three_blocks_are_three_files_that_a_new_store_reads(
    store_path: Path, codec: str, options: dict[str, Any], tenant: Tenant | None
) -> None:
    with Store(store_path, **options) as store:
        calibrate(store)
        saved = turn(store, StampedEngine(), some_ids(48), codec=codec, tenant=tenant).saved
    assert saved is not None
    assert (saved.blocks, saved.blocks_stored, saved.blocks_written) == (3, 3, 3)
    assert len(list(store_path.glob("blocks/*/*.safetensors"))) == 3
    with Store(store_path, **options) as store:
        engine = StampedEngine()
        done = turn(store, engine, some_ids(48), codec=codec, tenant=tenant, save=False)
    assert engine.positions == [47]
    assert done.resumed.fidelity == done.session.root.fidelity
    if not get_codec(codec).lossy:
        engine.check_rows()


@pytest.mark.parametrize("index", ["kept", "deleted"])
@pytest.mark.parametrize("codec", CODECS)
def test_a_new_process_reads_them(store_path: Path, child: Child, codec: str, index: str) -> None:
    with Store(store_path) as store:
        calibrate(store)
        fidelity = turn(
            store, StampedEngine(), some_ids(48), "chat", codec=codec
        ).session.root.fidelity
    if index == "deleted":
        for path in store_path.glob("index.sqlite3*"):
            path.unlink()
    (found,) = child("turn", store_path, 48, 0, "chat", "no-save", "unchecked")
    assert (found["positions"], found["fidelity"]) == ([47], fidelity)
