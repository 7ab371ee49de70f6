"""A folder is a store or a remote, never both: each would take the other's files for its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvsnap.formats.errors import RemoteError, StoreError
from kvsnap.kvstore.remotes import open_remote
from kvsnap.kvstore.sharing.push import push
from kvsnap.kvstore.sharing.sweep import sweep
from kvsnap.kvstore.store import Store
from kvsnap.testing.stamped import StampedEngine
from kvsnap.testing.turns import some_ids, turn


def test_a_remote_is_not_opened_as_a_store(tmp_path: Path) -> None:
    with Store(tmp_path / "a") as store, open_remote(f"file://{tmp_path}/remote") as remote:
        turn(store, StampedEngine(), some_ids(70), "chat")
        push(store, remote, "default", "chat")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(StoreError, match="is a remote, no store"):
        Store(tmp_path / "remote")
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("dry_run", [False, True])
def test_a_store_is_not_swept_as_a_remote(tmp_path: Path, dry_run: bool) -> None:
    with Store(tmp_path / "a") as store:
        turn(store, StampedEngine(), some_ids(70), "chat")
    before = sorted(tmp_path.rglob("*"))
    with (
        open_remote(f"file://{tmp_path}/a") as remote,
        pytest.raises(RemoteError, match="is a store, and no remote"),
    ):
        sweep(remote, grace_days=-1, dry_run=dry_run)
    assert sorted(tmp_path.rglob("*")) == before
