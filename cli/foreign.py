"""Text that somebody else wrote, or that a secret may be part of, fit for a terminal and a log."""

from __future__ import annotations

import re

CUT = 80
_USER = re.compile(r"(?i)\b(?!file:)([a-z][a-z0-9+.-]*://)\S*@")
"""Greedy: a password may hold a slash or an @ that should have been escaped. A folder has no user."""
_QUERY = re.compile(r"(?i)\b([a-z][a-z0-9+.-]*://[^\s?#]*)[?#]\S+")


def printable(text: str, limit: int = CUT) -> str:
    """One line: what would move a cursor, hide or turn text shows as its escape, the rest is cut."""
    if len(text) > limit:
        text = text[: limit - 1] + "…"
    if text.isprintable():
        return text
    return "".join(sign if sign.isprintable() else ascii(sign)[1:-1] for sign in text)


def without_secrets(text: str) -> str:
    """The text with `…` for user, password and query of the URLs in it (of any case, also malformed
    ones): a command line that is shown in an error may hold a key."""
    return _QUERY.sub(r"\1?…", _USER.sub(r"\1…@", text))
