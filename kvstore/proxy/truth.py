"""Whether the server does go on from what is restored: its own count of reused tokens tells.

A model with sliding windows (without --swa-full) or recurrent layers takes a slot file and computes the
prompt anyway: a slot file lacks the checkpoints that these need. So does a server whose slots somebody
else uses between restore and request. Once could be such an accident; twice in a row ends restoring.
"""

from __future__ import annotations

_ACCIDENTS = 2

NOT_HONOURED = (
    "the server computes prompts whose slots were restored: nothing more is restored"
    " (a model with a sliding window needs llama-server --swa-full; hybrid and recurrent models cannot"
    " go on from slot files; other clients must not use slots by number)"
)


class Truth:
    """Of one upstream process."""

    def __init__(self) -> None:
        self._failed = 0
        self.stopped = False

    def saw(self, restored: int, cached: int) -> bool:
        """A response to a request whose slot was restored with so many tokens; True the one time that
        restoring is given up."""
        if cached * 2 >= restored:
            self._failed = 0
            return False
        self._failed += 1
        if self._failed < _ACCIDENTS or self.stopped:
            return False
        self.stopped = True
        return True
