"""The one error tree of kvsnap. Every class carries what went wrong and what to do about it.

KvsnapError                 it did not work                                           exit 1
├── UsageError              the request makes no sense as it stands                   exit 2
│   └── BadTokenIds         token ids that are not integers in 0..2^32-1
├── Damaged                 bytes are not what they claim to be (on the read path: a miss)
│   └── Untrusted           no trusted key signed them, where a trust list asks for that
├── Unsupported             something kvsnap knows by name and does not handle
│   └── Sealed              a sealed file whose tenant's key is not at hand
├── NotFound                no such session, block or model
├── StoreError              the store's folder does not do what was asked
│   ├── StoreFull           no space left
│   ├── StoreReadOnly       nothing can be written there
│   ├── IndexDamaged        the index was damaged and thrown away; the next use builds it anew
│   └── Vanished            what a save stood on went from the store meanwhile
├── RemoteError             a remote does not do what was asked
│   ├── RemoteDown          no answer in time, or a failure that may pass: worth trying again
│   └── RemoteDenied        the remote wants other credentials
├── Diverged                a session went on elsewhere, with other tokens; neither is a newer one
├── EngineError             the engine did not do what was asked
├── DoesNotFit              more tokens than the engine's context holds
└── PartlyDone              some of it worked, and what did is kept                   exit 3
    ├── SessionMoved        a session changed meanwhile; this one was stored beside it
    └── NotAllStored        a session was saved, but the store had no room for all its blocks
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvsnap.formats.session import SessionFile


class KvsnapError(Exception):
    """Base of all errors. `what` is one line, `hint` one line on what to do (may be empty)."""

    exit_code = 1

    def __init__(self, what: str, hint: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.hint = hint


class UsageError(KvsnapError):
    """The caller asked for something that makes no sense as it stands."""

    exit_code = 2


class BadTokenIds(UsageError):
    """Token ids must be integers in 0..2^32-1; bools and floats are refused before hashing."""


class Damaged(KvsnapError):
    """Bytes are not what they claim to be. On the read path this is a miss with `what` as reason."""


class Untrusted(Damaged):
    """No trusted key signed it, and the store has a trust list."""


class Unsupported(KvsnapError):
    """A version, layout or engine feature that kvsnap knows by name and does not handle."""


class Sealed(Unsupported):
    """A sealed file whose tenant's key is not at hand."""


class NotFound(KvsnapError):
    """No such session, block, model or file."""


class StoreError(KvsnapError):
    """The store's folder does not do what was asked of it."""


class StoreFull(StoreError):
    """No space left on the store's disk. What was stored before is kept."""


class StoreReadOnly(StoreError):
    """Nothing can be written to the store. What it holds can still be read."""


class IndexDamaged(StoreError):
    """The index was damaged and has been thrown away; the next use builds it anew."""


class Vanished(StoreError):
    """A block or an unfinished file went away between two steps of a save: do it again."""


class RemoteError(KvsnapError):
    """A remote does not do what was asked of it."""


class RemoteDown(RemoteError):
    """No connection, no answer in time, or a failure that may pass. Says nothing about what the
    remote holds."""


class RemoteDenied(RemoteError):
    """The remote refuses these credentials, or this operation to them."""


class Diverged(KvsnapError):
    """Two sessions of one name hold different tokens, and neither goes on from the other."""


class EngineError(KvsnapError):
    """The engine did not do what was asked of it."""


class DoesNotFit(KvsnapError):
    """More tokens than the engine's context holds; nothing was computed."""


class PartlyDone(KvsnapError):
    """Some of it worked, and what did is kept. `report` says what, where there is one."""

    exit_code = 3
    report: object = None


class SessionMoved(PartlyDone):
    """The session was saved by somebody else meanwhile; this one is stored as `stored_as`."""

    def __init__(self, stored: SessionFile, what: str, hint: str = "") -> None:
        super().__init__(what, hint)
        self.stored = stored
        self.stored_as = stored.record.name


class NotAllStored(PartlyDone):
    """The session is saved, with fewer blocks than it has; resuming it computes the rest."""

    def __init__(self, stored: int, blocks: int, full: StoreFull) -> None:
        super().__init__(
            f"saved, but with {stored} of {blocks} blocks, resuming computes the rest: {full.what}",
            full.hint,
        )
        self.__cause__ = full
