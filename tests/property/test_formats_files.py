"""Block and session files of any layout and content; and files that an attacker could sign."""

from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvsnap.formats.block import BlockRecord, pack_block, parse_block
from kvsnap.formats.codecs import get_codec
from kvsnap.formats.container import Packed, check_file_digest, parse
from kvsnap.formats.errors import Damaged, Unsupported
from kvsnap.formats.identity import Identity, root_of
from kvsnap.formats.layout import Group, Layout, Plane
from kvsnap.formats.names import ZERO_PARENT, block_name, chain_names, token_array
from kvsnap.formats.session import SessionRecord, pack_session, parse_session

BLOCK_SIZE = 4
names = st.text("abk_12", min_size=1, max_size=4)


@st.composite
def planes(draw: st.DrawFn, cut: bool) -> Plane:
    kind = draw(st.sampled_from(["elements", "rows"] + ([] if cut else ["pages"])))
    elements = kind == "elements"
    dtype = draw(st.sampled_from(["F16", "BF16", "F32", "U8"])) if elements else "U8"
    row = draw(st.tuples(*[st.integers(1, 5)] * (2 if elements else 1)))
    return Plane(name=draw(names), kind=kind, dtype=dtype, row=row, source_type=dtype.lower())


@st.composite
def layouts(draw: st.DrawFn, cut: bool = False) -> Layout:
    groups = st.builds(
        lambda name, layers, found: Group(name=name, layers=layers, planes=tuple(found)),
        names,
        st.integers(1, 3),
        st.lists(planes(cut), min_size=1, max_size=3, unique_by=lambda plane: plane.name),
    )
    found = draw(st.lists(groups, min_size=1, max_size=3, unique_by=lambda group: group.name))
    return Layout(groups=tuple(found))


def random_rows(layout: Layout, tokens: int, seed: int) -> dict[str, np.ndarray]:
    source, rows = np.random.default_rng(seed), layout.empty(tokens)
    for array in rows.values():
        array[...] = source.integers(
            0, 2 ** source.integers(1, 8 * array.itemsize + 1), array.shape
        )
    return rows


def identity_of(layout: Layout) -> Identity:
    return Identity(
        family="f", weights="w", architecture="a", layout=layout, rope=None, block_size=BLOCK_SIZE
    )


def joined(packed: Packed) -> bytes:
    return b"".join(bytes(memoryview(part)) for part in packed.buffers)


def block_bytes(layout: Layout, codec: str, seed: int) -> bytes:
    root, ids = root_of(identity_of(layout)), token_array([seed, 2, 3, 4])
    name = block_name(root.key, ZERO_PARENT, ids)
    record = BlockRecord(name, ZERO_PARENT, root.root_id, 0, ids, root.identity)
    return joined(pack_block(record, get_codec(codec), layout, random_rows(layout, 4, seed)))


@given(layout=layouts(), seed=st.integers(0, 2**32 - 1))
def test_blocks_of_any_layout_come_back_and_all_codecs_agree(layout: Layout, seed: int) -> None:
    contents = set()
    for codec in ("raw", "zstd"):
        file = memoryview(block_bytes(layout, codec, seed))
        check_file_digest(file)
        block = parse_block(file)
        block.check_content()
        out = layout.empty(4)
        block.decode_into(layout, out)
        rows = random_rows(layout, 4, seed)
        assert all(np.array_equal(out[name], rows[name]) for name in rows)
        contents.add(block.content)
    assert len(contents) == 1


def session_record(layout: Layout, tokens: int, **changes: Any) -> SessionRecord:
    root, ids = root_of(identity_of(layout)), token_array(range(tokens))
    fields: dict[str, Any] = {
        "name": "alice",
        "tenant_id": "default",
        "root_id": root.root_id,
        "identity": root.identity,
        "block_size": BLOCK_SIZE,
        "revision": 1,
        "token_ids": ids,
        "chain": tuple(chain_names(root.key, ids, BLOCK_SIZE)),
    }
    return SessionRecord(**(fields | changes))


