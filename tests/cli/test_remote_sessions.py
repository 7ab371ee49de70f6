"""ls, verify, rm and gc of a remote; what somebody else wrote there. No engine is needed."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvsnap.formats.manifest import Manifest, pack_manifest, parse_manifest
from kvsnap.formats.tenant import parse_key
from kvsnap.kvstore.sharing.sweep import SweepReport
from kvsnap.kvstore.store import Store
from kvsnap.testing.stamped import StampedEngine
from kvsnap.testing.turns import some_ids, turn

SIZE = 64
DAY = 24 * 3600
Run = Callable[..., Any]


@pytest.fixture
def pushed(kvsnap: Run, store: Path, url: str) -> Store:
    """Sessions "a" and "b" of four and three blocks that share two, here and in the remote."""
    shared = some_ids(2 * SIZE, 1)
    with Store(store) as opened:
        for name, blocks in (("a", 2), ("b", 1)):
            own = some_ids(blocks * SIZE + 5, ord(name))
            turn(opened, StampedEngine(), [*shared, *own], name)
    for name in ("a", "b"):
        assert kvsnap("push", name, url, KVSNAP_CREATOR=f"{name}@host").code == 0
    return opened


def forge(folder: Path, key: str = "manifests/default/a.safetensors", **fields: Any) -> None:
    """Write the manifest of "a" with other fields at a key."""
    path = folder / "manifests/default/a.safetensors"
    manifest: Manifest = parse_manifest(memoryview(path.read_bytes()))
    for name, value in fields.items():
        object.__setattr__(manifest, name, value)  # past the checks that an attacker's lacks
    packed = pack_manifest(manifest)
    (folder / key).write_bytes(b"".join(map(bytes, packed.buffers)))


def damage(folder: Path, store: Store, name: str, number: int) -> str:
    """Change a byte of a block in the remote; the block's name."""
    block: str = store.sessions.load("default", name).record.chain[number].hex()
    path = folder / "blocks" / block[:2] / f"{block}.safetensors"
    data = bytearray(path.read_bytes())
    data[-9] ^= 1
    path.write_bytes(data)
    return block


def age(folder: Path, days: float) -> None:
    for path in folder.rglob("*.safetensors"):
        os.utime(path, (time.time() - days * DAY,) * 2)


def test_ls_shows_the_sessions_of_a_remote(kvsnap: Run, pushed: Store, url: str) -> None:
    done = kvsnap("ls", url)
    assert done.out.split("\n")[0].split() == [
        "session", "tokens", "blocks", "revision", "size", "pushed", "by", "model",
    ]  # fmt: skip
    (row,) = [line.split() for line in done.out.splitlines() if line.startswith("a ")]
    assert row[:4] == ["a", str(4 * SIZE + 5), "4", "1"]
    assert row[-1] == "a@host"
    assert done.err == "2 sessions\n"
    rows = {row["session"]: row for row in kvsnap("ls", url, "--json").json}
    assert (rows["a"]["blocks"], rows["b"]["blocks"]) == (4, 3)
    assert rows["b"]["stored_blocks"] == 3
    assert rows["a"]["creator"] == "a@host"
    assert rows["a"]["key"] == "manifests/default/a.safetensors"
    assert abs(rows["a"]["pushed"] - time.time()) < 300
    assert kvsnap("ls", "--json").json[0].keys() != rows["a"].keys()


def test_an_empty_remote_and_one_that_is_not_there_have_no_sessions(
    kvsnap: Run, url: str, store: Path
) -> None:
    done = kvsnap("ls", url)
    assert (done.code, done.out) == (0, "")
    assert "no sessions" in done.err
    assert kvsnap("ls", url, "--json").json == []
    assert not store.exists()


