"""`kvsnap export --to`: another tool's file of a session, as the command shows it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvsnap.cli import units
from kvsnap.cli.main import App
from kvsnap.formats.errors import Unsupported, UsageError
from kvsnap.formats.identity import EXACT


def export_foreign(
    app: App,
    session: str,
    out: Path,
    format_name: str,
    tenant: Any,
    options: Mapping[str, Any],
    *,
    force: bool,
) -> None:
    """Nothing stands at `out` before all of it is written."""
    from kvsnap.kvstore.interchange.exporting import export_files, writable, write_files

    try:
        to = writable(format_name)
    except Unsupported as error:
        raise UsageError(error.what, error.hint) from error
    with app.store() as store:
        found = store.find_session(session, tenant)
        files, tokens = export_files(store, found, tenant, to, options)
        write_files(files, out, as_folder=to.is_folder, force=force)
    record = found.record
    if record.fidelity != EXACT:
        app.out.warn(f"its rows are of fidelity {record.fidelity}: the file does not say so")
    size = sum(map(len, files.values()))
    if app.out.as_json:
        app.out.json(
            {
                "session": session,
                "format": to.name,
                "tokens": tokens,
                "files": len(files),
                "bytes": size,
                "fidelity": record.fidelity,
            }
        )
    app.out.text(
        f"exported {units.count(tokens, 'token')} of {session!r} to {out}:"
        f" {to.title}, {units.count(len(files), 'file')}, {units.size(size)}"
    )
