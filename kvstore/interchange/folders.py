"""What somebody else's folder of KV caches is, what is wrong with it, and what can be done with it.

Looked at are names, lengths and first bytes; slot files of llama-server are walked through, as one that is
cut ends the server that restores it. Nothing is changed, and no link is followed.
"""

from __future__ import annotations

import re
import shlex
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from kvsnap.formats.interchange import FORMATS
from kvsnap.formats.interchange.lmcache_fs import ChunkName, chunk_name
from kvsnap.formats.interchange.sglang_file import PageName, page_name
from kvsnap.formats.interchange.vllm_example import layer_number
from kvsnap.formats.interchange.vllm_fs_tier import (
    TEMPORARY,
    BlockFile,
    block_file,
    is_base,
    rank_folder,
)
from kvsnap.kvstore import files
from kvsnap.kvstore.doctor import Finding
from kvsnap.kvstore.interchange.folder_walk import MOST_FILES, Contents, Found, walk
from kvsnap.kvstore.interchange.folders_served import (
    counted,
    lmcache,
    sglang,
    size_of,
    some,
    total,
    vllm_example,
    vllm_fs,
)
from kvsnap.kvstore.interchange.folders_single import kind_of, single
from kvsnap.kvstore.place import SETTINGS

MOST_HEADS = 10_000
"""Files whose names say nothing, and that are looked into."""
_LEFT = re.compile(
    r".+\.(?:tmp|part|incomplete|unfinished)(?:\.[0-9]{1,20}\.[0-9]{1,20}\.[0-9a-f]{1,64})?",
    re.DOTALL,
)
"""SGLang writes NAME.tmp.<pid>.<thread>.<uuid>, LMCache NAME.tmp, and both rename."""


class _Sorted:
    """The files of a folder, by what their names say they are."""

    def __init__(self, contents: Contents) -> None:
        self.pages: list[tuple[Found, PageName]] = []
        self.chunks: list[tuple[Found, ChunkName]] = []
        self.prompts: dict[str, list[Found]] = defaultdict(list)
        self.configs: dict[str, Found] = {}
        self.blocks: dict[tuple[str, int], list[tuple[Found, BlockFile]]] = defaultdict(list)
        self.left: list[Found] = []
        self.others: list[Found] = []
        for found in contents.files:
            self._take(found)

    def _take(self, found: Found) -> None:
        folder, _, name = found.path.rpartition("/")
        if TEMPORARY.fullmatch(name) or _LEFT.fullmatch(name):
            self.left.append(found)
        elif (page := page_name(name)) is not None:
            self.pages.append((found, page))
        elif (chunk := chunk_name(name)) is not None:
            self.chunks.append((found, chunk))
        elif layer_number(name) is not None:
            self.prompts[folder].append(found)
        elif (base := folder.rpartition("/")[2]) and name == "config.json" and is_base(base):
            self.configs[base] = found
        elif not self._is_block(found):
            self.others.append(found)

    def _is_block(self, found: Found) -> bool:
        """Of vLLM's fs tier: RANK/hhh/hh_gN/hash.bin."""
        above, *rest = found.path.rsplit("/", 3)
        block = block_file("/".join(rest)) if len(rest) == 3 else None
        rank = rank_folder(above.rpartition("/")[2])
        if block is None or rank is None:
            return False
        self.blocks[rank].append((found, block))
        return True


def examine_folder(folder: Path) -> Iterator[Finding]:
    """All findings on a folder. Raises `NotFound` or `UsageError` where there is none."""
    if files.file_size(folder / SETTINGS) is not None:
        line = f"kvsnap doctor --store {shlex.quote(str(folder))}"
        yield Finding("ok", f"{folder} is a store of kvsnap's", line)
        return
    contents = walk(folder)
    yield Finding(
        "ok", f"{folder}: {counted(len(contents.files), 'files')}, {total(contents.files)}"
    )
    own = _Sorted(contents)
    kinds, unknown, budget = _by_content(contents, own.others)
    if own.pages:
        yield from sglang(own.pages, _line(folder, "sglang", "--block-tokens PAGE"))
    if own.chunks:
        options = "--block-tokens BLOCK --chunk-tokens CHUNK"
        yield from lmcache(own.chunks, _line(folder, "lmcache", options))
    if own.prompts:
        line = _line(folder, "vllm-example", "--block-tokens BLOCK")
        yield from vllm_example(contents, own.prompts, line, budget)
    if own.configs or own.blocks:
        yield from vllm_fs(contents, own.configs, own.blocks)
    yield from single(contents, kinds, lambda kind, found: _line_of_file(folder, kind, found))
    yield from _the_rest(contents, own.left, unknown)
    if not any((own.pages, own.chunks, own.prompts, own.configs, own.blocks, kinds)):
        what = "nothing here is a KV cache that kvsnap knows"
        yield Finding("note", what, "known: " + ", ".join([*FORMATS, "vLLM's fs tier"]))


def _by_content(
    contents: Contents, others: list[Found]
) -> tuple[dict[str, list[Found]], list[Found], int]:
    """Files by what their first bytes say, those that say nothing, and how many more may be opened."""
    kinds: dict[str, list[Found]] = defaultdict(list)
    unknown = others[MOST_HEADS:]
    for found in others[:MOST_HEADS]:
        kind = kind_of(contents, found) if found.size else None
        if kind is None:
            unknown.append(found)
        else:
            kinds[kind].append(found)
    return kinds, unknown, max(0, MOST_HEADS - len(others))


def _the_rest(contents: Contents, left: list[Found], unknown: list[Found]) -> Iterator[Finding]:
    """What is no cache, or cannot be looked at."""
    closed = [found.path for found in contents.files if not found.readable] + contents.closed
    if closed:
        what = f"{len(closed)} cannot be read: {some(closed)}"
        yield Finding("problem", what, "check owner and mode")
    if left:
        what = f"{counted(len(left), 'unfinished files')}, {total(left)}: {_names(left)}"
        yield Finding("note", what, "left by a killed writer: delete them while no engine runs")
    empty = [found for found in unknown if not found.size]
    if empty:
        yield Finding(
            "note", f"{counted(len(empty), 'empty files')}: {_names(empty)}", "delete them"
        )
    strange = [found for found in unknown if found.size]
    if strange:
        size = size_of(sum(found.size for found in strange))
        what = f"{counted(len(strange), 'files')} of no kind that kvsnap knows, {size}"
        yield Finding("note", f"{what}: {_names(strange)}", "nothing is done with them")
    if contents.links:
        what = f"{counted(len(contents.links), 'symbolic links')}: {some(contents.links)}"
        yield Finding("note", what, "not followed: look at where they lead")
    if contents.others:
        what = f"{len(contents.others)} neither files nor folders: {some(contents.others)}"
        yield Finding("note", what, "not opened")
    if contents.more:
        what = f"only the first {MOST_FILES} files and eight folders deep were looked at"
        yield Finding("note", what, "look at its folders one by one")


def _names(found: list[Found]) -> str:
    return some(one.path for one in found)


def _line(folder: Path, kind: str, options: str) -> str:
    """How one of its prompts is taken into a store."""
    where = shlex.quote(str(folder.resolve()))
    return f"kvsnap import {where} --from {kind} --model MODEL {options} --token-ids FILE --session NAME"


def _line_of_file(folder: Path, kind: str, found: Found) -> str:
    """The same of one file."""
    ids = "" if kind.startswith("llama") else " --prompt-file TEXT"
    where = shlex.quote(str(folder.resolve().parent / found.path))
    return f"kvsnap import {where} --from {kind} --model MODEL{ids} --session NAME"
