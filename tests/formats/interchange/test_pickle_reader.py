"""Pickles read as data: what Python would give for values, and a refusal by name for all else."""

from __future__ import annotations

import collections
import contextlib
import os
import pickle
import pickletools
import zipfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsnap.formats.errors import Damaged, KvsnapError, Unsupported
from kvsnap.formats.interchange import pickle_reader
from kvsnap.formats.interchange.pickle_reader import Known, Name, Stub, read_pickle

SAMPLES = Path(__file__).parents[2] / "golden" / "foreign"
KNOWN = Known(
    makers={
        "collections.OrderedDict": dict,
        "torch._utils._rebuild_tensor_v2": lambda *told: ("tensor", *told),
        "torch.device": lambda kind: kind,
        "__builtin__.set": set,
    },
    classes={"transformers.cache_utils.DynamicCache", "transformers.cache_utils.DynamicLayer"},
    values={"torch.BFloat16Storage", "torch.LongStorage", "torch.bfloat16"},
    persistent=lambda told: ("storage", told),
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.lists(inner, max_size=5).map(tuple)
        | st.dictionaries(st.text() | st.integers(), inner, max_size=5)
    ),
    max_leaves=30,
)


def sample_pickle(name: str) -> bytes:
    with zipfile.ZipFile(SAMPLES / name) as file:
        return file.read(f"{name.removesuffix('.pt')}/data.pkl")


PICKLES = {path.name: sample_pickle(path.name) for path in sorted(SAMPLES.glob("hf_*.pt"))}


@given(VALUES, st.integers(2, 5))
def test_values_and_containers_are_those_that_were_pickled(value: Any, protocol: int) -> None:
    assert read_pickle(pickle.dumps(value, protocol), KNOWN) == value


def test_what_is_pickled_twice_is_one_object_again() -> None:
    shared = [1]
    found: Any = read_pickle(pickle.dumps([shared, shared], 2), KNOWN)
    assert found[0] is found[1]
    many: Any = read_pickle(pickle.dumps([[n] for n in range(400)] * 2, 2), KNOWN)
    assert many[399] is many[799]


def test_sets_and_ordered_dicts_are_known() -> None:
    assert read_pickle(pickle.dumps({"a", "b"}, 4), KNOWN) == {"a", "b"}
    assert read_pickle(pickle.dumps({"a", "b"}, 2), KNOWN) == {"a", "b"}
    assert read_pickle(pickle.dumps(collections.OrderedDict(), 2), KNOWN) == {}


def test_a_list_that_holds_itself_is_given_as_it_is() -> None:
    loop: list[Any] = []
    loop.append(loop)
    found: Any = read_pickle(pickle.dumps(loop, 2), KNOWN)
    assert found[0] is found


def test_a_hundred_thousand_levels_are_no_recursion() -> None:
    found: Any = read_pickle(b"\x80\x02N" + b"\x85" * 100_000 + b".", KNOWN)
    assert type(found[0][0]) is tuple


@pytest.mark.parametrize("name", PICKLES)
def test_the_samples_of_torch_are_read(name: str) -> None:
    found: Any = read_pickle(PICKLES[name], KNOWN)
    if "dynamiccache" in name:
        assert isinstance(found, Stub)
        assert found.name == "transformers.cache_utils.DynamicCache"
        assert {"layers", "key_cache"} & found.state.keys()
    else:
        layers = found["past_key_values"] if "dict" in name else found
        assert len(layers) == 4
        kind, storage, offset, *_ = layers[3][1]
        assert (kind, storage[1][1], offset) == ("tensor", Name("torch.BFloat16Storage"), 0)


class Runs:
    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        return self.call[0], self.call[1:]


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
@pytest.mark.parametrize(
    ("call", "name"),
    [
        ((os.system, "touch CANARY"), f"{os.name}.system"),
        ((eval, "1"), "eval"),
        ((getattr, (), "x"), "getattr"),
        ((print, "CANARY"), "print"),
        ((Path, "x"), "Path"),
    ],
)
def test_a_name_that_is_not_known_is_refused_by_it_and_nothing_runs(
    call: Any, name: str, protocol: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    harmful = pickle.dumps([Runs(*call)], protocol)
    with pytest.raises(Unsupported, match=r"the pickle names|operation") as caught:
        read_pickle(harmful, KNOWN)
    if protocol >= 2:
        assert name in caught.value.what
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"ctransformers.cache_utils\nDynamicSlidingWindowLayer\n.", "DynamicSlidingWindowLayer"),
        (b"ctransformers.cache_utils DynamicCache\nx\n.", "DynamicCache.x"),
        (b"c\\x6fs\nsystem\n.", "x6fs.system"),
        (b"c\n\n.", "'.'"),
        (b"X\x02\0\0\0osX\x06\0\0\0system\x93.", "os.system"),
        (b"\x80\x02NU\x01a.", "SHORT_BINSTRING"),
        (b"\x80\x03C\x01a.", "SHORT_BINBYTES"),
        (b"(i__main__\nX\n.", "INST"),
        (b"NP0\n.", "PERSID"),
        (b"\x82\x01.", "EXT1"),
        (b"N0.", "POP"),
        (b"}N\x85Ns.", "a tuple as a key"),
        (b"}G\0\0\0\0\0\0\0\0Ns.", "a float as a key"),
    ],
)
def test_what_torch_does_not_write_is_refused_by_name(text: bytes, reason: str) -> None:
    with pytest.raises(Unsupported) as caught:
        read_pickle(text, KNOWN)
    assert reason in caught.value.what


