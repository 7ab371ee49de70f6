"""trust add, ls, rm; keygen --signing; push and export --sign. No engine is needed."""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from kvsnap.kvstore.store import Store
from kvsnap.testing.stamped import StampedEngine
from kvsnap.testing.turns import some_ids, turn
from tests.cli.in_process import run
from tests.planting import PLANTS, block_of, chain_files, plant

Run = Callable[..., Any]
IDS = some_ids(3 * 64 + 5, 1)
A = "ab" * 32


def machine(key: Path, store: Path) -> Run:
    """Commands on one machine, in this process: its key, its store, and no other variable."""

    def command(*words: object, **environment: str) -> Any:
        own = {"KVSNAP_SIGNING_KEY_FILE": str(key), **environment}
        with mock.patch.dict(os.environ, own):
            return run("--store", store, *words)

    return command


@pytest.fixture
def alice(tmp_path: Path, store: Path) -> Run:
    """The machine of who saves and pushes."""
    return machine(tmp_path / "alice.pem", store)


@pytest.fixture
def bob(tmp_path: Path, other: Path) -> Run:
    """That of who pulls, with a store of his own."""
    return machine(tmp_path / "bob.pem", other)


@pytest.fixture
def saved(store: Path) -> Path:
    with Store(store) as opened:
        turn(opened, StampedEngine(), IDS, "s")
    return store


def key_of(run: Run) -> str:
    found: str = run("keygen", "--signing", "--json").json["public"]
    return found


def key_in(store: Path) -> str:
    """Of who signed what is stored."""
    (signer,) = {block_of(path.read_bytes()).signer for path in chain_files(store)}
    return signer


def refused(done: Any, code: int, *words: str) -> None:
    assert done.code == code, (done.code, done.out, done.err)
    assert done.err.startswith("error: "), done.err
    assert len(done.err.strip().splitlines()) <= 2, "one line what, one line what to do"
    for word in words:
        assert word in done.err, done.err


def computed(path: Path, name: str | None = None) -> list[int]:
    engine = StampedEngine()
    with Store(path) as store:
        turn(store, engine, [*IDS, 7], name, save=False)
    engine.check_rows()
    return engine.positions


def test_a_whole_story(
    alice: Run, bob: Run, saved: Path, other: Path, folder: Path, url: str
) -> None:
    alices, bobs = key_of(alice), key_of(bob)
    assert alice("push", "s", url, "--sign").code == 0
    added = bob("trust", "add", alices, "--name", "alice", "--json").json
    assert added == {
        "key": alices, "name": "alice", "vouched": 0, "set_aside": 0, "sessions": 0
    }  # fmt: skip
    pulled = bob("pull", "s", url, "--json")
    assert (pulled.code, pulled.json["stored_blocks"]) == (0, 3)
    assert bob("verify").code == bob("verify", url).code == 0
    assert bob("trust", "ls", "--json").json == {
        "own": bobs, "trusted": [{"key": alices, "name": "alice"}]
    }  # fmt: skip
    files = chain_files(folder)
    plant(files[1], files[0], PLANTS["unsigned"])
    done = bob("verify", url)
    assert done.code == 1
    assert files[1].name in done.out
    assert "no trusted key signed it" in done.out
    files = chain_files(other)
    plant(files[2], files[0], PLANTS["signed by a stranger"])
    done = bob("verify", "s")
    assert done.code == 1
    assert "no trusted key signed it" in done.out
    assert bob("pull", "s", url).code == 0, "what is there was not touched for the third block"
    assert bob("verify").code == 0
    assert alice("push", "s", url, "--sign").code == 0
    assert bob("verify", url).code == 0, "and the second is genuine again there"


def test_keygen_makes_a_key_for_its_owner_alone_and_never_over_another(
    alice: Run, tmp_path: Path
) -> None:
    done = alice("keygen", "--signing")
    path = tmp_path / "alice.pem"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    before = path.read_bytes()
    (public,) = (word for word in done.out.split() if len(word) == 64)
    assert done.out == f"wrote a new key to {path}; others trust it by: kvsnap trust add {public}\n"
    refused(alice("keygen", "--signing"), 2, "is there already", str(path))
    assert path.read_bytes() == before
    shown = alice("trust", "ls")
    assert f"this machine: {public}" in shown.out
    secret = "".join(before.decode().splitlines()[1:-1])
    assert not any(secret[-30:] in text for text in (done.out, done.err, shown.out, shown.err))
    elsewhere = tmp_path / "elsewhere.pem"
    made = alice("keygen", "--signing", elsewhere, "--json").json
    assert (made["file"], made["public"] != public) == (str(elsewhere), True)
    assert stat.S_IMODE(elsewhere.stat().st_mode) == 0o600


