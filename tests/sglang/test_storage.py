"""KVSnapStorage through SGLang's real factory, against its real base class and host pools; no engine."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, HiCacheStorageConfig

from kvsnap.engines.sglang_identity import identity_of
from kvsnap.engines.sglang_start import RELEASES, installed_release, interface_differences
from kvsnap.formats.errors import KvsnapError
from kvsnap.kvstore.store import Store
from tests.sglang.conftest import Make
from tests.sglang.pools import (
    LAYOUTS,
    PAGE,
    behind,
    blocks,
    host_pool,
    indices,
    model_in,
    page_hashes,
    pages_of,
    wipe,
)


def test_the_installed_release_has_the_interface_that_is_known() -> None:
    assert installed_release() in RELEASES
    assert interface_differences(HiCacheStorage, HiCacheStorageConfig, installed_release()) == []


@pytest.mark.parametrize("codec", ["raw", "zstd"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_come_back_bit_for_bit_in_a_new_process(
    make: Make, layout: str, codec: str, tmp_path: Path
) -> None:
    pool, keys = host_pool(layout), page_hashes(5)
    before = pages_of(pool, 2, 5)
    storage = make(pool, codec=codec)
    assert storage.batch_exists(keys, behind(None)) == 0
    assert storage.batch_set_v1(keys, indices(2, 5), behind([])) == [True] * 5
    again = host_pool(layout)
    wipe(again)
    storage = make(again, codec=codec)
    assert storage.batch_exists(keys, behind(None)) == 5
    assert storage.batch_get_v1(keys, indices(7, 5), behind([])) == [True] * 5
    assert pages_of(again, 7, 5) == before
    assert not any(pages_of(again, 0, 7)[n].strip(b"\0") for n in range(7)), "and nothing else"
    with safe_open(blocks(tmp_path / "store")[0], "np") as file:
        assert file.metadata()["codec"] == codec


def test_fewer_or_more_pages_than_are_stored(make: Make) -> None:
    pool, keys = host_pool(), page_hashes(6)
    storage = make(pool)
    storage.batch_set_v1(keys[:4], indices(0, 4), behind([]))
    assert storage.batch_exists(keys, behind(None)) == 4
    assert storage.batch_exists(keys[:2], behind(None)) == 2
    got = storage.batch_get_v1(keys, indices(8, 6), behind([]))
    assert got == [True] * 4 + [False] * 2
    assert pages_of(pool, 8, 4) == pages_of(pool, 0, 4)
    assert storage.batch_exists([], behind(None)) == 0


def test_generic_calls_store_alone_and_both_kinds_of_calls_find_both(make: Make) -> None:
    pool, keys = host_pool(), page_hashes(4)
    storage = make(pool, interface_v1=0)
    assert storage.batch_set(keys[:2], [pool.get_data_page(n * PAGE) for n in range(2)])
    assert storage.set(keys[2], pool.get_data_page(2 * PAGE))
    assert storage.exists(keys[1])
    assert not storage.exists(keys[3])
    other = make(host_pool())
    assert other.batch_exists(keys, behind(None)) == 3
    assert other.batch_set_v1(keys[3:], indices(3, 1), behind(keys[:3])) == [True]
    for asking in (storage, other):
        assert asking.batch_exists(keys) == 4
        targets = [pool.get_dummy_flat_data_page() for _ in keys]
        pages = asking.batch_get(keys, targets)
        assert [page is target for page, target in zip(pages, targets, strict=True)] == [True] * 4
        found = [bytes(page.view(torch.uint8).numpy().tobytes()) for page in pages]
        assert found == pages_of(pool, 0, 4)
    assert storage.get(page_hashes(1, "b")[0], pool.get_dummy_flat_data_page()) is None
    alone = storage.get(keys[1])
    assert bytes(alone.view(torch.uint8).numpy().tobytes()) == pages_of(pool, 1, 1)[0]


def test_what_decides_pages_is_what_a_name_depends_on(make: Make, tmp_path: Path) -> None:
    """One thing changed at a time: nothing of the others is found, and each finds its own."""
    key = tmp_path / "key"
    key.write_text("1f" * 32)
    model = model_in(tmp_path / "model")
    with_code = model_in(tmp_path / "with code")
    (with_code.folder / "modeling.py").write_text("x = 1")
    variants: list[tuple[Any, dict[str, Any]]] = [
        (host_pool(), {}),
        (host_pool("page_first"), {}),
        (host_pool("page_first_direct"), {}),
        (host_pool(dtype=torch.float16), {}),
        (host_pool(dtype=torch.float32, dim=4), {}),
        (host_pool(heads=4, dim=4), {}),
        (host_pool(layers=1, dim=24), {}),
        (host_pool(page_size=8, dim=16), {}),
        (host_pool(), {"tp_rank": 0, "tp_size": 2}),
        (host_pool(), {"tp_rank": 1, "tp_size": 2}),
        (host_pool(), {"pp_rank": 1, "pp_size": 2}),
        (host_pool(), {"model": model_in(tmp_path / "other", b"other weights")}),
        (host_pool(), {"model": model_in(tmp_path / "model", settings=(("a", "1"),))}),
        (host_pool(), {"model": with_code}),
        (host_pool(), {"tenant_key_file": str(key)}),
    ]
    keys = page_hashes(2)
    for pool, told in variants:
        told = {"model": model, **told}
        storage = make(pool, **told)
        index = indices(0, 2, pool.page_size)
        assert storage.batch_exists(keys, behind(None)) == 0, (pool.layout, told)
        assert storage.batch_get_v1(keys, index, behind([])) == [False, False]
        assert storage.batch_set_v1(keys, index, behind([])) == [True, True]
        assert storage.batch_exists(keys, behind(None)) == 2
    with Store(tmp_path / "store") as store:
        assert len({row[0] for row in store.index.query("SELECT root FROM blocks")}) == len(
            variants
        )


def test_another_folder_of_the_same_weights_is_the_same_model(make: Make, tmp_path: Path) -> None:
    pool, keys = host_pool(), page_hashes(2)
    make(pool).batch_set_v1(keys, indices(0, 2), behind([]))
    moved = make(host_pool(), model_in(tmp_path / "moved"))
    assert moved.batch_exists(keys, behind(None)) == 2


def test_the_identity_says_what_it_is_made_of(make: Make, tmp_path: Path) -> None:
    pool = host_pool("page_first")
    storage = make(pool)
    assert storage.store is not None
    model = model_in(tmp_path / "model")
    told = identity_of(pool, storage.config, model, storage.store.file_digest).to_json()
    assert told["family"] == "sglang"
    assert told["kv_types"] == {"page.kv": "bfloat16"}
    assert told["layout"][0]["planes"][0]["row"] == [2 * 3 * PAGE * 2 * 8 * 2]
    assert ["sglang.layout", '"page_first"'] in told["overrides"]


def test_without_prefixes_pages_are_stored_alone_and_the_log_says_what_to_do(
    make: Make, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    pool, keys = host_pool(), page_hashes(4)
    storage = make(pool)
    for _ in range(3):
        assert storage.batch_set_v1(keys[2:], indices(2, 2), behind(None)) == [True, True]
    assert caplog.text.count("hicache_storage_pass_prefix_keys") == 1
    assert storage.batch_exists(keys, behind(None)) == 0
    assert storage.batch_set_v1(keys[:2], indices(0, 2), None) == [True, True]
    assert make(host_pool()).batch_exists(keys, behind(None)) == 4


@pytest.mark.parametrize("key", ["0" * 64 + ".mamba", "0" * 64 + "_ab_L0-4_H1", "abc"])
def test_keys_of_other_pools_and_schemes_are_passed_over(
    make: Make, caplog: pytest.LogCaptureFixture, key: str
) -> None:
    pool = host_pool()
    storage = make(pool)
    page = pool.get_data_page(0)
    assert storage.batch_exists([key]) == 0
    assert storage.batch_set_v1([key], indices(0, 1), behind([])) == [False]
    assert storage.batch_get_v1([key], indices(0, 1), behind([])) == [False]
    assert not storage.set(key, page)
    assert storage.get(key, page) is None
    assert caplog.text.count("is no page hash of 64 digits") == 1


def test_a_remote_is_read_through_and_written_behind(make: Make, tmp_path: Path) -> None:
    remote, pool, keys = f"file://{tmp_path / 'remote'}", host_pool(), page_hashes(6)
    first = make(pool, remote=remote, write_behind=True)
    assert first.batch_set_v1(keys, indices(0, 6), behind([])) == [True] * 6
    first.close()
    again = host_pool()
    wipe(again)
    second = make(again, store="elsewhere", remote=remote)
    assert second.batch_exists(keys, behind(None)) == 6
    assert second.batch_get_v1(keys, indices(0, 6), behind([])) == [True] * 6
    assert pages_of(again, 0, 6) == pages_of(pool, 0, 6)
    assert len(blocks(tmp_path / "elsewhere")) == 6


def test_pages_that_are_stored_alone_go_to_the_remote_each(make: Make, tmp_path: Path) -> None:
    pool, keys = host_pool(), page_hashes(6)
    first = make(pool, remote=f"file://{tmp_path / 'remote'}", write_behind=True)
    assert first.batch_set_v1(keys[1::2], indices(0, 3), None) == [True] * 3
    assert first.batch_set_v1(keys, indices(0, 6), None) == [True] * 6
    first.close()
    assert len(list((tmp_path / "remote").rglob("*.safetensors"))) == 6


def test_clear_and_close_delete_nothing_and_a_closed_one_answers_nothing(
    make: Make, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    pool, keys = host_pool(), page_hashes(2)
    storage = make(pool)
    storage.batch_set_v1(keys, indices(0, 2), behind([]))
    storage.clear()
    assert "the store is left as it is" in caplog.text
    assert storage.get_stats() is None
    storage.close()
    storage.close()
    assert storage.batch_exists(keys, behind(None)) == 0
    assert storage.batch_set_v1(keys, indices(0, 2), behind([])) == [False, False]
    assert len(blocks(tmp_path / "store")) == 2


def test_what_torch_or_a_detaching_raises_is_a_page_that_is_not_there(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exception would end SGLang's thread, and with it all reading from storage."""
    pool, keys = host_pool(), page_hashes(3)
    storage = make(pool)
    storage.batch_set_v1(keys, indices(0, 3), behind([]))

    def refuse(index: int, page: torch.Tensor) -> None:
        raise RuntimeError("shape is invalid")

    with monkeypatch.context() as patch:
        patch.setattr(pool, "set_from_flat_data_page", refuse)
        assert storage.batch_get_v1(keys, indices(4, 3), behind([])) == [False] * 3
    assert storage.batch_get_v1(keys, indices(4, 3), behind([])) == [True] * 3
    storage._pages.close()  # another thread is past the look for it
    assert storage.batch_get_v1(keys, indices(4, 3), behind([])) == [False] * 3


