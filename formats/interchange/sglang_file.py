"""SGLang's HiCacheFile: a file for a page of tokens, its name a hash over all tokens up to its end.

    <64 hex>_<model>_<tp rank>_<tp size>[_<pp size>_<pp rank>][_cp<rank>_<size>].bin

(SGLang 0.5.23, python/sglang/srt/mem_cache/hicache_storage.py, `HiCacheFile`.) `/` of the model's name
is `-`; latent attention leaves tp out; `<64 hex>.<pool>_…` are pages of other pools (recurrent states,
sliding windows). The hash of a page is sha256(hash of the page before, 32 bytes, or nothing | token ids
u32); requests with a salt or extra key begin with another hash. The content is the page as it stands in
host memory, with no head, and `--hicache-mem-layout` decides its order, at equal sizes:

    layer_first, page_first_direct  [K V, layers, page, heads, head_dim]      run with the engine
    page_first                      [K V, page, layers, heads, head_dim]      run with its host pool
    page_head                       [K V, heads, page, layers, head_dim]      run with its host pool
    page_unified                    not known here

The files say neither layout, element type, page size, layers, heads nor weights: all are given, and a size
is all that can contradict them. K's elements are in the order of transformers.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

import numpy as np

from kvsnap.formats.errors import Unsupported, UsageError
from kvsnap.formats.interchange.foreign import Files, ForeignRows, Format, Given
from kvsnap.formats.interchange.served_rows import (
    element_bytes,
    given_ids,
    given_size,
    proven_rows,
    read_parts,
    safe_model,
    stacked,
)
from kvsnap.formats.layout import Array
from kvsnap.formats.names import TokenIds, token_array

_POOL = r"draft_indexer|draft_swa|deepseek_v4_c(?:4|128)(?:_indexer)?(?:_state)?|[a-z0-9]+"
_NAME = re.compile(rf"([0-9a-f]{{64}})(?:\.({_POOL}))?_(.*)\.bin", re.DOTALL)
_PAIR = re.compile(r"(.*)_([0-9]{1,6})_([0-9]{1,6})", re.DOTALL)
_OTHER_RANKS = re.compile(r"(?:_(?:cp|tp|dcp|page)[0-9]{1,9}(?:_[0-9]{1,6})?)+\Z")
_ORDERS = {
    "layer_first": "lphd",
    "page_first_direct": "lphd",
    "page_first": "plhd",
    "page_head": "hpld",
}
"""Layout → axes of a page's K or V: layers, page, heads, head_dim."""


@dataclass(frozen=True)
class PageName:
    """A file's name, taken apart. `tp`: (rank, size); None: of latent attention. `others`: what else of
    ranks stands in it. Which of a name's digits are the model's own nobody wrote down: ranks are below
    their size, and stand behind the size where they are of a pipeline."""

    key: str
    pool: str
    model: str
    tp: tuple[int, int] | None
    pp: tuple[int, int] | None
    others: str


