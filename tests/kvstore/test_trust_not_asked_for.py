"""Whoever signs nothing pays nothing: without a list cryptography is not even loaded. With a list and
without the package there is one line on what to install, and nothing is set aside for want of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvsnap.kvstore.store import Store
from kvsnap.kvstore.trust_list import add
from kvsnap.testing.aftermath import assert_saved
from kvsnap.testing.stamped import StampedEngine
from kvsnap.testing.turns import some_ids, turn
from tests.planting import block_of, chain_files

IDS = some_ids(57)
A = "ab" * 32
LOADED = """
import json, sys
import kvsnap
from kvsnap.cli.main import main
from kvsnap.kvstore.gc import gc
from kvsnap.kvstore.remotes.folder import Folder
from kvsnap.kvstore.sharing.pull import pull
from kvsnap.kvstore.sharing.push import push
from kvsnap.kvstore.verify import verify_store
from kvsnap.testing.stamped import StampedEngine
from kvsnap.testing.turns import some_ids, turn

def loaded():
    return sorted(name for name in sys.modules if name.split(".")[0] == "cryptography")

found = {}
path, remote = sys.argv[1], Folder(f"file://{sys.argv[2]}", 5.0)
with kvsnap.Store(path) as store:
    found["opened"] = loaded()
    turn(store, StampedEngine(), some_ids(57), "chat")
    engine = StampedEngine()
    turn(store, engine, some_ids(60), "chat")
    assert engine.positions == [57, 58, 59]
    found["saved and resumed"] = loaded()
    verify_store(store)
    gc(store)
    found["verified"] = loaded()
    push(store, remote, "default", "chat")
with kvsnap.Store(path + "2") as store:
    pull(store, remote, "chat")
    found["pushed and pulled"] = loaded()
print(json.dumps(found))
"""
MISSING = """
import sys
sys.modules["cryptography"] = None
from kvsnap.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


def test_without_a_list_nothing_loads_it(store_path: Path, tmp_path: Path) -> None:
    (tmp_path / "store2").mkdir()
    (tmp_path / "store2" / "kvsnap.json").write_bytes((store_path / "kvsnap.json").read_bytes())
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", LOADED, str(store_path), str(tmp_path / "there")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert list(found) == ["opened", "saved and resumed", "verified", "pushed and pulled"]
    assert not any(found.values()), found


def test_also_not_where_a_key_is_there(store_path: Path, own_signing_key: Path) -> None:
    """Only a list makes it look for the key."""
    own_signing_key.parent.mkdir(parents=True)
    own_signing_key.write_text("no key at all")
    with Store(store_path) as store:
        turn(store, StampedEngine(), IDS, "chat")
        assert_saved(store, IDS, "chat")
        assert not any(block_of(path.read_bytes()).signer for path in chain_files(store_path))


@pytest.fixture
def listed(store_path: Path) -> Path:
    with Store(store_path) as store:
        turn(store, StampedEngine(), IDS, "chat")
        add(store, A, vouch=True)
    for index in store_path.glob("index.sqlite3*"):
        index.unlink()  # so that no file counts as synced, and each would be read by a save
    return store_path


def without_it(*arguments: object) -> subprocess.CompletedProcess[str]:
    """`kvsnap ARGUMENTS` where the package is not installed."""
    command = [sys.executable, "-W", "error", "-c", MISSING, *map(str, arguments)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, env=os.environ
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done


@pytest.mark.parametrize(
    "command",
    ["verify", "stats", "push chat URL", "pull chat URL", "trust ls", "trust add KEY --vouch"],
)
def test_with_a_list_and_without_the_package_one_line_says_what_to_install(
    listed: Path, tmp_path: Path, command: str
) -> None:
    words = command.replace("URL", (tmp_path / "there").as_uri()).replace("KEY", A).split()
    done = without_it("--store", listed, *words)
    assert done.returncode == 1, done.stdout
    assert "signatures need the package cryptography" in done.stderr
    assert "pip install 'kvsnap[remote]'" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 2
    assert not list((listed / "quarantine").glob("*"))
    with Store(listed) as store:
        assert_saved(store, IDS, "chat")


@pytest.mark.parametrize("words", ["push chat URL --sign", "keygen --signing", "trust add KEY"])
def test_without_a_list_only_what_signs_needs_it(
    store_path: Path, tmp_path: Path, own_signing_key: Path, words: str
) -> None:
    with Store(store_path) as store:
        turn(store, StampedEngine(), IDS, "chat")
    words = words.replace("URL", (tmp_path / "there").as_uri()).replace("KEY", A)
    before = [path.read_bytes() for path in chain_files(store_path)]
    done = without_it("--store", store_path, *words.split())
    assert done.returncode == 1, done.stdout
    assert "pip install 'kvsnap[remote]'" in done.stderr
    assert [path.read_bytes() for path in chain_files(store_path)] == before
    assert "trust" not in json.loads((store_path / "kvsnap.json").read_text())
    assert not own_signing_key.exists()
    assert without_it("--store", store_path, "verify").returncode == 0
