"""Findings on folders that serving engines keep pages in: vLLM's two, SGLang's and LMCache's.

Their files have no head and no checksum. What can be told is whether the names are whole, whether the
files of a kind have one length, and which models, ranks and groups they are of.
"""

from __future__ import annotations

import shlex
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from kvsnap.formats.errors import KvsnapError
from kvsnap.formats.interchange.lmcache_fs import ChunkName
from kvsnap.formats.interchange.safetensors_file import peek_header
from kvsnap.formats.interchange.sglang_file import PageName
from kvsnap.formats.interchange.vllm_example import layer_number
from kvsnap.formats.interchange.vllm_fs_tier import MAX_CONFIG, BlockFile, Config, parse_config
from kvsnap.kvstore.doctor import Finding
from kvsnap.kvstore.interchange.folder_walk import Contents, Found

SHOWN = 5
"""Names in a line."""
_SHORT = (
    "delete them while the engine is down: it computes what is missing, and trusts what is there"
)


def size_of(count: int) -> str:
    for unit, name in ((10**9, "GB"), (10**6, "MB"), (1000, "kB")):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count} bytes"


def total(files: Iterable[Found]) -> str:
    return size_of(sum(found.size for found in files))


def some(names: Iterable[str]) -> str:
    """The first names of many, for a line."""
    listed = sorted(names)
    return ", ".join(listed[:SHOWN]) + (" …" if len(listed) > SHOWN else "")


def counted(count: int, what: str) -> str:
    return f"{count} {what}" if count != 1 else f"one {what.removesuffix('s')}"


def odd_lengths(kind: str, files: Sequence[Found]) -> Iterator[Finding]:
    """Of files that must all have one length: the empty ones, and those unlike most."""
    empty = [found.path for found in files if not found.size]
    if empty:
        yield Finding("problem", f"{kind}: {len(empty)} empty: {some(empty)}", _SHORT)
    sizes = Counter(found.size for found in files if found.size)
    if len(sizes) < 2:
        return
    usual, most = max(sizes.items(), key=lambda item: (item[1], item[0]))
    odd = [f"{found.path} ({found.size})" for found in files if found.size not in (0, usual)]
    if len(odd) > most:
        listed = ", ".join(f"{size} ({count})" for size, count in sizes.most_common(SHOWN))
        what = f"{kind}: {len(sizes)} lengths in bytes (files of each): {listed}"
        yield Finding("note", what, "several page sizes or models under one name, or cut files")
    else:
        what = f"{kind}: {len(odd)} not of the {usual} bytes of the other {most}: {some(odd)}"
        yield Finding("problem", what, _SHORT)


def sglang(pages: Sequence[tuple[Found, PageName]], line: str) -> Iterator[Finding]:
    """SGLang's HiCacheFile."""
    models: dict[str, list[tuple[Found, PageName]]] = defaultdict(list)
    for found, name in pages:
        models[name.model].append((found, name))
    for model, own in sorted(models.items()):
        ranks: dict[str, list[Found]] = defaultdict(list)
        keys: dict[str, set[str]] = defaultdict(set)
        for found, name in own:
            ranks[_sglang_rank(name)].append(found)
            keys[_sglang_rank(name)].add(name.key)
        simple = list(ranks) == ["rank 0 of 1"]
        own_line = _of_model(line, model, len(models))
        advice = own_line if simple else "kvsnap imports pages of an engine on one device only"
        files = [found for found, _ in own]
        what = f"SGLang HiCacheFile, model {model!r}: {counted(len(own), 'pages')}, {total(files)}"
        yield Finding("ok", f"{what} ({some(ranks)})", advice)
        for rank, alike in sorted(ranks.items()):
            yield from odd_lengths(f"pages of {model!r}, {rank}", alike)
        lacking = _not_everywhere(keys.values())
        if lacking:
            what = f"{lacking} pages of {model!r} are not there for every rank and pool"
            yield Finding("note", what, "SGLang stops at the first page that one of them lacks")


