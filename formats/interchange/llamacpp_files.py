"""llama.cpp's own files: a sequence (`ggsq`) and a whole context (`ggsn`).

`llama_state_seq_save_file` and `llama_state_save_file` (src/llama-context.cpp), all little-endian:

    u32 "ggsq" = 0x67677371 | u32 version | u32 n | i32 token * n                        | STATE
    u32 "ggsn" = 0x6767736e | u32 version | u32 n | i32 token * n | u32 length, arch     | STATE

STATE is as formats/interchange/llamacpp.py says, in the version that goes with the file's:

    ggsq 2, ggsn 9   spring 2025 (run: llama-cpp-cffi 0.4.42): no n_stream word, cells without sequence
                     ids, and in ggsn outputs and logits before the cells
    ggsq 2, ggsn 9   mid 2025 to August 2026 (code: llama-cpp-python 0.3.35): as version 3
    ggsq 3, ggsn 10  llama-cpp-python 0.3.36: version 3
    ggsq 4, ggsn 11  llama.cpp b11434: version 4

Version 2 is two layouts under one number: both are tried, and a file is read where exactly one of
them ends with it. ggsn 9 is refused. A `ggsq` whose list starts with -1 is llama-server's, see
formats/interchange/llama_server_slot.py.

The list of tokens is the caller's own and may be empty. Not in these files: model, RoPE, heads, and
before version 4 whether quantized rows are rotated. The loader aborts its process on a `ggsq` that is
cut.
"""

from __future__ import annotations

import reprlib
import struct

import numpy as np

from kvsnap.formats.errors import Damaged, KvsnapError, Unsupported, UsageError
from kvsnap.formats.interchange.foreign import GGUF, Files, ForeignRows, Format, Given, only
from kvsnap.formats.interchange.llamacpp import State, kv_size, parse_sequence, write_kv
from kvsnap.formats.interchange.llamacpp_rows import fill, foreign_rows, ids_for, ids_of, kind_of
from kvsnap.formats.interchange.state_bytes import Reader, Writer
from kvsnap.formats.layout import Array

SEQUENCE_MAGIC, SESSION_MAGIC = 0x67677371, 0x6767736E
HEAD = struct.Struct("<III")
_WORD = struct.Struct("<I")
_LONGEST_NAME = 64
"""Bytes of an architecture's name; the longest of b11434 has 18."""
_STATE_OF_SESSION = {10: 3, 11: 4}


def read_head(reader: Reader, magic: int) -> tuple[int, Array, memoryview]:
    """Version, words of the token list, and what follows them."""
    found, version, count = reader.take(HEAD)
    if found != magic:
        raise Damaged(f"this kind of llama.cpp file starts with {magic:#x}, not {found:#x}")
    words = np.frombuffer(reader.bytes(4 * count), "<i4")
    return version, words, reader.buffer[reader.at :]


def is_packed(words: Array) -> bool:
    """Whether a token list is llama-server's packed one."""
    return bool(len(words)) and int(words[0]) == -1


def is_packed_sequence(files: Files) -> bool:
    return _starts(files, SEQUENCE_MAGIC) and _first_word(files) == b"\xff" * 4


def _is_plain_sequence(files: Files) -> bool:
    return _starts(files, SEQUENCE_MAGIC) and _first_word(files) != b"\xff" * 4


def _is_session(files: Files) -> bool:
    return _starts(files, SESSION_MAGIC)


def _starts(files: Files, magic: int) -> bool:
    return len(files) == 1 and bytes(next(iter(files.values()))[:4]) == _WORD.pack(magic)


def _first_word(files: Files) -> bytes:
    return bytes(next(iter(files.values()))[HEAD.size : HEAD.size + 4])


def _read_sequence(files: Files, given: Given) -> ForeignRows:
    version, words, rest = read_head(Reader(only(files)), SEQUENCE_MAGIC)
    if is_packed(words):
        raise Unsupported("the token list is llama-server's packed one", "read it as llama-server")
    if version == 2:
        state, layout = _version_2(rest)
        told = {"version": "2", "layout": layout}
    else:
        state, told = parse_sequence(rest, version), {"version": str(version)}
    return foreign_rows(state, ids_of(words) if len(words) else None, given, told)


