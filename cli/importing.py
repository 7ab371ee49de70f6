"""`kvsnap import` of another tool's file, as the command shows it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvsnap.cli import units
from kvsnap.cli.engine import Loaded, count_tokens, require_engine
from kvsnap.cli.inputs import read_source
from kvsnap.cli.main import App
from kvsnap.formats.errors import Damaged, Unsupported, UsageError
from kvsnap.formats.interchange import FORMATS, get_format, recognise
from kvsnap.formats.interchange.foreign import Files, ForeignRows, Format, Given

_GIVEN = {
    "batch_row": "batch_row",
    "block_tokens": "block",
    "chunk_tokens": "chunk",
    "model_name": "model_name",
    "page_layout": "page_layout",
}
"""Options of the command → what a reader calls them."""


def import_foreign(
    app: App, path: Path, name: str | None, tenant: Any, options: Mapping[str, Any]
) -> None:
    """Read, check, store, report."""
    from kvsnap.kvstore.conversation import new_prompt
    from kvsnap.kvstore.interchange.fitting import Target
    from kvsnap.kvstore.interchange.gathering import OnDisk
    from kvsnap.kvstore.interchange.importing import import_rows, token_ids_of

    started = time.perf_counter()
    files = OnDisk(path)
    found = _format_of(path, files.heads(), options["format_name"])
    if name is None:
        raise UsageError("the new session has no name", "add --session NAME")
    if options["model"] is None:
        raise UsageError(
            "a model is needed: what a file says of itself is not believed",
            "give the model that it was made with: --model",
        )
    sources = (options[key] for key in ("prompt", "prompt_file", "messages", "token_ids"))
    source = read_source(*sources)
    require_engine(options["engine"])
    more = {new: options[old] for old, new in _GIVEN.items()}
    tokens = _most_tokens(options, source, lambda: _read(found, files, Given(**more)).tokens)
    settings = {**options, "codec": None}
    loaded = Loaded(app, settings, tokens, name, tenant, saves=True)
    try:
        given = new_prompt(loaded.engine, source, answer=False) if source.given else None
        ids = given.token_ids if given is not None else None
        store = loaded.store
        target = Target(loaded.engine.identity(store.block_size, store.file_digest))
        rows = _read(found, files, target.given(token_ids=ids, **more))
        notes = given.notes(loaded.model) if given is not None else {"kind": "raw"}
        notes |= {
            "model": loaded.model,
            # Behind what the file says of itself, which may be anything.
            "imported": {**rows.told, "format": found.name, "verified": not options["unverified"]},
        }
        report = import_rows(
            loaded.session,
            rows,
            token_ids_of(rows, ids),
            whole=options["check_all"],
            unverified=options["unverified"],
            notes=notes,
            step_done=app.out.say,
        )
    finally:
        loaded.close()
    if app.out.as_json:
        app.out.json(
            {
                "session": report.saved.session,
                "model": loaded.model,
                "format": found.name,
                "tokens": report.tokens,
                "computed_tokens": report.computed_tokens,
                "verified": report.verified,
                "difference": report.difference,
                "bound": report.bound,
                "blocks": report.saved.blocks,
                "blocks_written": report.saved.blocks_written,
                "bytes_written": report.saved.bytes_written,
                "fidelity": report.saved.fidelity,
                "seconds": {
                    "load_model": loaded.load_seconds,
                    "total": time.perf_counter() - started,
                },
            }
        )
    app.out.text(
        f"imported {units.count(report.tokens, 'token')} of {found.title} as"
        f" {report.saved.session!r}: {report.saved.blocks_written} of"
        f" {units.count(report.saved.blocks, 'block')} written"
    )
    if report.verified:
        app.out.say(
            f"verified: {report.computed_tokens} tokens computed, rows differ by at most"
            f" {report.difference:.2g} (rounding: up to {report.bound:.2g})"
        )
    else:
        app.out.warn("not verified: only this session uses these rows")


def _format_of(path: Path, files: Files, name: str | None) -> Format:
    if name is not None:
        try:
            return get_format(name)
        except Unsupported as error:
            raise UsageError(error.what, error.hint) from error
    found = recognise(files)
    if found is None:
        raise Unsupported(
            f"{path} is nothing that kvsnap knows by its names and first bytes",
            f"kvsnap doctor {path if path.is_dir() else path.parent} says what is there; or name it:"
            f" --from {', '.join(FORMATS)}",
        )
    return found


def _read(found: Format, files: Files, given: Given) -> ForeignRows:
    try:
        return found.read(files, given)
    except Damaged as error:  # a file of the caller's, and not one of the store's
        raise type(error)(
            error.what, error.hint or "save it anew with the tool that made it; is it such a file?"
        ) from error


def _most_tokens(options: Mapping[str, Any], source: Any, in_file: Callable[[], int]) -> int:
    """How long a context is needed, before the engine is loaded. A file that does not say it does not
    hold its token ids either."""
    if source.given:
        return count_tokens(options["model"], source, options["engine"])
    return in_file()
