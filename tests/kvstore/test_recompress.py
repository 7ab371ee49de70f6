"""A stored session by another codec, without an engine; never one loss on top of another."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvsnap.formats.codecs import get_codec
from kvsnap.formats.errors import Damaged, NotFound, UsageError
from kvsnap.formats.identity import EXACT
from kvsnap.formats.tenant import Tenant
from kvsnap.kvstore.recompress import recompress
from kvsnap.kvstore.store import Store
from kvsnap.kvstore.verify import verify_store
from kvsnap.testing.recount import assert_counts
from kvsnap.testing.stamped import StampedEngine
from kvsnap.testing.turns import some_ids, turn

Opener = Callable[[], Store]
IDS = some_ids(57)
Q8 = get_codec("q8")


def assert_clean(store: Store, tenant: Tenant | None = None) -> None:
    report = verify_store(store, tenant)
    assert (report.bad, report.unreachable) == ([], [])
    assert_counts(store)


def test_an_exact_session_becomes_a_lossy_one(open_store: Opener) -> None:
    turn(open_store(), StampedEngine(), IDS, "chat")
    report = recompress(open_store(), "chat", Q8)
    assert (report.blocks, report.blocks_written, report.fidelity) == (3, 3, Q8.fidelity)
    engine = StampedEngine()
    done = turn(open_store(), engine, IDS, "chat")
    assert (done.resumed.reused_tokens, done.session.codec) == (56, Q8)
    assert_clean(open_store())


def test_the_exact_blocks_stay_for_whoever_shares_them(open_store: Opener) -> None:
    turn(open_store(), StampedEngine(), IDS, "one")
    turn(open_store(), StampedEngine(), IDS, "two")
    recompress(open_store(), "one", Q8)
    engine = StampedEngine()
    assert turn(open_store(), engine, IDS, "two").resumed.fidelity == EXACT
    engine.check_rows()


def test_a_recompressed_session_holds_what_a_lossy_save_holds(tmp_path: Path) -> None:
    rows = []
    for name, codec in (("recompressed", "zstd"), ("saved", "q8")):
        with Store(tmp_path / name) as store:
            turn(store, StampedEngine(), IDS, "chat", codec=codec)
            if codec == "zstd":
                recompress(store, "chat", Q8)
                for (block,) in store.index.query("SELECT name FROM blocks WHERE codec = 'zstd'"):
                    store.place.block(block).unlink()
            engine = StampedEngine()
            done = turn(store, engine, IDS, "chat", save=False)
            assert done.resumed.fidelity == Q8.fidelity
            rows.append(engine.export(0, 48))
    assert all(np.array_equal(rows[0][name], rows[1][name]) for name in rows[0])


def test_a_damaged_tail_is_found_before_anything_is_written(open_store: Opener) -> None:
    turn(open_store(), StampedEngine(), IDS, "chat")
    store = open_store()
    path = store.sessions.require("default", "chat")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(Damaged):
        recompress(store, "chat", Q8)
    assert store.index.query("SELECT DISTINCT codec FROM blocks") == [("zstd",)]


def test_a_lossy_session_is_not_coded_again(open_store: Opener) -> None:
    turn(open_store(), StampedEngine(), IDS, "chat", codec="q8")
    for codec in ("q8", "zstd"):
        with pytest.raises(UsageError, match="one loss to another"):
            recompress(open_store(), "chat", get_codec(codec))


@pytest.mark.parametrize(("before", "after"), [("raw", "zstd"), ("zstd", "raw")])
def test_a_lossless_codec_rewrites_the_files_under_their_names(
    open_store: Opener, before: str, after: str
) -> None:
    turn(open_store(), StampedEngine(), IDS, "chat", codec=before)
    names = {path.name for path in open_store().place.blocks.glob("*/*")}
    report = recompress(open_store(), "chat", get_codec(after))
    assert (report.blocks_written, report.fidelity) == (3, EXACT)
    assert (report.bytes_before < report.bytes_after) is (before == "zstd")
    assert {path.name for path in open_store().place.blocks.glob("*/*")} == names
    assert open_store().index.query("SELECT DISTINCT codec FROM blocks") == [(after,)]
    engine = StampedEngine()
    assert turn(open_store(), engine, IDS, "chat").resumed.reused_tokens == 56
    engine.check_rows()
    assert_clean(open_store())


def test_a_block_that_is_gone_stops_it_before_anything_changed(open_store: Opener) -> None:
    turn(open_store(), StampedEngine(), IDS, "chat")
    store = open_store()
    name = store.index.query("SELECT name FROM blocks WHERE start = 16")[0][0]
    store.place.block(name).unlink()
    with pytest.raises(NotFound, match="cannot be recompressed"):
        recompress(store, "chat", Q8)
    done = turn(open_store(), StampedEngine(), IDS, "chat")
    assert done.session.codec == get_codec("zstd")


def test_a_tenants_session_needs_its_key(open_store: Opener) -> None:
    tenant = Tenant(bytes(range(32)))
    turn(open_store(), StampedEngine(), IDS, "chat", tenant=tenant)
    with pytest.raises(NotFound):
        recompress(open_store(), "chat", Q8)
    recompress(open_store(), "chat", Q8, tenant)
    assert turn(open_store(), StampedEngine(), IDS, "chat", tenant=tenant).resumed.fidelity == (
        Q8.fidelity
    )
    assert_clean(open_store(), tenant)


def test_a_session_without_blocks_changes_its_fidelity_only(open_store: Opener) -> None:
    turn(open_store(), StampedEngine(), IDS[:5], "chat")
    assert recompress(open_store(), "chat", Q8).blocks == 0
    engine = StampedEngine()
    done = turn(open_store(), engine, IDS[:5], "chat")
    assert done.resumed.reused_tokens == 4
    engine.check_rows()
