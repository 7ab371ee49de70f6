"""JSON files changed: a value bent, the text damaged, another encoding."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from tests.fuzz import json_values, octets


def changed(random: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    kind = random.randrange(10)
    if kind == 0:
        return octets.changed(random, data, others)
    text = json_values.bent_text(random, data.decode("ascii"))
    if kind == 1:
        return text.encode(
            random.choice(("utf-16", "utf-32", "utf-8-sig", "utf-16-be")), "surrogatepass"
        )
    if kind == 2:
        text = text.replace("{", random.choice(('{"format":1,', '{"block_size":', "{{")), 1)
    return text.encode("utf-8", "surrogatepass")
