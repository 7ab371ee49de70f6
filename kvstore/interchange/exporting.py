"""A stored session's rows into another tool's file. No engine is needed: identity and layout stand in
the session's own."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kvsnap.formats.errors import Damaged, NotFound, StoreError, UsageError
from kvsnap.formats.identity import root_of
from kvsnap.formats.interchange import get_format
from kvsnap.formats.interchange.foreign import ForeignRows, Format, Given
from kvsnap.formats.session import SessionFile
from kvsnap.formats.tenant import Tenant
from kvsnap.kvstore.interchange.fitting import Target
from kvsnap.kvstore.match import chain
from kvsnap.kvstore.restore import read_blocks
from kvsnap.kvstore.store import Store


def writable(name: str) -> Format:
    """The format of a name; `UsageError` where nothing reads what would be written."""
    found = get_format(name)
    if found.write is None:
        raise UsageError(f"{found.title} cannot be written", "choose another format")
    return found


def export_files(
    store: Store,
    session: SessionFile,
    tenant: Tenant | None,
    to: Format,
    options: Mapping[str, Any],
) -> tuple[dict[str, bytes], int]:
    """The files of a session in another tool's form, relative path → content, and how many tokens are
    in them: formats of pages hold whole ones. They were read once by kvsnap's own reader.

    Raises `NotFound` where a block is not in the store any more, `Unsupported` or `UsageError` where the
    format cannot hold the rows or must be told more.
    """
    if options.get("version") is not None and not to.has_versions:
        raise UsageError(f"{to.title} has no versions to choose from", "leave out --format-version")
    target = Target(session.record.identity)
    rows = session_rows(store, session, tenant, target, to.order)
    assert to.write is not None
    given = target.given(token_ids=session.record.token_ids, **options)
    files = to.write(rows, given)
    if not files:
        raise UsageError(
            f"session {session.record.name!r} has {rows.tokens} tokens, which fill no page of {to.title}",
            "export a longer one",
        )
    return files, _tokens_in(files, rows, to, given)


def _tokens_in(files: Mapping[str, bytes], rows: ForeignRows, to: Format, given: Given) -> int:
    """As the reader of the format finds them. Some tools abort on a file that is not right."""
    found = to.read({name: memoryview(data) for name, data in files.items()}, given)
    for read, written in zip((*found.k, *found.v), (*rows.k, *rows.v), strict=True):
        if not np.array_equal(read, written[: found.tokens]):
            raise AssertionError(f"{to.name} does not read back what it wrote")
    return found.tokens


def session_rows(
    store: Store, session: SessionFile, tenant: Tenant | None, target: Target, order: str
) -> ForeignRows:
    """All rows of a stored session, blocks and tail, every check passed."""
    record, layout = session.record, target.layout
    root = root_of(record.identity, tenant)
    if root.root_id != record.root_id:
        raise UsageError(f"session {record.name!r} belongs to another tenant", "give its key")
    tokens = len(record.token_ids)
    if not tokens:
        raise UsageError(f"session {record.name!r} holds no tokens", "there is nothing to export")
    rows = layout.empty(tokens)
    wanted = chain(list(record.chain), record.token_ids, record.block_size)
    again = "resume the session once: what is missing is computed and stored again"
    with store.holds.lease() as lease:
        if wanted:
            lease.keep(wanted[-1].name)
        stop = record.tail_start
        reached, miss = read_blocks(store.blocks, root, wanted, layout, rows, 0, stop)
        if miss is not None:
            raise NotFound(
                f"tokens {reached} to {stop} of the session cannot be had: {miss}", again
            )
    try:
        tail = store.sessions.tail_rows(session)
    except Damaged as error:
        raise NotFound(f"the session's tail cannot be had: {error.what}", again) from error
    for name, array in tail.items():
        rows[name][:, stop:] = array
    return target.give(rows, record.token_ids, order)


def write_files(
    files: Mapping[str, bytes], out: Path, *, as_folder: bool, force: bool = False
) -> None:
    """Put one file at `out`, or a folder of files: whole or not at all.

    Everything is written beside it first, and renamed: a llama-server that reads a slot file which is
    half there aborts, and vLLM's connector takes a folder for whole as soon as it stands. Also with `force` no
    folder goes that holds anything but these files: it may be a server's, or somebody's home."""
    if not force and os.path.lexists(out):
        raise UsageError(f"{out} is there already", "choose another name, or --force")
    if not as_folder and out.exists() and not out.is_file():  # /dev/stdout would be renamed over
        what = "a folder" if out.is_dir() else "no regular file"
        raise UsageError(f"{out} is {what}", "name a file")
    if as_folder and os.path.lexists(out) and not _is_replaced_by(files, out):
        raise UsageError(
            f"{out} is something else than a folder of just these files",
            "choose another name, or remove it",
        )
    out = out.absolute()  # "." has no name to put another one beside
    beside = out.with_name(f".{out.name[:200]}.{secrets.token_hex(4)}.unfinished")
    try:
        if not as_folder:
            (data,) = files.values()
            _write(beside, data)
            os.replace(beside, out)
            return
        for name, data in files.items():
            _write(beside.joinpath(*name.split("/")), data)
        if os.path.lexists(out):
            shutil.rmtree(out)
        os.replace(beside, out)
    except OSError as error:
        raise StoreError(
            f"cannot write {out}: {error.strerror}", "check the path and the space on the disk"
        ) from error
    finally:
        if beside.is_dir():
            shutil.rmtree(beside, ignore_errors=True)
        with contextlib.suppress(OSError):  # not to tell of this instead
            beside.unlink(missing_ok=True)


def _is_replaced_by(files: Mapping[str, bytes], out: Path) -> bool:
    if out.is_symlink() or not out.is_dir():
        return False
    return all(
        each.relative_to(out).as_posix() in files or (each.is_dir() and not each.is_symlink())
        for each in out.rglob("*")
    )


def _write(path: Path, data: bytes) -> None:
    """For its owner alone, as what `kvsnap export` writes without --to: it is a conversation."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
