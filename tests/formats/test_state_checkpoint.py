"""State checkpoints: what stands in one, at any position, and that none is taken for a block."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from blake3 import blake3

from kvsnap.formats.block import STATE, BlockRecord, pack_block, parse_block
from kvsnap.formats.codecs import get_codec
from kvsnap.formats.container import check_file_digest
from kvsnap.formats.errors import Damaged, KvsnapError
from kvsnap.formats.identity import Identity, Root, root_of
from kvsnap.formats.layout import Group, Layout, Plane
from kvsnap.formats.names import ZERO_PARENT, block_name, chain_names, extra, token_array
from kvsnap.formats.session import pack_session, parse_session

SIZE, SPAN = 4, 6
Bytes = Callable[..., bytes]
Rows = Callable[..., dict[str, np.ndarray]]
Change = Callable[[dict[str, Any], bytearray], None]
IDS = token_array([9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 2**32 - 1, 11])
SPANS = Layout(
    groups=(
        Group(
            name="full",
            layers=2,
            planes=(Plane(name="k", kind="elements", dtype="F16", row=(2, 4), source_type="f16"),),
        ),
        Group(
            name="window",
            layers=1,
            span=SPAN,
            planes=(Plane(name="k", kind="rows", dtype="U8", row=(18,), source_type="q4_0"),),
        ),
        Group(
            name="recurrent",
            layers=3,
            span=0,
            planes=(Plane(name="r", kind="pages", dtype="U8", row=(10,), source_type="f32"),),
        ),
    )
)
RECURRENT = Layout(groups=(SPANS.groups[2],))


def root_for(identity: Identity, layout: Layout = SPANS) -> Root:
    return root_of(replace(identity, layout=layout))


def state_at(root: Root, position: int) -> BlockRecord:
    names = chain_names(root.key, IDS[:position], SIZE)
    parent, start = names[-1] if names else ZERO_PARENT, len(names) * SIZE
    ids = IDS[start:position]
    name = block_name(root.key, parent, ids, STATE)
    return BlockRecord(name, parent, root.root_id, start, ids, root.identity, STATE)


def noise(layout: Layout, record: BlockRecord) -> dict[str, np.ndarray]:
    """Rows of any bits for a record's part of a layout."""
    source = np.random.default_rng(record.stop)
    rows = record.part(layout).empty(record.ranges(layout))
    for array in rows.values():
        array[...] = source.integers(0, 2 ** (8 * array.itemsize), array.shape, array.dtype)
    return rows


@pytest.fixture
def state_bytes(identity: Identity, whole: Bytes) -> Bytes:
    def make(position: int = 10, codec: str = "raw", layout: Layout = SPANS) -> bytes:
        record = state_at(root_for(identity, layout), position)
        return whole(pack_block(record, get_codec(codec), layout, noise(layout, record)))

    return make


