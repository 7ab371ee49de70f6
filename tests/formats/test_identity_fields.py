"""Each single field of an identity decides the root (cases A01, A03, A05, A06, A08, A10)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest

from kvsnap.formats.identity import Adapter, Identity, Rope, Shard, root_of
from kvsnap.formats.layout import Group, Layout, Plane, PlaneRope

Change = Callable[[Identity], Identity]
LORA = Adapter(kind="lora", digest="blake3:01", scale=1.0)
ROPE = PlaneRope(pairing="interleaved", dims=2, base=10000.0)
OTHER = Adapter(kind="lora", digest="blake3:02", scale=1.0)


def of(**changes: Any) -> Change:
    return lambda identity: replace(identity, **changes)


def rope(**changes: Any) -> Change:
    def change(identity: Identity) -> Identity:
        assert identity.rope is not None
        return replace(identity, rope=replace(identity.rope, **changes))

    return change


def plane(**changes: Any) -> Change:
    """The first plane of the first group, changed."""

    def change(identity: Identity) -> Identity:
        group, *rest = identity.layout.groups
        planes = (replace(group.planes[0], **changes), *group.planes[1:])
        return replace(identity, layout=Layout(groups=(replace(group, planes=planes), *rest)))

    return change


def layout(change: Callable[[tuple[Group, ...]], tuple[Group, ...]]) -> Change:
    return lambda identity: replace(identity, layout=Layout(groups=change(identity.layout.groups)))


CHANGES: dict[str, Change] = {
    "weights": of(weights="blake3:" + "ac" * 32),
    "weights, the algorithm": of(weights="sha256:" + "ab" * 32),
    "family": of(family="transformers"),
    "architecture": of(architecture="qwen3"),
    "block_size": of(block_size=8),
    "fidelity": of(fidelity="kivi@1;bits=2"),
    "fidelity, a parameter": of(fidelity="kivi@1;bits=4"),
    "adapters": of(adapters=(LORA,)),
    "adapters, scale": of(adapters=(replace(LORA, scale=0.5),)),
    "adapters, scale zero": of(adapters=(replace(LORA, scale=0.0),)),
    "adapters, digest": of(adapters=(OTHER,)),
    "adapters, kind": of(adapters=(replace(LORA, kind="control"),)),
    "adapters, two": of(adapters=(LORA, OTHER)),
    "adapters, order": of(adapters=(OTHER, LORA)),
    "adapters, twice": of(adapters=(LORA, LORA)),
    "projector": of(projector="blake3:01"),
    "projector, empty": of(projector=""),
    "rotation_k": of(rotation_k=64),
    "rotation_v": of(rotation_v=64),
    "overrides": of(overrides=(("llama.rope.freq_base", "float:5000.0"),)),
    "overrides, empty value": of(overrides=(("llama.rope.freq_base", ""),)),
    "overrides, empty key": of(overrides=(("", "llama.rope.freq_base"),)),
    "rope, none": of(rope=None),
    "rope.type": rope(type="neox"),
    "rope.base": rope(base=10000.000000000002),
    "rope.scale": rope(scale=0.5),
    "rope.scaling": rope(scaling="yarn"),
    "rope.original_context": rope(original_context=4096),
    "rope.extension_factor": rope(extension_factor=0.0),
    "rope.attention_factor": rope(attention_factor=0.0),
    "rope.attention_factor, one": rope(attention_factor=1.0),
    "rope.beta_fast": rope(beta_fast=0.0),
    "rope.beta_slow": rope(beta_slow=0.0),
    "rope.long_context": rope(long_context=False),
    "rope.long_context, yes": rope(long_context=True),
    "shard.tensor_rank": of(shard=Shard(tensor_rank=1)),
    "shard.tensor_size": of(shard=Shard(tensor_size=2)),
    "shard.tensor, last": of(shard=Shard(tensor_rank=1, tensor_size=2)),
    "shard.pipeline_rank": of(shard=Shard(pipeline_rank=1)),
    "shard.pipeline_size": of(shard=Shard(pipeline_size=2)),
    "shard.context_rank": of(shard=Shard(context_rank=1)),
    "shard.context_size": of(shard=Shard(context_size=2)),
    "plane.name": plane(name="latent"),
    "plane.kind": plane(kind="rows", dtype="U8", row=(16,)),
    "plane.kind, pages": plane(kind="pages", dtype="U8", row=(16,)),
    "plane.dtype": plane(dtype="BF16"),
    "plane.row, heads and head_dim swapped": plane(row=(4, 2)),  # equal sizes on purpose (A03)
    "plane.row, other split": plane(row=(1, 8)),
    "plane.row, wider": plane(row=(2, 8)),
    "plane.rope": plane(rope=ROPE),
    "plane.rope.pairing": plane(rope=replace(ROPE, pairing="halves")),
    "plane.rope.dims": plane(rope=replace(ROPE, dims=4)),
    "plane.rope.base": plane(rope=replace(ROPE, base=500000.0)),
    "plane.rope.scale": plane(rope=replace(ROPE, scale=0.5)),
    "plane.source_type": plane(source_type="f16_rotated"),
    "planes, order": layout(lambda g: (replace(g[0], planes=g[0].planes[::-1]), *g[1:])),
    "planes, one less": layout(lambda g: (replace(g[0], planes=g[0].planes[:1]), *g[1:])),
    "group.name": layout(lambda g: (replace(g[0], name="window"), *g[1:])),
    "group.layers": layout(lambda g: (replace(g[0], layers=3), *g[1:])),
    "group.span": layout(lambda g: (replace(g[0], span=3), *g[1:])),
    "group.span, wider": layout(lambda g: (replace(g[0], span=4), *g[1:])),
    "group.span, of another group": layout(lambda g: (g[0], replace(g[1], span=3))),
    "groups, order": layout(lambda g: g[::-1]),
    "groups, one less": layout(lambda g: g[:1]),
    "groups, none": layout(lambda g: ()),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_changed_field_makes_another_root(identity: Identity, change: Change) -> None:
    here, there = root_of(identity), root_of(change(identity))
    assert here.key != there.key
    assert here.root_id != there.root_id


def test_no_two_changes_make_one_root(identity: Identity) -> None:
    roots = {root_of(change(identity)).key for change in CHANGES.values()}
    assert len(roots) == len(CHANGES)


@pytest.mark.parametrize("kind", [Identity, Rope, Shard, Adapter, Layout, Group, Plane, PlaneRope])
def test_a_new_field_cannot_be_forgotten_above(kind: type) -> None:
    # A field added later must get its own line in CHANGES, and its name here.
    known = {
        Identity: "adapters architecture block_size family fidelity layout overrides projector"
        " rope rotation_k rotation_v shard weights",
        Rope: "attention_factor base beta_fast beta_slow extension_factor long_context"
        " original_context scale scaling type",
        Shard: "context_rank context_size pipeline_rank pipeline_size tensor_rank tensor_size",
        Adapter: "digest kind scale",
        Layout: "groups",
        Group: "layers name planes span",
        Plane: "dtype kind name rope row source_type",
        PlaneRope: "base dims pairing scale",
    }
    assert " ".join(sorted(field.name for field in fields(kind))) == known[kind]


def test_optional_parts_with_equal_text_are_told_apart_by_their_tag(identity: Identity) -> None:
    # A08: a bare list of optional strings takes an adapter's name for a tenant's salt.
    text = "blake3:03"
    named = [
        replace(identity, adapters=(Adapter(kind="lora", digest=text, scale=1.0),)),
        replace(identity, projector=text),
        replace(identity, overrides=((text, ""),)),
        replace(identity, fidelity=text),
        replace(identity, weights=text),
        replace(identity, architecture=text),
        replace(identity, family=text),
    ]
    assert len({root_of(one).key for one in named}) == len(named)


def test_text_cannot_reach_into_the_next_field(identity: Identity) -> None:
    evil = replace(identity, architecture='llama","block_size":8,"x":"')
    assert root_of(evil).key != root_of(replace(identity, block_size=8)).key
    assert root_of(evil).key != root_of(identity).key
