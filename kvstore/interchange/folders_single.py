"""Findings on files that hold a whole cache each: slots of llama-server, and what users save themselves."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence

from kvsnap.formats.errors import Damaged, KvsnapError
from kvsnap.formats.interchange import get_format, recognise
from kvsnap.formats.interchange.foreign import Given
from kvsnap.formats.interchange.llama_server_slot import parse_slot
from kvsnap.formats.interchange.safetensors_file import peek_header
from kvsnap.kvstore.doctor import Finding
from kvsnap.kvstore.interchange.folder_walk import Contents, Found
from kvsnap.kvstore.interchange.folders_served import counted, declared_size, some, total

SLOT, SEQUENCE = "llama-server", "llama.cpp"
KVSNAP = "kvsnap"
LARGEST_SLOT = 2**34
"""16 GiB, in memory for a moment; no more than half of what the machine has."""
_LINES = 20
"""Broken files that get a line of their own."""
_MAGIC = b"qsgg"
_ABORTS = (
    "restoring it can end the llama-server process, or write other text: delete it or save it anew,"
    " unless a server is saving it just now"
)


def kind_of(contents: Contents, found: Found) -> str | None:
    """The name of a format, KVSNAP for its own files, None for what is neither."""
    head = contents.head(found)
    if bytes(head[:4]) == _MAGIC:
        return SLOT if bytes(head[12:16]) == b"\xff" * 4 else SEQUENCE
    if not head:
        return None
    header = peek_header(head)
    metadata = header.get("__metadata__") if header else None
    if isinstance(metadata, dict) and KVSNAP in metadata:
        return KVSNAP
    known = recognise({found.name: head})
    return known.name if known is not None else None


def single(
    contents: Contents, kinds: Mapping[str, list[Found]], line: Callable[[str, Found], str]
) -> Iterator[Finding]:
    """`kinds`: files by `kind_of`; `line`: what to do with a file of a kind."""
    for kind, own in sorted(kinds.items()):
        if kind == KVSNAP:
            what = f"{counted(len(own), 'files')} of kvsnap's own, {total(own)}"
            yield Finding("ok", what, "kvsnap doctor --store DIR and kvsnap verify look at a store")
            continue
        good, said = own, list[Finding]()
        if kind in (SLOT, SEQUENCE):
            good, said, tokens = _walked(contents, kind, own)
            more = f", {tokens} tokens in the {len(good)} that are whole"
        else:
            more = ""
            cut = [found.path for found in own if _is_cut(contents, found)]
            if cut:
                what = f"{len(cut)} are not as long as their header says: {some(cut)}"
                said.append(Finding("problem", what, "they were cut: nothing can be imported"))
                good = [found for found in own if found.path not in set(cut)]
        title = get_format(kind).title
        what = f"{title}: {counted(len(own), 'files')}, {total(own)}{more}"
        if good:
            yield Finding("ok", what, line(kind, good[0]))
        else:
            yield Finding("note", what, "none of them can be imported")
        yield from said


def _walked(
    contents: Contents, kind: str, own: Sequence[Found]
) -> tuple[list[Found], list[Finding], int]:
    """Those that are whole, findings on the others, and how many tokens the former hold."""
    good: list[Found] = []
    bad: list[Finding] = []
    notes: dict[str, list[str]] = defaultdict(list)
    tokens = 0
    for found in own:
        try:
            count = _tokens_of(contents, kind, found)
            if count is None:
                notes["too large to be looked through here"].append(found.path)
            else:
                tokens += count
                good.append(found)
        except Damaged as error:
            bad.append(Finding("problem", f"{found.path}: {error.what}", _ABORTS))
        except KvsnapError as error:
            notes[error.what].append(found.path)
        except OSError:
            notes["cannot be read"].append(found.path)
    if len(bad) > _LINES:
        more = f"{len(bad) - _LINES} more files like these"
        bad = [*bad[:_LINES], Finding("problem", more, _ABORTS)]
    said = [
        Finding("note", f"{some(paths)}: {what}", "cannot be imported")
        for what, paths in sorted(notes.items())
    ]
    return good, [*bad, *said], tokens


def _tokens_of(contents: Contents, kind: str, found: Found) -> int | None:
    """Of a file that is whole; None where it does not fit into memory."""
    buffer = contents.whole(found, min(LARGEST_SLOT, _half_of_memory()))
    if buffer is None:
        return None
    if kind == SLOT:
        return len(parse_slot(buffer).token_ids)
    return get_format(kind).read({found.name: buffer}, Given()).tokens


def _is_cut(contents: Contents, found: Found) -> bool:
    declared = declared_size(contents.head(found))
    return declared is not None and declared != found.size


def _half_of_memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
