"""Files of other tools that are large in one way. See `grown`."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from typing import Any

from kvsnap.formats.interchange.torch_zip import write_entries
from tests.fuzz.foreign_seeds import bundled, files, unbundled

Maker = Callable[[int], bytes]


def _tensors(header: Mapping[str, Any], size: int = 0) -> bytes:
    head = json.dumps(header).encode()
    return struct.pack("<Q", len(head)) + head + bytes(size)


def _entry(shape: list[int], start: int, stop: int) -> dict[str, Any]:
    return {"dtype": "F16", "shape": shape, "data_offsets": [start, stop]}


def many_layers(n: int) -> bytes:
    """Valid: of one token each."""
    names = [f"{plane}_{layer}" for layer in range(n) for plane in "kv"]
    table = {name: _entry([1, 1, 1, 1], 2 * at, 2 * at + 2) for at, name in enumerate(names)}
    return _tensors(table, 4 * n)


def many_empty(n: int) -> bytes:
    return _tensors({f"{name}_{layer}": _entry([0], 0, 0) for layer in range(n) for name in "kv"})


def many_classes(n: int) -> bytes:
    """Valid: of mlx-lm's older layout."""
    told = {key: text for at in range(n) for key, text in ((f"0.{at}", ""), (f"2.{at}", "KVCache"))}
    places = [(f"{layer}.{at}", 2 * layer + at) for layer in range(n) for at in (0, 1)]
    table = {name: _entry([1, 1, 1, 1], 2 * at, 2 * at + 2) for name, at in places}
    return _tensors({"__metadata__": told, **table}, 4 * n)


def long_metadata(n: int) -> bytes:
    return _tensors({"__metadata__": {"1.0": "KVCache", "0.x": "y" * n, "2.0": "", "2.1.0": "0.2"}})


def many_numbers(n: int) -> bytes:
    return b"\x80\x02](" + b"K\x05" * n + b"e."


def deep_lists(n: int) -> bytes:
    return b"\x80\x02" + b"]" * n + b"a" * (n - 1) + b"."


def twice_each(n: int) -> bytes:
    """Tuples that hold the one before twice: to look through all of them never ends."""
    return b"\x80\x02K\x01q\x00" + b"h\x00\x86q\x00" * n + b"."


def many_objects(n: int) -> bytes:
    one = b"ctransformers.cache_utils\nDynamicCache\n)\x81}X\x01\x00\x00\x00aNsb"
    return b"\x80\x02](" + one * n + b"e."


def _zipped(pickle: bytes, more: Mapping[str, bytes] | None = None) -> bytes:
    own = {"data.pkl": pickle, "byteorder": b"little", "version": b"3\n", **(more or {})}
    return write_entries([(f"x/{name}", data) for name, data in own.items()])


def deep_zipped(n: int) -> bytes:
    return _zipped(deep_lists(n))


def twice_zipped(n: int) -> bytes:
    return _zipped(twice_each(n))


def many_entries(n: int) -> bytes:
    return _zipped(b"\x80\x02).", {f"data/{number}": b"" for number in range(n)})


def many_ids(n: int) -> bytes:
    """A list of ids, and rows of none."""
    (magic, version) = struct.unpack_from("<2I", files("llama.cpp")[0])
    return struct.pack("<3I", magic, version, n) + bytes(4 * n)


def many_pages(n: int) -> bytes:
    own = unbundled(files("sglang")[0])
    return bundled({**own, **{f"{number:064x}_m_0_1.bin": b"" for number in range(n)}})


def many_chunks(n: int) -> bytes:
    own = unbundled(files("lmcache")[0])
    some = next(iter(own)).rpartition("@")[0]
    return bundled({**own, **{f"{some}@{number:064x}.data": b"" for number in range(n)}})


def many_folders(n: int) -> bytes:
    own = unbundled(files("vllm-example")[0])
    name = next(iter(own)).partition("/")[2]
    return bundled({**own, **{f"{number:032x}/{name}": b"" for number in range(n)}})


def many_groups(n: int) -> bytes:
    groups = [{"layer_names": ["a"], "tokens_per_block": 1}] * n
    told = {"model_name": "m", "dtype": "float16", "blocks_per_file": 1, "kv_cache_groups": groups}
    return json.dumps(told).encode()


FOREIGN_GROWN: tuple[tuple[str, Maker, int], ...] = (
    ("foreign, safetensors", many_layers, 2_000),
    ("foreign, safetensors", many_empty, 3_000),
    ("foreign, mlx-lm-0.31", many_classes, 2_000),
    ("foreign, mlx-lm", long_metadata, 200_000),
    ("foreign, pickle", many_numbers, 50_000),
    ("foreign, pickle", deep_lists, 50_000),
    ("foreign, pickle", twice_each, 50_000),
    ("foreign, pickle", many_objects, 5_000),
    ("foreign, transformers", deep_zipped, 50_000),
    ("foreign, transformers", twice_zipped, 20_000),
    ("foreign, transformers", many_entries, 3_000),
    ("foreign, llama.cpp", many_ids, 50_000),
    ("foreign, sglang", many_pages, 2_000),
    ("foreign, lmcache", many_chunks, 2_000),
    ("foreign, vllm-example", many_folders, 2_000),
    ("foreign, config of a tier", many_groups, 2_000),
)
