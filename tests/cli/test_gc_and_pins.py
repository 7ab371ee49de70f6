"""gc, pin, unpin, and what ls, show and stats say of a store within a budget. No engine is needed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvsnap.kvstore.store import Store
from kvsnap.testing.recount import disk_bytes, stored_blocks
from kvsnap.testing.stamped import StampedEngine
from kvsnap.testing.turns import some_ids, turn

SIZE = 16
BYTES = 3712
Run = Callable[..., Any]


@pytest.fixture
def filled(store: Path) -> Store:
    """Sessions "old" and "new" of seven and four blocks that share none."""
    store.mkdir(mode=0o700)
    text = json.dumps({"block_size": SIZE, "created": 1, "format": "1"})
    (store / "kvsnap.json").write_text(text)
    with Store(store, min_free="0") as opened:
        for name, blocks in [("old", 7), ("new", 4)]:
            ids = some_ids(blocks * SIZE + 3, blocks)
            turn(opened, StampedEngine(), ids, name, codec="raw")
    return opened


def room_for(store: Store, blocks: int) -> int:
    sessions = sum(path.stat().st_size for path in store.place.sessions.rglob("*.safetensors"))
    return sessions + blocks * BYTES


def test_a_dry_run_prints_what_gc_then_does(kvsnap: Run, filled: Store) -> None:
    options = ["--json", "gc", "--capacity", room_for(filled, 6)]
    before = disk_bytes(filled.place)
    planned = kvsnap(*options, "--dry-run")
    assert disk_bytes(filled.place) == before
    done = kvsnap(*options)
    assert (planned.code, done.code) == (0, 0)
    assert planned.json == {**done.json, "dry_run": True}
    assert done.json["evicted"] == 5
    assert done.json["freed_bytes"] == 5 * BYTES == before - disk_bytes(filled.place)
    assert done.json["kept_bytes"] == disk_bytes(filled.place)
    assert done.json["sessions_cut"] == ["old"]
    assert kvsnap(*options).json["evicted"] == 0


def test_gc_says_in_words_what_went_and_who_loses_by_it(kvsnap: Run, filled: Store) -> None:
    planned = kvsnap("gc", "--dry-run", "--capacity", room_for(filled, 6))
    assert planned.out.startswith("5 blocks would go, 18.6 kB;")
    assert "session 'old' loses the end of its blocks" in planned.err
    done = kvsnap("gc", "--capacity", room_for(filled, 6))
    assert done.out.startswith("5 blocks went, 18.6 kB;")
    quiet = kvsnap("gc", "--quiet", "--capacity", room_for(filled, 1))
    assert quiet.err == ""


def test_a_session_whose_blocks_went_is_listed_with_what_is_left(
    kvsnap: Run, filled: Store
) -> None:
    kvsnap("gc", "--capacity", room_for(filled, 7))
    line = next(row for row in kvsnap("ls").out.splitlines() if row.startswith("old"))
    assert line.split()[:3] == ["old", "115", "3/7"]
    (old,) = [row for row in kvsnap("--json", "ls").json if row["session"] == "old"]
    assert (old["tokens"], old["blocks"], old["stored_blocks"]) == (115, 7, 3)
    shown = kvsnap("--json", "show", "old").json
    assert [block["stored"] for block in shown["blocks"]] == [True] * 3 + [False] * 4
    assert (shown["stored_tokens"], shown["tokens"]) == (3 * SIZE, 115)
    assert len(shown["token_ids"]) == 115
    assert "3 of 7 stored" in kvsnap("show", "old").out
    assert kvsnap("verify").code == 0
    assert kvsnap("--json", "stats").json["evicted_blocks"] == 4


def test_a_pinned_session_keeps_its_blocks_until_it_is_unpinned(kvsnap: Run, filled: Store) -> None:
    done = kvsnap("pin", "old")
    assert (done.code, done.out) == (0, "pinned 'old'\n")
    kept = kvsnap("--json", "gc", "--capacity", 1)
    assert kept.code == 0
    assert kept.json["evicted"] == 4
    assert kept.json["short_bytes"] > 0
    rows = {row["session"]: row for row in kvsnap("--json", "ls").json}
    assert (rows["old"]["pinned"], rows["old"]["stored_blocks"]) == (True, 7)
    assert (rows["new"]["pinned"], rows["new"]["stored_blocks"]) == (False, 0)
    assert rows["old"]["pinned_until"] is None
    assert "pinned" in kvsnap("ls").out
    assert "over the budget" in kvsnap("gc", "--capacity", 1).err
    assert kvsnap("--json", "stats").json["pinned"] == 1
    assert kvsnap("--json", "unpin", "old").json == {"unpinned": ["old"]}
    assert kvsnap("--json", "gc", "--capacity", 1).json["evicted"] == 7


def test_a_block_is_pinned_by_the_beginning_of_its_name_and_keeps_those_before_it(
    kvsnap: Run, filled: Store
) -> None:
    third = kvsnap("--json", "show", "old").json["blocks"][2]["name"]
    assert kvsnap("pin", third[:12]).code == 0
    assert kvsnap("--json", "show", third[:12]).json["pinned"]
    kvsnap("gc", "--capacity", 1)
    assert len(stored_blocks(filled.place)) == 3
    assert kvsnap("unpin", third[:12]).code == 0
    kvsnap("gc", "--capacity", 1)
    assert stored_blocks(filled.place) == {}


def test_a_pin_for_a_time_says_until_when(kvsnap: Run, filled: Store) -> None:
    assert kvsnap("--json", "pin", "old", "new", "--for", "2w").json == {
        "pinned": ["old", "new"],
        "seconds": 14 * 86400,
    }
    saved = {row["session"]: row["saved"] for row in kvsnap("--json", "ls").json}
    for row in kvsnap("--json", "ls").json:
        assert abs(row["pinned_until"] - saved[row["session"]] - 14 * 86400) < 300


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["pin", "nobody"], 1, "no session or block 'nobody'"),
        (["unpin", "old"], 1, "session 'old' is not pinned"),
        (["pin"], 2, "Missing argument"),
        (["pin", "old", "--for", "soon"], 2, "'soon' is not a time"),
        (["pin", "old", "--for", "0d"], 2, "'0d' is not a time"),
        (["gc", "--capacity", "much"], 2, "'much' is not a size"),
        (["gc", "--min-free", "-1"], 2, "'-1' is not a size"),
    ],
)
def test_what_makes_no_sense_is_refused_and_nothing_changes(
    kvsnap: Run, filled: Store, arguments: list[str], code: int, says: str
) -> None:
    before = disk_bytes(filled.place)
    done = kvsnap(*arguments)
    assert done.code == code
    assert says in done.err
    assert disk_bytes(filled.place) == before
    assert not filled.place.pins.exists()


def test_one_name_that_is_not_there_pins_none_of_them(kvsnap: Run, filled: Store) -> None:
    assert kvsnap("pin", "old", "nobody").code == 1
    assert not any(row["pinned"] for row in kvsnap("--json", "ls").json)


def test_removing_a_session_that_is_pinned_lets_its_blocks_go(kvsnap: Run, filled: Store) -> None:
    kvsnap("pin", "old")
    assert kvsnap("rm", "old").code == 0
    kvsnap("gc", "--capacity", 1)
    assert stored_blocks(filled.place) == {}


@pytest.mark.parametrize("asked", ["--capacity", "KVSNAP_CAPACITY", "kvsnap.json"])
def test_stats_reads_back_the_capacity_and_who_asked_for_it(
    kvsnap: Run, filled: Store, asked: str
) -> None:
    # A51
    options: list[object] = []
    environment = {}
    if asked == "--capacity":
        options = ["--capacity", "7MB"]
    elif asked == "KVSNAP_CAPACITY":
        environment = {asked: "7MB"}
    else:
        settings = json.loads(filled.place.settings.read_text())
        filled.place.settings.write_text(json.dumps({**settings, "capacity": "7MB"}))
    source = "argument" if asked == "--capacity" else asked
    found = kvsnap("--json", *options, "stats", **environment).json
    assert (found["budget_bytes"], found["budget_source"]) == (7_000_000, source)
    assert found["bytes"] == disk_bytes(filled.place)
    assert f"7.0 MB ({source})" in kvsnap("stats", *options, **environment).out


def test_gc_keeps_free_space_that_is_asked_for(kvsnap: Run, filled: Store) -> None:
    assert kvsnap("--json", "gc", "--min-free", "1B").json["evicted"] == 0
    disk = shutil.disk_usage(filled.path)
    asked = (disk.free + disk.total) // 2
    done = kvsnap("--json", "gc", "--min-free", str(asked), "--dry-run").json
    assert done["evicted"] == 11
    assert done["short_bytes"] > 0


def test_gc_for_more_free_space_than_the_disk_has_is_refused(kvsnap: Run, filled: Store) -> None:
    done = kvsnap("gc", "--min-free", "900TB")
    assert done.code == 2
    assert "cannot be kept free" in done.err
    assert kvsnap("--json", "stats").json["blocks"] == 11


def test_gc_of_a_store_that_is_not_there_makes_none(kvsnap: Run, store: Path) -> None:
    assert kvsnap("--json", "gc", "--dry-run").json["kept_bytes"] == 0
    assert kvsnap("--json", "ls").json == []
    assert not store.exists()
