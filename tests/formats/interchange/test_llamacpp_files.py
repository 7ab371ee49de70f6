"""llama.cpp's sequence and session files: read to the value, written to the byte, or refused."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given as for_all
from hypothesis import strategies as st

from kvsnap.formats.errors import Damaged, KvsnapError, Unsupported, UsageError
from kvsnap.formats.interchange.foreign import GGUF, HALVES, ForeignRows, Format, Given
from kvsnap.formats.interchange.llama_server_slot import SLOT
from kvsnap.formats.interchange.llamacpp import parse_sequence
from kvsnap.formats.interchange.llamacpp_files import SEQUENCE, SESSION
from kvsnap.formats.names import token_array
from tests.formats.interchange.sample_rows import (
    EXPECTED,
    SAMPLES,
    as_f32,
    one_file,
    same_rows,
    stored_digest,
)

State = Callable[..., bytes]
SEQUENCES = [name for name in EXPECTED if name.endswith(".ggsq")]
SESSIONS = [name for name in EXPECTED if name.endswith(".ggsn")]
V3 = [name for name in SEQUENCES if "_v3_" in name]
V2 = [name for name in SEQUENCES if "_v2_" in name]
F16, CONSTRUCTED = "llama_cpp_seq_v3_f16_vt0.ggsq", V2[0]
(SESSION_10,) = SESSIONS


def format_of(name: str) -> Format:
    return SEQUENCE if name.endswith(".ggsq") else SESSION


def read(name: str) -> ForeignRows:
    return format_of(name).read(one_file(name), Given())


def write(known: Format, rows: ForeignRows, **given: object) -> bytes:
    assert known.write is not None
    (data,) = known.write(rows, Given(**given)).values()  # type: ignore[arg-type]
    return data


def sequence(version: int, ids: list[int], state: bytes) -> dict[str, memoryview]:
    head = struct.pack(f"<III{len(ids)}i", 0x67677371, version, len(ids), *ids)
    return {"x": memoryview(head + state)}


def session(state: bytes, *, version: int = 10, name: bytes = b"llama") -> dict[str, memoryview]:
    head = struct.pack("<IIIiiiI", 0x6767736E, version, 3, 7, 8, 9, len(name)) + name
    return {"x": memoryview(head + state)}


def test_there_are_files_of_every_kind_to_test() -> None:
    assert (len(V3), len(V2), len(SESSIONS)) == (6, 3, 1)
    assert len(SEQUENCES) == 9


@pytest.mark.parametrize("name", [*SEQUENCES, *SESSIONS])
def test_every_value_and_token_is_the_one_the_engine_held(name: str) -> None:
    expected, rows = EXPECTED[name], read(name)
    assert rows.token_ids is not None
    assert rows.token_ids.tolist() == expected["token_ids_in_file"]
    assert (rows.k_type, rows.v_type) == (expected["kv_type"],) * 2
    assert (len(rows.k), rows.tokens) == (expected["n_layers"], expected["n_rows"])
    assert (rows.order, rows.heads, rows.head_dim) == (GGUF, None, None)
    if "rows_as_stored_f32_sha256" in expected:
        assert stored_digest(rows) == expected["rows_as_stored_f32_sha256"]
    else:
        assert rows.k[0].shape == (40, expected["row_bytes"])
        assert rows.k[0][0, :18].tobytes().hex() == expected["first_k_row_hex"]


@pytest.mark.parametrize("name", [*SEQUENCES, *SESSIONS])
def test_rotation_is_unknown_where_it_is_not_recorded_and_there_may_be_one(name: str) -> None:
    assert read(name).rotation == (None if "_q" in name else (0, 0))


def test_what_a_file_says_of_itself_is_told() -> None:
    assert read(F16).told == {"version": "3"}
    assert read(CONSTRUCTED).told == {"version": "2", "layout": "mid 2025"}
    assert read(V2[1]).told == {"version": "2", "layout": "spring 2025"}
    assert read(SESSION_10).told == {"version": "10", "architecture": "llama"}


@pytest.mark.parametrize("name", V3)
def test_version_3_is_written_again_to_the_byte(name: str) -> None:
    transposed = bool(EXPECTED[name]["v_trans"])
    assert write(SEQUENCE, read(name), v_transposed=transposed) == one_file(name)[name]


def test_a_session_is_written_again_to_the_byte() -> None:
    written = write(SESSION, read(SESSION_10), architecture="llama")
    assert written == one_file(SESSION_10)[SESSION_10]


@pytest.mark.parametrize("name", V2)
def test_version_2_is_written_as_version_3(name: str) -> None:
    rows = read(name)
    written = write(SEQUENCE, rows)
    assert struct.unpack_from("<II", written) == (0x67677371, 3)
    assert same_rows(SEQUENCE.read({"": memoryview(written)}, Given()), rows)
    if name == CONSTRUCTED:  # it was made of this file's rows
        assert written == one_file(F16)[F16]


@pytest.mark.parametrize("streams", [1, 3])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("version", [3, 4, 10, 11])
def test_every_version_and_layout_that_is_written_is_read_the_same(
    version: int, transposed: bool, streams: int
) -> None:
    known, rows = (SEQUENCE if version < 10 else SESSION), read("llama_cpp_seq_v3_f16_vt1.ggsq")
    written = write(
        known,
        rows,
        version=version,
        v_transposed=transposed,
        streams=streams,
        architecture="qwen2",
    )
    again = known.read({"": memoryview(written)}, Given())
    assert same_rows(again, rows)
    assert np.array_equal(again.token_ids, rows.token_ids)  # type: ignore[arg-type]
    assert again.told["version"] == str(version)
    assert struct.unpack_from("<I", written, 172 + (9 if version > 9 else 0)) == (streams,)


def test_version_4_holds_what_llama_server_restores() -> None:
    """As its slot files but for the packing of the list, which it does not need."""
    slot = "llama_server_slot_v4_f16_np1.bin"
    written = write(SEQUENCE, SLOT.read(one_file(slot), Given()), version=4)
    state = bytes(one_file(slot)[slot])[12 + 4 * 44 :]
    assert written[12 + 4 * 40 :] == state
    assert SLOT.read({"": memoryview(written)}, Given()).tokens == 40


def test_quantized_rows_of_a_known_rotation_need_a_target_that_rotates_so() -> None:
    name = "llama_server_slot_v4_q8_0_np1.bin"
    rows = SLOT.read(one_file(name), Given())
    with pytest.raises(UsageError, match="rotated by"):
        write(SEQUENCE, rows)
    written = write(SEQUENCE, rows, rotation=(64, 64))
    assert SEQUENCE.read({"": memoryview(written)}, Given()).rotation is None
    assert written == bytes(one_file("llama_cpp_seq_v3_q8_0_vt0.ggsq").popitem()[1])


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"version": 2}, "version 2 cannot be written"),
        ({"version": 5}, "version 5 cannot be written"),
        ({"streams": 257}, "1 to 256"),
        ({"rotation": (64, 0)}, "rotated by"),
    ],
)
def test_targets_that_there_are_not_are_refused(given: dict[str, object], why: str) -> None:
    with pytest.raises((UsageError, Unsupported), match=why):
        write(SEQUENCE, read(F16), **given)


def test_rows_that_must_be_converted_or_lack_something_are_refused() -> None:
    rows, q8 = read(F16), read("llama_cpp_seq_v3_q8_0_vt0.ggsq")
    for known, bad, given, why in (
        (SEQUENCE, replace(rows, order=HALVES), {}, "order halves"),
        (SEQUENCE, replace(rows, token_ids=None), {}, "token ids"),
        (SEQUENCE, q8, {"version": 4}, "nothing says whether"),
        (SEQUENCE, q8, {"v_transposed": True}, "cannot be transposed"),
        (SESSION, rows, {}, "architecture"),
        (SESSION, rows, {"architecture": "l" * 65}, "architecture"),
        (SESSION, rows, {"architecture": "llämä"}, "architecture"),
        (SESSION, rows, {"architecture": "llama", "version": 9}, "version 9 cannot"),
    ):
        with pytest.raises((UsageError, Unsupported), match=why):
            write(known, bad, **given)  # type: ignore[arg-type]


def test_a_packed_list_is_left_to_the_slots_format() -> None:
    name = "llama_server_slot_v4_f16_np1.bin"
    with pytest.raises(Unsupported, match="packed"):
        SEQUENCE.read(one_file(name), Given())


def test_a_file_without_token_ids_takes_those_given(state: State) -> None:
    files = sequence(3, [], state(head=b""))
    assert SEQUENCE.read(files, Given()).token_ids is None
    assert SEQUENCE.read(files, Given()).tokens == 3
    given = SEQUENCE.read(files, Given(token_ids=token_array([5, 6])))
    assert given.tokens == 2
    with pytest.raises(Damaged, match="lists 4 tokens"):
        SEQUENCE.read(files, Given(token_ids=token_array([5, 6, 7, 8])))
    with pytest.raises(Unsupported, match="list is empty"):
        SEQUENCE.read(files, Given(token_ids=token_array([])))


def test_given_ids_that_are_not_the_files_own_are_refused(state: State) -> None:
    files = sequence(3, [7, 8, 9], state(head=b""))
    assert SEQUENCE.read(files, Given(token_ids=token_array([7, 8, 9]))).tokens == 3
    with pytest.raises(UsageError, match="not those given"):
        SEQUENCE.read(files, Given(token_ids=token_array([7, 8, 1])))


@pytest.mark.parametrize("version", [0, 1, 5, 9, 2**32 - 1])
def test_versions_of_sequences_that_nobody_knows_are_refused(state: State, version: int) -> None:
    with pytest.raises(Unsupported, match=f"version {version} is not known"):
        SEQUENCE.read(sequence(version, [7, 8, 9], state(head=b"")), Given())


@pytest.mark.parametrize("version", [0, 3, 8, 9, 12])
def test_versions_of_sessions_that_are_not_handled_are_refused(state: State, version: int) -> None:
    SESSION.read(session(state(head=b"")), Given())
    with pytest.raises(Unsupported, match=f"version {version} is not handled"):
        SESSION.read(session(state(head=b""), version=version), Given())


@pytest.mark.parametrize("name", [b"", b"l" * 65, b"ll\nma", b"ll\xe4ma"])
def test_an_architecture_that_is_no_name_is_damage(state: State, name: bytes) -> None:
    with pytest.raises(Damaged, match="architecture"):
        SESSION.read(session(state(head=b""), name=name), Given())


def test_a_context_of_several_sequences_is_refused() -> None:
    # Positions 0..39 each once, but the last ones of another conversation.
    data = bytearray(one_file(SESSION_10)[SESSION_10])
    cells = 12 + 160 + 9 + 8
    data[cells + 12 * 30 + 8] = 1
    with pytest.raises(Unsupported, match="several sequences"):
        SESSION.read({"": memoryview(data)}, Given())


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"positions": [1, 2, 3]}, Damaged),
        ({"positions": [0, 0, 1]}, Damaged),
        ({"n_seq": 2}, Unsupported),
        ({"extension": 2}, Unsupported),
        ({"streams": (1, 1)}, Unsupported),
        ({"last": b"\0\0\0\0"}, Unsupported),
        ({"k": (9, 8)}, Unsupported),
        ({"layers": 0}, KvsnapError),
    ],
)
def test_states_that_are_not_one_plain_sequence_are_refused(
    state: State, change: dict[str, object], error: type[KvsnapError]
) -> None:
    for version in (2, 3):
        with pytest.raises(error):
            SEQUENCE.read(sequence(version, [7, 8, 9], state(head=b"", **change)), Given())


def test_layers_that_differ_in_type_are_refused(state: State) -> None:
    data = bytearray(sequence(3, [7, 8, 9], state(head=b""))["x"])
    assert data.count(struct.pack("<iQ", 1, 8)) == 2
    at = data.rindex(struct.pack("<iQ", 1, 8))
    struct.pack_into("<i", data, at, 0)
    with pytest.raises(Unsupported, match="K differ in type"):
        SEQUENCE.read({"": memoryview(data)}, Given())


def test_version_2_in_both_of_its_layouts_at_once_is_refused() -> None:
    """A file made on purpose: 8 streams, the first of 1 cell with rows of 84 bytes; or 8 cells, whose
    heads and rows of 4 bytes are inside of that row."""
    words = [0] * 41
    words[0:9] = [8, 1, 0, 0, 0, 1, 0, 84, 0]
    words[17:22] = [0, 1, 0, 4, 0]
    words[30:33] = [0, 4, 0]
    both = struct.pack("<41I", *words)
    for state, cells in ((both, 1), (struct.pack("<I", 1) + both, 8)):
        assert len(parse_sequence(memoryview(state), 3).positions) == cells
    with pytest.raises(Unsupported, match="both of its layouts"):
        SEQUENCE.read(sequence(2, [7], both), Given())


@pytest.mark.parametrize("name", V2)
def test_version_2_is_read_in_one_layout_alone(name: str) -> None:
    """With the version changed a file of spring 2025 is refused, and one of later is read."""
    data = bytearray(one_file(name)[name])
    data[4] = 3
    if name == CONSTRUCTED:
        assert same_rows(SEQUENCE.read({"": memoryview(data)}, Given()), read(name))
    else:
        with pytest.raises((Damaged, Unsupported)):
            SEQUENCE.read({"": memoryview(data)}, Given())


@pytest.mark.parametrize("name", [*SEQUENCES, *SESSIONS])
def test_files_that_are_cut_or_longer_are_refused(name: str) -> None:
    data, known = one_file(name)[name], format_of(name)
    for length in [*range(1200), *range(1200, len(data), 397), len(data) - 1]:
        with pytest.raises((Damaged, Unsupported)):
            known.read({"": data[:length]}, Given())
    for more in (1, 4, 64):
        with pytest.raises((Damaged, Unsupported)):
            known.read({"": memoryview(bytes(data) + bytes(more))}, Given())


@pytest.mark.parametrize("version", [2, 3, 4])
def test_small_sequences_cut_at_every_byte_are_refused(state: State, version: int) -> None:
    for transposed in (0, 1):
        built = state(head=b"", version=version, v_trans=transposed, streams=(0, 1, 0))
        data = sequence(version, [7, 8, 9], built)["x"]
        assert SEQUENCE.read({"": data}, Given()).tokens == 3
        for length in range(len(data)):
            with pytest.raises((Damaged, Unsupported)):
                SEQUENCE.read({"": data[:length]}, Given())


@pytest.mark.parametrize("name", [*SEQUENCES, *SESSIONS])
def test_changed_bytes_are_read_within_the_file_or_refused(name: str) -> None:
    data, source, refused = bytes(one_file(name)[name]), random.Random(name), 0
    for _ in range(400):
        changed = bytearray(data)
        for _ in range(source.randint(1, 3)):
            at = source.choice([source.randrange(200), source.randrange(700)])
            changed[at] = source.choice([0, 255, changed[at] ^ 1 << source.randrange(8)])
        try:
            rows = format_of(name).read({"": memoryview(changed)}, Given())
        except (Damaged, Unsupported):
            refused += 1
            continue
        assert sum(area.nbytes for area in (*rows.k, *rows.v)) <= len(data)
    assert refused > 100


@for_all(st.binary(max_size=120), st.sampled_from([0x67677371, 0x6767736E, 0]), st.integers(0, 12))
def test_garbage_is_refused_and_recognising_never_fails(
    tail: bytes, magic: int, version: int
) -> None:
    data = memoryview(struct.pack("<III", magic, version, len(tail) // 8) + tail)
    for known in (SEQUENCE, SESSION):
        assert known.recognise({"x": data}) in (True, False)
        with pytest.raises((Damaged, Unsupported)):
            known.read({"x": data}, Given())


@pytest.mark.parametrize(("known", "names"), [(SEQUENCE, SEQUENCES), (SESSION, SESSIONS)])
def test_its_own_files_alone_are_recognised(known: Format, names: list[str]) -> None:
    files = [name for name in EXPECTED if (SAMPLES / name).is_file()]
    assert [name for name in files if known.recognise(one_file(name))] == names
    assert not known.recognise({})
    assert not known.recognise({**one_file(names[0]), "other": memoryview(b"")})
    with pytest.raises(UsageError, match="one file, not 0"):
        known.read({}, Given())


def test_the_values_are_not_compared_with_nothing() -> None:
    rows = read(F16)
    assert (
        as_f32(rows.k[0], "f16")[0, :4].tolist()
        == (EXPECTED[F16]["stored"]["K"]["layer0"]["first_row_head0"])
    )
