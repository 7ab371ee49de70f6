"""A tenant's key on the command line: from a file or the environment, in every command alike, and in
nothing that is printed or written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvsnap.cli.main import COMMANDS, cli
from kvsnap.formats.errors import UsageError
from kvsnap.kvstore.tenant_key import FILE_VARIABLE, VARIABLE
from kvsnap.testing.stamped import StampedEngine
from kvsnap.testing.turns import some_ids, turn
from tests.tenants import ALICE, BOB, assert_not_in, open_shared, written

Run = Callable[..., Any]
IDS = some_ids(150)
CALLS = {
    "explain": ["--model", "m.gguf", "--prompt", "x"],
    "export": ["s", "f.kvsnap"],
    "import": ["f.kvsnap"],
    "ls": [],
    "pin": ["s"],
    "proxy": ["--slot-dir", "nowhere"],
    "pull": ["s", "file:///nowhere"],
    "push": ["s", "file:///nowhere"],
    "recompress": ["s", "--codec", "raw"],
    "resume": ["--model", "m.gguf", "--prompt", "x"],
    "rm": ["s"],
    "save": ["--model", "m.gguf", "--prompt", "x"],
    "show": ["s"],
    "stats": [],
    "unpin": ["s"],
    "verify": [],
}
"""A call of each command that takes a key."""


def test_these_are_all_commands_that_take_a_key() -> None:
    with_key = [
        name
        for name in COMMANDS
        if "tenant_key_file" in {p.name for p in cli.get_command(None, name).params}  # type: ignore[arg-type, union-attr]
    ]
    assert sorted(with_key) == sorted(CALLS)


@pytest.mark.parametrize("command", CALLS)
def test_every_command_reads_the_environment(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVSNAP_STORE", str(tmp_path / "store"))
    monkeypatch.setenv(VARIABLE, ALICE.key.hex()[:60])
    with pytest.raises(UsageError, match=f"{VARIABLE} is not 64 hex characters"):
        cli.main([command, *CALLS[command]], standalone_mode=False)
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setenv(FILE_VARIABLE, str(tmp_path))
    with pytest.raises(UsageError, match="holds no tenant key"):
        cli.main([command, *CALLS[command]], standalone_mode=False)


@pytest.fixture
def saved(store: Path) -> Path:
    with open_shared(store, 64) as opened:
        turn(opened, StampedEngine(), IDS, "s", tenant=ALICE)
    return store


def test_file_variable_and_option_name_the_same_session(
    kvsnap: Run, saved: Path, tmp_path: Path
) -> None:
    key, other = tmp_path / "alice.key", tmp_path / "bob.key"
    key.write_bytes(ALICE.key)
    other.write_bytes(BOB.key)
    with_option = ["--tenant-key-file", key]
    found = [
        kvsnap("show", "s", "--json", *with_option),
        kvsnap("show", "s", "--json", **{FILE_VARIABLE: str(key)}),
        kvsnap("show", "s", "--json", **{VARIABLE: ALICE.key.hex().upper()}),
        kvsnap("show", "s", "--json", *with_option, **{VARIABLE: BOB.key.hex()}),
        kvsnap("show", "s", "--json", *with_option, **{FILE_VARIABLE: str(other)}),
    ]
    assert [done.json["tokens"] for done in found] == [len(IDS)] * len(found)
    for environment in ({}, {VARIABLE: BOB.key.hex()}, {FILE_VARIABLE: str(other)}):
        assert kvsnap("show", "s", **environment).code == 1
    both = kvsnap("show", "s", **{VARIABLE: ALICE.key.hex(), FILE_VARIABLE: str(key)})
    assert (both.code, len(both.err.splitlines())) == (2, 2)
    assert "both set" in both.err


def test_what_is_no_key_is_one_line_and_not_shown(kvsnap: Run, tmp_path: Path) -> None:
    bad = tmp_path / "bad.key"
    bad.write_text(ALICE.key.hex()[:60])
    calls = [
        kvsnap("show", "s", "--verbose", **{VARIABLE: ALICE.key.hex()[:60]}),
        kvsnap("show", "s", "--verbose", "--tenant-key-file", bad),
        kvsnap("show", "s", "--verbose", "--tenant-key-file", ALICE.key.hex()),
        kvsnap("show", "s", "--verbose", **{FILE_VARIABLE: ALICE.key.hex()}),
    ]
    for done in calls:
        assert (done.code, done.out, len(done.err.splitlines())) == (2, "", 2)
        assert_not_in(ALICE.key, [done.err])


@pytest.mark.slow
def test_the_key_is_in_nothing_that_is_printed_or_written(
    kvsnap: Run, saved: Path, folder: Path, other: Path, url: str, tmp_path: Path
) -> None:
    key = tmp_path / "keys" / "alice.key"
    key.parent.mkdir()
    key.write_text(ALICE.key.hex())
    calls: list[list[object]] = [
        ["ls"],
        ["show", "s"],
        ["show", "--tree"],
        ["stats"],
        ["verify"],
        ["pin", "s"],
        ["unpin", "s"],
        ["push", "s", url],
        ["push", "s", url, "--force"],
        ["ls", url],
        ["verify", url],
        ["pull", "s", url, "--store", other],
        ["export", "s", tmp_path / "s.kvsnap"],
        ["import", tmp_path / "s.kvsnap", "--as", "t"],
        ["recompress", "s", "--codec", "raw"],
        ["gc", "--capacity", "100kB"],
        ["doctor"],
        ["rm", "t"],
    ]
    fail: list[list[object]] = [
        ["pull", "nobody", url],
        ["show", "nobody"],
        ["push", "s", "s3://no-bucket-of-ours/x"],
        ["stats", "--prometheus"],
    ]
    printed = []
    for number, call in enumerate([*calls, *fail]):
        how = ({VARIABLE: ALICE.key.hex()}, {FILE_VARIABLE: str(key)})[number % 2]
        done = kvsnap(*call, "--verbose", **how, AWS_ENDPOINT_URL="http://127.0.0.1:9")
        assert (done.code != 0) is (call in fail), (call, done.err)
        printed += [done.out, done.err]
    assert_not_in(ALICE.key, printed)
    assert_not_in(ALICE.naming_key, printed)
    places = [saved, folder, other]
    assert sum(1 for _ in written(*places)) > 15
    for secret in (ALICE.key, ALICE.naming_key):
        assert_not_in(secret, written(*places))
        assert_not_in(secret, [(tmp_path / "s.kvsnap").read_bytes()])


@pytest.mark.engine
@pytest.mark.slow
def test_nor_of_save_resume_and_explain(
    kvsnap: Run, store: Path, model: Path, tmp_path: Path
) -> None:
    ids = tmp_path / "ids.json"
    ids.write_text(json.dumps(IDS.tolist()))
    how, source = {VARIABLE: ALICE.key.hex()}, ["--model", model, "--token-ids", ids]
    calls = [
        kvsnap("save", *source, "--session", "s", "--verbose", **how),
        kvsnap("explain", *source, "--verbose", **how),
        kvsnap("resume", *source, "--max-tokens", 2, "--verbose", **how),
        kvsnap("resume", "s", "--model", model, "--max-tokens", 2, "--json", **how),
    ]
    assert [done.code for done in calls] == [0] * 4
    assert calls[3].json["reused_tokens"] == len(IDS) - 1  # nothing new: the last is computed again
    assert_not_in(ALICE.key, [part for done in calls for part in (done.out, done.err)])
    assert_not_in(ALICE.key, written(store))