def test_requests_are_counted_by_what_was_really_read(make: Make) -> None:
    pool, keys = host_pool(), page_hashes(4)
    storage = make(pool)
    storage.batch_exists(keys, behind(None))
    storage.batch_set_v1(keys[:3], indices(0, 3), behind([]))
    storage.batch_get_v1(keys, indices(0, 4), behind([]))
    index = storage.store.index
    index.write_notes()
    counted = dict(index.query("SELECT name, value FROM counters"))
    assert counted["requests"] == 2
    assert counted["reused_tokens"] == 3 * PAGE
    assert counted["computed_tokens"] == 5 * PAGE


def test_replaced_weights_end_it(make: Make) -> None:
    pool, keys = host_pool(), page_hashes(2)
    storage = make(pool)
    storage.batch_set_v1(keys[:1], indices(0, 1), behind([]))
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

    with pytest.raises(AttributeError):  # of the stand-in below; the notice comes first
        WeightUpdater.update_weights_from_tensor(object(), named_tensors=[])
    assert storage.batch_exists(keys, behind(None)) == 0
    assert storage.batch_set_v1(keys[1:], indices(1, 1), behind(keys[:1])) == [False]
    assert storage.batch_get_v1(keys, indices(0, 2), behind([])) == [False, False]


@pytest.mark.parametrize("name", ["swa", "mamba", "draft"])
def test_other_pools_are_refused_when_registered_and_nothing_is_done_then(
    make: Make, name: str
) -> None:
    pool, keys = host_pool(), page_hashes(1)
    storage = make(pool)
    with pytest.raises(KvsnapError, match=f"more than KV of every token: {name}"):
        storage.register_mem_host_pool_v2(pool, name)
    assert storage.batch_set_v1(keys, indices(0, 1), behind([])) == [False]
    assert storage.batch_exists(keys, behind(None)) == 0


def test_what_is_refused_says_what_to_do(make: Make, tmp_path: Path) -> None:
    with pytest.raises(KvsnapError, match=r"codec q8 is lossy.*; give raw or zstd"):
        make(host_pool(), codec="q8")
    with pytest.raises(KvsnapError, match="'stroe' is not known"):
        make(host_pool(), stroe="x")
    pool = host_pool()
    pool.layout = "page_unified"
    with pytest.raises(KvsnapError, match="'page_unified'"):
        make(pool)
    assert not (tmp_path / "store").exists()


def test_names_are_logged_and_keys_are_not(
    make: Make, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    key = tmp_path / "key"
    key.write_text("1f" * 32)
    with caplog.at_level(logging.DEBUG, "kvsnap"):
        storage = make(host_pool(), tenant_key_file=str(key))
        storage.batch_set_v1(page_hashes(1), indices(0, 1), behind([]))
    assert "pages of root" in caplog.text
    assert "1f1f1f" not in caplog.text
