"""export and import: a session in one file. No engine is needed."""

from __future__ import annotations

import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvsnap.formats.tenant import parse_key
from kvsnap.kvstore.remotes.archive import Archive
from kvsnap.kvstore.sharing.pull import PullReport
from kvsnap.kvstore.sharing.push import PushReport, push
from kvsnap.kvstore.store import Store
from kvsnap.testing.stamped import StampedEngine
from kvsnap.testing.turns import some_ids, turn

SIZE = 64
Run = Callable[..., Any]


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    return tmp_path / "s.kvsnap"


@pytest.fixture
def saved(store: Path) -> Store:
    """Sessions "s" of three blocks and "t" of two."""
    with Store(store) as opened:
        turn(opened, StampedEngine(), some_ids(3 * SIZE + 5, 1), "s")
        turn(opened, StampedEngine(), some_ids(2 * SIZE + 5, 2), "t")
    return opened


def refused(done: Any, code: int, *words: str) -> None:
    assert done.code == code, done.err
    assert "error: " in done.err, done.err
    for word in words:
        assert word in done.err


def test_an_exported_session_is_imported_and_computes_nothing(
    kvsnap: Run, saved: Store, archive: Path, other: Path
) -> None:
    exported = PushReport(**kvsnap("export", "s", archive, "--json").json)
    assert (exported.session, exported.remote) == ("s", str(archive))
    assert (exported.files, exported.moved_files, exported.evicted_blocks) == (4, 4, 0)
    imported = PullReport(**kvsnap("import", archive, "--json", "--store", other).json)
    assert (imported.session, imported.remote) == ("s", str(archive))
    assert (imported.blocks, imported.stored_blocks, imported.moved_files) == (3, 3, 3)
    engine = StampedEngine()
    with Store(other) as opened:
        found = turn(opened, engine, [*some_ids(3 * SIZE + 5, 1), 7], "s", save=False)
    assert found.computed == 1
    engine.check_rows()
    assert kvsnap("verify", "--store", other).code == 0


def test_the_file_is_a_tar_that_its_owner_may_read(
    kvsnap: Run, saved: Store, archive: Path
) -> None:
    assert kvsnap("export", "s", archive).code == 0
    assert archive.stat().st_mode & 0o777 == 0o600
    with tarfile.open(archive, "r:") as tar:
        names = tar.getnames()
    assert len(names) == 5
    assert sum(name.startswith("blocks/") for name in names) == 3


def test_a_file_that_is_there_is_kept_unless_it_is_forced(
    kvsnap: Run, saved: Store, archive: Path
) -> None:
    archive.write_text("mine")
    refused(kvsnap("export", "s", archive), 2, "is there already", "--force")
    refused(kvsnap("export", "nobody", archive, "--force"), 1, "no session 'nobody'")
    assert archive.read_text() == "mine"
    assert kvsnap("export", "s", archive, "--force").code == 0
    assert kvsnap("export", "t", archive, "--force").code == 0
    assert kvsnap("import", archive, "--dry-run", "--json").json["session"] == "t"
    assert sorted(path.name for path in archive.parent.iterdir()) == ["s.kvsnap", "store"]


def test_what_fails_leaves_no_file(kvsnap: Run, saved: Store, archive: Path) -> None:
    refused(kvsnap("export", "nobody", archive), 1, "no session 'nobody'", "kvsnap ls")
    refused(kvsnap("export", "s", archive / "below"), 1, "cannot write")
    refused(kvsnap("export", "s", archive.parent, "--force"), 1, "cannot write")
    assert [path.name for path in archive.parent.iterdir()] == ["store"]


def test_a_session_whose_end_was_evicted_is_exported_and_partly_done(
    kvsnap: Run, saved: Store, archive: Path, other: Path
) -> None:
    kvsnap("rm", "t")
    kvsnap("gc", "--capacity", 1)
    done = kvsnap("export", "s", archive, "--json")
    assert (done.code, done.json["evicted_blocks"]) == (3, 3)
    pulled = kvsnap("import", archive, "--json", "--store", other)
    assert (pulled.code, pulled.json["stored_blocks"]) == (3, 0)


