"""Session names to file names: reversible, distinct also where a file system folds case.

Lower-case letters, digits, `-`, `_` and inner dots stand for themselves; every other byte of the
UTF-8 name becomes `%xx`. A name whose escape is too long for a file name becomes `%~` and a digest
(the name stands inside the file). Windows' device names get their first letter escaped.
"""

from __future__ import annotations

import re

from blake3 import blake3

from kvsnap.formats.errors import UsageError

SUFFIX = ".safetensors"
MAX_NAME = 1024
CONFLICT_ROOM = 16
"""Bytes that a name given by a person leaves for a conflict's `@n`."""
MAX_FILE_NAME = 200
"""Longest escape; file systems allow 255 bytes, and the suffix and a conflict's @n need room."""
_SAFE = re.compile(rb"[a-z0-9_.-]")
_DEVICES = re.compile(rb"(con|prn|aux|nul|com[0-9]|lpt[0-9])(\.|$)")


def check_session_name(name: str, limit: int = MAX_NAME - CONFLICT_ROOM) -> None:
    """Raise `UsageError` for names that no person should have to type or read."""
    size = len(name.encode("utf-8", "surrogatepass"))
    if not name or size > limit:
        raise UsageError(
            f"a session name has 1 to {limit} bytes, this one has {size}",
            "choose a shorter name, e.g. alice/42",
        )
    if not name.isprintable():
        raise UsageError("a session name cannot hold control characters or lone surrogates")


def session_file_name(name: str) -> str:
    """The file name of a session, suffix included."""
    check_session_name(name, MAX_NAME)
    raw = name.encode("utf-8")
    escaped = "".join(chr(byte) if _SAFE.match(bytes([byte])) else f"%{byte:02x}" for byte in raw)
    if _DEVICES.match(raw) or escaped.startswith("."):
        escaped = f"%{raw[0]:02x}" + escaped[1:]
    if escaped.endswith("."):
        escaped = escaped[:-1] + "%2e"
    if len(escaped) > MAX_FILE_NAME:
        escaped = "%~" + blake3(raw).hexdigest()
    return escaped + SUFFIX
