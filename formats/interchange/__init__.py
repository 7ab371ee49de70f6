"""Other people's layouts: one file a format, bytes in and records out.

The table says which formats there are: name → where its `Format` is. A file is recognised by the first
of them that knows it.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterator
from importlib import import_module

from kvsnap.formats.errors import Unsupported
from kvsnap.formats.interchange.foreign import Files, Format

_HERE = "kvsnap.formats.interchange"

FORMATS = {
    "llama-server": f"{_HERE}.llama_server_slot:SLOT",
    "llama.cpp": f"{_HERE}.llamacpp_files:SEQUENCE",
    "llama.cpp-session": f"{_HERE}.llamacpp_files:SESSION",
    "mlx-lm": f"{_HERE}.mlx_lm:MLX_LM",
    "mlx-lm-0.31": f"{_HERE}.mlx_lm:MLX_LM_0_31",
    "transformers": f"{_HERE}.torch_cache:TORCH_CACHE",
    "safetensors": f"{_HERE}.safetensors_cache:SAFETENSORS_CACHE",
    "vllm-example": f"{_HERE}.vllm_example:VLLM_EXAMPLE",
    "sglang": f"{_HERE}.sglang_file:SGLANG_FILE",
    "lmcache": f"{_HERE}.lmcache_fs:LMCACHE_FS",
    "quant.cpp": f"{_HERE}.quantcpp:QUANTCPP",
}


def get_format(name: str) -> Format:
    """The format of a name; `Unsupported` names the known ones."""
    if name not in FORMATS:
        known = ", ".join(FORMATS)
        raise Unsupported(f"format {reprlib.repr(name)} is not known", f"known formats: {known}")
    module, _, attribute = FORMATS[name].partition(":")
    found: Format = getattr(import_module(module), attribute)
    return found


def known_formats() -> Iterator[Format]:
    return map(get_format, FORMATS)


def recognise(files: Files) -> Format | None:
    """The format that knows these files by their names and first bytes; None where none does."""
    return next((known for known in known_formats() if known.recognise(files)), None)
