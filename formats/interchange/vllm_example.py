"""vLLM's ExampleConnector: a folder for a prompt, a safetensors file for a layer.

    <md5>/<layer name>.safetensors      one tensor `kv_cache` [tokens, heads, 2 * head_dim]

(vLLM 0.32.0, vllm/distributed/kv_transfer/kv_connector/v1/example_connector.py.) `<md5>` is of the token
ids as i64, followed by the identifiers of images, so given ids are checked against it where the folder's
name is at hand. Tokens: a prompt's but for the last one, down to whole blocks. A layer's name holds
one number: model.layers.0.self_attn.attn. The elements are as formats/interchange/vllm_blocks.py says,
in the type of the engine's cache; K's are in the order of transformers.

The files say neither token ids, block size, layout (read as a CPU's), nor model. vLLM takes a folder that
is there for a whole one: write under another name and rename it.
"""

from __future__ import annotations

import hashlib
import re
import reprlib
from collections.abc import Sequence

from kvsnap.formats.errors import Damaged, Unsupported, UsageError
from kvsnap.formats.interchange.foreign import HALVES, Files, ForeignRows, Format, Given
from kvsnap.formats.interchange.safetensors_file import (
    ForeignTensor,
    parse_tensors,
    tensor_of,
    write_tensors,
)
from kvsnap.formats.interchange.served_rows import by_token, check_agrees, given_size, stacked
from kvsnap.formats.interchange.vllm_blocks import from_slots, to_slots
from kvsnap.formats.names import TokenIds, token_array

TENSOR = "kv_cache"
SUFFIX = ".safetensors"
_FOLDER = re.compile(r"[0-9a-f]{32}")
_LAYER = re.compile(r"(?:[A-Za-z_][A-Za-z0-9_]*\.)+([0-9]+)(?:\.[A-Za-z_][A-Za-z0-9_]*)+")
_MOST_LAYERS = 4096
_TYPES = {"BF16": "bf16", "F16": "f16", "F32": "f32"}
_NAMED_SO = {
    "apertus", "gemma", "granite", "llama", "minicpm", "mistral", "mixtral", "nemotron", "phi3", "qwen2",
    "qwen2_moe", "qwen2moe", "qwen3", "qwen3_moe", "qwen3moe", "stablelm",
}  # fmt: skip
"""Architectures (GGUF's and transformers' words) whose layers vLLM calls model.layers.N.self_attn.attn
(vllm/model_executor/models); under other names it finds a folder, and fails on a file that is not there."""


def layer_number(name: str) -> int | None:
    """The layer that a file's name is of; None for another file's."""
    if not name.endswith(SUFFIX):
        return None
    found = _LAYER.fullmatch(name[: -len(SUFFIX)])
    if found is None or len(found[1]) > 4 or found[1] != str(int(found[1])):
        return None
    return int(found[1])


def folder_name(token_ids: TokenIds) -> str:
    """Of a text's token ids."""
    return hashlib.md5(token_ids.astype("<i8").tobytes(), usedforsecurity=False).hexdigest()


def _recognise(files: Files) -> bool:
    return bool(files) and all(
        layer_number(path.rpartition("/")[2]) is not None and b'"kv_cache"' in bytes(content[8:264])
        for path, content in files.items()
    )


