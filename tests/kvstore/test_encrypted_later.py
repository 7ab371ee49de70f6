"""A plain store that becomes an encrypted one: what is saved again is sealed, and nothing is lost on the way."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from kvsnap.formats.errors import NotFound, SessionMoved, UsageError
from kvsnap.formats.sealed import is_sealed, sealed_name
from kvsnap.kvstore.explain.explain import explain
from kvsnap.kvstore.gc import gc
from kvsnap.kvstore.holds import pin_key
from kvsnap.kvstore.opener import UNSEALED
from kvsnap.kvstore.session import Session
from kvsnap.kvstore.session_file import read_pin
from kvsnap.kvstore.store import Store
from kvsnap.kvstore.verify import verify_store
from kvsnap.testing.recount import assert_closed, assert_counts
from tests.killing import killed_everywhere
from tests.sealed_places import (
    ARCHITECTURE,
    BLOCK,
    NAME,
    WEIGHTS,
    Told,
    assert_nothing_told,
    engine,
    everything,
    leaks,
    open_encrypted,
    restored,
    save,
    secret_ids,
)
from tests.tenants import ALICE

IDS = secret_ids(10 * BLOCK + 9, 1)
MORE = np.concatenate([IDS, secret_ids(2 * BLOCK, 3)])
OTHER = secret_ids(3 * BLOCK + 4, 2)
OTHERS_NAME = "another-name"


@pytest.fixture
def told() -> Told:
    found = Told(ids=[MORE])
    found.texts += [WEIGHTS, ARCHITECTURE]
    found.add_rows(IDS)
    return found


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """A plain store with one session, which is pinned, as files alone."""
    path = tmp_path / "s"
    with open_encrypted(path, encrypt=False) as store:
        save(store, IDS, NAME, ALICE, codec="raw")
        store.pins.pin_session(ALICE.tenant_id, NAME)
    return path


def sealed_files(path: Path) -> dict[str, bool]:
    """Every file of blocks and sessions by its name, and whether it is sealed."""
    files = [*path.glob("blocks/*/*"), *path.glob("sessions/*/*")]
    return {file.name: is_sealed(memoryview(file.read_bytes())) for file in files}


def pinned_block(store: Store) -> bytes | None:
    sql = "SELECT b.name FROM holds h LEFT JOIN blocks b ON b.id = h.block WHERE kind = 'pin'"
    ((name,),) = store.index.query(sql)
    return name  # type: ignore[no-any-return]


def assert_all_sealed(path: Path, told: Told) -> None:
    found = sealed_files(path)
    assert found
    assert all(found.values())
    assert [file.name for file in path.glob("sessions/*/*")] == [
        f"{sealed_name(ALICE, NAME)}.safetensors"
    ]
    assert_nothing_told(told, path)


@pytest.mark.parametrize("ids", [IDS, MORE, IDS[:70]], ids=["same", "more", "less"])
def test_the_next_save_seals_the_session_and_all_of_its_blocks(
    plain: Path, told: Told, ids: np.ndarray
) -> None:
    assert leaks(told, everything(plain))
    with open_encrypted(plain) as store:
        session = Session(store, engine(), NAME, tenant=ALICE)
        assert session.stored_token_ids().tolist() == IDS.tolist(), "the conversation can be read"
        save(store, ids, NAME, ALICE)
        if len(ids) < len(IDS):
            store.pins.unpin_session(ALICE.tenant_id, NAME)
            with open_encrypted(plain, capacity=1) as small:
                gc(small)  # plain blocks that no session has any more
            save(store, ids, NAME, ALICE)
    assert_all_sealed(plain, told)
    with open_encrypted(plain) as store:
        assert restored(store, ids, NAME, tenant=ALICE) == len(ids)
        report = verify_store(store, ALICE)
        assert (report.bad, report.sealed) == ([], 0)
        assert_closed(store)
        assert_counts(store)


def test_rows_that_are_not_sealed_are_not_used_and_not_damage(plain: Path) -> None:
    """Anyone can have written them; and they may be of before the store was an encrypted one."""
    before = {path: path.read_bytes() for path in (plain / "blocks").rglob("*.safetensors")}
    with open_encrypted(plain) as store:
        session = Session(store, engine(), NAME, tenant=ALICE)
        report = session.resume(IDS)
        assert report.reused_tokens == 0
        assert any("not sealed" in line for line in report.damage)
        assert explain(session, IDS, check=True).matched_tokens == 0
    assert {path: path.read_bytes() for path in (plain / "blocks").rglob("*.safetensors")} == before
    assert not list(plain.glob("quarantine/*"))
    with open_encrypted(plain) as store:
        save(store, IDS[: 10 * BLOCK], "blocks", ALICE)
        session = Session(store, engine(), NAME, tenant=ALICE)
        report = session.resume(IDS, leave=0)
        assert report.reused_tokens == 10 * BLOCK, "the blocks are sealed now, its tail is not"
        assert any("not sealed" in line for line in report.damage)
        save(store, IDS, NAME, ALICE)
        assert restored(store, IDS, NAME, tenant=ALICE) == len(IDS)


def test_its_pin_follows(plain: Path) -> None:
    with open_encrypted(plain) as store:
        save(store, MORE, NAME, ALICE)
        path = store.sessions.path(ALICE.tenant_id, NAME)
        assert [read_pin(pin).name for pin in plain.glob("pins/*/*")] == [
            sealed_name(ALICE, NAME)
        ], "the pin's file, too, has no name any more"
        store.pins.require(ALICE.tenant_id, NAME)
        last = store.sessions.load(ALICE.tenant_id, NAME).record.chain[-1]
        assert pinned_block(store) == last
        assert store.index.query("SELECT owner FROM holds") == [(pin_key(path),)]
    for file in plain.glob("index.sqlite3*"):
        file.unlink()
    with open_encrypted(plain, capacity=1) as store:
        gc(store)
        assert pinned_block(store) == last
        assert restored(store, MORE, NAME, tenant=ALICE) == len(MORE)
        store.pins.unpin_session(ALICE.tenant_id, NAME)
        gc(store)
        assert restored(store, MORE, tenant=ALICE) == 0


def test_what_is_not_saved_again_stays_as_it_is(plain: Path) -> None:
    with open_encrypted(plain, encrypt=False) as store:
        save(store, OTHER, OTHERS_NAME, ALICE)
        save(store, OTHER, "nobodys", None)
    with open_encrypted(plain) as store:
        save(store, IDS, NAME, ALICE)
    assert sorted(sealed_files(plain).values()) == [False] * 8 + [True] * 11
    with open_encrypted(plain) as store:
        session = Session(store, engine(), OTHERS_NAME, tenant=ALICE)
        assert session.stored_token_ids().tolist() == OTHER.tolist()
        assert restored(store, OTHER, "nobodys") == len(OTHER), "who has no key loses nothing"
        with pytest.raises(UsageError):
            save(store, OTHER, "nobodys", None)
        names = {row.facts.name for row in store.listing}
        assert names == {NAME, OTHERS_NAME, "nobodys"}
    with open_encrypted(plain) as store:
        assert {row.facts.name for row in store.listing} == {None, OTHERS_NAME, "nobodys"}
        report = verify_store(store)
        assert [(bad.name, bad.reason) for bad in report.bad] == [(OTHERS_NAME, UNSEALED)], (
            "its tail: whose the blocks are, nobody can tell without a key"
        )
        assert report.sealed == 11


@pytest.mark.parametrize("lookups", [1, 2])
def test_the_index_tells_no_identity_once_a_block_is_sealed(plain: Path, lookups: int) -> None:
    """Also one that is built from sealed and plain files of one root, in whatever order they come."""
    with open_encrypted(plain) as store:
        save(store, IDS[: 5 * BLOCK], "front", ALICE)
    kinds = set(sealed_files(plain).values())
    assert kinds == {True, False}
    for file in plain.glob("index.sqlite3*"):
        file.unlink()
    for _ in range(lookups):
        with open_encrypted(plain) as store:
            found = store.index.query("SELECT identity, tenant FROM roots")
            assert found == [("", ALICE.tenant_id)]
            assert restored(store, IDS, tenant=ALICE) == 5 * BLOCK


def test_in_the_background_as_well(plain: Path, told: Told) -> None:
    """Of more blocks than wait in memory."""
    with open_encrypted(plain) as store:
        model = engine()
        with Session(store, model, NAME, tenant=ALICE) as session:
            found = session.resume(MORE)
            model.evaluate(MORE[found.reused_tokens :])
            session.save_soon()
            assert session.flush() is not None
    assert_all_sealed(plain, told)


def test_removing_it_removes_it(plain: Path) -> None:
    """Also where a kill left both of its files."""
    copies = {file.name: file.read_bytes() for file in plain.glob("sessions/*/*")}
    with open_encrypted(plain) as store:
        save(store, IDS, NAME, ALICE)
        for name, data in copies.items():
            (plain / "sessions" / ALICE.tenant_id / name).write_bytes(data)
        assert store.sessions.remove(ALICE.tenant_id, NAME) > 2 * 1000
        with pytest.raises(NotFound):
            store.sessions.load(ALICE.tenant_id, NAME)
    assert not list(plain.glob("sessions/*/*"))
    assert not list(plain.glob("pins/*/*"))


def test_a_damaged_plain_file_is_set_aside_and_not_deleted(plain: Path) -> None:
    (file,) = plain.glob("sessions/*/*")
    file.write_bytes(b"no session")
    with open_encrypted(plain) as store:
        save(store, IDS, NAME, ALICE)
        assert restored(store, IDS, NAME, tenant=ALICE) == len(IDS)
    aside = [path.read_bytes() for path in plain.glob("quarantine/*") if path.suffix != ".reason"]
    assert aside == [b"no session"]
    assert not file.exists()


WORK = """
from pathlib import Path
import numpy as np
from tests.sealed_places import BLOCK, NAME, open_encrypted, save, secret_ids
from tests.tenants import ALICE

