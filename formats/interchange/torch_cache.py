"""transformers caches as people write them with torch.save.

    tuple(cache) in v4, to_legacy_cache()     tuple of layers, each (K, V)
    tuple((l.keys, l.values) for l in ...)    the same
    tuple(cache) in v5                        each (K, V, sliding window or None)
    {"past_key_values": ..., "input_ids": I}  one of these or a cache; I [batch, tokens] or [tokens]
    the cache, 4.46                           DynamicCache: key_cache, value_cache (lists), _seen_tokens
    the cache, 4.57 and 5.24                  DynamicCache: layers, each DynamicLayer: keys, values

K and V are [batch, heads, tokens, head_dim] in the model's type. Seen: transformers 4.46.3, 4.57.1, 5.24.0
with torch 2.13. torch.load(weights_only=True) reads the first four; the last two run code in torch, and
are taken apart as data here (pickle_reader.py).

Not in the file: token ids, unless the user put them there; model, RoPE; padding, unless there is an
attention mask. A layer of a sliding window holds the last tokens only: in a tuple only a length that
differs tells, so token ids must be exactly as many as the rows.
"""

from __future__ import annotations

import reprlib

import numpy as np

from kvsnap.formats.errors import Damaged, Unsupported, UsageError
from kvsnap.formats.interchange.foreign import Files, ForeignRows, Format, Given, only
from kvsnap.formats.interchange.heads_first import ITEM_BYTES, Pairs, one_type, pairs_of, rows_of
from kvsnap.formats.interchange.pickle_reader import Stub
from kvsnap.formats.interchange.torch_save import Tensor, save
from kvsnap.formats.interchange.torch_tensors import CACHE, LAYER, TorchTensor, read_torch
from kvsnap.formats.layout import Array
from kvsnap.formats.names import TokenIds, token_array

_FORMS = "known: a tuple of (keys, values) a layer, a DynamicCache, a dict with past_key_values"
_IDS, _PAST, _MASK = "input_ids", "past_key_values", "attention_mask"
_LOCAL_HEADER, _NAME_AT = b"PK\3\4", 30
_FILE, _FOLDER = "cache.pt", "cache"


def _recognise(files: Files) -> bool:
    """A zip whose first entry is FOLDER/data.pkl, as torch.save writes it."""
    if len(files) != 1:
        return False
    head = bytes(next(iter(files.values()))[:512])
    name = head[_NAME_AT : _NAME_AT + int.from_bytes(head[26:28], "little")]
    return head.startswith(_LOCAL_HEADER) and name.endswith(b"/data.pkl")


def _read(files: Files, given: Given) -> ForeignRows:
    buffer = only(files)
    saved = read_torch(buffer)
    ids = None
    if isinstance(saved, dict):
        if _PAST not in saved:
            raise Unsupported(f"a dict with {reprlib.repr(list(saved))} is no cache", _FORMS)
        _check_mask(saved.get(_MASK), given)
        ids = _ids(saved.get(_IDS), given)
        saved = saved[_PAST]
    layers, form = _layers(saved)
    total = sum(k.nbytes + v.nbytes for k, v in layers)
    if total > len(buffer):
        raise Unsupported(
            f"tensors of {total} bytes in a file of {len(buffer)}: layers share their storage"
        )
    names = {name: name for name in ITEM_BYTES}
    kind = one_type([tensor.type for layer in layers for tensor in layer], names)
    arrays = [(k.array(), v.array()) for k, v in layers]
    return rows_of(Pairs(arrays, kind, token_ids=ids, told={"form": form}), given)