def _read(files: Files, given: Given) -> ForeignRows:
    block = given_size(given, "block")
    folder, paths = _one_folder(files, given)
    tensors = [_tensor(path, files[path]) for path in _in_order(paths, given)]
    dtype, shape = tensors[0].dtype, tensors[0].shape
    if any((tensor.dtype, tensor.shape) != (dtype, shape) for tensor in tensors):
        raise Damaged("the layers differ in shape or type", "take a folder that is whole")
    if dtype not in _TYPES:
        raise Unsupported(f"a cache of {dtype} elements", "caches of bf16, f16 and f32 can be read")
    if len(shape) == 2:
        raise Unsupported("a cache of latent attention, [tokens, elements]")
    if len(shape) != 3 or not all(shape) or shape[2] % 2:
        raise Damaged(f"a tensor [tokens, heads, 2 * head_dim] has another shape: {shape}")
    check_agrees(given, heads=shape[1], head_dim=shape[2] // 2)
    if given.dtype not in (None, _TYPES[dtype]):
        raise UsageError(f"the file's elements are {_TYPES[dtype]}, and {given.dtype} was given")
    pairs = [from_slots(tensor.array(), block) for tensor in tensors]
    token_ids = _ids(folder, given, shape[0])
    return ForeignRows(
        k=by_token(k for k, _ in pairs),
        v=by_token(v for _, v in pairs),
        k_type=_TYPES[dtype],
        v_type=_TYPES[dtype],
        order=HALVES,
        heads=shape[1],
        head_dim=shape[2] // 2,
        token_ids=token_ids,
        ids_proven=token_ids is not None and bool(folder),
        told={
            "folder": folder or "its name is lost, a hash of the token ids that would prove them"
        },
    )


def _one_folder(files: Files, given: Given) -> tuple[str, list[str]]:
    """The folder's name, empty where it is lost, and the paths in it. Of several the one of the given
    ids; the others' files are not touched."""
    folders: dict[str, list[str]] = {}
    for path in files:
        if path.endswith(SUFFIX):
            folders.setdefault(path.rpartition("/")[0], []).append(path)
    if not folders:
        raise UsageError("none of these files is a layer's", f"a layer's file ends in {SUFFIX}")
    if len(folders) > 1:
        chosen = _folder_of(set(folders), given)
        folders = {chosen: folders[chosen]}
    ((folder, paths),) = folders.items()
    folder = folder.rpartition("/")[2]
    return (folder if _FOLDER.fullmatch(folder) else ""), paths


def _folder_of(folders: set[str], given: Given) -> str:
    if given.token_ids is None:
        raise UsageError(
            f"there are {len(folders)} folders, each of a prompt", "name one, or give the token ids"
        )
    names = {folder.rpartition("/")[2]: folder for folder in folders}
    if len(names) < len(folders):
        raise UsageError("several folders of one prompt, of unlike engines", "name one of them")
    ids, block = token_array(given.token_ids), given_size(given, "block")
    hasher = hashlib.md5(usedforsecurity=False)
    found = ""
    for start in range(0, len(ids) - block + 1, block):
        hasher.update(ids[start : start + block].astype("<i8").tobytes())
        found = names.get(hasher.hexdigest(), found)
    if not found:
        raise UsageError(
            f"none of {len(folders)} folders is of the token ids given: their hash differs",
            "give the ids exactly as vLLM read them, and its block size",
        )
    return found


def _in_order(paths: Sequence[str], given: Given) -> list[str]:
    """Layers 0 to the last one, each once, of one kind of name."""
    found: dict[int, str] = {}
    kinds = set()
    for path in paths:
        name = path.rpartition("/")[2]
        number = layer_number(name)
        if number is None:
            raise Damaged(f"{reprlib.repr(name)} is not named as a layer of vLLM's")
        found[number] = path
        kinds.add(tuple("0" if part.isdigit() else part for part in name.split(".")))
    if len(kinds) > 1:
        raise Unsupported("layers of several kinds (a draft model, cross attention)")
    count = given_size(given, "layers") if given.layers is not None else len(found)
    missing = [str(number) for number in range(min(count, _MOST_LAYERS)) if number not in found]
    if missing or len(found) != count:
        shown = ", ".join(missing[:5]) or "none"
        raise Damaged(
            f"{len(found)} layers are there, of {count} (missing: {shown})",
            "the folder is not whole: vLLM was interrupted, or files went",
        )
    return [found[number] for number in range(count)]


def _tensor(path: str, content: memoryview) -> ForeignTensor:
    tensors = parse_tensors(content.cast("B")).tensors
    if tensors.keys() != {TENSOR}:
        raise Damaged(
            f"{reprlib.repr(path.rpartition('/')[2])} does not hold the one tensor {TENSOR}"
        )
    return tensors[TENSOR]


def _ids(folder: str, given: Given, tokens: int) -> TokenIds | None:
    """The ids of the rows, out of those given, which may go on."""
    if given.token_ids is None:
        return None
    ids = token_array(given.token_ids)
    if len(ids) < tokens:
        raise UsageError(f"{len(ids)} token ids were given, and the rows are of {tokens} tokens")
    if folder and folder_name(ids[:tokens]) != folder:
        raise UsageError(
            "the folder's name is not the hash of the token ids given",
            "give the ids exactly as vLLM read them; a prompt with images has another hash",
        )
    return ids[:tokens]


def _write(rows: ForeignRows, given: Given) -> dict[str, bytes]:
    """The whole blocks of rows. vLLM looks for those of a prompt's tokens without the last one."""
    block = given_size(given, "block")
    if given.architecture not in (None, *_NAMED_SO):
        raise Unsupported(
            f"how vLLM names the layers of {given.architecture!r} is not known to kvsnap",
            "known: " + ", ".join(sorted(_NAMED_SO)),
        )
    k, v = stacked(rows, given, block, "vLLM")
    assert rows.token_ids is not None
    folder = folder_name(token_array(rows.token_ids)[: k.shape[1]])
    dtype = next(name for name, ours in _TYPES.items() if ours == rows.k_type)
    written = {}
    for number in range(len(k)):
        tensor = tensor_of(dtype, to_slots(k[number], v[number], block))
        name = f"{folder}/model.layers.{number}.self_attn.attn{SUFFIX}"
        written[name] = write_tensors({}, {TENSOR: tensor})
    return written


VLLM_EXAMPLE = Format(
    "vllm-example", "vLLM ExampleConnector folder", _recognise, _read, _write, is_folder=True
)