IDS = secret_ids({blocks} * BLOCK + 9, 1)

def work():
    with open_encrypted(Path({path!r})) as store:
        save(store, IDS, NAME, ALICE)
"""


def test_killed_at_any_moment_nothing_is_lost_and_the_next_save_ends_it(
    tmp_path: Path, told: Told
) -> None:
    path, ids = tmp_path / "top" / "s", IDS[: 2 * BLOCK + 9]
    path.parent.mkdir()
    with open_encrypted(path, encrypt=False) as store:
        save(store, ids, NAME, ALICE, codec="raw")
        store.pins.pin_session(ALICE.tenant_id, NAME)
    moments = killed_everywhere(path.parent, path, WORK.format(blocks=2, path=str(path)))
    done = [" ".join(words) for words, _ in moments]
    assert any("unlink sessions/" in words for words in done), done
    assert any("unlink pins/" in words for words in done)
    assert len(moments) > 12
    assert_all_sealed(path, told)
    for words, left in moments:
        here = left / "s"
        with open_encrypted(here, encrypt=False) as store:
            session = Session(store, engine(), NAME, tenant=ALICE)
            assert session.stored_token_ids().tolist() == ids.tolist(), words
            assert restored(store, ids, NAME, tenant=ALICE) in (0, BLOCK, 2 * BLOCK, len(ids))
        with open_encrypted(here, capacity=1) as store:
            gc(store)
            assert len(list(here.glob("blocks/*/*"))) == 2, f"{words}: they are pinned"
        with open_encrypted(here) as store:
            save(store, ids, NAME, ALICE)
            assert restored(store, ids, NAME, tenant=ALICE) == len(ids), words
            report = verify_store(store, ALICE)
            assert (report.bad, report.unreachable) == ([], []), words
            store.pins.require(ALICE.tenant_id, NAME)
            assert pinned_block(store) is not None, words
        for part in here.glob("tmp/*.part"):
            part.unlink()
        assert_all_sealed(here, told)


@pytest.mark.parametrize("attempt", range(3))
def test_two_at_once_leave_one_sealed_session(plain: Path, told: Told, attempt: int) -> None:
    moved = list[SessionMoved]()

    def again() -> None:
        with open_encrypted(plain) as store:
            try:
                save(store, MORE, NAME, ALICE)
            except SessionMoved as error:
                moved.append(error)

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(again) for _ in range(2)]:
            done.result()
    assert len(moved) <= 1
    assert all(sealed_files(plain).values())
    assert_nothing_told(told, plain)
    with open_encrypted(plain) as store:
        assert restored(store, MORE, NAME, tenant=ALICE) == len(MORE)
        assert len(list(store.listing)) == 1 + len(moved)


def test_a_process_that_had_it_open_goes_on_in_an_encrypted_one(plain: Path, told: Told) -> None:
    with open_encrypted(plain, encrypt=False) as old:
        session = save(old, IDS, NAME, ALICE)
        with open_encrypted(plain) as store:
            save(store, IDS, "front", ALICE)
        assert not old.encrypt
        blocks = Session(old, engine(), tenant=ALICE)
        blocks.engine.evaluate(MORE)
        blocks.save()
        assert old.encrypt, "also where no session's file is published"
        session.engine.evaluate(MORE[len(IDS) :])
        session.save()
        assert restored(old, MORE, NAME, tenant=ALICE) == len(MORE)
    found = sealed_files(plain)
    assert all(found.values())
    assert_nothing_told(told, plain)


def test_a_save_that_is_overtaken_by_it_is_sealed(plain: Path, told: Told) -> None:
    """The store becomes an encrypted one between the draft of a session's file and its publication."""
    with open_encrypted(plain, encrypt=False) as old:
        session = Session(old, engine(), NAME, tenant=ALICE)
        found = session.resume(MORE)
        session.engine.evaluate(MORE[found.reused_tokens :])
        publish, met = old.sessions.publish, []

        def overtaken(*args: object) -> object:
            if not met:
                met.append(True)
                open_encrypted(plain).close()
            return publish(*args)  # type: ignore[arg-type]

        old.sessions.publish = overtaken  # type: ignore[method-assign, assignment]
        session.save()
        assert met
        assert restored(old, MORE, NAME, tenant=ALICE) == len(MORE)
    assert_all_sealed(plain, told)


def test_lost_settings_do_not_make_it_a_plain_one(tmp_path: Path, told: Told) -> None:
    with open_encrypted(tmp_path / "s") as store:
        save(store, IDS, NAME, ALICE)
    (tmp_path / "s" / "kvsnap.json").unlink()
    for before, after in ((IDS, MORE), (MORE, IDS)):
        with Store(tmp_path / "s", min_free="0") as store:
            assert store.encrypt
            assert store.block_size == BLOCK
            assert restored(store, before, NAME, tenant=ALICE) == len(before)
            save(store, after, NAME, ALICE)
    settings = json.loads((tmp_path / "s" / "kvsnap.json").read_text())
    assert (settings["encrypt"], settings["block_size"]) == (True, BLOCK)
    assert_all_sealed(tmp_path / "s", told)


def test_lost_settings_and_encrypt_keep_the_block_size(plain: Path) -> None:
    (plain / "kvsnap.json").unlink()
    with Store(plain, encrypt=True, min_free="0") as store:
        assert store.block_size == BLOCK
    assert json.loads((plain / "kvsnap.json").read_text())["block_size"] == BLOCK
