"""Several sessions on one engine: one call at a time, none is stored with another's tokens, and no
tenant goes on from what the engine holds of another one."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar, cast

from kvsnap.engines.base import Engine
from kvsnap.formats.errors import UsageError
from kvsnap.formats.names import TokenIds, common_prefix

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")


class _OnEngine(Protocol):
    engine: Engine


_Self = TypeVar("_Self", bound=_OnEngine)
_locks: weakref.WeakKeyDictionary[object, threading.RLock] = weakref.WeakKeyDictionary()
_guard = threading.Lock()


def alone(
    method: Callable[Concatenate[_Self, _Args], _Result],
) -> Callable[Concatenate[_Self, _Args], _Result]:
    """Let a method wait until no other one runs on its engine, of whichever session: adapters are
    not for several threads at once. What the application itself does with the engine is not seen.
    """

    @functools.wraps(method)
    def waiting(self: _Self, *args: _Args.args, **kwargs: _Args.kwargs) -> _Result:
        with _guard:
            lock = _locks.setdefault(self.engine.shared, threading.RLock())
        with lock:
            return method(self, *args, **kwargs)

    # What `wraps` returns takes no method for a method.
    return cast("Callable[Concatenate[_Self, _Args], _Result]", waiting)


def holds_another_tenants(engine: Engine, tenant_id: str) -> bool:
    """Whether the session that used the engine last was another tenant's. What it left there is not to
    be reused: that a prompt is there at once tells that somebody else asked the same.

    Where no session used the engine before, what it holds is the application's."""
    return engine.holder is not None and engine.holder[0] != tenant_id


def claim(engine: Engine, tenant_id: str) -> None:
    """What the engine holds is stored by this tenant: no other one goes on from it."""
    if engine.holder is None or holds_another_tenants(engine, tenant_id):
        engine.holder = (tenant_id, None)


def refuse_another_conversation(
    engine: Engine, tenant_id: str, name: str, own: TokenIds | None
) -> None:
    """Raise `UsageError` unless the engine holds what session `name` may be saved with; `own` are
    the ids that it was resumed or stored with last.

    To save a conversation under a further, new name is fine, and so is to go on with one.
    """
    if own is None:
        return
    held = engine.token_ids()
    if len(own) and not len(held):
        raise UsageError(
            f"the engine holds nothing of session {name!r} any more",
            "resume the session before it is saved",
        )
    others = engine.holder is not None and engine.holder[1] not in (None, name)
    others = others or holds_another_tenants(engine, tenant_id)
    if others and common_prefix(own, held) < len(own):
        raise UsageError(
            f"the engine holds another conversation than session {name!r}",
            "resume the session before it is saved, or use an engine for each",
        )
