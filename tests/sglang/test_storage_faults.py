"""What goes wrong under KVSnapStorage is pages that are not there: damage, a full disk, a store that is gone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kvsnap.formats.errors import StoreReadOnly
from tests.sglang.conftest import Make
from tests.sglang.pools import behind, blocks, host_pool, indices, page_hashes, pages_of, wipe


def flip(path: Path, byte: int) -> None:
    data = bytearray(path.read_bytes())
    data[byte] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("byte", [-1, -2000, 40], ids=["last byte", "rows", "header"])
def test_a_flipped_bit_is_no_page_and_nothing_of_it_lands(
    make: Make, tmp_path: Path, byte: int
) -> None:
    pool, keys = host_pool(), page_hashes(6)
    make(pool).batch_set_v1(keys, indices(0, 6), behind([]))
    before = pages_of(pool, 0, 6)
    bad = blocks(tmp_path / "store")[2]
    flip(bad, byte)
    again = host_pool()
    wipe(again)
    storage = make(again)
    assert storage.batch_exists(keys, behind(None)) == 6, "a hint, which the read corrects"
    got = storage.batch_get_v1(keys, indices(0, 6), behind([]))
    assert got[:3] == [True, True, False]
    assert pages_of(again, 0, 2) == before[:2]
    assert pages_of(again, 2, 1) == [bytes(len(before[2]))]
    assert storage.batch_exists(keys, behind(None)) == 2
    assert bad.stem in {p.name.split(".")[0] for p in (tmp_path / "store/quarantine").iterdir()}
    fresh = host_pool()
    storage = make(fresh)
    assert storage.batch_set_v1(keys[2:], indices(2, 4), behind(keys[:2])) == [True] * 4
    assert storage.batch_exists(keys, behind(None)) == 6, "stored again, and what was behind counts"


@pytest.mark.parametrize("kept", [0, 100, -1], ids=["empty", "cut in the header", "one byte short"])
def test_a_file_that_was_cut_is_no_page(make: Make, tmp_path: Path, kept: int) -> None:
    pool, keys = host_pool(), page_hashes(3)
    make(pool).batch_set_v1(keys, indices(0, 3), behind([]))
    path = blocks(tmp_path / "store")[1]
    path.write_bytes(path.read_bytes()[:kept])
    storage = make(host_pool())
    assert storage.batch_get_v1(keys, indices(0, 3), behind([]))[:2] == [True, False]


def test_another_page_under_the_name_is_no_page(make: Make, tmp_path: Path) -> None:
    pool, keys = host_pool(), page_hashes(3)
    make(pool).batch_set_v1(keys, indices(0, 3), behind([]))
    _, second, third = blocks(tmp_path / "store")
    second.write_bytes(third.read_bytes())
    storage = make(host_pool())
    assert storage.batch_get_v1(keys, indices(0, 3), behind([]))[:2] == [True, False]


def test_a_full_store_says_no_and_keeps_what_is_whole(make: Make, tmp_path: Path) -> None:
    pool = host_pool()
    storage = make(pool, capacity="30kB", min_free=1)
    keys = page_hashes(12)
    done = storage.batch_set_v1(keys, indices(0, 12), behind([]))
    assert done[0] is True
    assert done[-1] is False
    count = done.index(False)
    assert done == [True] * count + [False] * (12 - count)
    assert storage.batch_exists(keys, behind(None)) == count
    more = storage.batch_set_v1(keys[count:], indices(count, 12 - count), behind(keys[:count]))
    assert not any(more), "its own front is not evicted for it"
    fresh = page_hashes(3, "b")
    assert any(storage.batch_set_v1(fresh, indices(0, 3), behind([]))), "older leaves are"


def test_a_page_behind_one_that_is_gone_is_not_stored(
    make: Make, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    pool, keys = host_pool(), page_hashes(4)
    storage = make(pool)
    assert storage.batch_set_v1(keys[2:], indices(2, 2), behind(keys[:2])) == [False, False]
    assert blocks(tmp_path / "store") == []
    assert "what stands before a page is not stored any more" in caplog.text


def test_a_page_of_another_size_is_refused_and_nothing_raised(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    pool, keys = host_pool(), page_hashes(1)
    storage = make(pool)
    assert not storage.set(keys[0], torch.zeros(7))
    assert not storage.set(keys[0], None)
    assert storage.set(keys[0], pool.get_data_page(0))
    assert storage.get(keys[0], torch.zeros(7)) is None
    assert "a page of 28 bytes" in caplog.text


def test_a_store_that_cannot_be_used_any_more_is_a_miss(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, keys = host_pool(), page_hashes(2)
    storage = make(pool)
    storage.batch_set_v1(keys, indices(0, 2), behind([]))

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(storage.store.blocks, "offers", fail)
    monkeypatch.setattr(storage.store.blocks, "has", fail)
    assert storage.batch_exists(keys, behind(None)) == 0
    assert storage.batch_get_v1(keys, indices(0, 2), behind([])) == [False, False]
    assert storage.batch_set_v1(keys, indices(0, 2), behind([])) == [False, False]


def test_a_read_only_store_is_read_and_not_written(
    make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pool, keys = host_pool(), page_hashes(4)
    make(pool).batch_set_v1(keys[:2], indices(0, 2), behind([]))
    storage = make(host_pool())

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise StoreReadOnly("nothing can be written there", "")

    monkeypatch.setattr(storage.store.space, "write", refuse)
    monkeypatch.setattr(storage.store.index, "transaction", refuse)
    assert storage.batch_set_v1(keys[2:], indices(2, 2), behind(keys[:2])) == [False, False]
    assert storage.batch_exists(keys, behind(None)) == 2
    assert storage.batch_get_v1(keys, indices(0, 4), behind([])) == [True, True, False, False]
