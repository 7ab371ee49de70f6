"""Which version of a session may replace which: forward only, unless a person says so."""

from __future__ import annotations

from kvsnap.formats.names import common_prefix
from kvsnap.formats.session import SessionRecord


def is_ahead(one: SessionRecord, other: SessionRecord) -> bool:
    """Whether a session begins with all tokens of the other, has more, and a later revision."""
    common = common_prefix(one.token_ids, other.token_ids)
    return common == len(other.token_ids) < len(one.token_ids) and one.revision > other.revision


def why_not_newer(older: SessionRecord, newer: SessionRecord) -> str:
    """Empty where `newer` begins with all tokens of `older` and has a later revision. Needs no memory
    of what was pushed before."""
    common = common_prefix(older.token_ids, newer.token_ids)
    if is_ahead(older, newer):
        return f"it goes on from this one, by {len(older.token_ids) - common} tokens"
    if common < len(older.token_ids):
        return f"it has other tokens from position {common} on"
    if older.revision == newer.revision:
        return f"it is another revision {older.revision}"
    if older.revision > newer.revision:
        return f"it is revision {older.revision}, this is {newer.revision}"
    return ""