def test_every_operation_of_pickle_ends_in_a_value_or_a_reason() -> None:
    seen = set()
    for opcode in pickletools.opcodes:
        for before in (b"", b"N", b"(", b"(NN", b"]", b"}", b"NN", b"]N", b"})", b"NNN"):
            for argument in (b"", b"0\n0\n", b"\0" * 12, b"\x01\0\0\0ab", b"\xff" * 12):
                text = before + opcode.code.encode("latin-1") + argument + b"."
                try:
                    read_pickle(text, KNOWN)
                except KvsnapError as error:
                    seen.add(type(error))
    assert seen == {Damaged, Unsupported}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"", "no pickle"),
        (b".", "leaves 0 objects"),
        (b"(.", "leaves 1 objects"),
        (b"NN.", "leaves 2 objects"),
        (b"N.N", "1 bytes follow"),
        (b"N", "no pickle"),
        (b"\xff.", "no pickle"),
        (b"X\xff\xff\xff\x7f.", "no pickle"),
        (b"X\x01\0\0\0\xff.", "no pickle"),
        (b"t.", "did not begin"),
        (b"h\0.", "asks for object 0"),
        (b"q\0.", "takes an object"),
        (b"(q\0.", "takes an object"),
        (b"(N\x86.", "takes an object"),
        (b"\x85.", "takes an object"),
        (b"NNa.", "no list"),
        (b"Na.", "takes an object"),
        (b"}(Ne.", "no list"),
        (b"](NNu.", "no dict"),
        (b"}(Nu.", "key without a value"),
        (b"}NNa.", "no list"),
        (b"](N\x90.", "no set"),
        (b"N)R.", "calls a NoneType"),
        (b"ctorch\nBFloat16Storage\n)R.", "calls torch.BFloat16Storage"),
        (b"ccollections\nOrderedDict\nNR.", "calls collections.OrderedDict"),
        (b"ccollections\nOrderedDict\nN\x85R.", "with other arguments"),
        (b"ccollections\nOrderedDict\n)\x81.", "no class"),
        (b"ctransformers.cache_utils\nDynamicCache\nN\x85\x81.", "no class"),
        (b"N)\x81.", "no class"),
        (b"}}b.", "gives attributes to a dict"),
        (b"ctransformers.cache_utils\nDynamicCache\n)\x81Nb.", "gives attributes"),
        (b"NN\x93.", "no text"),
    ],
)
def test_a_pickle_that_takes_what_is_not_there_is_refused(text: bytes, reason: str) -> None:
    with pytest.raises(Damaged, match=reason):
        read_pickle(text, KNOWN)


@pytest.mark.parametrize("name", ["hf_v5_dict.pt", "hf_v4.46_dynamiccache.pt"])
def test_a_pickle_that_is_cut_is_refused_at_every_length(name: str) -> None:
    for size in range(len(PICKLES[name])):
        with pytest.raises(KvsnapError):
            read_pickle(PICKLES[name][:size], KNOWN)


def test_no_flipped_bit_gives_anything_but_a_value_or_a_reason() -> None:
    refused = 0
    whole = PICKLES["hf_v5_dict.pt"]
    for at in range(len(whole)):
        for bit in range(8):
            damaged = bytearray(whole)
            damaged[at] ^= 1 << bit
            try:
                read_pickle(bytes(damaged), KNOWN)
            except KvsnapError:
                refused += 1
    assert refused > 1000


@given(
    st.lists(
        st.sampled_from([bytes([n]) for n in b"()]}N\x85\x86t.aeusbRq\0h\0\x81Q2"]), max_size=40
    )
)
def test_any_operations_end_in_a_value_or_a_reason(parts: list[bytes]) -> None:
    with contextlib.suppress(KvsnapError):
        read_pickle(b"".join(parts) + b".", KNOWN)


def test_pickles_larger_than_a_caches_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Unsupported, match="more than a cache needs"):
        read_pickle(bytes(pickle_reader.MAX_BYTES + 1), KNOWN)
    monkeypatch.setattr(pickle_reader, "MAX_OPS", 10)
    assert read_pickle(b"N" + b"\x85" * 8 + b".", KNOWN)
    with pytest.raises(Unsupported, match="more than 10 operations"):
        read_pickle(b"N" + b"\x85" * 9 + b".", KNOWN)
