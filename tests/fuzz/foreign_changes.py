"""Other tools' files changed: headers that still fit, zips whose checksums are right, folders with a file
renamed. Words of llama.cpp's files are set by `states`."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from pickletools import opcodes
from random import Random
from typing import Any

from kvsnap.formats.interchange.torch_zip import read_entries, write_entries
from tests.fuzz import json_values, octets
from tests.fuzz.foreign_seeds import bundled, unbundled

Change = Callable[[Random, bytes, Sequence[bytes]], bytes]
_DTYPES = ("F16", "BF16", "F32", "I32", "U32", "U8", "I64", "F64", "BOOL", "F8_E4M3", "", "f16")
_NUMBERS = (0, 1, 2, 3, 4, 8, 16, 32, 64, 65, 1024, 2**31, 2**40, 2**63 - 1, -1)
_CODES = [op.code.encode("latin-1") for op in opcodes]
_NAMES = ("../x", "/x", "", "x" * 300, "é", "a\0b", "a//b", "\ud800", "0" * 64, "_", "@@@", ".")


def in_tensors(random: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """Of a safetensors file without a digest: its header, whose offsets fit, or bytes of its tensors."""
    if random.random() < 0.2:
        return octets.changed(random, data, others)
    size = struct.unpack_from("<Q", data)[0]
    header, body = json.loads(data[8 : 8 + size]), bytearray(data[8 + size :])
    for _ in range(random.choice((1, 1, 1, 2))):
        _change_header(random, header, body)
    try:
        head = json_values.dumps(header).encode("utf-8", "surrogatepass")
    except (ValueError, RecursionError):
        return data
    return struct.pack("<Q", len(head)) + head + bytes(body)


def _change_header(random: Random, header: dict[str, Any], body: bytearray) -> None:
    names = [name for name, entry in header.items() if isinstance(entry, dict) and "shape" in entry]
    kind = random.randrange(10)
    if kind <= 1 or not names:
        json_values.bend(random, header)
    elif kind == 2 and isinstance(header.get("__metadata__"), dict):
        json_values.bend(random, header["__metadata__"])
    elif kind == 3:
        one, other = random.choice(names), random.choice(names)
        header[one], header[other] = header[other], header[one]
    elif kind == 4:
        one = random.choice(names)
        header[one + random.choice(("", ".0", "_0", "x"))] = header.pop(one)
    elif kind == 5:
        header[random.choice(names)]["dtype"] = random.choice(_DTYPES)
    elif kind == 6:
        shape = header[random.choice(names)]["shape"]
        if isinstance(shape, list):
            shape[random.randrange(len(shape) + 1) :] = random.choices(_NUMBERS, k=2)
    elif kind == 7:
        shape = header[random.choice(names)]["shape"]
        if isinstance(shape, list):  # as many elements, other axes
            random.choice((random.shuffle, list.reverse, lambda s: s.insert(0, 1)))(shape)
    elif kind == 8:
        offsets = header[random.choice(names)].get("data_offsets")
        if isinstance(offsets, list) and offsets:
            offsets[random.randrange(len(offsets))] = random.choice(_NUMBERS)
    elif body:
        at = random.randrange(len(body))
        octets.put_number(random, body, min(at, max(0, len(body) - 8)))


def in_zip(random: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """Of a file of torch.save: its pickle or another entry, zipped anew; one in five as it comes."""
    if random.random() < 0.2:
        return octets.changed(random, data, others)
    entries = [(name, bytes(entry)) for name, entry in read_entries(memoryview(data)).items()]
    at = random.randrange(len(entries))
    if random.random() < 0.7:
        at = next(n for n, (name, _) in enumerate(entries) if name.endswith("data.pkl"))
    name, entry = entries[at]
    kind = random.randrange(12)
    if kind == 0:
        del entries[at]
    elif kind == 1:
        entries.append(random.choice(entries))
    elif kind == 2:
        entries[at] = (name.partition("/")[0] + "/data/" + random.choice("012"), entry)
    elif name.endswith("data.pkl"):
        entries[at] = (name, in_pickle(random, entry, ()))
    else:
        entries[at] = (name, octets.changed(random, entry))
    return write_entries(entries)


def in_pickle(random: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """Numbers and operations of a pickle."""
    if random.random() < 0.4:
        return octets.changed(random, data, others)
    found = bytearray(data)
    for _ in range(random.choice((1, 1, 2, 4))):
        at = random.randrange(len(found))
        code = random.choice(
            (*_CODES, b"K\x05", b"M\xff\xff", b"J\xff\xff\xff\x7f", b")R", b"h\x00")
        )
        found[at : at + random.choice((0, 0, 1, 2))] = code
    return bytes(found)


def in_folder(change: Change) -> Change:
    """One file of several changed so, or dropped, renamed, put twice."""

    def changed(random: Random, data: bytes, others: Sequence[bytes]) -> bytes:
        content = unbundled(data)
        name = random.choice(list(content))
        kind = random.randrange(8)
        if kind == 0:
            over = random.choice(list(content))
            content[over] = content.pop(name)
        elif kind == 1:
            content[_renamed(random, name)] = content.pop(name)
        elif kind == 2:
            content[_renamed(random, name)] = content[name]
        else:
            content[name] = change(random, content[name], [*content.values()])
        return bundled(content)

    return changed


def _renamed(random: Random, name: str) -> str:
    if random.random() < 0.3:
        return random.choice(_NAMES)
    return in_name(random, name.encode("utf-8", "replace"), ()).decode("utf-8", "surrogateescape")


def in_name(random: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    return octets.changed(random, data, others)