def test_an_import_under_another_name_and_a_dry_run(
    kvsnap: Run, saved: Store, archive: Path, other: Path
) -> None:
    kvsnap("export", "s", archive)
    planned = kvsnap("import", archive, "--dry-run", "--store", other)
    assert planned.out.startswith(f"would import 's' from {archive}: 3 of 3 files")
    assert not other.exists()
    done = kvsnap("import", archive, "s", "--as", "mine", "--store", other)
    assert done.out.startswith(f"imported 'mine' from {archive}: 3 of 3 files")
    assert "kvsnap resume mine" in done.err
    assert [row["session"] for row in kvsnap("ls", "--json", "--store", other).json] == ["mine"]


def test_an_import_over_other_tokens_is_refused_until_it_is_forced(
    kvsnap: Run, saved: Store, archive: Path
) -> None:
    kvsnap("export", "s", archive)
    with Store(saved.path) as opened:
        turn(opened, StampedEngine(), some_ids(70, 9), "s")
    refused(kvsnap("import", archive, "--quiet"), 1, "another session 's'", "--as", "--force")
    assert kvsnap("import", archive, "--force").code == 0
    assert kvsnap("show", "s", "--json").json["tokens"] == 3 * SIZE + 5


def test_of_several_sessions_one_has_to_be_named(
    kvsnap: Run, saved: Store, archive: Path, other: Path
) -> None:
    with Store(saved.path) as opened, Archive.create(archive) as new:
        for name in ("s", "t"):
            push(opened, new, "default", name)
    refused(kvsnap("import", archive), 2, "holds 2 sessions: 's', 't'", "name the one")
    assert kvsnap("import", archive, "t", "--json", "--store", other).json["session"] == "t"
    refused(kvsnap("import", archive, "u"), 1, "no session 'u'")


def test_a_tenants_session_needs_its_key(
    kvsnap: Run, saved: Store, archive: Path, other: Path, tmp_path: Path
) -> None:
    key = tmp_path / "key"
    key.write_text("ab" * 32)
    with Store(saved.path) as opened:
        ids = some_ids(2 * SIZE, 1)
        turn(opened, StampedEngine(), ids, "mine", tenant=parse_key(key.read_bytes()))
    assert kvsnap("export", "mine", archive, "--tenant-key-file", key).code == 0
    refused(kvsnap("import", archive, "--store", other), 1, "no session that can be taken", "key")
    done = kvsnap("import", archive, "--store", other, "--tenant-key-file", key)
    assert done.code == 0


@pytest.mark.parametrize("cut", [0, 1, 511, 700, 5000, -600, -1])
def test_a_file_that_is_cut_is_refused_or_no_archive(
    kvsnap: Run, saved: Store, archive: Path, other: Path, cut: int
) -> None:
    kvsnap("export", "s", archive)
    archive.write_bytes(archive.read_bytes()[:cut])
    refused(kvsnap("import", archive, "--store", other), 1)
    assert not other.exists()


def test_a_damaged_block_makes_the_session_shorter(
    kvsnap: Run, saved: Store, archive: Path, other: Path
) -> None:
    kvsnap("export", "s", archive)
    with Store(saved.path) as opened:
        chain = opened.sessions.load("default", "s").record.chain
    data = bytearray(archive.read_bytes())
    with tarfile.open(archive, "r:") as tar:
        (last,) = [member for member in tar if chain[2].hex() in member.name]
    data[last.offset_data + last.size - 9] ^= 1
    archive.write_bytes(data)
    done = kvsnap("import", archive, "--json", "--store", other)
    assert (done.code, done.json["stored_blocks"]) == (3, 2)
    assert "error: " in done.err
    assert kvsnap("verify", "--store", other).code == 0


def test_what_is_no_archive_is_refused(kvsnap: Run, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no tar" * 1000)
    (tmp_path / "empty").touch()
    with tarfile.open(tmp_path / "foreign", "w:") as tar:
        tar.add(tmp_path / "text", "../../etc/passwd")
    for name in ("text", "empty", "foreign", "missing", "."):
        refused(kvsnap("import", tmp_path / name), 1)
    refused(kvsnap("import", "/dev/zero"), 1, "no regular file")
    refused(kvsnap("import", "s3://bucket/kv"), 2, "push and pull")
    refused(kvsnap("export", "s", "s3://bucket/kv"), 2, "push and pull")
