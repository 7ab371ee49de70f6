"""The smallest codec that holds a limit on KL, measured on this session and this engine.

An engine has a floor of its own: llama.cpp's distributions move by a KL of 2.4e-3 on the bundled
model when nothing but the last bits of the rows change. The floor is measured in the same run, by
rows rounded to bfloat16 and back; what the limit bounds is a codec's excess over it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from kvsnap.engines.text import TextEngine
from kvsnap.formats.codecs import CODECS, Codec, get_codec
from kvsnap.formats.codecs.uniform import narrow, widen
from kvsnap.formats.errors import NotFound, Unsupported, UsageError
from kvsnap.formats.identity import EXACT
from kvsnap.formats.layout import Array, Layout, Plane, Rows
from kvsnap.kvstore.measure.codec_loss import divergence, through_files
from kvsnap.kvstore.measure.live import LiveModel
from kvsnap.kvstore.session import Session

HELD_OUT = 256
"""Tokens at the end of the session to compare distributions on; at most a quarter of it."""
FEWEST = 16
"""With fewer a mean says nothing, and nothing is quantized."""


@dataclass(frozen=True, kw_only=True)
class Tried:
    """One codec: mean KL on the session's own tokens, its excess over the floor with the error that
    so few tokens leave (two standard errors of the mean), and the bytes of its block files."""

    codec: str
    kl: float
    excess: float
    error: float
    bytes: int

    def holds(self, limit: float) -> bool:
        """Whether the excess is below the limit for sure; one of NaN never is."""
        return self.excess + self.error <= limit


@dataclass(frozen=True, kw_only=True)
class Choice:
    """`codec` is None where no candidate holds the limit: the session stays exact."""

    codec: Codec | None
    limit: float
    floor: float
    held_out: int
    tried: tuple[Tried, ...]

    @property
    def excess(self) -> float:
        """Of the codec that was chosen; 0 for an exact session."""
        fidelity = self.codec.fidelity if self.codec is not None else EXACT
        return next((t.excess for t in self.tried if t.codec == fidelity), 0.0)

    def notes(self) -> Mapping[str, Any]:
        """For the session's notes, JSON: what is no finite number is null."""
        chosen = self.codec.fidelity if self.codec is not None else EXACT
        return {
            "limit": _finite(self.limit),
            "floor": _finite(self.floor),
            "excess": _finite(self.excess),
            "codec": chosen,
            "held_out_tokens": self.held_out,
            "tried": [{k: _finite(v) for k, v in asdict(t).items()} for t in self.tried],
        }


def candidates_of(session: Session) -> list[Codec]:
    """The lossy codecs that can code this session's rows; calibrated ones where the store has the
    model's calibration."""
    found, calibrations = [], session.store.calibrations
    for codec in map(get_codec, CODECS):
        if codec.lossy:
            with contextlib.suppress(NotFound, Unsupported):
                found.append(calibrations.complete(codec, session.weights))
    return found


def choose_codec(
    engine: TextEngine, candidates: Sequence[Codec], limit: float, block_size: int
) -> Choice:
    """Measure the candidates on what the engine holds; afterwards it holds the same, bit for bit.

    Raises `UsageError` where it holds rows that were restored with loss: there is nothing exact to
    compare with.
    """
    if engine.held_fidelity() != EXACT:
        raise UsageError(
            "a limit on KL is measured against exact rows, and the engine holds lossy ones",
            "save without --max-kl, or from a session that is exact",
        )
    ids = engine.token_ids()
    held_out = min(HELD_OUT, len(ids) // 4)
    start = (len(ids) - held_out) // block_size * block_size
    if held_out < FEWEST or start == 0:
        return Choice(codec=None, limit=limit, floor=0.0, held_out=0, tried=())
    whole = engine.export(0, len(ids))
    rows = {name: array[:, :start] for name, array in whole.items()}
    model = LiveModel(engine, whole, rows)
    context, rest = ids[:start], ids[start : start + held_out]
    try:
        exact = model.log_probs(context, rows, rest)

        def kl(changed: Rows) -> np.ndarray:
            return divergence(exact, model.log_probs(context, changed, rest))

        floor = kl(nudged(engine.layout, rows))
        tried: list[tuple[Codec, Tried]] = []
        for codec in candidates:
            try:
                changed, size = through_files(codec, engine.layout, context, rows, block_size)
            except Unsupported:  # rows that the engine quantized itself
                continue
            found = kl(changed)
            above = found - floor  # of the same tokens: most of the noise is common to both
            told = Tried(
                codec=codec.fidelity,
                kl=float(found.mean()),
                excess=max(0.0, float(above.mean())) if np.isfinite(above).all() else math.nan,
                error=float(2 * above.std(ddof=1) / math.sqrt(len(above))),
                bytes=size,
            )
            tried.append((codec, told))
    finally:
        model.put(ids, whole)
    holding = [(told.bytes, n) for n, (_, told) in enumerate(tried) if told.holds(limit)]
    return Choice(
        codec=tried[min(holding)[1]][0] if holding else None,
        limit=limit,
        floor=float(floor.mean()),
        held_out=held_out,
        tried=tuple(told for _, told in tried),
    )


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def nudged(layout: Layout, rows: Rows) -> Rows:
    """Rows rounded to bfloat16 and back to their own type (of BF16: to one bit less), which is no
    more than a restore in another element type would do."""
    return {name: _rounded(layout.planes()[name][1], array) for name, array in rows.items()}


def _rounded(plane: Plane, rows: Array) -> Array:
    if plane.kind != "elements" or plane.dtype == "U8":
        return rows
    if plane.dtype == "BF16":
        shorter: Array = (rows + ((rows >> 1) & 1)) & np.uint16(0xFFFE)
        return np.where((shorter & 0x7F80) == 0x7F80, rows, shorter)
    kind = np.dtype("<f2") if plane.dtype == "F16" else np.dtype("<f4")
    given = np.ascontiguousarray(rows).view(kind)
    with np.errstate(over="ignore"):
        found = widen("BF16", narrow("BF16", given.astype("<f4"))).astype(kind)
    found = np.where(np.isfinite(found), found, given)  # the largest halves would overflow
    rounded: Array = found.view(plane.memory_dtype)
    return rounded
