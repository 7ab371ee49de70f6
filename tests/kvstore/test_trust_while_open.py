"""Blocks that are planted while processes have the store open: every read and every save finds out."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from kvsnap.formats.block import BlockFile
from kvsnap.kvstore import space
from kvsnap.kvstore.gc import gc
from kvsnap.kvstore.session import Session
from kvsnap.kvstore.signing_key import require_signing_key
from kvsnap.kvstore.store import Store
from kvsnap.kvstore.verify import verify_store
from kvsnap.testing.aftermath import assert_clean, assert_saved
from kvsnap.testing.stamped import StampedEngine
from kvsnap.testing.turns import some_ids, turn
from tests.planting import PLANTS, block_of, chain_files, plant, quoting, unsigned

IDS = some_ids(57)
SOMEBODY = "ab" * 32
every_plant = pytest.mark.parametrize("how", PLANTS)


@pytest.fixture
def trusting(store_path: Path) -> Iterator[Store]:
    with Store(store_path, trust=[SOMEBODY]) as store:
        turn(store, StampedEngine(), IDS, "chat", codec="raw")
        yield store


def computed(store: Store, ids: np.ndarray = IDS, name: str | None = None) -> list[int]:
    """What an engine had to compute, with every row checked."""
    engine = StampedEngine()
    turn(store, engine, ids, name, save=False)
    engine.check_rows()
    return engine.positions


def plant_second(store: Store, how: str) -> tuple[Path, bytes]:
    files = chain_files(store.path)
    return files[1], plant(files[1], files[0], PLANTS[how])


@every_plant
def test_a_block_that_was_read_right_before_is_looked_at_again(trusting: Store, how: str) -> None:
    assert computed(trusting) == list(range(48, 57))
    path, genuine = plant_second(trusting, how)
    assert computed(trusting) == list(range(16, 57))
    turn(trusting, StampedEngine(), IDS, "chat", codec="raw")
    assert path.read_bytes() == genuine
    assert computed(trusting) == list(range(48, 57))


@every_plant
def test_what_stands_in_memory_is_right_whatever_stands_on_the_disk(
    store_path: Path, how: str
) -> None:
    with Store(store_path, trust=[SOMEBODY], ram="10MB") as store:
        turn(store, StampedEngine(), IDS, "chat", codec="raw")
        assert store.blocks.ram is not None
        assert len(store.blocks.ram) == 3
        path, genuine = plant_second(store, how)
        assert computed(store) == list(range(48, 57))
        turn(store, StampedEngine(), np.concatenate([IDS, some_ids(20, 5)]), "chat", codec="raw")
        assert path.read_bytes() == genuine, "a save looks at the files of its chain"
        plant_second(store, how)
    with Store(store_path, trust=[SOMEBODY], ram="10MB") as store:
        assert computed(store) == list(range(16, 57))
        assert store.blocks.ram is not None
        assert len(store.blocks.ram) == 1, "what was not believed is not kept"


@every_plant
@pytest.mark.parametrize("own", [True, False], ids=["of this process", "of another process"])
def test_a_save_that_reads_nothing_does_not_count_a_plant_as_stored(
    trusting: Store, store_path: Path, how: str, own: bool
) -> None:
    path, genuine = plant_second(trusting, how)
    store = trusting if own else Store(store_path, trust=[SOMEBODY])
    engine = StampedEngine()
    engine.evaluate(IDS)
    saved = Session(store, engine, "other", codec="raw").save()
    assert saved.blocks_written > 0
    assert path.read_bytes() == genuine
    if not own:
        store.close()
    assert_saved(trusting, IDS, "other")


@every_plant
def test_a_save_in_the_background_neither(trusting: Store, how: str) -> None:
    path, genuine = plant_second(trusting, how)
    engine = StampedEngine()
    engine.evaluate(IDS)
    with Session(trusting, engine, "other", codec="raw") as session:
        session.save_soon()
    assert path.read_bytes() == genuine


@every_plant
def test_the_front_of_a_sibling_is_not_taken_from_a_plant(trusting: Store, how: str) -> None:
    """A prompt that parts inside the planted block would take its first rows."""
    branch = np.concatenate([IDS[:24], some_ids(20, 3)])
    assert computed(trusting, branch) == list(range(24, 44))
    plant_second(trusting, how)
    assert computed(trusting, branch) == list(range(16, 44))


@every_plant
def test_a_branch_does_not_take_its_tail_from_a_plant(trusting: Store, how: str) -> None:
    plant_second(trusting, how)
    session = Session(trusting, StampedEngine(), "chat")
    with pytest.raises(Exception, match="cannot be had") as raised:
        session.branch("new", 24)
    assert type(raised.value).__name__ == "Unsupported"
    session.branch("shorter", 16)
    assert computed(trusting, IDS, "shorter") == list(range(16, 57))


def test_rows_that_change_without_a_trace_in_the_times(trusting: Store) -> None:
    """Through a mapping, which on a file system in memory leaves the times as they were: a save
    counts the block as stored, and whoever reads it finds out."""
    path = chain_files(trusting.path)[1]
    planted = quoting(path.read_bytes(), b"")
    before = path.stat()
    assert len(planted) == before.st_size
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        bytes(mapped)  # what is mapped for reading first is not noted when it is written
        mapped[:] = planted
    if path.stat().st_ctime_ns != before.st_ctime_ns:
        pytest.skip("this file system notes it")
    assert path.read_bytes() == planted
    assert trusting.blocks.has(block_of(planted).record.name), "the times are all it looks at"
    assert computed(trusting) == list(range(16, 57))
    turn(trusting, StampedEngine(), IDS, "chat", codec="raw")
    assert computed(trusting) == list(range(48, 57))
    assert_clean(trusting)


def test_a_file_without_a_row_is_believed_no_more_once_gc_finds_it(
    trusting: Store, store_path: Path
) -> None:
    for how in (unsigned, quoting):
        path, beside = chain_files(store_path)[1::-1]
        genuine = path.read_bytes()
        with trusting.index.transaction() as db:
            trusting.index.lose(db, block_of(genuine).record.name, "for the test")
        path.write_bytes(how(genuine, beside.read_bytes()))
        with Store(store_path, trust=[SOMEBODY]) as store:
            assert gc(store).adopted == 1
            assert computed(store) == list(range(16, 57))
            turn(store, StampedEngine(), IDS, codec="raw")
        assert path.read_bytes() == genuine


def test_a_signature_is_compared_with_the_rows_once_in_a_process(
    trusting: Store, store_path: Path
) -> None:
    """And again for a file with other bytes, whatever its header says."""
    check, looked = BlockFile.check_content, list[bytes]()

    def counted(block: BlockFile) -> None:
        looked.append(block.record.name)
        check(block)

    names = [block_of(path.read_bytes()).record.name for path in chain_files(store_path)]
    with (
        mock.patch.object(BlockFile, "check_content", counted),
        Store(store_path, trust=[SOMEBODY]) as store,
    ):
        computed(store)
        assert sorted(looked) == sorted(names)
        computed(store)
        assert len(looked) == len(names)
        plant_second(store, "quoting the genuine header")
        computed(store)
        assert names[1] in looked[len(names) :]


def test_a_process_that_knows_of_no_list_does_not_make_others_believe_its_blocks(
    trusting: Store, store_path: Path
) -> None:
    """It was started before; what it saves is unsigned, and saved anew by those with the list."""
    longer = np.concatenate([IDS, some_ids(30, 4)])
    with Store(store_path) as older:
        turn(older, StampedEngine(), longer, "theirs")
    assert computed(trusting, longer) == list(range(48, 87))
    turn(trusting, StampedEngine(), longer)
    assert computed(trusting, longer) == list(range(80, 87))
    assert [bad.reason for bad in verify_store(trusting).bad] == ["no trusted key signed it"]
    assert {block_of(p.read_bytes()).signer for p in chain_files(store_path)} == {
        require_signing_key().public
    }


def test_nor_where_it_saves_a_block_while_one_with_the_list_does(
    trusting: Store, store_path: Path
) -> None:
    """Between the look at what is stored and the rename of what was written."""
    ids, write, did = some_ids(20, 6), space.Space.write, list[int]()

    def meanwhile(room: space.Space, *words: object) -> object:
        if not did:
            did.append(1)
            with Store(store_path) as older:
                turn(older, StampedEngine(), ids)
        return write(room, *words)  # type: ignore[arg-type]

    with mock.patch.object(space.Space, "write", meanwhile):
        turn(trusting, StampedEngine(), ids)
    assert did
    with Store(store_path, trust=[SOMEBODY]) as store:
        assert computed(store, ids) == list(range(16, 20))


def test_an_engine_that_holds_the_rows_needs_no_file(trusting: Store) -> None:
    engine = StampedEngine()
    turn(trusting, engine, IDS, "chat", save=False)
    plant_second(trusting, "unsigned")
    before = list(engine.positions)
    turn(trusting, engine, np.concatenate([IDS, some_ids(9, 7)]), "chat", codec="raw")
    engine.check_rows()
    assert engine.positions[len(before) :] == list(range(57, 66))
    assert_saved(trusting, np.concatenate([IDS, some_ids(9, 7)]), "chat")


@pytest.mark.parametrize("deleted", [False, True], ids=["index there", "index rebuilt"])
def test_what_is_there_counts_by_its_signer(
    trusting: Store, store_path: Path, deleted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`Blocks.has`, also after a rebuild, which reads signers from the headers."""
    files = chain_files(store_path)
    names = [block_of(path.read_bytes()).record.name for path in files]
    plant(files[1], files[0], PLANTS["signed by a stranger"])
    trusting.index.close()
    if deleted:
        for file in store_path.glob("index.sqlite3*"):
            file.unlink()
    with Store(store_path, trust=[SOMEBODY]) as store:
        has: Callable[[bytes], bool] = store.blocks.has
        assert [has(name) for name in names] == [True, False, False]
        assert not files[1].exists()
        assert files[2].exists(), "what follows waits for the block before it"
