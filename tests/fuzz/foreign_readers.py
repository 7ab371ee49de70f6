"""What an import does with other tools' files: they are recognised, read, and all rows used. See `readers`."""

from __future__ import annotations

import numpy as np

from kvsnap.formats.errors import Damaged
from kvsnap.formats.interchange import get_format, recognise
from kvsnap.formats.interchange.foreign import Files, ForeignRows
from kvsnap.formats.interchange.llama_server_slot import SlotFile, parse_slot
from kvsnap.formats.interchange.lmcache_fs import chunk_name
from kvsnap.formats.interchange.pickle_reader import Known, read_pickle
from kvsnap.formats.interchange.safetensors_file import peek_header
from kvsnap.formats.interchange.sglang_file import page_name
from kvsnap.formats.interchange.torch_tensors import CACHE, DTYPES, LAYER, STORAGES
from kvsnap.formats.interchange.torch_zip import read_entries
from kvsnap.formats.interchange.vllm_example import layer_number
from kvsnap.formats.interchange.vllm_fs_tier import (
    Config,
    block_file,
    is_base,
    parse_config,
    rank_folder,
)
from tests.fuzz import foreign_seeds
from tests.fuzz.inputs import as_buffer, passes
from tests.fuzz.other_readers import in_order

_KNOWN = Known(
    makers={
        "torch._utils._rebuild_tensor_v2": lambda *told: told,
        "collections.OrderedDict": lambda *told: {},
        "__builtin__.set": lambda *told: told,
        "torch.device": lambda *told: told,
    },
    classes={CACHE, LAYER},
    values={*STORAGES, *(f"torch.{name}" for name in DTYPES)},
    persistent=lambda told: told,
)


def _files(name: str, data: bytes) -> Files:
    if name in foreign_seeds.GIVEN:
        return {n: as_buffer(content) for n, content in foreign_seeds.unbundled(data).items()}
    return {"x": as_buffer(data)}


def recognised(name: str, data: bytes) -> bool:
    return get_format(name).recognise(_files(name, data))


def header_past(data: bytes) -> bool:
    return peek_header(as_buffer(data)) is not None


def zip_past(data: bytes) -> bool:
    return passes(lambda: read_entries(as_buffer(data)))


def read(name: str, data: bytes) -> ForeignRows:
    """Also what all other formats say of it, who may refuse nothing."""
    files = _files(name, data)
    recognise(files)
    return get_format(name).read(files, foreign_seeds.given(name))


def used(found: ForeignRows) -> None:
    """All rows are there, as many as ids, and of one width a plane."""
    assert len(found.k) == len(found.v) > 0
    for rows in (*found.k, *found.v):
        assert len(np.ascontiguousarray(rows)) == found.tokens
        assert rows.dtype.kind == "u"
    for planes in (found.k, found.v):
        assert len({(rows.shape, rows.dtype) for rows in planes}) == 1
    assert found.token_ids is None or len(found.token_ids) == found.tokens
    assert all(isinstance(text, str) for pair in found.told.items() for text in pair)


def slot(data: bytes) -> SlotFile:
    return parse_slot(as_buffer(data))


def slot_rows(found: SlotFile) -> None:
    in_order(found.state)
    assert len(found.state.positions) == len(found.token_ids)
    if found.window is not None:
        first = len(found.token_ids) - len(found.window.positions)
        assert found.window.positions.tolist() == list(range(first, len(found.token_ids)))


def unpickled(data: bytes) -> object:
    """What is called gives its arguments, and a persistent id what stands for it."""
    return read_pickle(data, _KNOWN)


def config(data: bytes) -> Config:
    return parse_config(as_buffer(data))


def config_used(found: Config) -> None:
    assert found.folder
    assert found.least_size(0) >= 0


def name(data: bytes) -> None:
    """`Damaged` where nobody knows the name."""
    text = data.decode("utf-8", "surrogateescape")
    readers = (page_name, chunk_name, block_file, rank_folder, layer_number)
    if not any([reader(text) is not None for reader in readers] + [is_base(text)]):
        raise Damaged("no name of a page, chunk or block")
