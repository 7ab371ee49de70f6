"""Inputs that are large in one way: what small changed ones cannot show is memory or time that grows
faster than the input. Each maker takes how many."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable

from kvsnap.formats.archive import END, pack_header
from kvsnap.formats.fields import FORMAT_VERSION
from kvsnap.formats.interchange.llamacpp import STATE_MAGIC
from tests.fuzz import seeds, tables
from tests.fuzz.tables import File, Tensor

Maker = Callable[[int], bytes]


def _changed(data: bytes, change: Callable[[File], None]) -> bytes:
    file = tables.take_apart(data)
    change(file)
    return tables.put_together(json.dumps(tables.header_of(file)), file.tensors)


def _block(change: Callable[[File], None]) -> bytes:
    (found,) = seeds.golden("block-raw.*")
    return _changed(found, change)


def _session(change: Callable[[File], None]) -> bytes:
    (found,) = seeds.golden("session-raw.*")
    return _changed(found, change)


def many_tensors(n: int) -> bytes:
    empty = [Tensor(f"full.k.b{i}", "U8", [0], b"") for i in range(n)]
    return _block(lambda file: file.tensors.extend(empty))


def many_planes(n: int) -> bytes:
    """Valid: a block of no tokens in n groups."""

    def change(file: File) -> None:
        record = json.loads(file.metadata["identity"])
        plane = {"plane": "k", "kind": "rows", "dtype": "U8", "row": [1], "rope": None}
        record["layout"] = [
            {"group": f"g{i}", "layers": 1, "span": None, "planes": [plane]} for i in range(n)
        ]
        file.metadata["identity"] = json.dumps(record)
        planes = [Tensor(f"g{i}.k", "U8", [1, 0, 1], b"") for i in range(n)]
        file.tensors = [Tensor("token_ids", "U32", [0], b""), *planes]

    return _block(change)


def many_fields(n: int) -> bytes:
    return _block(lambda file: file.metadata.update({f"x{i}": "" for i in range(n)}))


def long_hex(n: int) -> bytes:
    return _block(lambda file: file.metadata.update(extras="00" * n))


def long_codec(n: int) -> bytes:
    fidelity = "q4@1;step=0.2" + "0" * n
    return _block(lambda file: file.metadata.update(codec="q4", fidelity=fidelity))


def many_parameters(n: int) -> bytes:
    return _block(lambda file: file.metadata.update(codec="q4", fidelity="q4@1" + ";a=1" * n))


def wide_identity(n: int) -> bytes:
    """One long name that n fields stand in."""
    text = json.dumps({"x" * n: {str(i): 0 for i in range(n // 8)}})
    return _session(lambda file: file.metadata.update(identity=text))


def deep_identity(n: int) -> bytes:
    depth = 300
    text = f'{{"{"x" * (n // depth)}":' * depth + "0" + "}" * depth
    return _session(lambda file: file.metadata.update(identity=text))


def many_ids(n: int) -> bytes:
    return _block(
        lambda file: setattr(file, "tensors", [Tensor("token_ids", "U32", [n], bytes(4 * n))])
    )


def long_chain(n: int) -> bytes:
    def change(file: File) -> None:
        ids, names = Tensor("token_ids", "U32", [16 * n], bytes(64 * n)), bytes(32 * n)
        file.tensors = [ids, Tensor("chain", "U8", [n, 32], names)]

    return _session(change)


def many_notes(n: int) -> bytes:
    return _session(lambda file: file.metadata.update(notes=json.dumps({"a": [[]] * n})))


def long_notes(n: int) -> bytes:
    return _session(lambda file: file.metadata.update(notes=json.dumps({"é" * n: "\ud800" * n})))


def many_items(n: int) -> bytes:
    def change(file: File) -> None:
        widths = {"sizes": 8, "positions": 8, "names": 32, "files": 32, "contents": 32, "kinds": 1}
        for tensor in file.tensors:
            width = widths[tensor.name]
            tensor.data = b"".join(
                i.to_bytes(8, "little").ljust(width, b"\0")[:width] for i in range(n)
            )
            tensor.shape = [n, *tensor.shape[1:]]
            if tensor.name == "kinds":
                tensor.data = b"\2" * (n - 1) + b"\3"

    (found,) = seeds.golden("manifest.*")
    return _changed(found, change)


def long_model(n: int) -> bytes:
    (found,) = seeds.golden("manifest.*")
    return _changed(found, lambda file: file.metadata.update(model="x" * n, creator="\u202e" * n))


def many_layer_groups(n: int) -> bytes:
    """A calibration that names groups which it does not have."""
    text = json.dumps({"full.k": {"layers": [1] * n, "row": [1, 1]}})
    return _changed(seeds.calibrations()[0], lambda file: file.metadata.update(planes=text))


def many_members(n: int) -> bytes:
    return b"".join(pack_header(f"blocks/{i:064x}", 0) for i in range(n)) + END


def many_long_names(n: int) -> bytes:
    deep = "/".join(["a" * 120] * 3)
    return b"".join(pack_header(f"{deep}/{i:064x}", 0) for i in range(n)) + END


def many_cells(n: int) -> bytes:
    cells = b"".join(struct.pack("<iIi", i, 1, 0) for i in range(n))
    rows = struct.pack("<iQ", 1, 2) + bytes(2 * n)
    head = struct.pack("<IiII", STATE_MAGIC, 0, 1, n)
    return head + cells + struct.pack("<II", 0, 1) + rows + rows


def many_layers(n: int) -> bytes:
    layers = min(n, 4096)
    rows = (struct.pack("<iQ", 1, 2) + bytes(2)) * (2 * layers)
    head = struct.pack("<IiII", STATE_MAGIC, 0, 1, 1) + struct.pack("<iIi", 0, 1, 0)
    return head + struct.pack("<II", 0, layers) + rows


def many_settings(n: int) -> bytes:
    return json.dumps({"format": "1", "block_size": 16, "x": [[]] * n}).encode()


def long_version(n: int) -> bytes:
    return json.dumps({"format": "x" * n, "block_size": 16}).encode()


def long_capacity(n: int) -> bytes:
    return json.dumps({"format": FORMAT_VERSION, "block_size": 16, "capacity": ["x"] * n}).encode()


def long_key(n: int) -> bytes:
    return b" " * n + b"0" * 64


BLOCK, REBUILD = "block", "record of a rebuild"
GROWN: tuple[tuple[str, Maker, int], ...] = (
    (BLOCK, many_tensors, 10_000),
    (BLOCK, many_planes, 5_000),
    (BLOCK, many_fields, 20_000),
    (BLOCK, long_hex, 200_000),
    (BLOCK, long_codec, 400_000),
    (BLOCK, many_parameters, 100_000),
    (BLOCK, many_ids, 100_000),
    (REBUILD, many_tensors, 10_000),
    (REBUILD, many_ids, 100_000),
    (REBUILD, long_hex, 200_000),
    ("size by header", many_tensors, 10_000),
    ("session", wide_identity, 30_000),
    ("session", wide_identity, 200_000),
    ("session", deep_identity, 60_000),
    ("session", long_chain, 5_000),
    ("session", many_notes, 100_000),
    ("session", long_notes, 50_000),
    ("manifest", many_items, 5_000),
    ("manifest", long_model, 100_000),
    ("calibration", many_layer_groups, 100_000),
    ("calibration", many_tensors, 10_000),
    ("sealed file", long_hex, 200_000),
    ("portable file", many_members, 2_000),
    ("portable file", many_long_names, 1_000),
    ("portable file, opened", many_members, 2_000),
    ("llama.cpp state 3", many_cells, 30_000),
    ("llama.cpp state 3", many_layers, 4_000),
    ("kvsnap.json", many_settings, 100_000),
    ("kvsnap.json", long_version, 400_000),
    ("kvsnap.json", long_capacity, 400_000),
    ("tenant key", long_key, 400_000),
)
"""Target, maker, and how many: files of some hundred kilobytes, so that what takes memory by the square of
its input, or a hundred times as much, takes more than is allowed."""
