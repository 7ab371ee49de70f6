"""Saved rows come back, whatever the length, the type and the codec; what is stored stays."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvsnap.kvstore.session import Session
from kvsnap.kvstore.store import Store
from kvsnap.kvstore.verify import verify_store
from kvsnap.testing.engine_suite import LENGTHS
from kvsnap.testing.stamped import StampedEngine
from kvsnap.testing.turns import some_ids, turn

Opener = Callable[[], Store]


def stamps(path: Path) -> dict[str, tuple[int, int, int]]:
    """Inode, size and mtime of every block file: a rewritten file has others."""
    found = {}
    for file in (path / "blocks").glob("*/*"):
        status = file.stat()
        found[file.name] = (status.st_ino, status.st_size, status.st_mtime_ns)
    return found


def assert_clean(store: Store) -> None:
    report = verify_store(store, progress=lambda done, total: None)
    assert (report.bad, report.unreachable) == ([], [])
    assert list(store.place.temporary.glob("*.part")) == []


@pytest.mark.parametrize("name", ["chat", None], ids=["session", "blocks-only"])
@pytest.mark.parametrize("length", LENGTHS)
def test_one_more_token_after_a_save_costs_what_the_store_cannot_hold(
    open_store: Opener, length: int, name: str | None
) -> None:
    # A16: saved + 1 token. With a session the tail is stored as well; without one it is not.
    ids = some_ids(length + 1)
    turn(open_store(), StampedEngine(), ids[:length], name)
    engine = StampedEngine()
    done = turn(open_store(), engine, ids, name)
    lost = 0 if name else length % 16
    assert engine.positions == list(range(length - lost, length + 1))
    assert done.resumed.reused_tokens == length - lost
    assert done.resumed.computed_tokens == engine.evaluated
    engine.check_rows()
    assert_clean(open_store())


@pytest.mark.parametrize("codec", ["raw", "zstd"])
@pytest.mark.parametrize("element", ["F16", "BF16", "F32", "rows"])
def test_every_type_and_codec_comes_back_bit_for_bit(
    open_store: Opener, element: str, codec: str
) -> None:
    # A20, A54: for every codec, blocks are there and are the same rows.
    ids = some_ids(57)
    saved = turn(open_store(), StampedEngine(element=element), ids, "chat", codec=codec).saved
    assert saved is not None
    assert (saved.blocks, saved.blocks_written, saved.codec) == (3, 3, codec)
    engine = StampedEngine(element=element)
    turn(open_store(), engine, ids, "chat")
    assert engine.positions == [56]
    engine.check_rows()
    assert_clean(open_store())


def test_raw_and_zstd_files_of_one_block_carry_one_name(open_store: Opener) -> None:
    turn(open_store(), StampedEngine(), some_ids(48), codec="raw")
    engine = StampedEngine()
    saved = turn(open_store(), engine, some_ids(48), codec="zstd").saved
    assert engine.positions == [47]
    assert saved is not None
    assert saved.blocks_written == 0


@pytest.mark.parametrize("length", LENGTHS)
def test_a_second_save_of_an_unchanged_session_writes_no_block(
    store: Store, store_path: Path, length: int
) -> None:
    first = turn(store, StampedEngine(), some_ids(length), "chat")
    before = stamps(store_path)
    again = first.session.save()
    assert (again.blocks_written, again.bytes_written, again.bytes_raw) == (0, 0, 0)
    assert (again.tokens, again.blocks) == (length, length // 16)
    other = turn(store, StampedEngine(), some_ids(length), "chat").saved
    assert other is not None
    assert other.blocks_written == 0
    assert stamps(store_path) == before


def test_a_longer_session_writes_only_its_new_blocks(store: Store, store_path: Path) -> None:
    session = turn(store, StampedEngine(), some_ids(100)[:40], "chat").session
    before = stamps(store_path)
    session.engine.evaluate(some_ids(100)[40:])
    saved = session.save()
    assert (saved.blocks, saved.blocks_written) == (6, 4)
    assert saved.bytes_raw == 4 * 16 * session.layout.token_bytes()
    now = stamps(store_path)
    assert saved.bytes_written == sum(now[n][1] for n in now.keys() - before.keys())
    assert {name: now[name] for name in before} == before


def test_sessions_that_share_a_long_prefix_store_it_once(store: Store, store_path: Path) -> None:
    shared = some_ids(1024)
    for number in range(3):
        ids = [*shared, *some_ids(40, seed=number + 1)]
        engine = StampedEngine()
        saved = turn(store, engine, ids, f"chat/{number}").saved
        assert saved is not None
        assert saved.blocks == 66
        assert saved.blocks_written == (66 if number == 0 else 2)
        assert engine.evaluated == (1064 if number == 0 else 40)
    assert len(stamps(store_path)) == 64 + 3 * 2
    assert_clean(store)


def test_saved_reports_add_up_over_the_files(store: Store, store_path: Path) -> None:
    session = Session(store, StampedEngine(), "chat")
    session.engine.evaluate(some_ids(49))
    session.put_filled()
    session.put_filled()
    saved = session.save()
    assert saved.blocks_written == 3
    assert saved.bytes_written == sum(size for _, size, _ in stamps(store_path).values())


def test_equal_content_gives_equal_files(store: Store, store_path: Path, tmp_path: Path) -> None:
    turn(store, StampedEngine(), some_ids(48))
    other = tmp_path / "other"
    other.mkdir()
    (other / "kvsnap.json").write_bytes((store_path / "kvsnap.json").read_bytes())
    with Store(other) as second:
        turn(second, StampedEngine(batch=5, capacity=99), some_ids(48))
    files = {file.relative_to(store_path): file for file in store_path.glob("blocks/*/*")}
    assert len(files) == 3
    for place, file in files.items():
        assert (other / place).read_bytes() == file.read_bytes()


def test_rows_are_copied_before_a_put_returns(store: Store) -> None:
    # A41: the producer goes on writing into its buffer right after the call.
    class Reusing(StampedEngine):
        def export(self, start: int, stop: int) -> dict:
            self.given = super().export(start, stop)
            return self.given

    engine = Reusing()
    session = Session(store, engine)
    engine.evaluate(some_ids(48))
    session.put_filled()
    for array in engine.given.values():
        array[...] = 0
    session.save()
    resumed = StampedEngine()
    turn(store, resumed, some_ids(49))
    assert resumed.positions == [48]
    resumed.check_rows()


@pytest.mark.parametrize("length", LENGTHS)
def test_loading_twice_gives_two_independent_engines(store: Store, length: int) -> None:
    # A63: a cache that was handed out once must not have grown when it is handed out again.
    ids = some_ids(length + 1)
    turn(store, StampedEngine(), ids[:length], "chat")
    session = Session(store, StampedEngine(), "chat")
    session.resume(ids)
    session.engine.evaluate(some_ids(5, seed=3))
    session.resume(ids)
    assert session.engine.token_ids().tolist() == ids[:length].tolist()
    second = StampedEngine()
    Session(store, second, "chat").resume(ids)
    assert second.token_ids().tolist() == ids[:length].tolist()
    second.check_rows()


def test_memory_of_a_save_stays_at_a_few_blocks(store: Store) -> None:
    class Watched(StampedEngine):
        widest = 0

        def export(self, start: int, stop: int) -> dict:
            self.widest = max(self.widest, stop - start)
            return super().export(start, stop)

    engine = Watched()
    turn(store, engine, some_ids(16 * 60))
    names = sorted(store.place.blocks.glob("*/*"))
    first, last = (store.index.query(sql)[0][0].hex() for sql in _FIRST_AND_LAST)
    for file in names:
        if file.name.startswith((first, last)):
            file.unlink()
    engine.widest = 0
    saved = Session(store, engine).save()
    assert saved.blocks_written == 2
    assert engine.widest <= 8 * 16


_FIRST_AND_LAST = (
    "SELECT name FROM blocks ORDER BY start LIMIT 1",
    "SELECT name FROM blocks ORDER BY start DESC LIMIT 1",
)
