"""Of blocks of one model that do not serve one another doctor says why."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from kvsnap.formats.codecs import get_codec
from kvsnap.formats.identity import Identity, root_of
from kvsnap.formats.layout import Group, Layout, Plane
from kvsnap.formats.names import ZERO_PARENT, block_name, token_array
from kvsnap.formats.tenant import Tenant
from kvsnap.kvstore.doctor import examine
from kvsnap.kvstore.roots_apart import roots_apart
from kvsnap.kvstore.store import Store
from kvsnap.kvstore.wanted import Wanted

PLANE = Plane(name="kv", kind="pages", dtype="U8", row=(64,), source_type="bfloat16")
LAYOUT = Layout(groups=(Group(name="g0", layers=1, planes=(PLANE,)),))
SERVED = Identity(
    family="vllm",
    weights="blake3:" + "5a" * 32,
    architecture="llama",
    layout=LAYOUT,
    rope=None,
    block_size=16,
    overrides=(("vllm.dtype", '"bfloat16"'), ("vllm.isa", '"vec"')),
)


def put(store: Store, identity: Identity, tenant: Tenant | None = None) -> None:
    root, ids = root_of(identity, tenant), token_array(list(range(16)))
    wanted = Wanted(block_name(root.key, ZERO_PARENT, ids), ZERO_PARENT, 0, ids)
    store.blocks.put(root, wanted, get_codec("raw"), LAYOUT, LAYOUT.empty(0))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"overrides": (("vllm.dtype", '"float16"'), ("vllm.isa", '"vec"'))}, "vllm.dtype"),
        ({"weights": "blake3:" + "11" * 32}, "weights"),
        ({"block_size": 32}, "block_size"),
        ({"family": "sglang"}, "one engine's rows are not another's"),
    ],
)
def test_the_fields_that_differ_are_named(
    opened: Callable[..., Store], change: dict, reason: str
) -> None:
    store = opened()
    put(store, dataclasses.replace(SERVED, **change))
    put(store, SERVED)
    (apart,) = roots_apart(store)
    assert str(apart).endswith(reason) or reason in apart.fields[0]
    assert apart.blocks == 1
    told = [finding.what for finding in examine(store.path)]
    assert any(reason in line and "do not serve" in line for line in told)


def test_one_root_or_another_model_is_nothing_to_tell(opened: Callable[..., Store]) -> None:
    store = opened()
    put(store, SERVED)
    put(store, dataclasses.replace(SERVED, architecture="qwen2"))
    assert list(roots_apart(store)) == []


def test_another_tenants_blocks_of_the_same_model_differ_in_the_tenant(
    opened: Callable[..., Store],
) -> None:
    store = opened()
    put(store, SERVED)
    put(store, SERVED, Tenant(bytes(range(32))))
    (apart,) = roots_apart(store)
    assert str(apart).endswith("the tenant")
