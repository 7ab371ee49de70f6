"""State checkpoints of any layout, at any position: what goes in comes out, whatever the codec."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvsnap.formats.block import STATE, BlockRecord, pack_block, parse_block
from kvsnap.formats.codecs import get_codec
from kvsnap.formats.container import check_file_digest
from kvsnap.formats.identity import Identity, root_of
from kvsnap.formats.layout import Group, Layout, Plane
from kvsnap.formats.names import ZERO_PARENT, block_name, chain_names, token_array

SIZE = 4
IDS = token_array(range(100, 140))


@st.composite
def groups(draw: st.DrawFn, name: str) -> Group:
    """A group of all tokens, of a window, or of a state."""
    span = draw(st.none() | st.integers(0, 9))
    made = []
    for number in range(draw(st.integers(1, 2))):
        kind = "pages" if span == 0 else draw(st.sampled_from(["elements", "rows"]))
        dtype = draw(st.sampled_from(["F16", "F32"])) if kind == "elements" else "U8"
        row = draw(st.tuples(*[st.integers(1, 4)] * (2 if kind == "elements" else 1)))
        made.append(Plane(name=f"p{number}", kind=kind, dtype=dtype, row=row, source_type="t"))
    return Group(name=name, layers=draw(st.integers(1, 3)), span=span, planes=tuple(made))


layouts = st.integers(1, 3).flatmap(
    lambda count: st.tuples(*[groups(f"g{number}") for number in range(count)])
)


@given(found=layouts, position=st.integers(0, 40), seed=st.integers(0, 2**32 - 1))
def test_states_of_any_layout_come_back_at_any_position(
    found: tuple[Group, ...], position: int, seed: int
) -> None:
    layout = Layout(groups=found)
    root = root_of(
        Identity(
            family="f", weights="w", architecture="a", layout=layout, rope=None, block_size=SIZE
        )
    )
    names = chain_names(root.key, IDS[:position], SIZE)
    parent, start = names[-1] if names else ZERO_PARENT, position // SIZE * SIZE
    ids = IDS[start:position]
    name = block_name(root.key, parent, ids, STATE)
    record = BlockRecord(name, parent, root.root_id, start, ids, root.identity, STATE)
    source, ranges = np.random.default_rng(seed), record.ranges(layout)
    rows = layout.empty(ranges)
    for array in rows.values():
        array[...] = source.integers(0, 2 ** (8 * array.itemsize), array.shape, array.dtype)
    contents = set()
    for codec in ("raw", "zstd"):
        packed = pack_block(record, get_codec(codec), layout, rows)
        buffer = memoryview(b"".join(bytes(memoryview(part)) for part in packed.buffers))
        check_file_digest(buffer)
        state = parse_block(buffer)
        assert state.record.is_state
        assert state.record.stop == position
        again = state.layout().empty(state.record.ranges(state.layout()))
        state.decode_into(state.layout(), again)
        assert all(np.array_equal(again[name], array) for name, array in rows.items())
        state.check_content()
        contents.add(state.content)
    assert len(contents) == 1
    for group in found:
        for plane in group.planes:
            span = ranges[f"{group.name}.{plane.name}"]
            reach = len(ids) if group.span is None else min(group.span, position)
            assert (span.stop, len(span)) == (position, reach)