def _of_model(line: str, model: str, models: int) -> str:
    return f"{line} --model-name {shlex.quote(model)}" if models > 1 else line


def _not_everywhere(keys: Iterable[set[Any]]) -> int:
    """How many parts some rank has, and not each."""
    first, *others = keys
    return len(first.union(*others)) - len(first.intersection(*others))


def _sglang_rank(name: PageName) -> str:
    rank = "latent attention" if name.tp is None else f"rank {name.tp[0]} of {name.tp[1]}"
    if name.pp is not None:
        rank += f", stage {name.pp[0]} of {name.pp[1]}"
    return rank + name.others + (f", pool {name.pool}" if name.pool else "")


def lmcache(chunks: Sequence[tuple[Found, ChunkName]], line: str) -> Iterator[Finding]:
    """LMCache's fs tier."""
    models: dict[str, list[tuple[Found, ChunkName]]] = defaultdict(list)
    for found, name in chunks:
        models[name.model].append((found, name))
    for model, own in sorted(models.items()):
        kinds: dict[str, list[Found]] = defaultdict(list)
        keys: dict[str, set[tuple[str, str]]] = defaultdict(set)
        for found, name in own:
            rank = f"rank {name.rank >> 16 & 255} of {name.world}, group {name.group}"
            kinds[rank].append(found)
            keys[rank].add((name.key, name.salt))
        salts = len({name.salt for _, name in own if name.salt})
        files = [found for found, _ in own]
        what = f"LMCache fs, model {model!r}: {counted(len(own), 'chunks')}, {total(files)}"
        what += f" ({some(kinds)}" + (f"; {counted(salts, 'salts')})" if salts else ")")
        simple = list(kinds) == ["rank 0 of 1, group 0"]
        own_line = _of_model(line, model, len(models))
        advice = own_line if simple else "kvsnap imports chunks of an engine on one device only"
        yield Finding("ok", what, advice)
        for kind, alike in sorted(kinds.items()):
            yield from odd_lengths(f"chunks of {model!r}, {kind}", alike)
        lacking = _not_everywhere(keys.values())
        if lacking:
            what = f"{lacking} chunks of {model!r} are not there for every rank and group"
            yield Finding("note", what, "a chunk is used where every rank has its part")


def vllm_example(
    contents: Contents, folders: Mapping[str, Sequence[Found]], line: str, budget: int
) -> Iterator[Finding]:
    """Folders of vLLM's ExampleConnector, a prompt each. `budget`: how many files may be opened."""
    files = [found for own in folders.values() for found in own]
    what = f"vLLM ExampleConnector: {counted(len(folders), 'prompts')}, {total(files)}"
    yield Finding("ok", what, line)
    incomplete: list[str] = []
    broken: list[str] = []
    most = max(map(len, folders.values()))
    for folder, own in folders.items():
        numbers = sorted(layer_number(found.name) or 0 for found in own)
        if numbers != list(range(most)):
            incomplete.append(f"{folder} ({len(own)} of {most})")
        if (budget := budget - len(own)) < 0:
            continue
        kinds = {_tensor_of(contents, found) for found in own}
        if None in kinds or len(kinds) > 1:
            broken.append(folder)
    if incomplete:
        what = f"prompts without all their layers: {some(incomplete)}"
        yield Finding("problem", what, "delete their folders: vLLM takes them for whole ones")
    if broken:
        what = f"prompts with layers that are cut or unlike one another: {some(broken)}"
        yield Finding("problem", what, "delete their folders: vLLM fails when it loads them")
    if budget < 0:
        yield Finding("note", "not all of their files were looked into: there are too many")


def _tensor_of(contents: Contents, found: Found) -> tuple[Any, ...] | None:
    """Type and shape of the one tensor; None where the file is not as long as its header says."""
    head = contents.head(found)
    header = peek_header(head)
    tensor = header.get("kv_cache") if header else None
    if not isinstance(tensor, dict) or declared_size(head) != found.size:
        return None
    return str(tensor.get("dtype")), str(tensor.get("shape"))