def _version_2(state: memoryview) -> tuple[State, str]:
    """The one layout that ends with the file. The older one lacks the word of the newer and no more,
    so it is read with that word before it, out of a copy."""
    found: list[tuple[State, str]] = []
    failed: list[KvsnapError] = []
    for layout, before in (("mid 2025", b""), ("spring 2025", _WORD.pack(1))):
        try:
            buffer = memoryview(before + state) if before else state
            found.append((parse_sequence(buffer, 3), layout))
        except (Damaged, Unsupported) as error:
            failed.append(error)
    if len(found) > 1:
        raise Unsupported(
            "a sequence file of version 2 that can be read in both of its layouts",
            "load it where it was saved, and save it with a newer llama.cpp",
        )
    if not found:
        why = "; ".join(error.what for error in failed)
        kind = Damaged if all(isinstance(error, Damaged) for error in failed) else Unsupported
        raise kind(f"a sequence file of version 2 in neither of its layouts ({why})")
    return found[0]


def _read_session(files: Files, given: Given) -> ForeignRows:
    version, words, rest = read_head(Reader(only(files)), SESSION_MAGIC)
    if version not in _STATE_OF_SESSION:
        known = ", ".join(map(str, _STATE_OF_SESSION))
        raise Unsupported(
            f"a llama.cpp session file of version {version} is not handled (only {known})",
            "version 9 has two layouts, one of them with logits: save it with a newer llama.cpp",
        )
    reader = Reader(rest)
    (length,) = reader.take(_WORD)
    if not 0 < length <= _LONGEST_NAME:
        raise Damaged(f"an architecture's name of {length} bytes")
    name = bytes(reader.bytes(length))
    if not name.isascii() or not name.decode("ascii").isprintable():
        raise Damaged(f"an architecture named {reprlib.repr(name)}")
    state = parse_sequence(rest[reader.at :], _STATE_OF_SESSION[version])
    told = {"version": str(version), "architecture": name.decode("ascii")}
    return foreign_rows(state, ids_of(words) if len(words) else None, given, told)


def _write_sequence(rows: ForeignRows, given: Given) -> dict[str, bytes]:
    version = _wanted(given, (3, 4))
    return {"sequence.ggsq": _file(rows, given, SEQUENCE_MAGIC, version, version, b"")}


def _write_session(rows: ForeignRows, given: Given) -> dict[str, bytes]:
    version = _wanted(given, tuple(_STATE_OF_SESSION))
    name = (given.architecture or "").encode("utf-8")
    if not 0 < len(name) <= _LONGEST_NAME or not name.isascii():
        raise UsageError(
            "a llama.cpp session file names the model's architecture",
            "give it as the model's GGUF file has it, e.g. llama",
        )
    middle = _WORD.pack(len(name)) + name
    state_version = _STATE_OF_SESSION[version]
    return {"session.ggsn": _file(rows, given, SESSION_MAGIC, version, state_version, middle)}


def _wanted(given: Given, known: tuple[int, ...]) -> int:
    version = known[0] if given.version is None else given.version
    if version not in known:
        names = " and ".join(map(str, known))
        raise Unsupported(f"version {version} cannot be written", f"versions {names} can")
    return version


def _file(
    rows: ForeignRows, given: Given, magic: int, version: int, state_version: int, middle: bytes
) -> bytes:
    ids, kind = ids_for(rows), kind_of(rows, given, state_version)
    size = HEAD.size + 4 * len(ids) + len(middle) + kv_size(kind, len(ids))
    writer = Writer(np.empty(size, np.uint8))
    writer.put(HEAD, magic, version, len(ids))
    writer.area(4 * len(ids)).view("<u4")[...] = ids
    writer.area(len(middle))[...] = np.frombuffer(middle, np.uint8)
    k, v = write_kv(writer, kind, len(ids), 0, 0)
    buffer = writer.finish()
    fill(k, v, rows)
    return buffer.tobytes()


SEQUENCE = Format(
    "llama.cpp",
    "llama.cpp sequence file",
    _is_plain_sequence,
    _read_sequence,
    _write_sequence,
    order=GGUF,
    has_versions=True,
)
SESSION = Format(
    "llama.cpp-session",
    "llama.cpp session file",
    _is_session,
    _read_session,
    _write_session,
    order=GGUF,
    has_versions=True,
)
