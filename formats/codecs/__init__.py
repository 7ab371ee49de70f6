"""The table of codecs: wire id → where it lives. A file's id is looked up here and nowhere else."""

from __future__ import annotations

import reprlib
from importlib import import_module

from kvsnap.formats.codecs.base import Codec
from kvsnap.formats.errors import Unsupported

CODECS = {
    "raw": "kvsnap.formats.codecs.raw:Raw",
    "zstd": "kvsnap.formats.codecs.zstd:Zstd",
}
DEFAULT_CODEC = "zstd"

__all__ = ["CODECS", "DEFAULT_CODEC", "Codec", "get_codec"]


def get_codec(codec_id: str) -> Codec:
    """The codec of a wire id; `Unsupported` names the id and the known ones."""
    try:
        module, _, name = CODECS[codec_id].partition(":")
    except KeyError:
        raise Unsupported(
            f"codec {reprlib.repr(codec_id)} is not known to this version of kvsnap",
            f"known codecs: {', '.join(sorted(CODECS))}",
        ) from None
    codec: Codec = getattr(import_module(module), name)()
    return codec
