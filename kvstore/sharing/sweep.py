"""`gc` of a remote: what no session's manifest names, and has not for a time of grace, goes.

Mark, then sweep. A push writes blocks before the manifest that names them, and skips those that are
there: the grace covers the first, and sweep_mark.py the second. Children go before their parents, so that a
sweep that is cut off leaves prefixes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from kvsnap.formats.errors import Damaged
from kvsnap.formats.session_name import SUFFIX
from kvsnap.kvstore.keyring import Keyring
from kvsnap.kvstore.remotes.base import Entry, Remote
from kvsnap.kvstore.sharing import manifests
from kvsnap.kvstore.sharing.sweep_mark import marked, remote_time
from kvsnap.kvstore.sharing.transfer import in_order

GRACE_DAYS = 7.0
"""Longer than any push takes, its breaks included."""
_SWEPT = ("blocks/", "sessions/", "calibrations/")
_DAY = 24 * 3600.0


@dataclass(frozen=True, kw_only=True)
class SweepReport:
    """`young_files`: named by no manifest, and within the grace. `foreign_files`: what is not
    called as files of ours are; they stay."""

    sessions: int
    kept_files: int
    kept_bytes: int
    young_files: int
    young_bytes: int
    removed_files: int
    freed_bytes: int
    foreign_files: int
    dry_run: bool


def sweep(
    remote: Remote,
    *,
    grace_days: float = GRACE_DAYS,
    dry_run: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> SweepReport:
    """Raises `Damaged` where a manifest cannot be read: what it names must not go."""
    if dry_run or next(iter(remote.list("")), None) is None:  # nothing is written in either case
        return replace(_look(remote, grace_days, time.time(), lambda: None)[0], dry_run=dry_run)
    with marked(remote) as refresh:
        report, going = _look(remote, grace_days, remote_time(remote), refresh)
        _remove(remote, going, refresh, progress)
    return report


def _look(
    remote: Remote, grace_days: float, now: float, refresh: Callable[[], None]
) -> tuple[SweepReport, list[Entry]]:
    """What a sweep does, and what goes."""
    entries = [entry for prefix in _SWEPT for entry in remote.list(prefix)]
    refresh()
    # Manifests are read after the listing: what was pushed in between is named by one of them.
    named, sessions = _named(remote, refresh)
    kept = [entry for entry in entries if entry.key in named]
    rest = [entry for entry in entries if entry.key not in named]
    ours = [entry for entry in rest if _is_ours(entry)]
    since = now - grace_days * _DAY
    young = [entry for entry in ours if entry.changed > since]
    going = [entry for entry in ours if entry.changed <= since]
    report = SweepReport(
        sessions=sessions,
        kept_files=len(kept),
        kept_bytes=_bytes(kept),
        young_files=len(young),
        young_bytes=_bytes(young),
        removed_files=len(going),
        freed_bytes=_bytes(going),
        foreign_files=len(rest) - len(ours),
        dry_run=False,
    )
    return report, going


def _named(remote: Remote, refresh: Callable[[], None]) -> tuple[set[str], int]:
    named, sessions = set[str](), 0
    for found in manifests.every(remote, Keyring()):
        if found.problem:
            raise Damaged(
                f"{remote.url} has a damaged manifest, {found.key}: {found.problem}",
                "push that session again, or remove the manifest; its blocks are kept until then",
            )
        named.update(found.named)
        sessions += 1
        refresh()
    return named, sessions


def _remove(
    remote: Remote,
    going: list[Entry],
    refresh: Callable[[], None],
    progress: Callable[[int, int], None],
) -> None:
    def delete(entry: Entry) -> None:
        remote.delete(entry.key)

    # The place in its chain stands in a block, not in its name. What was written last stands deepest:
    # a push goes from the front to the end.
    last_first = sorted(going, key=lambda entry: -entry.changed)
    for number, _ in enumerate(in_order(delete, last_first, linger=None)):
        refresh()
        progress(number + 1, len(going))


def _is_ours(entry: Entry) -> bool:
    stem = entry.key.rsplit("/", 1)[-1].removesuffix(SUFFIX)
    return len(stem) == 64 and entry.key.endswith(SUFFIX) and set(stem) <= set("0123456789abcdef")


def _bytes(entries: list[Entry]) -> int:
    return sum(entry.size for entry in entries)
