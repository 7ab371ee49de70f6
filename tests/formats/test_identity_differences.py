"""A miss must say why: which field of two identities differs, the most telling first."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace

import pytest

from kvsnap.formats.errors import Damaged
from kvsnap.formats.identity import Adapter, Identity, Shard, differences
from kvsnap.formats.layout import Layout


def test_equal_identities_have_no_differences(identity: Identity) -> None:
    assert differences(identity.canonical(), identity.canonical()) == []


def test_a_nested_field_is_named_with_dots_and_both_values(identity: Identity) -> None:
    assert identity.rope is not None
    other = replace(identity, rope=replace(identity.rope, base=500000.0))
    assert differences(identity.canonical(), other.canonical()) == [
        ("rope.base", "10000.0", "500000.0")
    ]


def test_the_most_telling_field_comes_first(identity: Identity) -> None:
    assert identity.rope is not None
    lora = Adapter(kind="lora", digest="blake3:01", scale=1.0)
    changes = {
        "weights": {"weights": "blake3:00"},
        "adapters": {"adapters": (lora,)},
        "overrides": {"overrides": (("a", "b"),)},
        "rope.base": {"rope": replace(identity.rope, base=1.0)},
        "rotation_k": {"rotation_k": 64},
        "block_size": {"block_size": 8},
        "architecture": {"architecture": "other"},
    }
    while changes:
        other = replace(identity, **{k: v for one in changes.values() for k, v in one.items()})
        found = differences(identity.canonical(), other.canonical())
        assert found[0][0].startswith(next(iter(changes)))
        changes.pop(next(iter(changes)))


def test_of_settings_only_those_that_differ_are_named(identity: Identity) -> None:
    one = replace(identity, overrides=(("dtype", '"f16"'), ("isa", '"vec"')))
    other = replace(identity, overrides=(("dtype", '"bf16"'), ("isa", '"vec"')))
    found = differences(one.canonical(), other.canonical())
    assert found == [("overrides.dtype", '"\\"f16\\""', '"\\"bf16\\""')]


def test_all_changed_fields_are_listed_once(identity: Identity) -> None:
    other = replace(identity, shard=Shard(tensor_rank=1, tensor_size=2), family="x")
    named = [field for field, _, _ in differences(identity.canonical(), other.canonical())]
    assert sorted(named) == ["family", "shard.tensor_rank", "shard.tensor_size"]


def test_a_field_that_only_one_side_has_is_absent_on_the_other(identity: Identity) -> None:
    record = json.loads(identity.canonical())
    longer = json.dumps(record | {"later": "absent"})
    assert differences(longer, identity.canonical()) == [("later", '"absent"', "absent")]
    assert differences(identity.canonical(), longer) == [("later", "absent", '"absent"')]


def test_a_changed_type_of_rows_is_named(identity: Identity) -> None:
    group, *rest = identity.layout.groups
    plane = replace(group.planes[0], dtype="BF16", source_type="bf16")
    groups = (replace(group, planes=(plane, *group.planes[1:])), *rest)
    other = replace(identity, layout=Layout(groups=groups))
    found = differences(identity.canonical(), other.canonical())
    assert found[0] == ("kv_types.full.k", '"f16"', '"bf16"')


def test_a_value_and_its_text_are_different(identity: Identity) -> None:
    record = json.loads(identity.canonical())
    other = json.dumps(record | {"rotation_k": "0"})
    assert differences(identity.canonical(), other) == [("rotation_k", "0", '"0"')]


@pytest.mark.parametrize("depth", [100, 500, 700, 900, 10**5])
def test_a_deeply_nested_identity_is_compared_or_damaged(identity: Identity, depth: int) -> None:
    # What fits depends on how deep the caller's own stack is; anything but Damaged is a crash.
    bomb = '{"a":' * depth + "1" + "}" * depth
    with suppress(Damaged):
        assert differences(identity.canonical(), bomb)


def test_an_endlessly_nested_identity_is_damaged(identity: Identity) -> None:
    with pytest.raises(Damaged, match="identity"):
        differences(identity.canonical(), "[" * 10**5)
