"""Valid files of other tools to start from: golden ones of some 50 kB, and small ones written here. See `seeds`."""

from __future__ import annotations

import functools
import json
from typing import Any

import numpy as np

from kvsnap.formats.interchange import get_format
from kvsnap.formats.interchange.foreign import GGUF, HALVES, ForeignRows, Given
from kvsnap.formats.interchange.torch_zip import read_entries
from kvsnap.formats.names import token_array
from tests.formats.interchange.windowed_slots import slot_file
from tests.fuzz.seeds import GOLDEN

_LAYERS, _HEADS, _DIM = 2, 2, 8
IDS = np.arange(5, 15, dtype=np.uint32)
GIVEN: dict[str, dict[str, Any]] = {
    "vllm-example": {"token_ids": IDS, "block": 4},
    "sglang": {"token_ids": IDS, "block": 4, "page_layout": "layer_first"},
    "lmcache": {"token_ids": IDS, "block": 4, "chunk": 8},
}
"""What those know who ask for folders of pages; of single files nothing is given."""
_SAMPLES = {
    "llama-server": ("llama_server_slot_v4_q8_0*", "llama_server_slot_v4_f16_vt1*"),
    "llama.cpp": ("llama_cpp_2025_seq_v2*vt1*", "llama_cpp_seq_v3_q4_0*", "llama_cpp_seq_v3_q8_0*"),
    "llama.cpp-session": ("*.ggsn",),
    "mlx-lm": ("mlx_lm_0.32.2_quantized4*",),
    "mlx-lm-0.31": ("mlx_lm_0.31.0_quantized8*",),
    "transformers": ("hf_v4.46_dynamiccache*", "hf_v5_dict*", "hf_v5_dynamiccache*"),
    "safetensors": ("hf_v5_kv*",),
    "quant.cpp": ("quantcpp_f32*",),
}


def given(name: str) -> Given:
    facts = {"layers": _LAYERS, "heads": _HEADS, "head_dim": _DIM, "dtype": "f16"}
    own = GIVEN.get(name)
    return Given(model_name="m", architecture="llama", **facts, **own) if own else Given()


def rows(tokens: int, kind: str, order: str) -> ForeignRows:
    wide = 4 if kind == "f32" else 2
    numbers = np.arange(2 * _LAYERS * tokens * _HEADS * _DIM, dtype=f"<u{wide}")
    planes = numbers.reshape(2, _LAYERS, tokens, _HEADS * _DIM)
    return ForeignRows(
        k=tuple(planes[0]), v=tuple(planes[1]), k_type=kind, v_type=kind, order=order, heads=_HEADS,
        head_dim=_DIM, token_ids=IDS[:tokens],
    )  # fmt: skip


def _golden(pattern: str) -> list[bytes]:
    return [path.read_bytes() for path in sorted((GOLDEN / "foreign").glob(pattern))]


@functools.cache
def files(name: str) -> list[bytes]:
    """Of one format; those of folders as `bundled` puts them."""
    found = get_format(name)
    assert found.write is not None
    order = GGUF if found.order == GGUF else HALVES
    kind = "f32" if name == "quant.cpp" else "f16"
    written = [found.write(rows(tokens, kind, order), _told(name)) for tokens in (10, 8)]
    if found.is_folder:
        return [bundled(one) for one in written]
    own = [data for one in written for data in one.values()]
    return [*own, *(data for text in _SAMPLES[name] for data in _golden(text))]


def slots() -> list[bytes]:
    """Slots of one memory, and of two."""
    windowed = [slot_file(token_array(IDS), first) for first in (0, 6)]
    return [*files("llama-server"), *map(bytes, windowed)]


def _told(name: str) -> Given:
    """What a writer needs besides: `given` of a single file is nothing."""
    return given(name) if name in GIVEN else Given(architecture="llama", model_name="m")


def bundled(content: dict[str, bytes]) -> bytes:
    """Several files as one input: a line of JSON with names and sizes, then all bytes."""
    head = json.dumps([[name, len(data)] for name, data in content.items()])
    return head.encode() + b"\n" + b"".join(content.values())


def unbundled(data: bytes) -> dict[str, bytes]:
    head, _, rest = data.partition(b"\n")
    found, at = {}, 0
    for name, size in json.loads(head):
        found[name] = rest[at : at + size]
        at += size
    return found


@functools.cache
def pickles() -> list[bytes]:
    """data.pkl of each golden file of torch.save."""
    found = []
    for data in _golden("*.pt"):
        entries = read_entries(memoryview(data))
        found += [bytes(entry) for name, entry in entries.items() if name.endswith("/data.pkl")]
    return found


def configs() -> list[bytes]:
    return _golden("vllm_fs_tier/*/config.json")


def names() -> list[bytes]:
    """Of pages, chunks and blocks of servers' folders."""
    paths = [name for one in GIVEN for data in files(one) for name in unbundled(data)]
    of_folders = [path.rpartition("/")[2] for path in paths]
    tier = "327/6b_g0/" + "3276b9673ce05f1f" * 4 + ".bin"
    return [text.encode() for text in (*of_folders, tier, "llama4L_7e6fc280d529_r0")]
