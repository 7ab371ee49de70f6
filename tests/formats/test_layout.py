"""Layouts: which planes there are, how large, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvsnap.formats.errors import Damaged, KvsnapError, Unsupported
from kvsnap.formats.layout import Group, Layout, Plane, layout_from_json, layout_to_json

K = Plane(name="k", kind="elements", dtype="BF16", row=(2, 4))
V = Plane(name="v", kind="rows", dtype="U8", row=(18,))
PAGE = Plane(name="kv", kind="pages", dtype="U8", row=(1000,))
CUT = Layout(
    groups=(Group(name="full", layers=3, planes=(V, K)), Group(name="a", layers=1, planes=(K,)))
)
WHOLE = Layout(groups=(*CUT.groups, Group(name="page", layers=2, planes=(PAGE,))))
WINDOW = Group(name="window", layers=2, span=5, planes=(K, V))
RECURRENT = Group(name="recurrent", layers=4, span=0, planes=(PAGE,))
SPANS = Layout(groups=(WINDOW, CUT.groups[0], RECURRENT))


def test_planes_are_sorted_by_name_with_their_layers() -> None:
    assert list(WHOLE.planes().items()) == [
        ("a.k", (1, K)),
        ("full.k", (3, K)),
        ("full.v", (3, V)),
        ("page.kv", (2, PAGE)),
    ]


def test_elements_rows_and_pages_have_their_shapes_in_memory_and_in_files() -> None:
    shapes = [
        (p.memory_shape(3, 16), p.memory_dtype.str, p.file_shape(3, 16)) for p in (K, V, PAGE)
    ]
    assert shapes == [
        ((3, 16, 8), "<u2", (3, 16, 2, 4)),
        ((3, 16, 18), "|u1", (3, 16, 18)),
        ((3, 1000), "|u1", (3, 1000)),
    ]


def test_only_pages_cannot_be_cut() -> None:
    assert [K.can_cut, V.can_cut, PAGE.can_cut] == [True, True, False]
    assert CUT.can_cut
    assert not WHOLE.can_cut


def test_the_bytes_of_a_token_are_those_of_all_planes_that_can_be_cut() -> None:
    assert CUT.token_bytes() == 3 * (8 * 2 + 18) + 8 * 2
    assert WHOLE.token_bytes() == CUT.token_bytes()
    assert sum(array.nbytes for array in CUT.empty(7).values()) == 7 * CUT.token_bytes()


@pytest.mark.parametrize("tokens", [0, 1, 16])
def test_empty_arrays_pass_the_check(tokens: int) -> None:
    WHOLE.check(WHOLE.empty(tokens), tokens)


def test_rows_of_another_shape_type_or_name_fail_the_check() -> None:
    rows = CUT.empty(4)
    with pytest.raises(Damaged, match=r"plane a\.k is uint16 \(1, 4, 8\), not uint16 \(1, 5, 8\)"):
        CUT.check(rows, 5)
    bad: dict[str, Any] = {
        "signed": rows["full.k"].view(np.int16),
        "floats": rows["full.k"].view(np.float16),
        "big-endian": rows["full.k"].astype(">u2"),
        "heads apart": rows["full.k"].reshape(3, 4, 2, 4),
        "heads first": rows["full.k"].reshape(3, 8, 4),
        "one layer": rows["full.k"][:1],
    }
    for array in bad.values():
        with pytest.raises(Damaged, match=r"plane full\.k is"):
            CUT.check({**rows, "full.k": array}, 4)
    for names in ({}, {"full.k": rows["full.k"]}, {**rows, "b.k": rows["a.k"]}):
        with pytest.raises(Damaged, match="planes"):
            CUT.check(names, 4)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("tiles", "U8"), ("", "U8"), ("Elements", "F16"), ("rows", "F16"), ("pages", "BF16"),
        ("elements", "F64"), ("elements", "f16"), ("elements", ""),
    ],
)  # fmt: skip
def test_an_unknown_kind_or_type_of_rows_is_refused_by_name(kind: str, dtype: str) -> None:
    with pytest.raises(Unsupported) as caught:
        Plane(name="k", kind=kind, dtype=dtype, row=(2, 4))
    assert repr(kind) in caught.value.what or repr(dtype) in caught.value.what


@pytest.mark.parametrize("row", [(), (4,), (2, 4, 1), (0, 4), (2, 0), (-2, -4), (2**31, 1)])
def test_elements_have_heads_and_a_head_dim(row: tuple[int, ...]) -> None:
    with pytest.raises(Damaged, match="'k' has an impossible row shape"):
        Plane(name="k", kind="elements", dtype="F16", row=row)


@pytest.mark.parametrize("kind", ["rows", "pages"])
@pytest.mark.parametrize("row", [(), (2, 4), (0,), (-1,), (2**31,)])
def test_rows_and_pages_have_a_number_of_bytes(kind: str, row: tuple[int, ...]) -> None:
    with pytest.raises(Damaged, match="impossible row shape"):
        Plane(name="k", kind=kind, dtype="U8", row=row)


@pytest.mark.parametrize("layers", [0, -1, 2**31])
def test_a_group_has_layers(layers: int) -> None:
    with pytest.raises(Damaged, match="impossible number of layers"):
        Group(name="g", layers=layers, planes=(K,))


@pytest.mark.parametrize("name", ["", ".", "a.b"])
def test_a_name_that_would_make_group_and_plane_ambiguous_is_refused(name: str) -> None:
    # "a" + "b.c" and "a.b" + "c" would be one tensor.
    with pytest.raises(Damaged, match="cannot name"):
        Group(name=name, layers=1, planes=(K,))
    with pytest.raises(Damaged, match="cannot name"):
        Plane(name=name, kind="rows", dtype="U8", row=(4,))


def test_two_planes_of_one_name_are_refused() -> None:
    group = Group(name="full", layers=1, planes=(K,))
    for groups in ((group, group), (Group(name="full", layers=1, planes=(K, K)),)):
        with pytest.raises(Damaged, match="one name"):
            Layout(groups=groups)


def test_blocks_hold_the_groups_without_a_span() -> None:
    assert SPANS.needs_state
    assert list(SPANS.in_blocks.planes()) == ["full.k", "full.v"]
    assert SPANS.in_blocks.in_blocks is SPANS.in_blocks
    assert not SPANS.in_blocks.needs_state
    only = Layout(groups=(RECURRENT,))
    assert only.needs_state
    assert not only.in_blocks.planes()


@pytest.mark.parametrize("layout", [CUT, WHOLE, Layout(groups=())])
def test_a_layout_without_spans_is_whole_in_blocks(layout: Layout) -> None:
    assert not layout.needs_state
    assert layout.in_blocks is layout


@pytest.mark.parametrize(
    ("start", "position", "window"),
    [(0, 0, 0), (0, 1, 1), (0, 5, 5), (0, 6, 5), (4, 4, 4), (4, 7, 5), (64, 64, 5), (64, 65, 5)],
)
def test_a_position_needs_the_last_rows_of_a_window_and_those_after_the_last_block(
    start: int, position: int, window: int
) -> None:
    ranges = SPANS.ranges_at(start, position)
    assert ranges == {
        "full.k": range(start, position),
        "full.v": range(start, position),
        "recurrent.kv": range(position, position),
        "window.k": range(position - window, position),
        "window.v": range(position - window, position),
    }
    rows = SPANS.empty(ranges)
    SPANS.check(rows, ranges)
    assert {name: array.shape for name, array in rows.items()} == {
        "full.k": (3, position - start, 8),
        "full.v": (3, position - start, 18),
        "recurrent.kv": (4, 1000),
        "window.k": (2, window, 8),
        "window.v": (2, window, 18),
    }
    assert SPANS.size(ranges) == sum(array.nbytes for array in rows.values())


def test_rows_of_a_shorter_window_fail_the_check() -> None:
    ranges = SPANS.ranges_at(64, 66)
    rows = SPANS.empty(ranges)
    with pytest.raises(Damaged, match=r"plane window\.k is uint16 \(2, 4, 8\), not .*\(2, 5, 8\)"):
        SPANS.check({**rows, "window.k": rows["window.k"][:, 1:]}, ranges)


@pytest.mark.parametrize("span", [-1, 2**31, 10**30])
def test_an_impossible_span_is_refused(span: int) -> None:
    with pytest.raises(Damaged, match="'g' has an impossible span"):
        Group(name="g", layers=1, span=span, planes=(K,))


@pytest.mark.parametrize(
    ("span", "planes"), [(0, (K,)), (1, (PAGE,)), (0, (PAGE, K)), (1, (PAGE, K))]
)
def test_windows_have_rows_of_tokens_and_states_of_a_position_have_pages(
    span: int, planes: tuple[Plane, ...]
) -> None:
    with pytest.raises(Damaged, match="'g' has planes that do not fit its span"):
        Group(name="g", layers=1, span=span, planes=planes)


@pytest.mark.parametrize("layout", [CUT, WHOLE, SPANS, Layout(groups=())])
def test_a_layout_comes_back_from_json(layout: Layout) -> None:
    assert layout_from_json(layout_to_json(layout)) == layout


def json_of(**changes: Any) -> list[dict[str, Any]]:
    plane = {"plane": "k", "kind": "elements", "dtype": "F16", "row": [2, 4], "rope": None}
    group = {"group": "full", "layers": 3, "planes": [plane], "span": None}
    for key, value in changes.items():
        (plane if key in plane else group)[key] = value
    return [group]


def test_the_json_that_the_others_bend_is_accepted() -> None:
    assert layout_from_json(json_of()).planes()["full.k"][0] == 3
    assert layout_from_json(json_of(span=7)).groups[0].span == 7


@pytest.mark.parametrize(
    "value",
    [
        None,
        1,
        "x",
        ["x"],
        [None],
        [{}],
        {"group": "full"},
        json_of(layers="3"),
        json_of(layers=3.0),
        json_of(layers=True),
        json_of(layers=None),
        json_of(layers=-3),
        json_of(layers=10**30),
        json_of(span="7"),
        json_of(span=7.0),
        json_of(span=True),
        json_of(span=-1),
        json_of(span=2**31),
        json_of(span=0),
        [{key: value for key, value in json_of()[0].items() if key != "span"}],
        json_of(group=1),
        json_of(group="a.b"),
        json_of(planes=None),
        json_of(planes=[1]),
        json_of(planes="k"),
        json_of(plane=None),
        json_of(plane=7),
        json_of(kind=["elements"]),
        json_of(kind="tiles"),
        json_of(dtype=16),
        json_of(dtype="F8"),
        json_of(row="24"),
        json_of(row=8),
        json_of(row=["2", "4"]),
        json_of(row=[2.0, 4.0]),
        json_of(row=[True, True]),
        json_of(row=[2]),
        json_of(row=[2, -4]),
        json_of(row=[10**30, 4]),
        json_of() * 2,
    ],
    ids=str,
)
def test_any_other_json_is_refused_in_one_line(value: Any) -> None:
    with pytest.raises(KvsnapError) as caught:
        layout_from_json(value)
    assert type(caught.value) in (Damaged, Unsupported)
    assert "\n" not in caught.value.what


@pytest.mark.parametrize("tokens", [1, 2**16])
def test_a_layout_that_no_memory_holds_is_damaged_when_it_is_used(tokens: int) -> None:
    huge = layout_from_json(json_of(layers=2**31 - 1, row=[2**31 - 1, 2**31 - 1]))
    with pytest.raises(Damaged, match="no memory for so many tokens"):
        huge.empty(tokens)
