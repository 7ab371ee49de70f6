"""What is said once a kind: a server that is down stays so for thousands of requests."""

from __future__ import annotations

import logging

from kvsnap.formats.errors import KvsnapError

_log = logging.getLogger("kvsnap")


class Told:
    """Warnings of one proxy."""

    def __init__(self) -> None:
        self._kinds: set[str] = set()

    def once(self, kind: str, error: KvsnapError | str) -> None:
        """Log a warning, unless one of its kind was logged since it was last `over`."""
        if kind in self._kinds:
            return
        self._kinds.add(kind)
        what = error if isinstance(error, str) else error.what
        hint = "" if isinstance(error, str) or not error.hint else f" ({error.hint})"
        _log.warning("kvsnap: %s%s", what, hint)

    def over(self, kind: str) -> None:
        """What was wrong is right again: the next time is news."""
        self._kinds.discard(kind)
