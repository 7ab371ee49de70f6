"""The tree of shared prefixes in lines, as `tree` draws folders."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from kvsnap.cli import units

_Waiting = tuple[Any, str, str]
"""A node (or how many were left out), and what stands before its own line and before what follows."""


def draw(tree: Any) -> Iterator[str]:
    """One line a node. A leading `*` marks the path to what was asked for; where several models
    have blocks, each tree says which it is of."""
    below: dict[int | None, list[Any]] = defaultdict(list)
    for node in tree.nodes:
        below[node.parent].append(node)
    marked = any(node.on_path for node in tree.nodes)
    several = len({node.root_id for node in tree.nodes}) > 1
    stack: list[_Waiting] = [(node, "", "") for node in below[None]]
    if tree.omitted:
        stack.append((tree.omitted, "", ""))
    stack.reverse()
    while stack:
        node, own, rest = stack.pop()
        if isinstance(node, int):
            branches = "branch" if node == 1 else "branches"
            yield ("  " if marked else "") + f"{own}… {node} more {branches if own else 'trees'}"
            continue
        mark = ("* " if node.on_path else "  ") if marked else ""
        yield mark + own + _label(node, several and node.parent is None)
        following = [*below[node.id], *([node.omitted] if node.omitted else [])]
        for number, child in reversed(list(enumerate(following, 1))):
            last = number == len(following)
            stack.append(
                (child, rest + ("└─ " if last else "├─ "), rest + ("   " if last else "│  "))
            )


def _counts(node: Any) -> list[str]:
    states = [units.count(node.states, "state")] if node.states else []
    return [units.count(node.blocks, "block"), *states]


def _label(node: Any, with_model: bool) -> str:
    parts = [
        f"{node.start}–{node.start + node.tokens - 1}" if node.tokens else f"{node.start}–?",
        f"{', '.join(_counts(node))}, {units.size(node.bytes)}",
        f"reused {units.count(node.reused, 'time')}" if node.reused else "never reused",
        node.last_block[:12],
    ]
    if node.sessions:
        parts.append(", ".join(node.sessions))
    if with_model:
        parts.append(f"({node.architecture} {node.root_id[:8]})")
    parts += [word for word in ("pinned", "leased") if getattr(node, word)]
    if node.lost is not None:
        parts.append(f"lost: {node.lost}")
    elif node.unusable:
        parts.append(f"{node.unusable} unreachable")
    return "  ".join(parts)
