"""The canonical form: one spelling per identity, and a hash that never changes."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from blake3 import blake3

from kvsnap.formats.errors import Damaged, UsageError
from kvsnap.formats.identity import Adapter, Identity, layout_of, parse_identity, root_of

GOLDEN_CANONICAL = (
    '{"adapters":[],"architecture":"llama","block_size":4,"family":"llama.cpp","fidelity":"ex'
    'act","identity":1,"kv_types":{"full.k":"f16","full.v":"bf16","quantized.k":"q4_0"},"layo'
    'ut":[{"group":"full","layers":2,"planes":[{"dtype":"F16","kind":"elements","plane":"k","'
    'rope":null,"row":[2,4]},{"dtype":"BF16","kind":"elements","plane":"v","rope":null,"row":'
    '[2,2]}],"span":null},{"group":"quantized","layers":1,"planes":[{"dtype":"U8","kind":"row'
    's","plane":"k","rope":null,"row":[18]}],"span":null}],"overrides":[],"projector":null,"r'
    'ope":{"attention_factor":null,"base":10000.0,"beta_fast":null,"beta_slow":null,"extensio'
    'n_factor":null,"long_context":null,"original_context":2048,"scale":1.0,"scaling":"none",'
    '"type":"norm"},"rotation_k":0,"rotation_v":0,"shard":{"context_rank":0,"context_size":1,'
    '"pipeline_rank":0,"pipeline_size":1,"tensor_rank":0,"tensor_size":1},"weights":"blake3:a'
    'bababababababababababababababababababababababababababababababab"}'
)
GOLDEN_ROOT_ID = "bcef1ea1b387ad8cb7aa2e8c338743ceb279ebf4cb74e9ad0b41051336292c9f"


def test_the_canonical_form_and_the_root_id_are_the_golden_ones(identity: Identity) -> None:
    assert identity.canonical() == GOLDEN_CANONICAL
    assert root_of(identity).root_id == GOLDEN_ROOT_ID


def test_the_golden_root_id_follows_from_the_formula() -> None:
    key = blake3(GOLDEN_CANONICAL.encode()).digest()
    assert blake3(key, derive_key_context="kvsnap root id").hexdigest() == GOLDEN_ROOT_ID


def test_the_root_of_a_stored_identity_is_the_root_of_the_live_one(identity: Identity) -> None:
    assert root_of(identity.canonical()) == root_of(identity)


def test_an_unknown_field_makes_another_root(identity: Identity) -> None:
    # Unknown is never a wildcard: a reader that lacks the field must miss.
    record = parse_identity(identity.canonical())
    for value in (None, "", [], 0, False, {}):
        text = json.dumps(record | {"new": value}, sort_keys=True, separators=(",", ":"))
        assert root_of(text).key != root_of(identity).key


def test_a_missing_field_makes_another_root(identity: Identity) -> None:
    record = parse_identity(identity.canonical())
    for field in record:
        less = {key: value for key, value in record.items() if key != field}
        text = json.dumps(less, sort_keys=True, separators=(",", ":"))
        assert root_of(text).key != root_of(identity).key


def test_absent_empty_and_zero_differ_in_every_field(identity: Identity) -> None:
    record = parse_identity(identity.canonical())
    for field in record:
        spellings = [None, "", [], {}, 0, False, 0.0, "0", "null"]
        texts = [json.dumps(record | {field: value}, sort_keys=True) for value in spellings]
        assert len({root_of(text).key for text in texts}) == len(spellings)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_what_is_no_finite_number_is_refused(identity: Identity, number: float) -> None:
    assert identity.rope is not None
    with pytest.raises(UsageError, match="NaN or infinity"):
        replace(identity, rope=replace(identity.rope, base=number)).canonical()
    adapter = Adapter(kind="lora", digest="blake3:01", scale=number)
    with pytest.raises(UsageError, match="NaN or infinity"):
        root_of(replace(identity, adapters=(adapter,)))


@pytest.mark.parametrize("size", [0, -1, 2**16 + 1])
def test_an_impossible_block_size_is_refused(identity: Identity, size: int) -> None:
    with pytest.raises(UsageError, match="1 to 65536"):
        replace(identity, block_size=size)


def test_text_beyond_ascii_is_escaped(identity: Identity) -> None:
    accented = replace(identity, architecture="llamá")
    assert accented.canonical().isascii()
    assert root_of(accented).key != root_of(replace(identity, architecture="llama")).key


def test_a_stored_identity_that_is_not_ascii_is_damaged() -> None:
    with pytest.raises(Damaged, match="canonical"):
        root_of('{"architecture":"llamá"}')


@pytest.mark.parametrize("text", ["", "{", "[]", "1", '"x"', "null", "[" * 10**5])
def test_what_is_no_record_is_damaged(text: str) -> None:
    with pytest.raises(Damaged, match="identity"):
        parse_identity(text)


def test_an_identity_without_a_layout_is_damaged() -> None:
    with pytest.raises(Damaged, match="layout"):
        layout_of("{}")


def test_the_layout_can_be_read_from_the_identity_alone(identity: Identity) -> None:
    read = layout_of(identity.canonical())
    shapes = {name: plane.file_shape(n, 4) for name, (n, plane) in read.planes().items()}
    planes = identity.layout.planes()
    assert shapes == {name: plane.file_shape(n, 4) for name, (n, plane) in planes.items()}
