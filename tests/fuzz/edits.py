"""What is changed in a safetensors file: its metadata, its tensors, what tensors hold, its header's text."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from random import Random

import zstandard

from tests.fuzz import codes, json_values, octets, seeds
from tests.fuzz.tables import File, Tensor, header_of, put_together, sign, take_apart

ITEM = {"U8": 1, "F16": 2, "BF16": 2, "F32": 4, "U32": 4, "U64": 8}
_ZSTD = b"\x28\xb5\x2f\xfd"
_INNER = ("identity", "notes", "planes")
_HEX = ("name", "parent", "root_id", "content", "talk", "extras", "state", "salt", "signature")
_CODECS = (
    "raw", "zstd", "q8", "q4", "kvtc", "", "@", ";", "zstd@1", "q8@1", "q8@2", "q8@1;a=b", "nothing",
    "q4@1;step=0.2", "q4@1;step=nan", "q4@1;step=1e-300", "q4@1;step=0.2;step=0.2", "exact", "q4;step",
    "kvtc@1;calibration=;step=0.01", "kvtc@1;step=1e300", "q4@1;step=0." + "0" * 400 + "2",
)  # fmt: skip
_DECIMALS = (
    "0", "1", "2", "15", "16", "17", "65536", "65537", "9" * 18, "9" * 19, "-1", "+1", "1.0", "", "٣",
    "1_0", " 1", "00", "4294967296", str(2**53), str(2**63),
)  # fmt: skip
_SUFFIXES = ("", ".b0", ".b1", ".b7", ".codes", ".scale", ".steps", ".kept", ".exact", ".x", ".")


def changed(random: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """A file that was valid, changed and signed; one in thirty is not signed."""
    if random.random() < 0.2:
        return _maybe_signed(random, octets.changed(random, data, others))
    file = take_apart(data)
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        random.choice(EDITS)(random, file, others)
    header = header_of(file)
    if random.random() < 0.3:
        json_values.bend(random, header)
    try:
        text = json_values.dumps(header)
    except (ValueError, RecursionError):
        return data
    if random.random() < 0.05:
        text = _other_text(random, text)
    return _maybe_signed(random, put_together(text, file.tensors))


def changed_inside(random: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """A sealed file whose plain one was changed by somebody who has the key."""
    plain = [seeds.opened(data), random.choice(seeds.blocks())]
    return seeds.seal_again(data, changed(random, plain[0], plain))


def _maybe_signed(random: Random, data: bytes) -> bytes:
    return data if random.random() < 0.03 else sign(data)


def _other_text(random: Random, text: str) -> str:
    """The same JSON, or nearly, as no writer of ours puts it."""
    kind = random.randrange(5)
    if kind == 0:
        return text[:-1] + "," + text[1:]  # every key twice
    if kind == 1:
        return text.replace(":", " : ").replace('"file" : "', '"file":"')
    if kind == 2:
        return text.replace('"dtype"', '"d\\u0074ype"')
    if kind == 3:
        return text + random.choice((" ", "\n", "{}", "\0", "x", "é"))
    return text.replace('"__metadata__":', '"__metadata__":{"file":"' + "1" * 64 + '"},"a":', 1)


def _bend_inner(random: Random, file: File, others: Sequence[bytes]) -> None:
    keys = [key for key in _INNER if isinstance(file.metadata.get(key), str)]
    if keys:
        key = random.choice(keys)
        file.metadata[key] = json_values.bent_text(random, file.metadata[key])


def _bend_field(random: Random, file: File, others: Sequence[bytes]) -> None:
    if not file.metadata:
        return
    key = random.choice(list(file.metadata))
    value = str(file.metadata[key])
    if key in ("codec", "fidelity"):
        file.metadata[key] = random.choice(_CODECS)
    elif key in _HEX and random.random() < 0.7:
        file.metadata[key] = random.choice(
            (
                value[:-1],
                value[:-2],
                value.upper(),
                value * 2,
                value + "g0",
                "00" * 32,
                "",
                value[::-1],
            )
        )
    elif value.isdigit() and random.random() < 0.8:
        file.metadata[key] = random.choice(_DECIMALS)
    elif random.random() < 0.3:
        file.metadata[key] = file.metadata[random.choice(list(file.metadata))]
    else:
        file.metadata[key] = random.choice(
            ("", "é", "\ud800", "x" * 2000, "\n", "default", "sealed")
        )


def _other_metadata(random: Random, file: File, others: Sequence[bytes]) -> None:
    other = take_apart(random.choice(others))
    keys = random.sample(list(other.metadata), random.randint(1, len(other.metadata)))
    file.metadata |= {key: other.metadata[key] for key in keys}


def _other_tensors(random: Random, file: File, others: Sequence[bytes]) -> None:
    tensors = take_apart(random.choice(others)).tensors
    if tensors:
        file.tensors[random.randrange(len(file.tensors) + 1) :] = tensors


def _bytes(random: Random, file: File, others: Sequence[bytes]) -> None:
    """Bytes of a tensor, its size kept; of a zstd frame rather those that it holds."""
    tensor = _any(random, file)
    if tensor is None or not tensor.data:
        return
    inside = _inside(tensor.data) if random.random() < 0.7 else None
    found = bytearray(tensor.data if inside is None else inside)
    for _ in range(random.choice((1, 1, 3, 20))):
        at = random.randrange(len(found))
        if random.random() < 0.4 and len(found) >= 8:
            octets.put_number(random, found, min(at - at % 4, len(found) - 8))
        else:
            found[at] = random.choice(
                (0, 1, 3, 0x78, 0x7F, 0x80, 0xF8, 0xFF, random.randrange(256))
            )
    tensor.data = bytes(found)
    if inside is not None:
        told = random.random() < 0.8
        tensor.data = zstandard.ZstdCompressor(write_content_size=told).compress(tensor.data)
        tensor.shape = [len(tensor.data)]


def _frame(random: Random, file: File, others: Sequence[bytes]) -> None:
    """A frame of something else in the place of a tensor."""
    tensor = _any(random, file)
    if tensor is None:
        return
    size = random.choice((0, 1, len(tensor.data), 3 * len(tensor.data), 2**16))
    tensor.data = zstandard.ZstdCompressor().compress(bytes([random.randrange(256)]) * size)
    if random.random() < 0.3:
        tensor.data = _ZSTD + b"\xe0" + struct.pack("<Q", random.choice((size, 2**63))) + b"\1\0\0"
    tensor.shape = [len(tensor.data)]
    tensor.dtype = "U8"


def _reshape(random: Random, file: File, others: Sequence[bytes]) -> None:
    """Another type or shape of as many bytes."""
    tensor = _any(random, file)
    if tensor is None:
        return
    dtype = random.choice([d for d, size in ITEM.items() if len(tensor.data) % size == 0])
    count = len(tensor.data) // ITEM[dtype]
    shapes = [[count], [1, count], [count, 1], [1] * 8 + [count], [*tensor.shape[::-1]]]
    if count == 0:
        shapes += [[0, 2**62], [2**31 - 1, 0, 2**31 - 1, 1], []]
    if count % 2 == 0:
        shapes.append([2, count // 2])
    shape = random.choice(shapes)
    if dtype == tensor.dtype or shape is not shapes[4]:
        tensor.dtype, tensor.shape = dtype, shape


def _resize(random: Random, file: File, others: Sequence[bytes]) -> None:
    """One axis longer or shorter, with as many bytes as it needs; of one tensor, or of all: what was the
    number of tokens is another."""
    tensor = _any(random, file)
    if tensor is None or not tensor.shape:
        return
    axis = random.randrange(len(tensor.shape))
    old, new = tensor.shape[axis], random.choice((0, 1, 2, 3, 5, 17, 64, 200))
    for one in file.tensors if random.random() < 0.5 else [tensor]:
        one.shape = [new if size == old else size for size in one.shape]
        size = ITEM.get(one.dtype, 1)
        for number in one.shape:
            size *= number
        size = min(size, 2**16)
        one.data = (one.data * (size // max(1, len(one.data)) + 1) + bytes(size))[:size]


def _names(random: Random, file: File, others: Sequence[bytes]) -> None:
    """Tensors renamed, swapped, dropped, repeated, moved."""
    tensor = _any(random, file)
    if tensor is None:
        return
    kind, stem = random.randrange(6), ".".join(tensor.name.split(".")[:2])
    if kind == 0:
        tensor.name = random.choice((stem + random.choice(_SUFFIXES), "x" * 500, "token_ids", ""))
    elif kind == 1:
        other = random.choice(file.tensors)
        tensor.name, other.name = other.name, tensor.name
    elif kind == 2:
        file.tensors.remove(tensor)
    elif kind == 3:
        name = stem + random.choice(_SUFFIXES)
        file.tensors.append(Tensor(name, tensor.dtype, tensor.shape, tensor.data))
    elif kind == 4:
        random.shuffle(file.tensors)
    else:
        file.tensors += [
            Tensor(f"{stem}.{n}", "U8", [0], b"") for n in range(random.choice((1, 40)))
        ]


def _kept(random: Random, file: File, others: Sequence[bytes]) -> None:
    """The list of tokens that a lossy codec keeps exactly, another one."""
    for tensor in file.tensors:
        if tensor.name.endswith(".kept") and len(tensor.data) >= 4:
            count = len(tensor.data) // 4
            start = random.choice((0, 1, 2**32 - count, 60))
            ids = [(start + n) % 2**32 for n in range(count)]
            if random.random() < 0.5:
                ids[random.randrange(count)] = random.choice((0, 5, 2**32 - 1, 2**31))
            tensor.data = struct.pack(f"<{count}I", *ids)


def _coded(random: Random, file: File, others: Sequence[bytes]) -> None:
    """Codes of kvtc for other numbers, as many as the plane has."""
    by_name = {tensor.name: tensor for tensor in file.tensors}
    ids, fidelity = by_name.get("token_ids"), str(file.metadata.get("fidelity"))
    for name, tensor in by_name.items():
        plane, _, suffix = name.rpartition(".")
        if ids is not None and suffix == "codes":
            kept = by_name.get(f"{plane}.kept")
            count = (len(ids.data) - (len(kept.data) if kept is not None else 0)) // 4
            tensor.data = codes.codes(random, fidelity, plane, count) or tensor.data
            tensor.shape = [len(tensor.data)] if tensor.dtype == "U8" else tensor.shape


def _hollow(random: Random, file: File, others: Sequence[bytes]) -> None:
    """No tokens at all, in planes of any size: nothing is stored, and nothing says how large they are."""
    layers, row = random.choice((1, 2**20, 2**31 - 1)), random.choice((1, 2**16, 2**31 - 1))
    for tensor in file.tensors:
        tensor.data = b""
        if len(tensor.shape) > 1 and tensor.name not in ("token_ids", "chain"):
            tensor.shape = [layers, 0, *([row] * (len(tensor.shape) - 2))]
        else:
            tensor.shape = [0, *tensor.shape[1:]]
    try:
        record = json.loads(file.metadata["identity"])
        for group in record["layout"]:
            group["layers"] = layers
            for plane in group["planes"]:
                plane["row"] = [row for _ in plane["row"]]
    except (ValueError, KeyError, TypeError, RecursionError):
        return
    file.metadata["identity"] = json.dumps(record)


def _inside(data: bytes) -> bytes | None:
    """What a zstd frame holds; None for what is none, or holds nothing or much."""
    try:
        if not data.startswith(_ZSTD) or not 0 < zstandard.frame_content_size(data) < 2**20:
            return None
        return zstandard.ZstdDecompressor().decompress(data)
    except zstandard.ZstdError:
        return None


def _any(random: Random, file: File) -> Tensor | None:
    return random.choice(file.tensors) if file.tensors else None


EDITS: tuple[Callable[[Random, File, Sequence[bytes]], None], ...] = (
    _bend_inner, _bend_inner, _bend_field, _bend_field, _other_metadata, _other_tensors, _bytes, _bytes,
    _bytes, _frame, _reshape, _resize, _resize, _names, _kept, _coded, _hollow,
)  # fmt: skip
