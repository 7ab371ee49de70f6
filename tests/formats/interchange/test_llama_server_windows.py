"""Slots of models with sliding windows: two memories, of the second one the last rows only."""

from __future__ import annotations

import dataclasses

import pytest

from kvsnap.formats.errors import Damaged, Unsupported
from kvsnap.formats.interchange.foreign import Given
from kvsnap.formats.interchange.llama_server_slot import SLOT, parse_slot
from kvsnap.formats.interchange.llamacpp import State, kv_size
from kvsnap.formats.names import token_array
from tests.formats.interchange.windowed_slots import KIND, parsed, slot_file


def test_a_slot_of_two_memories_is_read_by_position() -> None:
    found = parsed(token_array(range(7, 27)), 5)
    assert isinstance(found.window, State)
    assert found.window.positions.tolist() == [15, 16, 17, 18, 19]
    assert found.window.k[0][:, 1].tolist() == [15, 16, 17, 18, 19]
    assert found.state.v[0][:, 0].tolist() == list(range(20))
    assert found.kinds == (KIND, KIND)


def test_every_cut_and_every_longer_file_of_two_memories_is_refused() -> None:
    data = slot_file(token_array(range(7, 17)), 4)
    parse_slot(memoryview(data))
    between = len(data) - kv_size(KIND, 6)  # there it is whole, of a model without windows
    assert parse_slot(memoryview(data[:between])).kinds == (KIND,)
    for length in set(range(len(data))) - {between}:
        with pytest.raises((Damaged, Unsupported)):
            parse_slot(memoryview(data[:length]))
    with pytest.raises((Damaged, Unsupported)):
        parse_slot(memoryview(data + b"\0"))


def test_positions_of_a_window_are_there_once_and_end_with_the_tokens() -> None:
    ids = token_array(range(7, 17))
    data = slot_file(ids, 4)
    cells = len(data) - kv_size(KIND, 6) + 8
    assert data[cells : cells + 4] == (4).to_bytes(4, "little")
    for wrong in (3, 5, 11, -1):
        changed = data.copy()
        changed[cells : cells + 4] = wrong.to_bytes(4, "little", signed=True)
        with pytest.raises(Damaged):
            parse_slot(memoryview(changed))


def test_such_a_slot_is_not_imported() -> None:
    data = memoryview(slot_file(token_array(range(7, 17)), 4))
    with pytest.raises(Unsupported, match="sliding windows"):
        SLOT.read({"slot.bin": data}, Given())


def test_kinds_of_a_slot_without_windows_are_one() -> None:
    found = parsed(token_array(range(9)), 4)
    assert dataclasses.replace(found, window=None).kinds == (KIND,)
