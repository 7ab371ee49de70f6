"""Encryption on the command line: an encrypted store and sealed remotes through every command, with the
key and without; and what is refused, in one line, before anything is computed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvsnap.formats.fields import FORMAT_VERSION
from kvsnap.formats.sealed import is_sealed
from kvsnap.formats.tenant import Tenant
from kvsnap.kvstore.store import Store
from tests.cli.conftest import SYSTEM
from tests.cli.in_process import Ran, run
from tests.sealed_places import (
    ARCHITECTURE,
    BLOCK,
    NAME,
    WEIGHTS,
    Told,
    everything,
    leaks,
    open_encrypted,
    restored,
    save,
    secret_ids,
)
from tests.tenants import ALICE, BOB

IDS = secret_ids(4 * BLOCK + 7, 1)
FILES = ("blocks/*/*.safetensors", "sessions/*/*.safetensors")
Kvsnap = Callable[..., Any]


@pytest.fixture(autouse=True)
def no_key_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KVSNAP_TENANT_KEY", "KVSNAP_TENANT_KEY_FILE", "KVSNAP_ENCRYPT", "KVSNAP_REMOTE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def keys(tmp_path: Path) -> dict[Tenant, Path]:
    files = {ALICE: tmp_path / "alice.key", BOB: tmp_path / "bob.key"}
    for tenant, file in files.items():
        file.write_text(tenant.key.hex())
    return files


@pytest.fixture
def saved(store: Path) -> Path:
    """Alice's session in an encrypted store."""
    with open_encrypted(store) as opened:
        save(opened, IDS, NAME, ALICE)
    return store


@pytest.fixture
def call(store: Path, keys: dict[Tenant, Path]) -> Callable[..., Ran]:
    """Run a command with the test's store, and with Alice's key unless it is told another, or None."""

    def in_store(*words: object, key: Tenant | None = ALICE, where: Path = store) -> Ran:
        with_key = ["--tenant-key-file", keys[key]] if key is not None else []
        done = run(*words, *with_key, "--store", where)
        assert done.complaint() == ""
        return done

    return in_store


def told() -> Told:
    found = Told(ids=[IDS])
    found.texts += [WEIGHTS, ARCHITECTURE]
    return found


def all_sealed(path: Path) -> bool:
    files = [file for pattern in FILES for file in path.glob(pattern)]
    assert files
    return all(is_sealed(memoryview(file.read_bytes())) for file in files)


def one_error(done: Ran, code: int, *words: str) -> None:
    assert done.code == code, done.err
    lines = done.err.strip().splitlines()
    assert lines[-2].startswith("error: ")
    assert lines[-1].startswith("  ")
    for word in words:
        assert word in done.err, done.err


def test_with_the_key_all_is_shown(saved: Path, call: Callable[..., Ran]) -> None:
    (row,) = call("ls", "--json").json
    assert (row["session"], row["tokens"], row["stored_blocks"]) == (NAME, len(IDS), 4)
    shown = call("show", NAME, "--json").json
    assert shown["token_ids"] == IDS.tolist()
    block = shown["blocks"][2]["name"]
    assert call("show", block[:16], "--json").json["token_ids"] == IDS[32:48].tolist()
    assert NAME in call("show", "--tree").out
    assert call("stats", "--json").json["blocks"] == 4
    verified = call("verify", "--json")
    assert (verified.code, verified.json["checked"], verified.json["sealed"]) == (0, 5, 0)
    assert call("verify", NAME).code == 0


@pytest.mark.parametrize("key", [None, BOB], ids=["without", "another's"])
def test_without_it_nothing_is(saved: Path, call: Callable[..., Ran], key: Tenant | None) -> None:
    for words in (["ls"], ["ls", "--json"], ["stats"], ["show", "--tree"], ["verify", "--json"]):
        done = call(*words, key=key)
        assert done.code == 0
        assert leaks(told(), [("what is said", (done.out + done.err).encode())]) == []
    for words in (["show", NAME], ["verify", NAME], ["rm", NAME], ["pin", NAME], ["unpin", NAME]):
        one_error(call(*words, key=key), 1)
    with Store(saved) as store:
        (name,) = store.index.query("SELECT name FROM blocks WHERE start = 0")[0]
    one_error(call("show", name.hex(), key=key), 1)
    found = call("verify", "--json", key=key).json
    assert found["sealed"] == (5 if key is None else 0)
    (row,) = call("ls", "--json").json
    assert row["session"] == NAME, "it is all there"


