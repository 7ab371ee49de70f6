"""Which cases to replay: every capacity with every policy and every routing."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from kvsnap.formats.errors import UsageError
from kvsnap.kvstore.simulation.policies import CLAIRVOYANT, POLICIES
from kvsnap.kvstore.simulation.replay import Case, Row, replay
from kvsnap.kvstore.simulation.request import Workload
from kvsnap.kvstore.simulation.routing import ROUTINGS

SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
"""Of the distinct blocks; the default capacities of all replicas together."""


def default_capacities(workload: Workload, replicas: int = 1) -> list[int | None]:
    """From far too small to no limit."""
    distinct = len(workload.parents)
    limited = {max(1, round(share * distinct / replicas)) for share in SHARES}
    return [*sorted(limited), None]


def cases(
    capacities: Sequence[int | None],
    policies: Sequence[str],
    replicas: int = 1,
    routings: Sequence[str] = (),
) -> list[Case]:
    """Refuses what makes no sense. Several replicas and no routing named: all routings."""
    _check_names("policy", policies, POLICIES)
    _check_names("routing", routings, ROUTINGS)
    if replicas == 1 and routings:
        raise UsageError("one replica leaves nothing to route", "add --replicas N")
    clairvoyant = sorted(CLAIRVOYANT & set(policies))
    if replicas > 1 and clairvoyant:
        raise UsageError(
            f"policy {clairvoyant[0]!r} must know what a replica will be asked, which routing"
            " decides as it goes",
            "replay it on one replica, or choose another policy",
        )
    ways: Sequence[str | None] = routings or (list(ROUTINGS) if replicas > 1 else [None])
    return [
        Case(capacity, policy, replicas, routing)
        for capacity in capacities
        for policy in policies
        for routing in ways
    ]


def sweep(
    workload: Workload, chosen: Sequence[Case], update: Callable[[int, int], None]
) -> list[Row]:
    """A row a case. `update(done, total)` is called on the way."""
    rows = []
    for number, case in enumerate(chosen):
        update(number, len(chosen))
        rows.append(replay(workload, case))
    return rows


def _check_names(what: str, names: Sequence[str], known: Collection[str]) -> None:
    for name in names:
        if name not in known:
            raise UsageError(f"{what} {name!r} is not known", f"known: {', '.join(known)}")