@pytest.mark.parametrize("codec", ["raw", "zstd"])
@pytest.mark.parametrize("position", range(13))
def test_record_and_rows_come_back_at_every_position(
    identity: Identity, state_bytes: Bytes, position: int, codec: str
) -> None:
    wanted = state_at(root_for(identity), position)
    buffer = memoryview(state_bytes(position, codec))
    check_file_digest(buffer)
    found = parse_block(buffer)
    assert (found.record.start, found.record.stop) == (position // SIZE * SIZE, position)
    assert found.record.is_state
    ids = found.record.token_ids
    assert ids.tolist() == wanted.token_ids.tolist()
    assert replace(wanted, token_ids=ids) == found.record
    found.check_content()
    rows = SPANS.empty(found.record.ranges(SPANS))
    found.decode_into(SPANS, rows)
    for name, array in noise(SPANS, wanted).items():
        assert np.array_equal(rows[name], array)
    shapes = {name: array.shape for name, array in rows.items()}
    assert shapes == {
        "full.k": (2, position % SIZE, 8),
        "window.k": (1, min(position, SPAN), 18),
        "recurrent.r": (3, 10),
    }


def test_on_a_block_edge_there_are_no_ids_and_no_rows_of_the_other_groups(
    state_bytes: Bytes,
) -> None:
    found = parse_block(memoryview(state_bytes(8)))
    assert found.record.token_ids.tolist() == []
    assert found.tensors["full.k"].shape == (2, 0, 2, 4)
    assert found.tensors["window.k"].shape == (1, SPAN, 18)


def test_content_follows_from_its_description(identity: Identity, state_bytes: Bytes) -> None:
    record = state_at(root_for(identity), 10)
    fields = {
        "extras": "05000000737461746500000000",
        "fidelity": "exact",
        "kind": "state",
        "name": record.name.hex(),
        "parent": record.parent.hex(),
        "root_id": record.root_id,
        "start": "8",
    }
    shapes = {
        "full.k": ["uint16", 2, 2, 8],
        "recurrent.r": ["uint8", 3, 10],
        "window.k": ["uint8", 1, 6, 18],
    }
    text = json.dumps([fields, shapes], sort_keys=True, separators=(",", ":")).encode()
    rows = noise(SPANS, record)
    data = len(text).to_bytes(4, "little") + text + IDS[8:10].tobytes()
    data += b"".join(rows[name].tobytes() for name in sorted(rows))
    for codec in ("raw", "zstd"):
        found = parse_block(memoryview(state_bytes(10, codec)))
        assert found.content == blake3(data).hexdigest()


def test_a_state_and_a_block_of_the_same_tokens_have_names_of_their_own(
    identity: Identity,
) -> None:
    root = root_for(identity)
    for ids in (IDS[:4], IDS[:0], IDS[:3]):
        assert block_name(root.key, ZERO_PARENT, ids) != block_name(
            root.key, ZERO_PARENT, ids, STATE
        )


def test_a_block_of_such_a_model_holds_the_groups_without_a_span(
    identity: Identity, whole: Bytes
) -> None:
    root = root_for(identity)
    name = block_name(root.key, ZERO_PARENT, IDS[:4])
    record = BlockRecord(name, ZERO_PARENT, root.root_id, 0, IDS[:4], root.identity)
    rows = noise(SPANS, record)
    assert rows.keys() == {"full.k"}
    found = parse_block(memoryview(whole(pack_block(record, get_codec("raw"), SPANS, rows))))
    assert not found.record.is_state
    assert found.tensors.keys() == {"full.k"}
    found.check_content()
    with pytest.raises(Damaged, match="planes"):
        pack_block(record, get_codec("raw"), SPANS, SPANS.empty(4))


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_blocks_of_a_model_without_other_groups_hold_no_rows(
    identity: Identity, whole: Bytes, state_bytes: Bytes, codec: str
) -> None:
    root = root_for(identity, RECURRENT)
    name = block_name(root.key, ZERO_PARENT, IDS[:4])
    record = BlockRecord(name, ZERO_PARENT, root.root_id, 0, IDS[:4], root.identity)
    buffer = memoryview(whole(pack_block(record, get_codec(codec), RECURRENT, {})))
    check_file_digest(buffer)
    block = parse_block(buffer)
    assert not block.tensors
    block.check_content()
    block.decode_into(RECURRENT, {})
    state = parse_block(memoryview(state_bytes(10, codec, RECURRENT)))
    state.check_content()
    assert state.record.token_ids.tolist() == IDS[8:10].tolist()


def test_rows_that_do_not_fit_the_position_are_not_packed(identity: Identity) -> None:
    record = state_at(root_for(identity), 10)
    rows, codec = noise(SPANS, record), get_codec("raw")
    short = rows | {"window.k": rows["window.k"][:, 1:]}
    pages = rows | {"recurrent.r": rows["recurrent.r"][:2]}
    for wrong in (short, pages, {"full.k": rows["full.k"]}, {}):
        with pytest.raises(Damaged):
            pack_block(record, codec, SPANS, wrong)


def changed(**fields: str) -> Change:
    return lambda header, _: header["__metadata__"].update(fields)


def refusal(file: bytes) -> KvsnapError:
    check_file_digest(memoryview(file))
    with pytest.raises(KvsnapError) as caught:
        parse_block(memoryview(file)).check_content()
    assert "\n" not in caught.value.what
    assert len(caught.value.what) < 200
    return caught.value


@pytest.mark.parametrize(
    "fields",
    [
        {"kind": "block"},
        {"extras": ""},
        {"extras": (STATE + STATE).hex()},
        {"extras": extra("state", b"\0").hex()},
        {"extras": extra("image", b"").hex()},
        {"extras": STATE[:-1].hex()},
        {"extras": (STATE + b"\0").hex()},
        {"kind": "state "},
        {"kind": "session"},
    ],
    ids=str,
)
def test_a_state_whose_kind_and_extras_do_not_go_together_is_damaged(
    state_bytes: Bytes, resign: Bytes, fields: dict[str, str]
) -> None:
    assert type(refusal(resign(state_bytes(), changed(**fields)))) is Damaged


@pytest.mark.parametrize("fields", [{"kind": "state"}, {"extras": STATE.hex()}], ids=str)
def test_a_block_whose_kind_and_extras_do_not_go_together_is_damaged(
    block_bytes: Bytes, resign: Bytes, fields: dict[str, str]
) -> None:
    assert type(refusal(resign(block_bytes(), changed(**fields)))) is Damaged


def test_a_block_made_a_state_in_both_fields_lacks_what_a_state_has(
    identity: Identity, whole: Bytes, resign: Bytes
) -> None:
    # Its own digest is right, as an attacker would make it.
    root = root_for(identity)
    name = block_name(root.key, ZERO_PARENT, IDS[:4])
    record = BlockRecord(name, ZERO_PARENT, root.root_id, 0, IDS[:4], root.identity)
    file = whole(pack_block(record, get_codec("raw"), SPANS, noise(SPANS, record)))
    assert type(refusal(resign(file, changed(kind="state", extras=STATE.hex())))) is Damaged


def test_a_state_made_a_block_has_what_no_block_has(state_bytes: Bytes, resign: Bytes) -> None:
    error = refusal(resign(state_bytes(), changed(kind="block", extras="")))
    assert "tensors that the layout does not have" in error.what


@pytest.mark.parametrize("codec", ["q8", "q4"])
def test_a_state_in_a_lossy_codec_is_damaged(state_bytes: Bytes, resign: Bytes, codec: str) -> None:
    fields = {"codec": codec, "fidelity": get_codec(codec).fidelity}
    error = refusal(resign(state_bytes(), changed(**fields)))
    assert error.what == f"a state checkpoint in the lossy codec {codec}"


def test_a_state_of_a_lossy_chain_is_stored_without_loss(identity: Identity, whole: Bytes) -> None:
    root = root_of(replace(identity, layout=SPANS, fidelity="q8@1"))
    record = replace(state_at(root, 10), fidelity="q8@1")
    rows = noise(SPANS, record)
    found = parse_block(memoryview(whole(pack_block(record, get_codec("zstd"), SPANS, rows))))
    found.check_content()
    assert (found.codec.id, found.record.fidelity) == ("zstd", "q8@1")


@pytest.mark.parametrize("start", ["0", "1", "4", "9", "9" * 18])
def test_a_state_moved_to_another_position_is_damaged(
    state_bytes: Bytes, resign: Bytes, start: str
) -> None:
    # Of a position below the span the window is shorter; of the others `content` differs.
    assert type(refusal(resign(state_bytes(), changed(start=start)))) is Damaged


@pytest.mark.parametrize("start", ["", "-1", "0x8", "8.0", "9" * 19])
def test_a_start_that_is_no_number_is_damaged(
    state_bytes: Bytes, resign: Bytes, start: str
) -> None:
    assert "'start' is not a number" in refusal(resign(state_bytes(), changed(start=start))).what


@pytest.mark.parametrize("start", ["0", "9" * 18])
def test_a_hostile_layout_takes_no_memory(state_bytes: Bytes, resign: Bytes, start: str) -> None:
    plane = {"plane": "k", "dtype": "U8", "row": [2**31 - 1], "rope": None}
    groups = [
        {"group": "g", "layers": 2**31 - 1, "span": span, "planes": [{**plane, "kind": kind}]}
        for span, kind in ((2**31 - 1, "rows"), (0, "pages"))
    ]
    for group in groups:
        identity = json.dumps({"layout": [group]})
        error = refusal(resign(state_bytes(), changed(identity=identity, start=start)))
        assert type(error) is Damaged
        assert "more than any block has" in error.what


@pytest.mark.parametrize("span", [-1, 2**31, 7.0, "6", True, [6]], ids=str)
def test_an_impossible_span_in_the_file_is_damaged(
    state_bytes: Bytes, resign: Bytes, span: object
) -> None:
    def change(header: dict[str, Any], _: bytearray) -> None:
        identity = json.loads(header["__metadata__"]["identity"])
        identity["layout"][1]["span"] = span
        header["__metadata__"]["identity"] = json.dumps(identity)

    assert type(refusal(resign(state_bytes(), change))) is Damaged


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_every_damaged_byte_is_found(state_bytes: Bytes, codec: str) -> None:
    damaged = bytearray(state_bytes(10, codec))
    for at in range(len(damaged)):
        damaged[at] ^= 0x10
        with pytest.raises(Damaged):
            check_file_digest(memoryview(damaged))
        damaged[at] ^= 0x10


@pytest.mark.parametrize("tokens", [0, 8, 10])
def test_a_session_names_its_checkpoint_and_leaves_the_rows_of_the_tail_to_it(
    identity: Identity, session_record: Callable[..., Any], whole: Bytes, tokens: int
) -> None:
    root, ids = root_for(identity), IDS[:tokens]
    record = session_record(
        tokens,
        root_id=root.root_id,
        identity=root.identity,
        token_ids=ids,
        chain=tuple(chain_names(root.key, ids, SIZE)),
        state=state_at(root, tokens).name,
    )
    found = parse_session(memoryview(whole(pack_session(record, get_codec("raw"), SPANS, {}))))
    assert found.record.state == record.state
    assert not found.tensors
    found.check_talk()
    assert found.tail_rows() == {}


@pytest.mark.parametrize("state", ["00", "00" * 31, "00" * 33, "0" * 63, "AB" * 32, "x" * 64])
def test_a_session_whose_state_is_no_name_is_damaged(
    session_bytes: Bytes, session_record: Callable[..., Any], resign: Bytes, state: str
) -> None:
    file = resign(session_bytes(session_record(10)), changed(state=state))
    with pytest.raises(Damaged, match="state"):
        parse_session(memoryview(file))


def test_another_state_in_a_session_fails_the_talk(
    session_bytes: Bytes, session_record: Callable[..., Any], resign: Bytes
) -> None:
    file = resign(session_bytes(session_record(10)), changed(state="ab" * 32))
    with pytest.raises(Damaged, match="changed after they were written"):
        parse_session(memoryview(file)).check_talk()