def test_without_it_the_store_is_kept_in_order(saved: Path, call: Callable[..., Ran]) -> None:
    done = run("gc", "--json", "--store", saved)
    assert (done.code, done.json["evicted"], done.json["quarantined"]) == (0, 0, 0)
    assert run("doctor", "--store", saved).code == 0
    for file in saved.glob("index.sqlite3*"):
        file.unlink()
    assert call("verify", "--json", key=None).json["sealed"] == 5
    (last,) = (f for f in saved.glob("blocks/*/*") if f.stem == _last(saved))
    data = last.read_bytes()
    last.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    found = call("verify", "--json", key=None)
    assert found.code == 1
    assert [bad["path"] for bad in found.json["bad"]] == [str(last)]


def _last(path: Path) -> str:
    with Store(path) as store:
        name: bytes = store.index.query("SELECT name FROM blocks ORDER BY start DESC LIMIT 1")[0][0]
    return name.hex()


def test_a_session_goes_sealed_from_store_to_store(
    saved: Path, other: Path, url: str, folder: Path, call: Callable[..., Ran]
) -> None:
    one_error(call("push", NAME, url, key=None), 1, "no session")
    pushed = call("push", NAME, url, "--json").json
    assert (pushed["files"], pushed["moved_files"]) == (5, 5)
    assert call("push", NAME, url, "--json").json["moved_files"] == 0
    assert leaks(told(), everything(folder)) == []
    (row,) = call("ls", url, "--json").json
    assert row["session"] == NAME
    for words in (["ls", url], ["ls", url, "--json"], ["verify", url]):
        done = call(*words, key=None)
        assert done.code == 0
        assert leaks(told(), [("said", (done.out + done.err).encode())]) == []
    assert call("verify", url, "--json").json["checked"] == 6
    one_error(call("pull", NAME, url, key=None, where=other), 1, "no session")
    one_error(call("pull", NAME, url, key=BOB, where=other), 1, "no session")
    other.mkdir(mode=0o700)
    settings = {"block_size": BLOCK, "created": 1, "format": FORMAT_VERSION, "encrypt": True}
    (other / "kvsnap.json").write_text(json.dumps(settings))
    assert call("pull", NAME, url, where=other).code == 0
    assert all_sealed(other)
    with open_encrypted(other) as store:
        assert restored(store, IDS, NAME, tenant=ALICE) == len(IDS)
    assert run("gc", "--remote", url, "--store", saved).code == 0
    assert call("verify", url, "--json").json["bad"] == []
    one_error(call("rm", NAME, "--remote", url, key=None), 1, "no session")
    assert call("rm", NAME, "--remote", url).code == 0
    assert call("ls", url, "--json").json == []


def test_a_plain_store_seals_what_it_sends_where_it_is_asked_to(
    store: Path, url: str, folder: Path, tmp_path: Path, call: Callable[..., Ran]
) -> None:
    with open_encrypted(store, encrypt=False) as opened:
        save(opened, IDS, NAME, ALICE)
        save(opened, IDS, "nobodys", None)
    assert call("push", NAME, url, "--encrypt").code == 0
    assert call("push", NAME, url).code == 0, "and it stays so"
    exported = tmp_path / "exported.kvsnap"
    assert call("export", NAME, exported, "--encrypt").code == 0
    told_of = told()
    assert leaks(told_of, everything(folder)) == []
    assert leaks(told_of, [("the file", exported.read_bytes())]) == []
    one_error(call("push", "nobodys", url, "--encrypt", key=None), 2, "no tenant key was given")
    one_error(call("export", "nobodys", tmp_path / "e", "--encrypt", key=None), 2)
    assert not (tmp_path / "e").exists()
    one_error(call("import", exported, key=None, where=tmp_path / "o"), 1)
    one_error(call("import", exported, key=BOB, where=tmp_path / "o"), 1)


def test_a_second_tenant_is_refused_in_the_clear(
    store: Path, other: Path, url: str, folder: Path, call: Callable[..., Ran]
) -> None:
    for where, tenant in ((store, ALICE), (other, BOB)):
        with open_encrypted(where, encrypt=False) as opened:
            save(opened, IDS, NAME, tenant)
    assert call("push", NAME, url).code == 0
    before = dict(everything(folder))
    one_error(call("push", NAME, url, key=BOB, where=other), 2, "another tenant", "--encrypt")
    assert dict(everything(folder)) == before
    assert call("push", NAME, url, "--encrypt", key=BOB, where=other).code == 0
    one_error(call("pull", NAME, url, key=BOB), 2, "another tenant", "--encrypt")
    with open_encrypted(store, encrypt=False) as opened:
        assert len(list(opened.listing)) == 1


