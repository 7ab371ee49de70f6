"""JSON bent on purpose: other types, huge and impossible numbers, deep nesting, duplicate keys."""

from __future__ import annotations

import copy
import json
import re
from random import Random
from typing import Any

VALUES: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 2, 7, 255, 2**16, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**62,
    2**63 - 1, 2**63, 2**64, -(2**63), 10**40, 0.5, -0.0, 1e-320, 1e308, float("nan"), float("inf"),
    "", "0", "1", "-1", "9" * 18, "9" * 19, "1_0", " 1", "٣", "raw", "F32", "elements", "\ud800",
    "é", "a\nb", "\x00", "x" * 300, [], {}, [1], [[]], [None], [-1, 2], [2**31, 2**31], {"": None},
)  # fmt: skip
"""`json.dumps` writes NaN and Infinity as Python's own reader takes them."""
_TEXTS = (
    "NaN", "-Infinity", "1e999", "-1E400", "01", "+1", ".5", "0x10", "'a'", '"\\ud800"', '"\\u0000"',
    '"\\udfff\\ud800"', '"\\x"', '"a', "[1,]", "{1:2}", "nul", "\\", "9" * 5000, "-" + "9" * 4300,
    "1." + "0" * 400 + "1", '{"a":1,"a":2}',
)  # fmt: skip
"""What no dump writes; a place in the text is marked and replaced by one of these."""
_MARK = re.compile(r'"\\u0000(text|list|table):(\d+)\\u0000"')


def hostile(random: Random) -> Any:
    """A value to put where another stood."""
    kind = random.randrange(24)
    if kind == 0:
        return f"\0text:{random.randrange(len(_TEXTS))}\0"
    if kind == 1:  # 1,000 is where Python's readers and writers give up, not at the same depth
        depth = random.choice((2, 40, random.randint(850, 1010), random.randint(950, 1000), 5000))
        return f"\0{random.choice(('list', 'table'))}:{depth}\0"
    return copy.deepcopy(random.choice(VALUES))


def dumps(value: Any) -> str:
    """Compact JSON in ASCII, with marked places replaced."""
    return _MARK.sub(_replaced, json.dumps(value, separators=(",", ":")))


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) inside a JSON value."""
    found: list[tuple[Any, Any]] = []
    todo = [value]
    while todo:
        inside = todo.pop()
        if isinstance(inside, dict | list):
            keys = list(inside) if isinstance(inside, dict) else range(len(inside))
            found += [(inside, key) for key in keys]
            todo += [inside[key] for key in keys]
    return found


def bend(random: Random, value: Any) -> None:
    """Replace, drop, repeat, swap or rename one value, anywhere."""
    found = places(value)
    if not found:
        return
    inside, key = random.choice(found)
    kind = random.randrange(8)
    if kind == 0:
        del inside[key]
    elif kind == 1 and isinstance(inside, list):
        inside.extend([inside[key]] * random.choice((1, 2, 30)))
    elif kind == 2 and isinstance(inside, dict):
        inside[random.choice(("", "x", "\ud800", "__metadata__", key + "."))] = inside.pop(key)
    elif kind == 3:
        other, there = random.choice(found)
        # Copies: else a value could come to hold itself.
        inside[key], other[there] = copy.deepcopy(other[there]), copy.deepcopy(inside[key])
    elif kind == 4 and type(inside[key]) is int:
        inside[key] += random.choice((-1, 1, 2**31, -inside[key] - 1))
    else:
        inside[key] = hostile(random)


def bent_text(random: Random, text: str) -> str:
    """A JSON text with one to three values bent; one that is nested too deeply comes back as it is."""
    try:
        value = [json.loads(text)]
        for _ in range(random.choice((1, 1, 2, 3))):
            bend(random, value)
        return dumps(value[0] if value else None)
    except (ValueError, RecursionError):
        return text


def _replaced(found: re.Match[str]) -> str:
    kind, number = found[1], int(found[2])
    if kind == "text":
        return _TEXTS[number % len(_TEXTS)]
    if kind == "list":
        return "[" * number + "]" * number
    return '{"a":' * number + "0" + "}" * number