def test_words_of_others_do_nothing_to_the_terminal(
    kvsnap: Run, pushed: Store, folder: Path, url: str
) -> None:
    evil = "\x1b]0;title\x07\u202egnp.exe\x9b2J\n"
    forge(folder, creator=evil, model="m" * 5000 + evil, created=10**18 - 1)
    done = kvsnap("ls", url)
    assert done.code == 0
    assert all(sign.isprintable() for sign in done.out.replace("\n", ""))
    assert len(done.out.splitlines()) == 3
    assert r"\x1b]0;title\x07\u202egnp.exe\x9b2J\n" in done.out
    assert max(map(len, done.out.splitlines())) < 300
    rows = {row["session"]: row for row in kvsnap("ls", url, "--json").json}
    assert rows["a"]["creator"] == r"\x1b]0;title\x07\u202egnp.exe\x9b2J\n"
    assert rows["a"]["pushed"] == 10**18 - 1
    with Store(pushed.path) as opened:
        turn(opened, StampedEngine(), some_ids(SIZE, 77), "a")
    refused = kvsnap("push", "a", url)
    assert refused.code == 1
    assert len(refused.err.splitlines()) == 2
    assert all(sign.isprintable() for sign in refused.err.replace("\n", ""))


@pytest.mark.parametrize(
    ("key", "fields"),
    [
        ("other", {}),
        ("control", {"name": "\x1b[2J"}),
        ("long", {"name": "a" * 5000}),
        ("empty", {"name": ""}),
        ("surrogate", {"name": "\ud800"}),
        ("tenant", {"tenant_id": "ab" * 32}),
    ],
)
def test_a_manifest_that_cannot_be_is_listed_with_its_problem(
    kvsnap: Run, pushed: Store, folder: Path, url: str, key: str, fields: dict[str, Any]
) -> None:
    forge(folder, f"manifests/default/{key}.safetensors", **fields)
    done = kvsnap("ls", url, "--json")
    assert done.code == 0
    (bad,) = [row for row in done.json if row["session"] is None]
    assert bad["key"] == f"manifests/default/{key}.safetensors"
    assert bad["problem"]
    assert bad["tokens"] is None
    listed = kvsnap("ls", url)
    assert f"(damaged: manifests/default/{key}.safetensors)" in listed.out
    assert "3 sessions, 1 damaged" in listed.err
    assert kvsnap("verify", url).code == 1
    refused = kvsnap("gc", "--remote", url, "--grace", 0)
    assert refused.code == 1
    assert f"{key}.safetensors" in refused.err


def test_verify_of_a_remote_finds_what_is_bad(
    kvsnap: Run, pushed: Store, folder: Path, url: str
) -> None:
    whole = kvsnap("verify", url, "--json")
    # Two manifests, two session files, five blocks: two of the seven are the same.
    assert (whole.code, whole.json) == (0, {"checked": 9, "bad": [], "unreachable": []})
    name = damage(folder, pushed, "a", 3)
    done = kvsnap("verify", url)
    assert done.code == 1
    assert f"bad  blocks/{name[:2]}/{name}.safetensors\n     " in done.out
    assert done.out.endswith("9 files checked, 1 bad\n")
    assert "push --force" in done.err
    assert [bad["name"] for bad in kvsnap("verify", "a", url, "--json").json["bad"]] == [name]
    assert kvsnap("verify", "b", url).code == 0


def test_verify_with_a_url_alone_is_of_the_remote_and_makes_no_store(
    kvsnap: Run, store: Path, url: str
) -> None:
    assert kvsnap("verify", url).out == "0 files checked, 0 bad\n"
    assert kvsnap("verify", "nobody", url).code == 1
    assert kvsnap("verify", "nobody", "nowhere").code == 2
    assert not store.exists()