def test_the_environment_may_ask_for_it(
    store: Path, call: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_encrypted(store, encrypt=False) as opened:
        save(opened, IDS, NAME, ALICE)
    for value in ("true", "yes", "2", "1 "):
        monkeypatch.setenv("KVSNAP_ENCRYPT", value)
        one_error(call("ls"), 2, "KVSNAP_ENCRYPT is", "1")
    for value in ("", "0"):
        monkeypatch.setenv("KVSNAP_ENCRYPT", value)
        assert call("ls").code == 0
        assert not json.loads((store / "kvsnap.json").read_text()).get("encrypt")
    monkeypatch.setenv("KVSNAP_ENCRYPT", "1")
    with Store(store) as opened:
        save(opened, IDS, NAME, ALICE)
    assert all_sealed(store)
    monkeypatch.delenv("KVSNAP_ENCRYPT")
    with Store(store) as opened:
        assert opened.encrypt, "for good"


def test_damaged_settings_do_not_make_it_a_plain_one(saved: Path, call: Callable[..., Ran]) -> None:
    settings = saved / "kvsnap.json"
    settings.write_text(settings.read_text().replace("true", "truth"))
    one_error(call("ls"), 1, "is damaged, and says whether it is encrypted", "mend it")


@pytest.mark.engine
class TestWithAnEngine:
    """On the bundled model, in processes of their own."""

    def test_a_chat_is_saved_sealed_and_resumed(
        self, kvsnap: Kvsnap, model: Path, chat: Path, store: Path, keys: dict[Tenant, Path]
    ) -> None:
        short = [{"role": "system", "content": f"{SYSTEM * 4}"}, {"role": "user", "content": "Hi?"}]
        chat.write_text(json.dumps(short))  # one block and some
        key = ("--tenant-key-file", keys[ALICE])
        words = ("--model", model, "--messages", chat, "--session", "library", *key)
        one_error(kvsnap("save", *words[:-2], "--encrypt"), 2, "--encrypt needs a tenant key")
        assert not store.exists()
        first = kvsnap("save", *words, "--encrypt", "--json").json
        assert first["computed_tokens"] == first["tokens"]
        assert all_sealed(store)
        answer = kvsnap(
            "resume", "library", "--model", model, "--prompt", "And on Sundays?", *key,
            "--max-tokens", 4, "--json",
        )  # fmt: skip
        assert answer.json["reused_tokens"] >= first["tokens"] - 1
        assert all_sealed(store), "it stays an encrypted one"
        found = Told(["small library", "opening hours", "on Sundays?", model.name])
        assert leaks(found, everything(store)) == []
        text = kvsnap("show", "library", "--json", *key).json["notes"]
        assert "on Sundays?" in json.dumps(text)

    def test_without_a_key_nothing_is_computed(
        self, kvsnap: Kvsnap, model: Path, chat: Path, store: Path, keys: dict[Tenant, Path]
    ) -> None:
        with open_encrypted(store) as opened:
            save(opened, IDS, NAME, ALICE)
        before = dict(everything(store))
        done = kvsnap("save", "--model", model, "--messages", chat, "--session", "library")
        one_error(done, 2, "needs the tenant's key", "--tenant-key-file")
        assert "prefill" not in done.err
        done = kvsnap("resume", "library", "--model", model, "--prompt", "x")
        one_error(done, 1, "no session")
        assert {k: v for k, v in everything(store) if k.endswith("safetensors")} == {
            k: v for k, v in before.items() if k.endswith("safetensors")
        }

    def test_nor_for_a_second_tenant_in_a_plain_store(
        self, kvsnap: Kvsnap, model: Path, chat: Path, store: Path, keys: dict[Tenant, Path]
    ) -> None:
        with open_encrypted(store, encrypt=False) as opened:
            save(opened, IDS, NAME, ALICE)
        words = ("--model", model, "--messages", chat, "--tenant-key-file", keys[BOB])
        done = kvsnap("save", *words, "--session", "library")
        one_error(done, 2, "another tenant", "--encrypt")
        assert "prefill" not in done.err