def _layers(saved: object) -> tuple[list[tuple[TorchTensor, TorchTensor]], str]:
    if isinstance(saved, tuple | list):
        return [_layer(number, layer) for number, layer in enumerate(saved)], "tuple"
    if not isinstance(saved, Stub) or saved.name != CACHE:
        raise Unsupported(f"a {type(saved).__name__} is no cache", _FORMS)
    if "layers" in saved.state:
        stubs = saved.state["layers"]
        if not isinstance(stubs, list):
            raise Damaged("the DynamicCache's layers are no list")
        return [_layer(n, _attributes(n, stub)) for n, stub in enumerate(stubs)], "DynamicCache"
    keys, values = saved.state.get("key_cache"), saved.state.get("value_cache")
    if not isinstance(keys, list) or not isinstance(values, list) or len(keys) != len(values):
        raise Damaged("the DynamicCache has neither layers nor as many keys as values")
    layers = [_layer(n, pair) for n, pair in enumerate(zip(keys, values, strict=True))]
    seen = saved.state.get("_seen_tokens")
    if any(k.shape[2:3] != (seen,) for k, _ in layers):
        raise Unsupported(
            f"the DynamicCache saw {reprlib.repr(seen)} tokens and holds others: some are gone"
        )
    return layers, "DynamicCache of 4.46"


def _attributes(number: int, stub: object) -> tuple[object, object]:
    if not isinstance(stub, Stub) or stub.name != LAYER:
        raise Unsupported(f"layer {number} of the DynamicCache is no DynamicLayer")
    return stub.state.get("keys"), stub.state.get("values")


def _layer(number: int, layer: object) -> tuple[TorchTensor, TorchTensor]:
    if not isinstance(layer, tuple | list) or len(layer) not in (2, 3):
        raise Unsupported(f"layer {number} is no pair of keys and values", _FORMS)
    k, v, *window = layer
    if window and window[0] is not None:
        raise Unsupported(
            f"layer {number} has a sliding window: the tokens before it are gone",
            "only caches that hold all tokens in all layers can be read",
        )
    if not isinstance(k, TorchTensor) or not isinstance(v, TorchTensor):
        raise Unsupported(f"layer {number} is no pair of tensors", _FORMS)
    return k, v


def _ids(saved: object, given: Given) -> TokenIds | None:
    if saved is None:
        return None
    row = _integers(saved, _IDS, given)
    if row.size and not 0 <= int(row.min()) <= int(row.max()) < 2**32:
        raise Damaged("the file's token ids are outside 0..2^32-1")
    return row.astype(np.uint32)


def _check_mask(saved: object, given: Given) -> None:
    if saved is not None and not (_integers(saved, _MASK, given) == 1).all():
        raise Unsupported(
            "the file's attention mask hides some tokens: padding moves the positions of the others",
            "save the cache of one sequence without padding",
        )


def _integers(saved: object, name: str, given: Given) -> Array:
    """The row of a [batch, tokens] tensor, or a [tokens] one, or a list of numbers."""
    if isinstance(saved, list) and all(type(item) is int and 0 <= item < 2**32 for item in saved):
        return np.array(saved, np.int64)
    if not isinstance(saved, TorchTensor) or saved.type not in ("i64", "i32", "bool"):
        raise Unsupported(f"{name} is neither a tensor of integers nor a list of them")
    array = saved.array()
    if array.dtype.itemsize > 1:
        array = array.view(f"<i{array.dtype.itemsize}")
    if array.ndim == 1:
        return array
    if array.ndim != 2 or not 0 <= (given.batch_row or 0) < len(array):
        raise UsageError(f"{name} has shape {list(saved.shape)}, and no such row")
    row: Array = array[given.batch_row or 0]
    return row


def _write(rows: ForeignRows, given: Given) -> dict[str, bytes]:
    """The dict with token ids where they are known, else the tuple.

    A cache is of no use without the exact ids that it was computed from, in any tool, and a file that
    holds them can be imported again. `torch.load(FILE)["past_key_values"]` is the tuple."""
    pairs = tuple(
        tuple(Tensor(rows.k_type, plane) for plane in layer) for layer in pairs_of(rows, given)
    )
    ids = rows.token_ids
    if ids is None:
        return {_FILE: save(pairs, _FOLDER)}
    if len(ids) != rows.tokens:
        raise UsageError(f"{len(ids)} token ids do not go with the rows of {rows.tokens} tokens")
    wide = token_array(ids).astype("<u8").reshape(1, -1)
    return {_FILE: save({_PAST: pairs, _IDS: Tensor("i64", wide)}, _FOLDER)}


TORCH_CACHE = Format("transformers", "transformers cache of torch.save", _recognise, _read, _write)