def declared_size(head: memoryview) -> int | None:
    """How long a safetensors file is by its header; None where that cannot be told."""
    header = peek_header(head)
    if header is None:
        return None
    ends = [0]
    for name, entry in header.items():
        offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
        if name == "__metadata__":
            continue
        if not isinstance(offsets, list) or len(offsets) != 2 or type(offsets[1]) is not int:
            return None
        ends.append(offsets[1])
    return 8 + int.from_bytes(head[:8], "little") + max(ends)


def vllm_fs(
    contents: Contents,
    configs: Mapping[str, Found],
    blocks: Mapping[tuple[str, int], Sequence[tuple[Found, BlockFile]]],
) -> Iterator[Finding]:
    """vLLM's fs tier. `configs`: by the folder's name; `blocks`: by that name and rank."""
    ranks: dict[str, list[int]] = defaultdict(list)
    for base, rank in blocks:
        ranks[base].append(rank)
    for base in sorted({*configs, *ranks}):
        own = [found for rank in ranks[base] for found, _ in blocks[base, rank]]
        config, said = _config(contents, configs.get(base), base)
        model = f"model {config.model!r}, {config.dtype}" if config else f"folder {base!r}"
        what = f"vLLM fs tier, {model}: {counted(len(own), 'files')}, {total(own)}"
        what += f" (ranks {some(map(str, ranks[base])) or 'none'}"
        groups = ", ".join(
            f"{group.layers} layers in blocks of {group.tokens_per_block} tokens"
            for group in (config.groups[:SHOWN] if config else ())
        )
        yield Finding(
            "ok",
            f"{what}; {groups})" if groups else f"{what})",
            "cannot be imported: nothing in it says of which tokens a file is; vLLM can keep its blocks in"
            " a kvsnap store instead, see docs/serving.md",
        )
        yield from said
        if config is not None and len(ranks[base]) not in (0, config.ranks):
            what = f"{base}: {len(ranks[base])} ranks of {config.ranks} are there"
            yield Finding("note", what, "a block is used where every rank has its part")
        for rank in sorted(ranks[base]):
            yield from _rank(f"{base}, rank {rank}", blocks[base, rank], config)


def _config(
    contents: Contents, found: Found | None, base: str
) -> tuple[Config | None, list[Finding]]:
    if found is None:
        what = f"{base}: its config.json is missing, which names the model"
        return None, [Finding("note", what, "vLLM writes it anew; its folder may have been moved")]
    try:
        buffer = contents.whole(found, MAX_CONFIG)
        if buffer is None:
            return None, [Finding("problem", f"{found.path} is too long", "vLLM did not write it")]
        config = parse_config(buffer)
    except (KvsnapError, OSError) as error:
        return None, [Finding("problem", f"{found.path}: {error}", "vLLM does not read it either")]
    if config.folder != base:
        what = f"{found.path} belongs to a folder {config.folder!r}"
        return config, [
            Finding("note", what, "renamed or changed by hand: vLLM finds nothing here")
        ]
    return config, []


def _rank(
    where: str, blocks: Sequence[tuple[Found, BlockFile]], config: Config | None
) -> Iterator[Finding]:
    groups: dict[int, list[Found]] = defaultdict(list)
    for found, block in blocks:
        groups[block.group].append(found)
    for group, files in sorted(groups.items()):
        yield from odd_lengths(f"{where}, group {group}", files)
        least = config.least_size(group) if config else 0
        short = [found.path for found in files if 0 < found.size < least]
        if short:
            what = f"{where}: {len(short)} shorter than {least} bytes can be: {some(short)}"
            yield Finding("problem", what, _SHORT)
        if config is not None and group >= len(config.groups):
            yield Finding("note", f"{where}: group {group} is none of config.json's")
    lost = [found.path for found, block in blocks if not block.placed]
    if lost:
        what = f"{where}: {len(lost)} files are not in the folders of their hash: {some(lost)}"
        yield Finding("note", what, "vLLM does not find them there")
