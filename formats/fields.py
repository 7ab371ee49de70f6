"""Header fields that all kvsnap files share, read with a reason when they are wrong."""

from __future__ import annotations

import re
import reprlib

import numpy as np

from kvsnap.formats.codecs import Codec, get_codec
from kvsnap.formats.container import Container, Tensor
from kvsnap.formats.errors import Damaged, Unsupported
from kvsnap.formats.names import TokenIds, token_array

FORMAT_VERSION = "1"
"""Of all files. Frozen: names and files of it stay readable, and a reader refuses what it lacks by name.
Version 0 was never released."""


def check_version(container: Container, kind: str) -> None:
    version = container.field("kvsnap")
    if version != FORMAT_VERSION:
        raise Unsupported(
            f"format version {reprlib.repr(version)}; this kvsnap reads version {FORMAT_VERSION}",
            "read it with the kvsnap that wrote it, or a newer one",
        )
    found = container.field("kind")
    if found != kind:
        raise Damaged(f"a file of kind {reprlib.repr(found)} where a {kind} belongs")


def codec_field(container: Container) -> Codec:
    """The codec of a file: a lossless one is named by its id alone, a lossy one is that of the
    file's fidelity. A lossless codec may stand in a lossy chain, of a fidelity that is not even known
    here: a session's tail is stored so, and its conversation can be read."""
    codec_id, fidelity = container.field("codec"), container.field("fidelity")
    codec = get_codec(codec_id)
    if not codec.lossy:
        return codec
    if fidelity.partition("@")[0] != codec_id:
        raise Damaged(f"the lossy codec {codec_id} in a file of fidelity {reprlib.repr(fidelity)}")
    codec = get_codec(fidelity)
    if codec.fidelity != fidelity:
        raise Unsupported(f"fidelity {reprlib.repr(fidelity)} is not known to this version")
    return codec


def digest_field(container: Container, key: str) -> bytes:
    value = hex_field(container, key)
    if len(value) != 32:
        raise Damaged(f"header field {key!r} is not 64 hexadecimal digits")
    return value


def hex_field(container: Container, key: str) -> bytes:
    text = container.field(key)
    # Not as pairs: matching a group again and again takes 90 bytes of memory a character.
    if len(text) % 2 or not re.fullmatch(r"[0-9a-f]*", text):
        raise Damaged(f"header field {key!r} is not lower-case hexadecimal")
    return bytes.fromhex(text)


def number_field(container: Container, key: str) -> int:
    text = container.field(key)
    if not (text.isascii() and text.isdigit()) or len(text) > 18:
        raise Damaged(f"header field {key!r} is not a number")
    return int(text)


def ids_tensor(tensor: Tensor | None) -> TokenIds:
    if tensor is None or tensor.dtype != "U32" or len(tensor.shape) != 1:
        raise Damaged("the file has no tensor of token ids")
    return token_array(np.frombuffer(tensor.data, "<u4"))
