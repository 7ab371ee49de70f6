"""Which cases are replayed, and the picture that is drawn of them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from kvsnap.formats.errors import NotFound, Unsupported, UsageError
from kvsnap.kvstore.pictures import check_plot
from kvsnap.kvstore.simulation.chat import ChatTraffic
from kvsnap.kvstore.simulation.plot import draw, lines
from kvsnap.kvstore.simulation.replay import Row
from kvsnap.kvstore.simulation.sweep import cases, default_capacities, sweep


def _rows(replicas: int = 1) -> list[Row]:
    workload = ChatTraffic(requests=40).workload()
    return sweep(workload, cases([None, 20], ["leaf-lru", "lru"], replicas), lambda *_: None)


def test_every_capacity_comes_with_every_policy_and_routing() -> None:
    found = cases([5, None], ["leaf-lru", "fifo"], 2, ["prefix", "round-robin"])
    assert len(set(found)) == 8
    assert all(case.routing and case.replicas == 2 for case in found)


def test_replicas_without_a_routing_compare_all_routings() -> None:
    routings = [case.routing for case in cases([5], ["lru"], 2)]
    assert routings == ["prefix", "round-robin", "least-loaded"]
    assert [case.routing for case in cases([5], ["lru"])] == [None]


@pytest.mark.parametrize(
    ("policies", "replicas", "routings", "what"),
    [
        (["mru"], 1, [], "policy 'mru'"),
        (["lru"], 2, ["random"], "routing 'random'"),
        (["lru"], 1, ["prefix"], "one replica"),
        (["lru", "opt"], 2, [], "policy 'opt'"),
    ],
)
def test_what_makes_no_sense_is_refused(
    policies: list[str], replicas: int, routings: list[str], what: str
) -> None:
    with pytest.raises(UsageError, match=what) as caught:
        cases([5], policies, replicas, routings)
    assert caught.value.hint


def test_default_capacities_go_from_a_hundredth_to_no_limit() -> None:
    workload = ChatTraffic(requests=200).workload()
    distinct = len(workload.parents)
    alone = default_capacities(workload)
    assert alone[0] == round(distinct / 100)
    assert alone[-1] is None
    assert len(alone) == 7
    assert default_capacities(workload, 4)[-2] == round(distinct / 8)
    tiny = default_capacities(ChatTraffic(requests=1, block_size=512).workload())
    assert tiny[0] == 1
    assert len(set(tiny)) == len(tiny)


@pytest.mark.parametrize(
    ("suffix", "begins"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".SVG", b"<?xml")]
)
def test_a_picture_has_a_line_a_policy(tmp_path: Path, suffix: str, begins: bytes) -> None:
    rows = _rows()
    paths = [tmp_path / f"{number}{suffix}" for number in range(2)]
    for path in paths:
        check_plot(path)
        draw(rows, path)
    content = paths[0].read_bytes()
    assert content.startswith(begins)
    assert content == paths[1].read_bytes()
    assert set(lines(rows)) == {"leaf-lru", "lru"}


def test_no_limit_is_drawn_where_all_distinct_blocks_have_room() -> None:
    rows = _rows(replicas=2)
    for label, points in lines(rows).items():
        assert ", " in label
        assert [capacity for capacity, _ in points] == [20, rows[0].distinct_blocks]


def test_a_picture_that_cannot_be_drawn_is_refused_before_the_replay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match=r"neither .png nor .svg"):
        check_plot(tmp_path / "rates.pdf")
    with pytest.raises(NotFound, match="nothing can be written"):
        check_plot(tmp_path / "none" / "rates.png")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(Unsupported, match="matplotlib is not installed") as caught:
        check_plot(tmp_path / "rates.png")
    assert caught.value.hint == "pip install 'kvsnap[plot]'"


def test_progress_is_told_before_each_replay() -> None:
    told: list[Any] = []
    sweep(
        ChatTraffic(requests=5).workload(),
        cases([1, 2], ["lru"]),
        lambda done, total: told.append((done, total)),
    )
    assert told == [(0, 2), (1, 2)]
