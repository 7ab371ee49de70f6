"""The table of codecs: wire id → where it lives. A file's id is looked up here and nowhere else,
then among the entry points of group `kvsnap.codecs`, where other packages name theirs.

A codec is written as its id, or with parameters: `q4`, `q4;step=0.3`, `kvtc;calibration=HEX`. A
fidelity is the same with the version and every parameter: `q4@1;step=0.25`.
"""

from __future__ import annotations

import dataclasses
import functools
import reprlib
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from kvsnap.formats.codecs.base import Codec, Stretch
from kvsnap.formats.errors import Unsupported

CODECS = {
    "raw": "kvsnap.formats.codecs.raw:Raw",
    "zstd": "kvsnap.formats.codecs.zstd:Zstd",
    "q8": "kvsnap.formats.codecs.q8:Q8",
    "q4": "kvsnap.formats.codecs.q4:Q4",
    "kvtc": "kvsnap.formats.codecs.kvtc:Kvtc",
}
_NOT_TO_CHOOSE = {"unverified": "kvsnap.formats.codecs.unverified:Unverified"}
"""Codecs that say where rows come from: an import takes one, nobody compresses by it."""
DEFAULT_CODEC = "zstd"
ENTRY_POINTS = "kvsnap.codecs"
MAX_TEXT = 1024
"""Characters of a codec's text. Files say it, and what `get_codec` found stays in memory."""

__all__ = [
    "CODECS",
    "DEFAULT_CODEC",
    "Codec",
    "Stretch",
    "chosen_codec",
    "get_codec",
    "known_codecs",
    "lossless",
]


@functools.lru_cache(maxsize=64)
def get_codec(text: str) -> Codec:
    """The codec that an id, an id with parameters or a fidelity names; `Unsupported` names the id
    and the known ones, the version, or the parameter that is wrong."""
    if len(text) > MAX_TEXT:
        raise Unsupported(f"codec {reprlib.repr(text)} is not known: its text is too long")
    head, *pairs = text.split(";")
    codec_id, at, version = head.partition("@")
    kind = _class_of(codec_id)
    if at and version != str(kind.version):
        raise Unsupported(
            f"version {reprlib.repr(version)} of codec {codec_id} is not known,"
            f" this kvsnap has version {kind.version}",
            "use the kvsnap that wrote it, or a newer one",
        )
    try:
        return kind(**_parameters(kind, pairs))
    except TypeError as error:  # an abstract class, a field without a default
        raise _broken(codec_id, error) from error


def chosen_codec(text: str) -> Codec:
    """As `get_codec`, for what somebody asks to compress by; `Unsupported` also for a codec that only says
    where rows come from."""
    found = get_codec(text)
    if found.of_one_session:
        raise Unsupported(
            f"codec {found.id} cannot be chosen: it marks rows that nobody compared",
            f"known codecs: {', '.join(known_codecs())}",
        )
    return found


def known_codecs() -> list[str]:
    """The built-in ones from the largest files to the smallest, then other packages'."""
    others = {point.name for point in entry_points(group=ENTRY_POINTS)} - CODECS.keys()
    return [*CODECS, *sorted(others)]


def _class_of(codec_id: str) -> type[Codec]:
    own = CODECS | _NOT_TO_CHOOSE
    places = [own[codec_id]] if codec_id in own else _other_places(codec_id)
    for module, _, name in (place.partition(":") for place in places):
        try:
            found = getattr(import_module(module), name)
        except Exception as error:  # another package's, which may do anything
            raise _broken(codec_id, error) from error
        if isinstance(found, type) and issubclass(found, Codec) and found.id == codec_id:
            return found
    raise Unsupported(
        f"codec {reprlib.repr(codec_id)} is not known to this version of kvsnap",
        f"known codecs: {', '.join(known_codecs())}",
    )


def lossless(codec: Codec) -> Codec:
    """The codec itself, or the default one in place of a lossy one."""
    return get_codec(DEFAULT_CODEC) if codec.lossy else codec


def _other_places(codec_id: str) -> list[str]:
    return [point.value for point in entry_points(group=ENTRY_POINTS, name=codec_id)]


def _broken(codec_id: str, error: Exception) -> Unsupported:
    return Unsupported(
        f"codec {codec_id} cannot be loaded: {type(error).__name__}:"
        f" {' '.join(str(error).split())}",
        "update or remove the package that it comes from",
    )


def _parameters(kind: type[Codec], pairs: list[str]) -> dict[str, Any]:
    """Field → value, each as the field's own type reads it."""
    types: dict[str, type[Any]] = {f.name: type(f.default) for f in dataclasses.fields(kind)}
    values: dict[str, Any] = {}
    for pair in pairs:
        key, _, text = pair.partition("=")
        if key in values:
            raise Unsupported(f"parameter {key} of codec {kind.id} is given twice", "give it once")
        if key not in types:
            known = ", ".join(types) or "none"
            raise Unsupported(
                f"codec {kind.id} has no parameter {reprlib.repr(key)}", f"it has: {known}"
            )
        try:
            if not text.isascii() or "_" in text:  # float() would take 0_2 and other digits
                raise ValueError
            values[key] = types[key](text)
        except ValueError:
            raise Unsupported(
                f"parameter {key} of codec {kind.id} is {reprlib.repr(text)}",
                f"it is a {types[key].__name__}",
            ) from None
    return values