def page_name(name: str) -> PageName | None:
    """None for what is no page's name."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    key, pool, model = found[1], found[2] or "", found[3]
    others = _OTHER_RANKS.search(model)
    if others is not None:
        model = model[: others.start()]
    tp = pp = None
    pair = _PAIR.fullmatch(model)
    if pair is not None and int(pair[2]) > int(pair[3]):
        pp, model = (int(pair[3]), int(pair[2])), pair[1]
        pair = _PAIR.fullmatch(model)
    if pair is not None and int(pair[2]) < int(pair[3]):
        tp, model = (int(pair[2]), int(pair[3])), pair[1]
    return PageName(key, pool, model, tp, pp, others[0] if others is not None else "")


def page_keys(token_ids: TokenIds, page: int) -> list[str]:
    """The hashes of all whole pages, in order."""
    ids = token_ids.astype("<u4", copy=False)
    digest, keys = b"", []
    for start in range(0, len(ids) - page + 1, page):
        digest = hashlib.sha256(digest + ids[start : start + page].tobytes()).digest()
        keys.append(digest.hex())
    return keys


def _recognise(files: Files) -> bool:
    return bool(files) and all(page_name(path.rpartition("/")[2]) for path in files)


def _read(files: Files, given: Given) -> ForeignRows:
    """Every whole page of the given ids must be there; pages of other prompts are passed over."""
    page, layers, heads, dim = (
        given_size(given, name) for name in ("block", "layers", "heads", "head_dim")
    )
    wide, axes, ids = element_bytes(given.dtype), _axes(given), given_ids(given)
    model, pages = _of_one_model(files, given)
    keys = page_keys(ids, page)
    contents = read_parts(files, pages, keys, page, "page", given)
    count = len(contents)
    sizes = {"l": layers, "p": page, "h": heads, "d": dim}
    planes = np.empty((2, layers, count * page, heads, dim), f"<u{wide}")
    order = [0, *(1 + axes.index(axis) for axis in "lphd")]
    for number, content in enumerate(contents):
        rows = np.frombuffer(content, f"<u{wide}").reshape(2, *(sizes[axis] for axis in axes))
        planes[:, :, number * page : (number + 1) * page] = rows.transpose(order)
    told = {"model": model, "pages": str(count)}
    if len(pages) > count:
        told["other pages"] = str(len(pages) - count)
    return proven_rows(planes, given, ids, told)


def _axes(given: Given) -> str:
    layout = given.page_layout or "layer_first"
    if layout not in _ORDERS:
        raise Unsupported(
            f"pages of layout {layout!r} are not known to kvsnap", "known: " + ", ".join(_ORDERS)
        )
    return _ORDERS[layout]


def _of_one_model(files: Files, given: Given) -> tuple[str, dict[str, str]]:
    """Hash of a page → its path, of the model that was given, or of the only one there. Names alone
    are looked at: a server's folder holds the pages of many prompts."""
    wanted = None if given.model_name is None else safe_model(given.model_name, "-")
    found: dict[str, dict[str, str]] = {}
    for path in files:
        name = page_name(path.rpartition("/")[2])
        if name is None or wanted not in (None, name.model):
            continue
        if name.pool:
            raise Unsupported(
                f"the model's pages have a part in pool {name.pool[:32]!r}: recurrent layers or"
                " sliding windows, whose rows are not all kept"
            )
        if name.tp is None:
            raise Unsupported("pages of latent attention (their names hold no rank)")
        if name.tp != (0, 1) or name.pp or name.others:
            raise Unsupported(
                "pages of one of several ranks hold a part of the heads or layers",
                "only pages of an engine on one device can be read",
            )
        found.setdefault(name.model, {})[name.key] = path
    if len(found) > 1:
        names = ", ".join(repr(name[:64]) for name in sorted(found)[:5])
        raise UsageError(f"pages of {len(found)} models: {names}", "give model_name (--model-name)")
    if not found:
        raise UsageError(
            "none of these files is a page of that model" if wanted else "none of these is a page",
            "give the folder of SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR, and the model's name as it"
            " stands in the files' names",
        )
    return next(iter(found.items()))


def _write(rows: ForeignRows, given: Given) -> dict[str, bytes]:
    """The whole pages of rows, for an engine on one device."""
    page, axes = given_size(given, "block"), _axes(given)
    model = safe_model(given.model_name, "-")
    k, v = stacked(rows, given, page, "SGLang")
    assert rows.token_ids is not None
    keys = page_keys(token_array(rows.token_ids)[: k.shape[1]], page)
    order = [0, *(1 + "lphd".index(axis) for axis in axes)]
    written = {}
    for number, key in enumerate(keys):
        part = slice(number * page, (number + 1) * page)
        content: Array = np.stack([k[:, part], v[:, part]]).transpose(order)
        written[f"{key}_{model}_0_1.bin"] = content.tobytes()
    return written


SGLANG_FILE = Format(
    "sglang", "SGLang HiCacheFile pages", _recognise, _read, _write, is_folder=True
)
