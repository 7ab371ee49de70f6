"""Sizes and times for people."""

from __future__ import annotations

import re

from kvsnap.formats.errors import UsageError


def size(count: int) -> str:
    """Bytes in decimal units, as disks and `--capacity` have them."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def seconds(value: float) -> str:
    return f"{value * 1000:.1f} ms" if value < 1 else f"{value:.2f} s"


def parse_time(text: str) -> float:
    """Seconds from 90m, 12h, 7d or 2w; raises `UsageError`."""
    found = re.fullmatch(r"(\d{1,6}(?:\.\d+)?)([smhdw])", text.strip().lower())
    if found is None or float(found[1]) == 0:
        raise UsageError(f"{text!r} is not a time", "give one like 90m, 12h, 7d or 2w")
    return float(found[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}[found[2]]


def count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
