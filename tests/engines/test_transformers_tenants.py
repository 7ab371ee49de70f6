"""Tenants through `load` and `save` of the transformers adapter, and through engines on one cache."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvsnap.engines import Transformers
from kvsnap.engines.transformers import load, save
from kvsnap.kvstore.session import Session
from kvsnap.kvstore.store import Store
from kvsnap.testing.tiny_llama import CACHE, tiny_llama
from kvsnap.testing.turns import some_ids
from tests.tenants import ALICE, BOB, assert_not_in, open_shared, written

pytestmark = pytest.mark.engine

IDS = some_ids(50, vocabulary=490).tolist()


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_llama()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_shared(tmp_path / "store") as opened:
        yield opened


def generate(model: Any, cache: Any) -> torch.Tensor:
    ids = torch.tensor([IDS])
    found: torch.Tensor = model.generate(ids, max_new_tokens=4, do_sample=False, **{CACHE: cache})
    return found


def test_what_one_tenant_saved_only_its_key_loads(model: Any, store: Store) -> None:
    cache, reused = load(store, model, IDS, tenant=ALICE)
    output = generate(model, cache)
    save(store, model, cache, output, tenant=ALICE, name="chat")
    assert reused == 0
    for tenant, wanted in ((BOB, 0), (None, 0), (ALICE, 48)):
        cache, reused = load(store, model, IDS, tenant=tenant)
        assert reused == wanted == cache.get_seq_length()
        assert torch.equal(generate(model, cache), output)
    assert load(store, model, [*IDS, 1], tenant=ALICE, name="chat")[1] == len(IDS)
    assert load(store, model, [*IDS, 1], tenant=BOB, name="chat")[1] == 0
    assert_not_in(ALICE.key, written(store.path))


def test_a_cache_that_served_one_tenant_is_not_gone_on_from_for_another(
    model: Any, store: Store
) -> None:
    engine = Transformers(model)
    Session(store, engine, tenant=ALICE).resume(IDS)
    engine.evaluate(some_ids(50, vocabulary=490))
    for tenant, wanted in ((ALICE, 49), (BOB, 0)):
        # An adapter of its own for each request, over the cache that is at hand.
        other = Transformers(model, engine.cache, IDS[: engine.cache.get_seq_length()])
        assert Session(store, other, tenant=tenant).resume(IDS).reused_tokens == wanted
        assert other.cache.get_seq_length() == wanted
