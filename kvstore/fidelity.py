"""Which rows may serve which session: exact ones any, lossy ones only those of their own fidelity.

Exact and lossy chains have different roots, so files never mix. What this module keeps apart is the
engine's memory: rows that were restored with loss must never be stored as exact ones, nor be coded
a second time by another codec.
"""

from __future__ import annotations

import contextlib
import dataclasses

from kvsnap.engines.base import Engine, LossyRows
from kvsnap.formats.codecs import get_codec
from kvsnap.formats.errors import KvsnapError, UsageError
from kvsnap.formats.identity import EXACT, Identity, Root
from kvsnap.formats.names import TokenIds
from kvsnap.formats.tenant import Tenant
from kvsnap.kvstore.store import Store
from kvsnap.kvstore.why import stored_roots


def lossy_roots(store: Store, tenant: Tenant | None, identity: Identity) -> list[Root]:
    """Of what is stored with loss of this model and these settings, and can be decoded here."""
    found = []
    for root in stored_roots(store, tenant):
        with contextlib.suppress(KvsnapError):  # a file may claim any fidelity
            same = dataclasses.replace(identity, fidelity=root.fidelity).canonical()
            codec = get_codec(root.fidelity)
            if same == root.identity and codec.lossy:
                store.calibrations.prepare(codec)
                found.append(root)
    return found


def held_lossy(engine: Engine, held: int) -> bool:
    """Whether rows that were restored with loss are among the first `held` tokens in the engine."""
    lossy = engine.lossy
    return lossy is not None and engine.held_fidelity() != EXACT and held > lossy.start


def usable_tokens(engine: Engine, held: int, root: Root) -> int:
    """How many of the first `held` tokens in the engine may serve a session under `root`."""
    lossy = engine.lossy
    if lossy is None or engine.held_fidelity() in (EXACT, root.fidelity):
        return held
    return min(held, lossy.start)


def forget_lossy(engine: Engine, held: int) -> None:
    """After the engine forgot all but `held` tokens: no mark for rows that are gone."""
    if engine.lossy is not None and held <= engine.lossy.start:
        engine.lossy = None


def mark_lossy(engine: Engine, root: Root, token_ids: TokenIds, held: int) -> None:
    """Before `token_ids` are loaded, those from `held` on from what is stored under `root`.

    Before, not after: a Ctrl-C in between must not leave lossy rows in the engine unmarked.
    """
    if root.fidelity != EXACT:
        start = held if engine.lossy is None else min(engine.lossy.start, held)
        engine.lossy = LossyRows(root.fidelity, start, token_ids.copy())


def refuse_other_fidelity(engine: Engine, root: Root) -> None:
    """Raise `UsageError` where the engine's rows must not be stored under `root`."""
    held = engine.held_fidelity()
    if held not in (EXACT, root.fidelity):
        raise UsageError(
            f"the engine holds rows of fidelity {held}, and the session is {root.fidelity}:"
            " rows that were restored with loss are not coded again",
            "resume the session before it is saved",
        )
