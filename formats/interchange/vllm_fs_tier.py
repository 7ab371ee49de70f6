"""vLLM's file system tier of offloaded blocks: what its names and its config.json say.

    <model, / as _>_<12 hex>/config.json                        the fields below
    <model, / as _>_<12 hex>_r<rank>/<hhh>/<hh>_g<group>/<hash>.bin

(vLLM 0.32.0, vllm/v1/kv_offload/file_mapper.py and tiering/fs.) `<12 hex>` begins the sha256 of the
fields as compact sorted JSON. Fields: model_name, dtype, tokens_per_hash, blocks_per_file, tp_size,
pp_size, pcp_size, dcp_size, inference_engine, kv_cache_groups [{tokens_per_block, layer_names}], and
where they apply parallel_agnostic, replicated_layout, canonical_format, storage_format. hhh and hh are
the hash's first digits. A file is written as `<name>_<number>.tmp` and renamed.

A block's file is the pages of one rank, tensor after tensor, rounded up to an alignment. It cannot be
imported: names are hashes over a pickle of tokens and more, and nothing tells which tokens, shapes or
layout a file has. All files of a group and rank have one size; which one, the config does not say, only
that each token of each layer takes a byte at least.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from typing import Any

from kvsnap.formats.errors import Damaged, Unsupported

MAX_CONFIG = 2**20
"""The layer names of 200 layers take 10 kB."""
_RANK = re.compile(r"(.+_[0-9a-f]{12})_r([0-9]{1,6})", re.DOTALL)
_BASE = re.compile(r".+_[0-9a-f]{12}", re.DOTALL)
_PATH = re.compile(r"([0-9a-f]{3})/([0-9a-f]{2})_g([0-9]{1,6})/([0-9a-f]{8,128})\.bin")
TEMPORARY = re.compile(r"(?:[0-9a-f]{8,128}\.bin|\.o_direct_probe)_[0-9]{1,20}\.tmp")
_MOST = 2**31 - 1
_RANKS = ("tp_size", "pp_size", "pcp_size", "dcp_size")


@dataclass(frozen=True)
class Group:
    """Layers whose blocks are alike."""

    layers: int
    tokens_per_block: int


@dataclass(frozen=True)
class Config:
    """`folder`: the name that these fields make. `split`: how many ranks share layers or tokens; those
    of tensor parallelism share heads."""

    folder: str
    model: str
    dtype: str
    ranks: int
    split: int
    blocks_per_file: int
    groups: tuple[Group, ...]
    format: str

    def least_size(self, group: int) -> int:
        """Bytes that a file of a group has at least; 0 where that is not known."""
        if group >= len(self.groups) or self.split > 1:
            return 0
        own = self.groups[group]
        return own.layers * own.tokens_per_block * self.blocks_per_file


@dataclass(frozen=True)
class BlockFile:
    """`placed`: whether its folders are those of its digest, where vLLM looks for it."""

    digest: str
    group: int
    placed: bool


def parse_config(buffer: memoryview) -> Config:
    """Raises `Damaged` for what is no config.json of this tier, `Unsupported` for another engine's."""
    if len(buffer) > MAX_CONFIG:
        raise Damaged(f"a config.json of {len(buffer)} bytes")
    try:
        fields = json.loads(bytes(buffer).decode("utf-8"))
        text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    except (ValueError, RecursionError) as error:
        raise Damaged("config.json is not JSON") from error
    if not isinstance(fields, dict):
        raise Damaged("config.json is not a table")
    model = fields.get("model_name")
    if not isinstance(model, str) or not isinstance(fields.get("dtype"), str):
        raise Damaged("config.json names no model or no element type")
    if fields.get("inference_engine", "vllm") != "vllm":
        raise Unsupported("config.json is of another engine than vLLM")
    sizes = {name: _count(fields, name, 1) for name in _RANKS}
    split = sizes["pp_size"] * sizes["pcp_size"] * sizes["dcp_size"]
    groups = fields.get("kv_cache_groups")
    if not isinstance(groups, list):
        raise Damaged("config.json lists no groups of layers")
    digest = hashlib.sha256(text.encode("utf-8")).hexdigest()[:12]
    return Config(
        folder=f"{model.replace('/', '_')}_{digest}",
        model=model,
        dtype=fields["dtype"],
        ranks=min(split * sizes["tp_size"], _MOST),
        split=min(split, _MOST),
        blocks_per_file=_count(fields, "blocks_per_file"),
        groups=tuple(map(_group, groups)),
        format=str(fields.get("canonical_format") or fields.get("storage_format") or ""),
    )


def _group(record: Any) -> Group:
    names = record.get("layer_names") if isinstance(record, dict) else None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise Damaged("config.json has a group without names of layers")
    return Group(len(names), _count(record, "tokens_per_block"))


def _count(record: dict[str, Any], name: str, default: int | None = None) -> int:
    value = record.get(name, default)
    if type(value) is not int or not 1 <= value <= _MOST:
        raise Damaged(f"config.json has no usable {name}")
    return value


def is_base(folder: str) -> bool:
    """Whether a folder is named as one that holds a config.json."""
    return _BASE.fullmatch(folder) is not None


def rank_folder(folder: str) -> tuple[str, int] | None:
    """Name of the config's folder, and the rank; None for another folder's name."""
    found = _RANK.fullmatch(folder)
    return (found[1], int(found[2])) if found is not None else None


def block_file(path: str) -> BlockFile | None:
    """Of a path below a rank's folder; None for another file's."""
    found = _PATH.fullmatch(path)
    if found is None:
        return None
    first, second, group, name = found.groups()
    return BlockFile(name, int(group), name.startswith(first + second))
