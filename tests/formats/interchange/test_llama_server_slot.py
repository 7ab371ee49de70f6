"""llama-server's slot files: its own, those written as it writes them, and those nobody should restore."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given as for_all
from hypothesis import strategies as st

from kvsnap.formats.errors import Damaged, KvsnapError, Unsupported, UsageError
from kvsnap.formats.interchange.foreign import HALVES, Given
from kvsnap.formats.interchange.ggml import GGML_TYPES
from kvsnap.formats.interchange.llama_server_slot import SLOT, assemble_slot, parse_slot
from kvsnap.formats.interchange.llamacpp import LayerType, StateType
from kvsnap.formats.interchange.llamacpp_files import SEQUENCE
from kvsnap.formats.names import token_array
from tests.formats.interchange.sample_rows import (
    EXPECTED,
    SAMPLES,
    one_file,
    same_rows,
    stored_digest,
)

SLOTS = [name for name in EXPECTED if name.startswith("llama_server_slot")]
ONE, SLOT_1, TRANSPOSED, Q8 = (
    f"llama_server_slot_v4_{name}.bin"
    for name in ("f16_np1", "f16_np2_slot1", "f16_vt1_np1", "q8_0_np1")
)
State = Callable[..., bytes]


def packed(
    ids: Sequence[int], *, media: Sequence[int] = (), version: int = 1, more: int = 0
) -> bytes:
    words = [-1, version, len(ids), *ids, len(media), *media, *[0] * more]
    return struct.pack(f"<{len(words)}i", *words)


def slot(tokens: bytes, state: bytes, version: int = 4) -> memoryview:
    return memoryview(struct.pack("<III", 0x67677371, version, len(tokens) // 4) + tokens + state)


def plain(ids: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(ids)}i", *ids)


def test_there_are_slots_to_test() -> None:
    assert len(SLOTS) == 5


@pytest.mark.parametrize("name", SLOTS)
def test_every_value_and_token_is_the_one_the_server_held(name: str) -> None:
    expected, rows = EXPECTED[name], SLOT.read(one_file(name), Given())
    assert rows.token_ids is not None
    assert rows.token_ids.tolist() == expected["token_ids_in_file"]
    assert (rows.k_type, rows.v_type) == (expected["kv_type"],) * 2
    assert rows.rotation == tuple(expected["n_rot"])
    assert (len(rows.k), rows.tokens) == (expected["n_layers"], expected["n_rows"])
    assert stored_digest(rows) == expected["rows_as_stored_f32_sha256"]


@pytest.mark.parametrize("name", [name for name in SLOTS if name != SLOT_1])
def test_a_slot_is_written_again_to_the_byte(name: str) -> None:
    files, expected = one_file(name), EXPECTED[name]
    rows = SLOT.read(files, Given())
    assert rows.rotation is not None
    given = Given(v_transposed=bool(expected["v_trans"]), rotation=rows.rotation)
    assert SLOT.write is not None
    assert list(SLOT.write(rows, given).values()) == [bytes(files[name])]


def test_the_rows_of_slot_1_are_written_into_stream_0() -> None:
    # llama-server puts them where the slot that it restores lives; the bytes only move.
    data = bytes(one_file(SLOT_1)[SLOT_1])
    assert SLOT.write is not None
    (written,) = SLOT.write(SLOT.read(one_file(SLOT_1), Given()), Given(streams=2)).values()
    state = data[12 + 4 * 44 :]
    cells = bytearray(state[8:])
    for at in range(40):
        assert cells[4 + 12 * at + 8] == 1  # the sequence id, which nobody reads
        cells[4 + 12 * at + 8] = 0
    assert written == data[: 12 + 4 * 44] + state[:4] + cells + bytes(4)
    assert parse_slot(memoryview(written)).state.type.n_stream == 2


def test_v_is_transposed_as_the_target_wants_it() -> None:
    assert SLOT.write is not None
    for source, transposed in ((ONE, True), (TRANSPOSED, False)):
        rows = SLOT.read(one_file(source), Given())
        (written,) = SLOT.write(rows, Given(v_transposed=transposed)).values()
        assert parse_slot(memoryview(written)).state.type.v_trans == transposed
        assert same_rows(SLOT.read({"": memoryview(written)}, Given()), rows)


@pytest.mark.parametrize("version", [3, 4])
@pytest.mark.parametrize("tokens", [packed, plain])
def test_packed_and_plain_lists_are_read(
    state: State, version: int, tokens: Callable[[Sequence[int]], bytes]
) -> None:
    data = slot(tokens([7, 8, 9]), state(version=version, head=b""), version)
    found = parse_slot(data)
    assert (found.version, found.token_ids.tolist()) == (version, [7, 8, 9])
    assert found.token_ids.dtype == np.uint32
    assert parse_slot(data, version).state.positions.tolist() == [0, 1, 2]


def test_another_version_than_the_one_that_is_wanted_is_refused(state: State) -> None:
    with pytest.raises(Unsupported, match=r"version 3 is not handled \(only 4\)"):
        parse_slot(slot(packed([7, 8, 9]), state(head=b""), 3), 4)
    for version in (0, 2, 5, 2**32 - 1):
        with pytest.raises(Unsupported, match=f"version {version} is not handled"):
            parse_slot(slot(packed([7, 8, 9]), state(version=4, head=b""), version))


def test_cells_in_another_order_are_brought_into_that_of_their_positions() -> None:
    data = bytearray(one_file(ONE)[ONE])
    rows = SLOT.read(one_file(ONE), Given())
    cells = 12 + 4 * 44 + 8
    order = random.Random(1).sample(range(40), 40)
    for at, position in enumerate(order):
        struct.pack_into("<i", data, cells + 12 * at, position)
    turned = SLOT.read({"": memoryview(data)}, Given())
    for ours, original in zip((*turned.k, *turned.v), (*rows.k, *rows.v), strict=True):
        assert np.array_equal(ours[order], original)


def test_of_a_list_shorter_than_the_cells_only_its_rows_are_taken(state: State) -> None:
    data = bytearray(slot(plain([7, 8]), state(version=4, positions=[2, 1, 0], head=b"")))
    k = len(data) - 2 * (12 + 3 * 4) - (12 + 3 * 8) - 3 * 8  # the first layer's K, of 3 cells
    data[k : k + 24] = bytes([2] * 8 + [1] * 8 + [0] * 8)
    found = parse_slot(memoryview(data))
    assert found.state.k[0].tolist() == [[0] * 4, [0x0101] * 4]
    assert {rows.shape[0] for rows in (*found.state.k, *found.state.v)} == {2}


def test_a_list_longer_than_the_cells_is_refused(state: State) -> None:
    with pytest.raises(Damaged, match="lists 4 tokens and holds the rows of 3"):
        parse_slot(slot(packed([7, 8, 9, 10]), state(version=4, head=b"")))


@pytest.mark.parametrize("positions", [[0, 1, 1], [1, 2, 3], [0, 1, 3], [-1, 0, 1], [0, 2, 5]])
def test_positions_that_are_not_all_from_0_on_are_refused(
    state: State, positions: list[int]
) -> None:
    for ids in ([7, 8, 9], [7, 8]):
        with pytest.raises(Damaged, match=r"are not positions 0\.\.2"):
            parse_slot(slot(packed(ids), state(version=4, positions=positions, head=b"")))


@pytest.mark.parametrize(
    ("tokens", "error", "why"),
    [
        (packed([7, 8, 9], media=[1]), Unsupported, "1 images"),
        (packed([7, -1, 9]), Unsupported, "-1"),
        (plain([7, -1, 9]), Unsupported, "-1"),
        (packed([7, -2, 9]), Damaged, "negative"),
        (plain([7, 8, -9]), Damaged, "negative"),
        (packed([7, 8, 9], version=2), Unsupported, "list of version 2"),
        (packed([7, 8, 9], more=1), Damaged, "1 words follow"),
        (plain([-1]), Damaged, "1 words is not all"),
        (plain([-1, 1, 0]), Damaged, "3 words is not all"),
        (plain([-1, 1, 4, 7, 8, 9, 0]), Damaged, "cannot hold 4"),
        (plain([-1, 1, -1, 7, 8, 9, 0]), Damaged, "cannot hold 4294967295"),
    ],
)
def test_token_lists_that_are_not_plainly_of_text_are_refused(
    state: State, tokens: bytes, error: type[KvsnapError], why: str
) -> None:
    parse_slot(slot(packed([7, 8, 9]), state(version=4, head=b"")))
    with pytest.raises(error, match=why):
        parse_slot(slot(tokens, state(version=4, head=b"")))


def test_what_follows_the_state_is_refused(state: State) -> None:
    with pytest.raises(Unsupported, match="1 bytes follow"):
        parse_slot(slot(packed([7, 8, 9]), state(version=4, head=b"", last=b"\0")))


def test_a_slot_that_evaluated_nothing_is_parsed_and_not_imported() -> None:
    data = slot(packed([]), struct.pack("<II", 1, 0))
    found = parse_slot(data)
    assert (len(found.token_ids), found.state.k) == (0, ())
    with pytest.raises(Unsupported, match="no rows"):
        SLOT.read({"": data}, Given())


def test_cells_of_several_sequences_are_refused() -> None:
    data = bytearray(one_file(ONE)[ONE])
    data[12 + 4 * 44 + 8 + 12 * 39 + 8] = 1
    with pytest.raises(Unsupported, match="several sequences"):
        parse_slot(memoryview(data))


@pytest.mark.parametrize("rotation", [(63, 0), (0, 32), (256, 0), (0, 96), (2**31, 0), (2048, 0)])
def test_a_rotation_that_no_row_can_have_is_refused(rotation: tuple[int, int]) -> None:
    data = bytearray(one_file(Q8)[Q8])
    at = 12 + 4 * 44 + 8 + 12 * 40 + 8
    assert struct.unpack_from("<II", data, at) == (64, 64)
    struct.pack_into("<II", data, at, *rotation)
    with pytest.raises(Damaged, match="not rotated by"):
        SLOT.read({"": memoryview(data)}, Given())


def test_a_slot_cut_at_every_byte_is_refused(state: State) -> None:
    data = slot(packed([7, 8, 9]), state(version=4, head=b"", streams=(0, 1, 0)))
    parse_slot(data)
    for length in range(len(data)):
        with pytest.raises((Damaged, Unsupported)):
            parse_slot(data[:length])


@pytest.mark.parametrize("name", SLOTS)
def test_the_servers_slots_cut_anywhere_are_refused(name: str) -> None:
    data = one_file(name)[name]
    for length in [*range(1200), *range(1200, len(data), 397), len(data) - 1]:
        with pytest.raises((Damaged, Unsupported)):
            parse_slot(data[:length])


@pytest.mark.parametrize("name", SLOTS)
def test_changed_bytes_are_read_within_the_file_or_refused(name: str) -> None:
    data, source, refused = bytes(one_file(name)[name]), random.Random(name), 0
    for _ in range(600):
        changed = bytearray(data)
        for _ in range(source.randint(1, 3)):
            at = source.choice(
                [source.randrange(200), source.randrange(700), source.randrange(len(data))]
            )
            changed[at] = source.choice([0, 255, changed[at] ^ 1 << source.randrange(8)])
        try:
            rows = SLOT.read({"": memoryview(changed)}, Given())
        except (Damaged, Unsupported):
            refused += 1
            continue
        assert sum(area.nbytes for area in (*rows.k, *rows.v)) <= len(data)
        assert rows.token_ids is not None
        assert rows.tokens == len(rows.token_ids)
    assert refused > 100


@for_all(st.binary(max_size=80), st.booleans())
def test_garbage_is_refused_and_recognising_never_fails(tail: bytes, headed: bool) -> None:
    head = struct.pack("<III", 0x67677371, 4, len(tail) // 8) if headed else b""
    data = memoryview(head + tail)
    for known in (SLOT, SEQUENCE):
        assert known.recognise({"x": data}) in (True, False)
    with pytest.raises((Damaged, Unsupported)):
        SLOT.read({"x": data}, Given())


def test_slots_alone_are_recognised() -> None:
    recognised = {
        name for name in EXPECTED if (SAMPLES / name).is_file() and SLOT.recognise(one_file(name))
    }
    assert recognised == set(SLOTS)
    assert not SLOT.recognise({})
    assert not SLOT.recognise({**one_file(ONE), **one_file(Q8)})


_F16 = LayerType(GGML_TYPES[1], 8, GGML_TYPES[1], 4)
KIND = StateType(4, False, (_F16, _F16))


def test_a_draft_is_the_file_but_for_its_rows() -> None:
    draft = assemble_slot(token_array([7, 8, 9]), replace(KIND, n_stream=3))
    assert [area.shape for area in (*draft.k, *draft.v)] == [(3, 4)] * 2 + [(3, 2)] * 2
    for number, area in enumerate((*draft.k, *draft.v)):
        area[...] = number
    found = parse_slot(draft.buffer.data, 4)
    assert found.token_ids.tolist() == [7, 8, 9]
    assert found.state.type == replace(KIND, n_stream=3)
    assert [int(area.max()) for area in (*found.state.k, *found.state.v)] == [0, 1, 2, 3]


def test_a_draft_of_another_version_of_nothing_or_of_no_layers_is_refused() -> None:
    ids = token_array([7, 8, 9])
    for kind in (replace(KIND, version=3), replace(KIND, layers=())):
        with pytest.raises(UsageError):
            assemble_slot(ids, kind)
    for bad in ([], [2**31]):
        with pytest.raises(UsageError):
            assemble_slot(token_array(bad), KIND)


@pytest.mark.parametrize(
    ("change", "given", "why"),
    [
        ({"token_ids": None}, {}, "token ids"),
        ({"token_ids": token_array([1, 2])}, {}, "2 token ids"),
        ({"order": HALVES}, {}, "order halves"),
        ({"rotation": (64, 64)}, {}, "rotated by"),
        ({"rotation": None}, {}, "nothing says whether"),
        ({}, {"rotation": (64, 64)}, "rotated by"),
        ({}, {"version": 3}, "not 3"),
        ({}, {"streams": 0}, "1 to 256 streams"),
        ({"k_type": "f32"}, {}, "4-byte"),
        ({"k_type": "f8"}, {}, "f8"),
        ({"v": ()}, {}, "4 layers of K and 0 of V"),
        ({"v_type": "q8_0"}, {"v_transposed": True}, "cannot be transposed"),
    ],
)
def test_rows_that_a_slot_cannot_hold_are_refused_with_the_reason(
    change: dict[str, object], given: dict[str, object], why: str
) -> None:
    rows = SLOT.read(one_file(ONE), Given())
    assert SLOT.write is not None
    SLOT.write(rows, Given())
    with pytest.raises((UsageError, Unsupported), match=why):
        SLOT.write(replace(rows, **change), Given(**given))  # type: ignore[arg-type]


def test_given_ids_that_are_not_the_files_own_are_refused() -> None:
    ids = EXPECTED[ONE]["token_ids_in_file"]
    assert SLOT.read(one_file(ONE), Given(token_ids=token_array(ids))).tokens == 40
    with pytest.raises(UsageError, match="not those given"):
        SLOT.read(one_file(ONE), Given(token_ids=token_array(ids[:-1])))
