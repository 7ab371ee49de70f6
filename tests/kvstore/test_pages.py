"""Blocks of pages, as serving engines store them: of another length than the store's, whole or not at all."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvsnap.formats.codecs import get_codec
from kvsnap.formats.extras import media_extra, salt_extra
from kvsnap.formats.identity import Identity, Root, root_of
from kvsnap.formats.layout import Group, Layout, Plane, Rows
from kvsnap.formats.names import ZERO_PARENT, block_name, token_array
from kvsnap.kvstore.store import Store
from kvsnap.kvstore.verify import verify_store
from kvsnap.kvstore.wanted import Miss, Wanted

LAYOUT = Layout(
    groups=(
        Group(
            name="g0",
            layers=3,
            planes=(
                Plane(name="kv", kind="pages", dtype="U8", row=(640,), source_type="bfloat16"),
            ),
        ),
    )
)
SIZE = 128


def root(family: str = "vllm") -> Root:
    identity = Identity(
        family=family,
        weights="blake3:" + "5a" * 32,
        architecture="llama",
        layout=LAYOUT,
        rope=None,
        block_size=SIZE,
    )
    return root_of(identity)


def chain(of: Root, extras: list[bytes]) -> list[Wanted]:
    """As many blocks as there are extras."""
    blocks, parent = [], ZERO_PARENT
    for number, own in enumerate(extras):
        ids = token_array(list(range(number * SIZE, (number + 1) * SIZE)))
        name = block_name(of.key, parent, ids, own)
        blocks.append(Wanted(name, parent, number * SIZE, ids, own))
        parent = name
    return blocks


def rows(seed: int) -> Rows:
    chosen = np.random.default_rng(seed)
    return {"g0.kv": chosen.integers(0, 256, (3, 640), dtype=np.uint8)}


def put(store: Store, of: Root, blocks: list[Wanted], codec: str = "raw") -> None:
    with store.holds.lease() as lease:
        for number, block in enumerate(blocks):
            store.blocks.put(of, block, get_codec(codec), LAYOUT, rows(number), lease)


def read(store: Store, of: Root, block: Wanted) -> Rows:
    out = LAYOUT.empty(0)
    store.blocks.read_into(of, block, LAYOUT, out, slice(0, len(block.token_ids)))
    return out


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_pages_come_back_bit_for_bit_whatever_the_stores_block_size(
    opened: Callable[..., Store], codec: str
) -> None:
    own, store = root(), opened()
    blocks = chain(own, [salt_extra("a"), media_extra("ab" * 32, -3), b""])
    put(store, own, blocks, codec)
    for number, block in enumerate(blocks):
        assert np.array_equal(read(store, own, block)["g0.kv"], rows(number)["g0.kv"])
    assert not verify_store(store).bad


def test_a_block_of_the_same_tokens_and_other_extras_is_another(
    opened: Callable[..., Store],
) -> None:
    own, store = root(), opened()
    put(store, own, chain(own, [salt_extra("a")]))
    (other,) = chain(own, [salt_extra("b")])
    assert not store.blocks.offers(other.name)
    (salted,) = chain(own, [salt_extra("a")])
    asked = Wanted(salted.name, salted.parent, 0, salted.token_ids, b"")
    with pytest.raises(Miss, match="another block's"):
        read(store, own, asked)


def test_an_index_that_is_built_anew_knows_them(
    opened: Callable[..., Store], store_path: Path
) -> None:
    own, store = root(), opened()
    blocks = chain(own, [b"", b"", b""])
    put(store, own, blocks)
    store.close()
    for file in store_path.glob("index.sqlite3*"):
        file.unlink()
    again = opened()
    assert again.index.depth([block.name for block in blocks]) == 3
    assert np.array_equal(read(again, own, blocks[2])["g0.kv"], rows(2)["g0.kv"])


def test_what_a_serving_engine_stored_does_not_give_a_lost_kvsnap_json_its_block_size(
    opened: Callable[..., Store], store_path: Path
) -> None:
    store = opened()
    put(store, root(), chain(root(), [b""]))
    store.close()
    (store_path / "kvsnap.json").unlink()
    assert opened().block_size != SIZE


def test_the_stores_side_of_a_serving_engine_loads_neither_torch_nor_an_engine(
    tmp_path: Path,
) -> None:
    code = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from kvsnap.formats.codecs import get_codec
from kvsnap.kvstore.page_writer import Batch, PageWriter
from kvsnap.kvstore.store import Store
from tests.kvstore.test_pages import LAYOUT, chain, read, root, rows

store = Store({str(tmp_path / "store")!r})
writer = PageWriter(store, get_codec("raw"), 10**6)
blocks = chain(root(), [b"", b""])
writer.add(Batch(root(), blocks, LAYOUT, lambda: [rows(0), rows(1)], 3840))
writer.flush()
assert (read(store, root(), blocks[1])["g0.kv"] == rows(1)["g0.kv"]).all()
print(sorted({{"torch", "vllm", "sglang", "transformers", "numba"}} & set(sys.modules)))
"""
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert found.stdout.strip() == "[]", found.stderr