def test_sessions_of_other_keys_are_named_as_not_checked(
    kvsnap: Run, pushed: Store, url: str, tmp_path: Path
) -> None:
    key = tmp_path / "key"
    key.write_text("ab" * 32)
    tenant = parse_key(key.read_bytes())
    with Store(pushed.path) as opened:
        turn(opened, StampedEngine(), some_ids(SIZE, 5), "t", tenant=tenant)
    kvsnap("push", "t", url, "--tenant-key-file", key)
    done = kvsnap("verify", url)
    assert done.code == 0
    assert f"not checked: manifests/{tenant.tenant_id}/t.safetensors" in done.err
    assert "t (of a tenant's key)" in kvsnap("ls", url).out
    assert kvsnap("verify", "t", url, "--tenant-key-file", key).out == "3 files checked, 0 bad\n"


def test_rm_removes_the_sessions_manifest_there_and_nothing_here(
    kvsnap: Run, pushed: Store, folder: Path, url: str
) -> None:
    size = (folder / "manifests/default/a.safetensors").stat().st_size
    assert kvsnap("rm", "a", "nobody", "--remote", url).code == 1
    assert len(kvsnap("ls", url, "--json").json) == 2
    done = kvsnap("rm", "a", "--remote", url, "--json")
    assert done.json == {"removed": ["a"], "freed_bytes": size}
    assert [row["session"] for row in kvsnap("ls", url, "--json").json] == ["b"]
    assert kvsnap("pull", "a", url).code == 1
    assert {row["session"] for row in kvsnap("ls", "--json").json} == {"a", "b"}
    assert kvsnap("rm", "b", "--remote", url).out == f"removed 'b' from {url}\n"


def test_gc_of_a_remote_removes_what_no_session_names_after_the_grace(
    kvsnap: Run, pushed: Store, folder: Path, url: str
) -> None:
    kvsnap("rm", "a", "--remote", url)
    young = kvsnap("gc", "--remote", url)
    assert young.out.startswith(f"0 files of {url} went, 0 B; 1 session keeps 4 files")
    assert "3 files, " in young.err
    age(folder, 8)
    planned = kvsnap("gc", "--remote", url, "--dry-run", "--json").json
    assert len(list(folder.glob("blocks/*/*.safetensors"))) == 5
    done = SweepReport(**kvsnap("gc", "--remote", url, "--json").json)
    assert planned == {**dataclasses.asdict(done), "dry_run": True}
    # Two own blocks of "a" and its session file; the two that it shared with "b" stay.
    assert (done.removed_files, done.kept_files, done.young_files) == (3, 4, 0)
    assert len(list(folder.glob("blocks/*/*.safetensors"))) == 3
    assert kvsnap("verify", url).code == 0
    assert kvsnap("--json", "stats").json["blocks"] == 5


def test_a_longer_grace_keeps_more(kvsnap: Run, pushed: Store, folder: Path, url: str) -> None:
    kvsnap("rm", "a", "--remote", url)
    age(folder, 8)
    assert kvsnap("gc", "--remote", url, "--grace", "9", "--json").json["removed_files"] == 0
    assert kvsnap("gc", "--remote", url, "--grace", "0.5", "--json").json["removed_files"] == 3


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--grace", "1"], "--grace is for a remote"),
        (["--remote", "URL", "--grace", "nan"], "--grace is nan"),
        (["--remote", "URL", "--grace", "-1"], "--grace"),
        (["--remote", "URL", "--capacity", "1GB"], "a remote has no budget"),
        (["--remote", "URL", "--min-free", "1GB"], "a remote has no budget"),
        (["--remote", "nowhere"], "not the URL of a remote"),
    ],
)
def test_options_of_gc_that_do_not_go_together_are_usage_errors(
    kvsnap: Run, pushed: Store, folder: Path, url: str, options: list[str], says: str
) -> None:
    kvsnap("rm", "a", "b", "--remote", url)
    age(folder, 8)
    done = kvsnap("gc", *[url if word == "URL" else word for word in options])
    assert done.code == 2
    assert says in done.err
    assert len(list(folder.glob("blocks/*/*.safetensors"))) == 5
