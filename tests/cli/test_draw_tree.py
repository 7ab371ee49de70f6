"""The tree of shared prefixes as text: a line a node, the path marked, models told apart."""

from __future__ import annotations

from kvsnap.cli.draw_tree import draw
from kvsnap.kvstore.tree import Node, Tree


def _node(number: int, parent: int | None, **more: object) -> Node:
    values = {
        "id": number, "parent": parent, "start": 64, "tokens": 128, "blocks": 2, "bytes": 5,
        "reused": 1, "first_block": "aa" * 32, "last_block": f"{number:02x}" * 32, "root_id": "r",
        "architecture": "llama", "sessions": (), "pinned": False, "leased": False, "unusable": 0,
        "lost": None, "on_path": False, "omitted": 0,
    }  # fmt: skip
    return Node(**{**values, **more})


def test_the_drawing_has_a_line_a_node_and_one_for_what_is_left_out() -> None:
    tree = Tree(
        (
            _node(0, None, reused=7, omitted=1),
            _node(1, 0, reused=0, sessions=("a", "b"), pinned=True),
            _node(2, 1, unusable=2, lost="the file is missing"),
            _node(3, 0, unusable=2, leased=True),
            _node(4, None),
        ),
        3,
    )
    assert list(draw(tree)) == [
        "64–191  2 blocks, 5 B  reused 7 times  000000000000",
        "├─ 64–191  2 blocks, 5 B  never reused  010101010101  a, b  pinned",
        "│  └─ 64–191  2 blocks, 5 B  reused 1 time  020202020202  lost: the file is missing",
        "├─ 64–191  2 blocks, 5 B  reused 1 time  030303030303  leased  2 unreachable",
        "└─ … 1 more branch",
        "64–191  2 blocks, 5 B  reused 1 time  040404040404",
        "… 3 more trees",
    ]


def test_the_drawing_marks_the_path_and_tells_models_apart() -> None:
    tree = Tree(
        (_node(0, None, on_path=True), _node(1, 0), _node(2, None, root_id="0123456789")), 0
    )
    first, second, third = draw(tree)
    assert first == "* 64–191  2 blocks, 5 B  reused 1 time  000000000000  (llama r)"
    assert second.startswith("  └─ 64–191")
    assert third.endswith("(llama 01234567)")
