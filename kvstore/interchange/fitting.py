"""Between rows of another tool's file and those of an engine's layout.

What fits is decided by what both sides say: layers, widths, element types, rotation, order of K's
elements. What a file does not say is taken from the engine, and proven by the importer or refused.
"""

from __future__ import annotations

import reprlib
from typing import Any

import numpy as np

from kvsnap.formats.errors import Unsupported
from kvsnap.formats.identity import Identity, parse_identity
from kvsnap.formats.interchange.element_order import reordered
from kvsnap.formats.interchange.foreign import GGUF, HALVES, ForeignRows, Given
from kvsnap.formats.layout import Array, Plane, Rows, layout_from_json
from kvsnap.formats.names import TokenIds

_ORDERS = {"llama.cpp": GGUF, "transformers": HALVES}
"""Engine family → the order of the elements of its K rows."""


class Target:
    """An engine's identity, as far as rows of other tools are put in order by it."""

    def __init__(self, identity: Identity | str) -> None:
        record = parse_identity(identity if isinstance(identity, str) else identity.canonical())
        self.layout = layout_from_json(record["layout"])
        self.family, self.architecture = str(record["family"]), str(record["architecture"])
        self.rotation = (int(record["rotation_k"]), int(record["rotation_v"]))
        self.types: dict[str, str] = dict(record["kv_types"])
        if self.family not in _ORDERS:
            raise Unsupported(
                f"rows of {self.family} are whole pages of a server, and not exchanged",
                "import into and export from sessions of llama.cpp and transformers",
            )
        if not self._is_plain():
            raise Unsupported(
                "this model's layers do not all keep K and V of every token (sliding windows,"
                " recurrent layers, latent attention) in one memory, and other tools' files hold just those",
                "only models whose layers are all alike are exchanged",
            )

    @property
    def order(self) -> str:
        return _ORDERS[self.family]

    def given(self, **more: Any) -> Given:
        """What the engine tells a reader or writer."""
        plane = self.layout.planes()[self._names()[0][0]][1]
        heads, dim = plane.row if plane.kind == "elements" else (None, None)
        return Given(
            layers=sum(group.layers for group in self.layout.groups),
            heads=heads,
            head_dim=dim,
            dtype=self.types[self._names()[0][0]],
            architecture=self.architecture,
            rotation=self.rotation,
            **more,
        )

    def take(self, rows: ForeignRows) -> dict[str, Array]:
        """Rows of a file as the engine has them; `Unsupported` says what does not fit."""
        self._check_rotation(rows)
        layers = sum(group.layers for group in self.layout.groups)
        if (len(rows.k), len(rows.v)) != (layers, layers):
            raise Unsupported(
                f"the file has {len(rows.k)} layers of K and {len(rows.v)} of V, the model {layers}",
                "give the model that the file was made with",
            )
        out: dict[str, Array] = {}
        first = 0
        for group, (k_name, v_name) in zip(self.layout.groups, self._names(), strict=True):
            for name, given, kind in ((k_name, rows.k, rows.k_type), (v_name, rows.v, rows.v_type)):
                plane = self.layout.planes()[name][1]
                self._check_plane(name, plane, kind, rows)
                own = given[first : first + group.layers]
                if name == k_name:
                    own = tuple(self._turned(layer, plane, rows.order, self.order) for layer in own)
                shape = plane.memory_shape(1, rows.tokens)[1:]
                for layer in own:
                    if layer.shape != shape or layer.dtype != plane.memory_dtype:
                        raise Unsupported(
                            f"the file's rows are {layer.dtype} {layer.shape}, the model's {name}"
                            f" {plane.memory_dtype} {shape}",
                            "give the model that the file was made with",
                        )
                out[name] = np.stack(own)
            first += group.layers
        return out

    def give(self, rows: Rows, token_ids: TokenIds, order: str) -> ForeignRows:
        """Rows as the engine has them, for a writer that wants K in this order."""
        k: list[Array] = []
        v: list[Array] = []
        planes = self.layout.planes()
        for k_name, v_name in self._names():
            plane = planes[k_name][1]
            k += [self._turned(layer, plane, self.order, order) for layer in rows[k_name]]
            v += list(rows[v_name])
        (k_name, v_name), plane = self._names()[0], planes[self._names()[0][0]][1]
        heads, dim = plane.row if plane.kind == "elements" else (None, None)
        return ForeignRows(
            k=tuple(k),
            v=tuple(v),
            k_type=self.types[k_name],
            v_type=self.types[v_name],
            order=order,
            heads=heads,
            head_dim=dim,
            rotation=self.rotation,
            token_ids=token_ids,
        )

    def _names(self) -> list[tuple[str, str]]:
        return [(f"{group.name}.k", f"{group.name}.v") for group in self.layout.groups]

    def _is_plain(self) -> bool:
        wanted = [{"k", "v"}] * len(self.layout.groups)
        names = [{plane.name for plane in group.planes} for group in self.layout.groups]
        return (
            bool(names) and names == wanted and not self.layout.needs_state and self._is_in_order()
        )

    def _is_in_order(self) -> bool:
        """Whether the layers of the groups, one group after another, are those of the model. Windows that
        llama.cpp keeps whole are a memory of their own; groups of transformers may take turns. llama.cpp's
        runs of layers with as many heads each are in order."""
        names = [group.name for group in self.layout.groups]
        runs = self.family == "llama.cpp" and all(name.startswith("full") for name in names)
        return len(names) == 1 or runs

    def _check_rotation(self, rows: ForeignRows) -> None:
        if rows.rotation not in (None, self.rotation):
            raise Unsupported(
                f"the file's K and V are rotated by {rows.rotation}, the engine's by {self.rotation}",
                "LLAMA_ATTN_ROT_DISABLE turns it on and off, for quantized types only",
            )

    def _check_plane(self, name: str, plane: Plane, kind: str, rows: ForeignRows) -> None:
        if kind != self.types[name]:
            hint = "load the model in that type"
            if self.family == "llama.cpp":
                letter = name.rpartition(".")[2]
                hint = f"give --cache-type-{letter} {kind}"
            raise Unsupported(
                f"the file's rows are {reprlib.repr(kind)}, the engine's {name} {self.types[name]}",
                hint,
            )
        shape = tuple(n for n in (rows.heads, rows.head_dim) if n is not None)
        if plane.kind == "elements" and len(shape) == 2 and shape != plane.row:
            raise Unsupported(
                f"the file has {shape[0]} KV heads of {shape[1]} elements, the model"
                f" {plane.row[0]} of {plane.row[1]}",
                "give the model that the file was made with",
            )

    def _turned(self, layer: Array, plane: Plane, order: str, wanted: str) -> Array:
        if order == wanted:
            return layer
        if plane.kind != "elements":
            raise Unsupported(
                "K of a quantized type cannot be put into another engine's order",
                "its elements share scales: take a file of f16, bf16 or f32",
            )
        return reordered(
            layer,
            order=order,
            wanted=wanted,
            architecture=self.architecture,
            head_dim=plane.row[1],
            rotated=plane.rope.dims if plane.rope is not None else plane.row[1],
        )
