"""Blocks of another model, setting, shard or tenant are never used, and the report says why."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvsnap.formats.container import Container, Tensor, pack, parse
from kvsnap.formats.identity import Adapter, Shard, root_of
from kvsnap.formats.tenant import Tenant
from kvsnap.kvstore import files
from kvsnap.kvstore.index import big_endian
from kvsnap.kvstore.store import Store
from kvsnap.kvstore.verify import verify_store
from kvsnap.testing.engine_suite import LENGTHS
from kvsnap.testing.stamped import ROPE, StampedEngine
from kvsnap.testing.turns import some_ids, turn

Opener = Callable[[], Store]


def rope(**change: Any) -> dict[str, Any]:
    return {"rope": dataclasses.replace(ROPE, **change)}


LORA = Adapter(kind="lora", digest="blake3:01", scale=1.0)
CHANGES = {
    # A01: other weights under the same display name (nothing else names a model here).
    "weights": {"weights": "other weights"},
    "architecture": {"architecture": "other"},
    "family": {"family": "other"},
    # A03: layouts of equal size; no check of sizes can tell them apart.
    "layout": {"kv_heads": 4, "head_dim": 4},
    # A04, A10: shards of one model.
    "shard.tensor_rank": {"shard": Shard(tensor_rank=1, tensor_size=2)},
    "shard.pipeline_rank": {"shard": Shard(pipeline_rank=1)},
    "shard.context_rank": {"shard": Shard(context_rank=1)},
    # A05: rotary embedding, field by field, and the context that it was built for.
    "rope.base": rope(base=500000.0),
    "rope.type": rope(type="norm"),
    "rope.scale": rope(scale=0.5),
    "rope.scaling": rope(scaling="yarn"),
    "rope.original_context": rope(original_context=4096),
    "rope.extension_factor": rope(extension_factor=1.0),
    "rope.attention_factor": rope(attention_factor=1.0),
    "rope.beta_fast": rope(beta_fast=32.0),
    "rope.beta_slow": rope(beta_slow=1.0),
    "rope.long_context": rope(long_context=True),
    # A06: types, and the rotation that quantized types get.
    "kv_types": {"element": "BF16"},
    "rotation_k": {"rotation_k": 64},
    "adapters": {"adapters": [LORA]},
    "projector": {"projector": "blake3:02"},
    "overrides": {"overrides": [("stamped.rope.freq_base", "1.0")]},
}


@pytest.mark.parametrize("name", [None, "chat"], ids=["blocks", "session"])
@pytest.mark.parametrize("field", CHANGES)
def test_one_changed_field_reuses_nothing_and_is_named(
    open_store: Opener, field: str, name: str | None
) -> None:
    ids = some_ids(65)
    turn(open_store(), StampedEngine(), ids, name)
    changed = StampedEngine(**CHANGES[field])
    done = turn(open_store(), changed, ids, name, save=False)
    assert changed.positions == list(range(65))
    assert done.resumed.reused_tokens == 0
    assert done.resumed.stopped_by.startswith(f"identity: {field}")
    back = StampedEngine()
    turn(open_store(), back, ids, name)
    assert back.positions == [64]


@pytest.mark.parametrize("field", CHANGES)
def test_both_identities_live_in_one_store(open_store: Opener, field: str) -> None:
    # A06: chains of two settings never mix; A10: each rank reads its own stamp.
    ids = some_ids(65)
    for change in ({}, CHANGES[field]):
        turn(open_store(), StampedEngine(**change), ids, "chat/" + str(bool(change)))
    for change in ({}, CHANGES[field]):
        engine = StampedEngine(**change)
        turn(open_store(), engine, ids)
        assert engine.positions == [64]
        engine.check_rows()


@pytest.mark.parametrize("length", LENGTHS)
def test_other_weights_share_nothing_at_any_length(open_store: Opener, length: int) -> None:
    ids = some_ids(length + 1)
    turn(open_store(), StampedEngine(), ids[:length], "chat")
    other = StampedEngine(weights="other weights")
    turn(open_store(), other, ids, "chat", save=False)
    assert other.positions == list(range(length + 1))


@pytest.mark.parametrize("change", [{"batch": 3}, {"capacity": 300}, {"vocabulary": 77}])
def test_what_cannot_change_rows_does_not_cost_a_hit(
    open_store: Opener, change: dict[str, int]
) -> None:
    # A05's guard against a store that is safe because it never hits.
    turn(open_store(), StampedEngine(), some_ids(65), "chat")
    engine = StampedEngine(**change)
    turn(open_store(), engine, some_ids(65), "chat")
    assert engine.positions == [64]


def test_an_adapter_is_not_its_scale_its_kind_or_its_absence(open_store: Opener) -> None:
    # A08: which field a text stands in is part of the name.
    half = dataclasses.replace(LORA, scale=0.5)
    control = dataclasses.replace(LORA, kind="control")
    kinds: list[dict[str, Any]] = [{}, {"adapters": [LORA]}, {"adapters": [half]}]
    kinds += [{"adapters": [control]}, {"projector": LORA.digest}, {"architecture": LORA.digest}]
    kinds += [{"adapters": [LORA, half]}, {"adapters": [half, LORA]}]
    for kind in kinds:
        engine = StampedEngine(**kind)
        turn(open_store(), engine, some_ids(33))
        assert engine.positions == list(range(33)), kind


KEYS = [Tenant(bytes([n]) * 32) for n in (1, 2)]


def test_tenants_share_nothing_and_cannot_tell_that_others_have_it(open_store: Opener) -> None:
    # A68: as for never-seen tokens; the same key still hits.
    ids = some_ids(65)
    turn(open_store(), StampedEngine(), ids, "chat", tenant=KEYS[0])
    never_seen = turn(
        open_store(), StampedEngine(), some_ids(65, seed=9), "chat", tenant=KEYS[1], save=False
    ).resumed
    for tenant in (KEYS[1], None):
        engine = StampedEngine()
        done = turn(open_store(), engine, ids, "chat", tenant=tenant, save=False).resumed
        assert engine.positions == list(range(65))
        assert done == never_seen
        assert done.stopped_by == "nothing stored for this prompt"
    engine = StampedEngine()
    turn(open_store(), engine, ids, "chat", tenant=KEYS[0])
    assert engine.positions == [64]


def test_nothing_in_the_store_gives_away_a_tenants_key(store: Store, store_path: Path) -> None:
    tenant = Tenant(bytes(range(100, 132)))
    session = turn(store, StampedEngine(), some_ids(33), "chat", tenant=tenant).session
    secrets = [tenant.key, tenant.naming_key, session.root.key]
    for file in filter(Path.is_file, store_path.rglob("*")):
        data = file.read_bytes()
        for secret in secrets:
            assert secret not in data
            assert secret.hex().encode() not in data


@pytest.mark.parametrize("identity", [None, "", "{}", "null", '"?"', "{"])
def test_a_block_of_unknown_identity_is_no_wildcard(
    open_store: Opener, store_path: Path, identity: str | None
) -> None:
    # A02: an older writer that left the field out must not match every model.
    ids = some_ids(65)
    session = turn(open_store(), StampedEngine(), ids).session
    for file in store_path.glob("blocks/*/*"):
        container = parse(files.read_whole(file))
        metadata = {k: v for k, v in container.metadata.items() if k not in ("identity", "file")}
        if identity is not None:
            metadata["identity"] = identity
        _write(file, Container(metadata, container.tensors))
    for delete_index in (False, True):
        if delete_index:
            (store_path / "index.sqlite3").unlink()
        engine = StampedEngine()
        done = turn(open_store(), engine, ids, save=False).resumed
        assert engine.positions == list(range(65))
        assert done.damage or delete_index
        engine.check_rows()
    assert session.engine.evaluated == 65


def test_verify_lists_a_block_whose_name_does_not_follow_from_it(
    open_store: Opener, store_path: Path
) -> None:
    turn(open_store(), StampedEngine(), some_ids(33))
    for file in store_path.glob("blocks/*/*"):
        container = parse(files.read_whole(file))
        record = json.loads(container.metadata["identity"]) | {"weights": "forged"}
        root = root_of(json.dumps(record, sort_keys=True, separators=(",", ":")))
        forged = {"identity": root.identity, "root_id": root.root_id}
        _write(file, Container({**container.metadata, **forged}, container.tensors))
    store = open_store()
    assert len(verify_store(store, progress=lambda done, total: None).bad) == 2
    engine = StampedEngine(weights="forged")
    turn(store, engine, some_ids(33), save=False)
    assert engine.positions == list(range(33))


def _write(file: Path, container: Container) -> None:
    """A file that is whole by every digest, whoever wrote it."""
    order = sorted(container.tensors.items(), key=lambda item: item[0] != "token_ids")
    tensors = [(name, Tensor(t.dtype, t.shape, t.data)) for name, t in order]
    file.write_bytes(b"".join(bytes(b) for b in pack(container.metadata, tensors).buffers))


def test_index_rows_of_another_root_are_not_siblings(store: Store) -> None:
    first = turn(store, StampedEngine(), some_ids(16)).session
    other = turn(store, StampedEngine(weights="other"), some_ids(16)).session
    asked = big_endian(some_ids(16))
    for session in (first, other):
        (row,) = store.index.neighbours(session.root.root_id, bytes(32), asked)
        assert row.name.hex() in {file.name[:64] for file in store.place.blocks.glob("*/*")}
    assert first.root.root_id != other.root.root_id
