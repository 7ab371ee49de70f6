"""The sessions of a remote, as `kvsnap ls REMOTE` shows them.

A remote's manifests say what somebody else wrote: words are shown with escapes and cut, and dates may
be no dates.
"""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING, Any

from kvsnap.cli import units
from kvsnap.cli.foreign import printable
from kvsnap.cli.main import App
from kvsnap.formats.manifest import BLOCK
from kvsnap.formats.tenant import tenant_id

if TYPE_CHECKING:
    from kvsnap.kvstore.remotes.base import Remote
    from kvsnap.kvstore.sharing.manifests import Pushed

COLUMNS = ["session", "tokens", "blocks", "revision", "size", "pushed", "by", "model"]
LONGEST = 300
"""Characters of a reason."""
MOST = 100_000
"""Sessions: a listing may have no end, and its rows take memory."""


def list_sessions(app: App, remote: Remote) -> None:
    from kvsnap.kvstore.keyring import Keyring
    from kvsnap.kvstore.sharing.manifests import every

    keys = Keyring()
    keys.add(app.tenant)
    own = app.tenant.tenant_id if app.tenant is not None else None
    rows = [_row(found) for found in itertools.islice(every(remote, keys, own), MOST)]
    if len(rows) == MOST:
        app.out.warn(f"the listing was left after {MOST} sessions")
    rows.sort(key=lambda row: row["pushed"], reverse=True)
    if app.out.as_json:
        app.out.json(rows)
        return
    if not rows:
        app.out.say(f"no sessions in {remote.url} yet; kvsnap push SESSION {remote.url} brings one")
        return
    app.out.table(COLUMNS, [_cells(row, tenant_id(app.tenant)) for row in rows])
    damaged = sum(row["problem"] is not None for row in rows)
    told = f", {damaged} damaged" if damaged else ""
    app.out.say(f"{units.count(len(rows), 'session')}{told}")


def _row(found: Pushed) -> dict[str, Any]:
    manifest = found.manifest
    tenant = found.key.partition("/")[2].partition("/")[0]  # a listing may hold any key
    if manifest is None:
        empty = dict.fromkeys(("tokens", "blocks", "stored_blocks", "revision", "bytes"))
        words = dict.fromkeys(("fidelity", "creator", "model"))
        pushed = int(found.changed)
        named: dict[str, Any] = {"session": None, "tenant": tenant, **empty, "pushed": pushed}
        return {
            **named,
            **words,
            "key": found.key,
            "problem": printable(found.problem, LONGEST) or None,
        }
    return {
        "session": manifest.name,
        "tenant": tenant,
        "tokens": manifest.tokens,
        "blocks": manifest.tokens // manifest.block_size,
        "stored_blocks": len(manifest.of_kind(BLOCK)),
        "revision": manifest.revision,
        "bytes": manifest.size,
        "pushed": manifest.created,
        "fidelity": printable(manifest.fidelity),
        "creator": printable(manifest.creator),
        "model": printable(manifest.model),
        "key": found.key,
        "problem": None,
    }


def _cells(row: dict[str, Any], own: str) -> list[str]:
    when = _date(row["pushed"])
    if row["session"] is None and not row["problem"]:
        return ["(sealed)", "-", "-", "-", "-", when, "-", "-"]
    if row["session"] is None:
        return [f"(damaged: {row['key']})", "-", "-", "-", "-", when, "-", row["problem"]]
    blocks, stored = row["blocks"], row["stored_blocks"]
    other = row["tenant"] != own
    return [
        printable(row["session"]) + (" (of a tenant's key)" if other else ""),
        str(row["tokens"]),
        str(blocks) if stored == blocks else f"{stored}/{blocks}",
        str(row["revision"]),
        units.size(row["bytes"]),
        when,
        row["creator"] or "-",
        row["model"],
    ]


def _date(seconds: int) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
    except (OverflowError, OSError, ValueError):  # the year 30 billion
        return "-"
