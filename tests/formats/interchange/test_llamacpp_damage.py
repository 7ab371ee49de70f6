"""Real state files, cut and changed: refused, or read within their bytes; never a crash."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from kvsnap.formats.errors import Damaged, Unsupported
from kvsnap.formats.interchange.llamacpp import parse_sequence

SMALL = "llama_cpp_seq_v3_q4_0_vt0.ggsq"
LARGE = ["llama_cpp_seq_v3_f16_vt1.ggsq", "llama_server_slot_v4_f16_np2_slot1.bin"]


def refused_when_cut(read: Any, length: int) -> None:
    with pytest.raises((Damaged, Unsupported)):
        parse_sequence(read.state[:length], read.version)


def test_a_real_state_cut_at_every_offset_is_refused(sample: Callable[[str], Any]) -> None:
    read = sample(SMALL)
    parse_sequence(read.state, read.version)
    for length in range(len(read.state)):
        refused_when_cut(read, length)


@pytest.mark.parametrize("name", LARGE)
def test_real_states_cut_near_every_field_are_refused(
    sample: Callable[[str], Any], name: str
) -> None:
    read = sample(name)
    for length in [*range(600), *range(600, len(read.state), 97)]:
        refused_when_cut(read, length)


@pytest.mark.parametrize("name", [SMALL, *LARGE])
def test_real_states_with_changed_bytes_are_read_within_them_or_refused(
    sample: Callable[[str], Any], name: str
) -> None:
    read, source = sample(name), random.Random(name)
    layer_bytes = (len(read.state) - 500) // 8
    headers = [500 + layer_bytes * n for n in range(8)]
    refused = 0
    for _ in range(1500):
        data = bytearray(read.state)
        for _ in range(source.randint(1, 3)):
            start = source.choice([0, 0, 490, source.choice(headers) - 20])
            data[source.randrange(start, start + 40) % len(data)] = source.randrange(256)
        try:
            state = parse_sequence(memoryview(data), read.version)
        except (Damaged, Unsupported):
            refused += 1
            continue
        assert sum(rows.nbytes for rows in (*state.k, *state.v)) <= len(data)
    assert refused > 100


@pytest.mark.parametrize("version", [3, 4])
def test_a_state_is_not_read_as_the_other_version(
    sample: Callable[[str], Any], version: int
) -> None:
    # The version is not in the bytes: the two words of version 4 must make the other refuse.
    names = {3: "llama_cpp_seq_v3_f16_vt0.ggsq", 4: "llama_server_slot_v4_f16_np1.bin"}
    with pytest.raises((Damaged, Unsupported)):
        parse_sequence(sample(names[version]).state, 7 - version)