def session_bytes(layout: Layout, tokens: int, codec: str, **changes: Any) -> bytes:
    record = session_record(layout, tokens, **changes)
    tail = random_rows(layout, record.tail_tokens, 1) if record.tail_tokens else {}
    return joined(pack_session(record, get_codec(codec), layout, tail))


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(
    layout=layouts(cut=True),
    tokens=st.integers(0, 10),
    codec=st.sampled_from(["raw", "zstd"]),
    notes=st.dictionaries(st.text(), json_values, max_size=3),
    name=st.text(min_size=1),
    revision=st.integers(0, 10**18 - 1),
)
def test_sessions_of_any_layout_and_notes_come_back(
    layout: Layout, tokens: int, codec: str, notes: dict[str, Any], name: str, revision: int
) -> None:
    changes = {"notes": notes, "name": name, "revision": revision}
    file = memoryview(session_bytes(layout, tokens, codec, **changes))
    check_file_digest(file)
    session = parse_session(file)
    session.check_talk()
    found = session.record
    assert {key: getattr(found, key) for key in changes} == changes
    assert found.token_ids.tolist() == list(range(tokens))
    assert found.chain == session_record(layout, tokens).chain
    tail = random_rows(layout, tokens % BLOCK_SIZE, 1) if tokens % BLOCK_SIZE else {}
    rows = session.tail_rows()
    assert rows.keys() == tail.keys()
    assert all(np.array_equal(rows[plane], tail[plane]) for plane in tail)


hostile = (
    st.none() | st.booleans() | st.text(max_size=5) | st.floats()
    | st.sampled_from([-1, 0, 1, 2**31, 2**32, 2**63, 2**64, [], {}, [1], "0", "1", "raw", "zstd"])
)  # fmt: skip


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) inside a JSON value."""
    if not isinstance(value, dict | list):
        return []
    keys = list(value) if isinstance(value, dict) else range(len(value))
    return [(value, key) for key in keys] + [p for key in keys for p in places(value[key])]


def bend(value: Any, data: st.DataObject) -> None:
    """Replace or drop one value, anywhere; identity and layout inside their string too."""
    inside, key = data.draw(st.sampled_from(places(value)))
    if key == "identity" and isinstance(inside[key], str) and data.draw(st.integers(0, 3)):
        record = json.loads(inside[key])
        bend(record if data.draw(st.booleans()) else record["layout"], data)
        inside[key] = json.dumps(record)
    elif data.draw(st.booleans()):
        inside[key] = data.draw(hostile)
    else:
        del inside[key]


def read_block(file: memoryview) -> None:
    parse_block(file).check_content()


def read_session(file: memoryview) -> None:
    session = parse_session(file)
    session.tail_rows()
    session.check_talk()


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None, max_examples=300)
@given(
    layout=layouts(cut=True),
    codec=st.sampled_from(["raw", "zstd"]),
    session=st.booleans(),
    flips=st.integers(0, 2),
    data=st.data(),
)
def test_a_signed_file_with_a_bent_header_is_read_or_refused(
    layout: Layout, codec: str, session: bool, flips: int, data: st.DataObject
) -> None:
    file = session_bytes(layout, 6, codec) if session else block_bytes(layout, codec, 1)
    (size,) = struct.unpack_from("<Q", file)
    header, body = json.loads(file[8 : 8 + size]), bytearray(file[8 + size :])
    header["__metadata__"]["file"] = "0" * 64
    bend(header, data)
    for _ in range(flips):
        body[data.draw(st.integers(0, len(body) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    text = json.dumps(header, separators=(",", ":")).encode()
    length = struct.pack("<Q", len(text))
    digest = blake3(length + text + body).hexdigest().encode()
    signed = length + text.replace(b'"file":"%b' % (b"0" * 64), b'"file":"%b' % digest) + body
    refusal = ""
    try:
        check_file_digest(memoryview(signed))
        (read_session if session else read_block)(memoryview(signed))
    except (Damaged, Unsupported) as error:
        refusal = error.what
    assert "\n" not in refusal
    assert len(refusal) < 250


@given(data=st.binary(max_size=300) | st.binary(max_size=60).map(lambda b: b"\x20" + bytes(7) + b))
def test_random_bytes_are_damaged(data: bytes) -> None:
    for reader in (check_file_digest, parse, parse_block, parse_session):
        with pytest.raises((Damaged, Unsupported)):
            reader(memoryview(data))
