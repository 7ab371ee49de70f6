"""Text that somebody else wrote, or that a secret may be part of, fit for a terminal and a log."""

from __future__ import annotations

import json
import re

CUT = 80
MAX_LINE = 2000
"""Characters of an error or warning: a file or a server may say more than a person reads."""
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_USER = re.compile(r"(?i)\b(?!file:)([a-z][a-z0-9+.-]*://)\S*@")
"""Greedy: a password may hold a slash or an @ that should have been escaped. A folder has no user."""
_QUERY = re.compile(r"(?i)\b([a-z][a-z0-9+.-]*://[^\s?#]*)[?#]\S+")


def escaped(text: str, backslash: str = "\\") -> str:
    """One line, as long as it is: what would move a cursor, hide or turn text shows as its escape."""
    if text.isprintable():
        return text
    return "".join(
        sign if sign.isprintable() else ascii(sign)[1:-1].replace("\\", backslash) for sign in text
    )


def printable(text: str, limit: int = CUT) -> str:
    """The same, and what is longer is cut."""
    return escaped(text if len(text) <= limit else text[: limit - 1] + "…")


def escaped_json(text: str) -> str:
    """JSON with line ends, the same by value: what does not print stands inside of strings only."""
    return "\n".join(
        line if line.isprintable() else "".join(map(_json_sign, line)) for line in text.split("\n")
    )


def escaped_controls(text: str) -> str:
    """A model's answer on a terminal. Of what it writes only control characters are escaped: marks of
    direction and joiners belong to some scripts."""
    return _CONTROLS.sub(lambda found: ascii(found[0])[1:-1], text)


def _json_sign(sign: str) -> str:
    if sign.isprintable():
        return sign
    number = ord(sign)
    return f"\\u{number:04x}" if number < 0x10000 else json.dumps(sign)[1:-1]


def without_secrets(text: str) -> str:
    """The text with `…` for user, password and query of the URLs in it (of any case, also malformed
    ones): a command line that is shown in an error may hold a key."""
    return _QUERY.sub(r"\1?…", _USER.sub(r"\1…@", text))