def test_it_is_looked_for_in_the_users_configuration_folder(kvsnap: Run, tmp_path: Path) -> None:
    home = tmp_path / "configuration"
    done = kvsnap("keygen", "--signing", "--json", XDG_CONFIG_HOME=str(home))
    path = home / "kvsnap" / "signing.pem"
    assert done.json["file"] == str(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    shown = kvsnap("trust", "ls", "--json", XDG_CONFIG_HOME=str(home))
    assert shown.json == {"own": done.json["public"], "trusted": []}
    assert kvsnap("trust", "ls", "--json").json["own"] is None, "this one's is not there"


def test_without_anybody_listed_that_is_said(alice: Run, store: Path) -> None:
    done = alice("trust", "ls")
    assert done.code == 0
    assert "blocks need no signature here" in done.err
    assert "no key yet: kvsnap keygen --signing" in done.err
    assert not store.exists()


def test_adding_sets_aside_and_vouching_signs(alice: Run, saved: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    shutil.copytree(saved, kept)
    done = alice("trust", "add", A, "--name", "build server")
    assert done.out == f"trusted {A} (build server)\n"
    assert "set aside 3 blocks that no trusted key signed" in done.err
    assert chain_files(saved) == []
    again = machine(tmp_path / "alice.pem", kept)
    done = again("trust", "add", A, "--vouch")
    assert "signed 3 blocks and 1 session that were here" in done.err
    assert key_in(kept) == again("trust", "ls", "--json").json["own"]
    assert again("verify").code == 0


def test_removing_by_name_by_key_and_what_cannot_be(alice: Run, saved: Path) -> None:
    alice("trust", "add", A, "--name", "one", "--vouch")
    alice("trust", "add", "cd" * 32, "--name", "two")
    refused(alice("trust", "rm", "three"), 1, "no key is listed as 'three'", "kvsnap trust ls")
    assert alice("trust", "rm", "one").out == f"no longer trusted: {A} (one)\n"
    done = alice("trust", "rm", "cd" * 32, "--json").json
    assert (done["key"], done["set_aside"]) == ("cd" * 32, 0)
    assert alice("trust", "ls", "--json").json["trusted"] == []
    assert computed(saved, "s") == [len(IDS)]


def test_what_is_no_key_or_no_name_is_refused(alice: Run, saved: Path) -> None:
    refused(alice("trust", "add", "--", "-----BEGIN"), 2, "64 hexadecimal digits")
    refused(alice("trust", "add", A, "--name", "two\nlines"), 2, "printable")
    assert len(chain_files(saved)) == 3


def test_a_name_that_somebody_else_wrote_shows_no_escapes(alice: Run, store: Path) -> None:
    alice("trust", "add", A, "--name", "x")
    path = store / "kvsnap.json"
    settings = json.loads(path.read_text())
    settings["trust"] = {A: "\x1b[31mred\x07\nline"}
    path.write_text(json.dumps(settings))
    for words in (("trust", "ls"), ("trust", "rm", A)):
        done = alice(*words)
        assert done.code == 0
        assert "\x1b" not in done.out + done.err
        assert "\x07" not in done.out + done.err


def test_a_push_of_an_unsigned_session_from_a_store_with_a_list_is_one_line(
    alice: Run, saved: Path, url: str, folder: Path
) -> None:
    done = alice("push", "s", url, KVSNAP_TRUST=A)
    refused(done, 1, "session 's': no trusted key signed it", "resume and save it here")
    assert not list(folder.rglob("*.safetensors"))


def test_a_pull_of_what_nobody_trusted_signed_is_one_line(
    alice: Run, bob: Run, saved: Path, other: Path, url: str
) -> None:
    alice("push", "s", url)
    refused(bob("pull", "s", url, KVSNAP_TRUST=A), 1, "nobody signed it", "kvsnap trust add")
    alice("push", "s", "--sign", KVSNAP_REMOTE=url)
    alices = key_in(saved)
    refused(bob("pull", "s", url, KVSNAP_TRUST=A), 1, f"it is signed by {alices}")
    assert bob("pull", "s", KVSNAP_REMOTE=url, KVSNAP_TRUST=f"{A},{alices}").code == 0
    assert "trust" not in json.loads((other / "kvsnap.json").read_text())


def test_export_sign_and_import(
    alice: Run, bob: Run, saved: Path, other: Path, tmp_path: Path
) -> None:
    archive = tmp_path / "s.kvsnap"
    assert alice("export", "s", archive, "--sign").code == 0
    bob("trust", "add", key_in(saved))
    done = bob("import", archive, "--json")
    assert (done.code, done.json["stored_blocks"]) == (0, 3)
    files = chain_files(other)
    plant(files[1], files[0], PLANTS["quoting the genuine header"])
    done = bob("import", archive, "--json")
    assert (done.code, done.json["moved_files"]) == (0, 2), "it is fetched again, and what follows"
    assert bob("verify").code == 0


def test_a_dry_run_of_a_signed_push_writes_nothing(
    alice: Run, saved: Path, url: str, tmp_path: Path
) -> None:
    before = {path: path.read_bytes() for path in saved.rglob("*.safetensors")}
    assert alice("push", "s", url, "--sign", "--dry-run").out.startswith("would push 's'")
    assert {path: path.read_bytes() for path in saved.rglob("*.safetensors")} == before
    assert not (tmp_path / "alice.pem").exists()


def test_wrong_values_of_the_environment_are_one_line(alice: Run, saved: Path) -> None:
    refused(alice("stats", KVSNAP_TRUST="ab"), 2, "64 hexadecimal digits")
    key = saved.parent / "no.pem"
    key.write_text("secret words")
    done = alice("verify", KVSNAP_TRUST=A, KVSNAP_SIGNING_KEY_FILE=str(key))
    refused(done, 2, str(key), "no signing key")
    assert "secret" not in done.err
    assert not (saved / "quarantine").exists()


def test_a_damaged_list_is_an_error_of_every_command(alice: Run, saved: Path) -> None:
    alice("trust", "add", A, "--vouch")
    path = saved / "kvsnap.json"
    path.write_bytes(path.read_bytes()[:-20])
    for words in (("ls",), ("trust", "add", A)):
        refused(alice(*words), 1, "is damaged, and holds a trust list")
    done = alice("doctor")
    assert "holds a trust list" in done.out + done.err
    assert done.code == 1
