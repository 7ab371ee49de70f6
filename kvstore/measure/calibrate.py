"""Computes calibrations of codec `kvtc` from rows of keys and values and their gradients.

What an error in a row costs is told by the gradient of the log-likelihood of a token that the model
itself would say: the expectation of (gradient * error)^2 is twice the KL divergence it makes (the
Fisher information). One backward pass a text gives it for every row. Texts must be as varied as what
will be stored: calibrated on 11,000 tokens of Python's documentation and sources only, V of other
texts took a quarter more bits than with 10,000 more, half of them written by the model itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from kvsnap.formats.codecs.calibration import Calibration, LayerGroup, PlaneCalibration
from kvsnap.formats.codecs.escape import SINKS
from kvsnap.formats.codecs.parts import DROPPED
from kvsnap.formats.codecs.rope import pairs, rotate
from kvsnap.formats.errors import UsageError
from kvsnap.formats.layout import Array, PlaneRope

FINEST = 0.003
"""The default smallest step; a KL of less than 1e-3 on the bundled model."""
WIDEST = 3072
"""Values of a token that one transform takes: more layers together are fewer bytes, while time
grows with the square. 15 layers of 192, as the bundled model gets: 1.4x the ratio of one."""
_SHRINK = 0.4
"""Of the gradients' covariance within a head, towards its diagonal."""
_FLOOR = 1e-6
"""Of a head's largest sensitivity: what a channel that nothing reads is taken to have."""
_RIDGE = 200.0
_SHARES = (3, 1)
"""Weights change the metric, which changes the components that weights are told from: a first round
for the weights only takes every third token."""


@dataclass(frozen=True)
class Samples:
    """Rows of one plane. `values` and `gradients` are [tokens, layers, heads, dim], float16 or
    float32, as the engine has them (RoPE done); `positions` [tokens] rise by one within a text."""

    values: Array
    gradients: Array
    positions: Array
    rope: PlaneRope | None = None


def calibrate(
    model: str, samples: Mapping[str, Samples], finest: float = FINEST, widest: int = WIDEST
) -> Calibration:
    """The calibration of all planes, `GROUP.PLANE` → samples. `pack_calibration` makes the file.

    Takes 8 bytes a value of one group of layers, twice over, and for every group a few times
    tokens * width^2 and width^3 operations. `UsageError` where there are too few tokens.
    """
    return Calibration(
        model, finest, {name: _plane(name, own, finest, widest) for name, own in samples.items()}
    )


def _plane(name: str, samples: Samples, finest: float, widest: int) -> PlaneCalibration:
    _, layers, heads, dim = samples.values.shape
    if int((samples.positions >= SINKS).sum()) < 2 * dim:
        raise UsageError(f"too few tokens to calibrate {name} with", "give more text")
    count = -(-layers // max(1, widest // (heads * dim)))
    edges = [layers * number // count for number in range(count + 1)]
    place = _place(samples.positions)
    groups = []
    for first, last in itertools.pairwise(edges):
        values, gradients = (
            _vectors(samples, array[:, first:last]) for array in (samples.values, samples.gradients)
        )
        groups.append(_group(values, gradients, place, (last - first, heads, dim), finest))
    return PlaneCalibration((heads, dim), tuple(groups))


def _texts(positions: Array) -> Iterator[slice]:
    """Runs of rising positions."""
    breaks = np.flatnonzero(np.diff(positions) != 1) + 1
    edges = [0, *breaks.tolist(), len(positions)]
    return (slice(a, b) for a, b in itertools.pairwise(edges))


def _vectors(samples: Samples, rows: Array) -> Array:
    """float32 [tokens, width] without sinks, RoPE undone, pairs as halves: as the codec has it.
    Rotations keep lengths, so gradients turn as values do."""
    found = []
    for text in _texts(samples.positions):
        values = rows[text].astype(np.float32)
        if samples.rope is not None:
            start = int(samples.positions[text.start])
            rotate(samples.rope, values.swapaxes(0, 1), start, back=True)
            first, second = pairs(samples.rope, values)
            rest = values[..., samples.rope.dims :]
            values = np.concatenate([first, second, rest], axis=-1)
        found.append(values[samples.positions[text] >= SINKS])
    return np.concatenate(found).reshape(sum(map(len, found)), -1)


def _place(positions: Array) -> Array:
    """float64 [tokens, 2], centred: logarithms of how many tokens follow in the text and precede.
    A row counts for all later ones of its text; codecs cannot know that, and weights must not
    depend on it."""
    found = []
    for text in _texts(positions):
        own = positions[text]
        both = np.stack([np.log(own[-1] - own + 8.0), np.log(own + 1.0)], axis=1)
        found.append(both[own >= SINKS])
    place = np.concatenate(found)
    place -= place.mean(axis=0)
    return place


def _group(
    values: Array, gradients: Array, place: Array, shape: tuple[int, int, int], finest: float
) -> LayerGroup:
    mean = values.mean(axis=0)
    values = values - mean
    factor = np.ones((len(values), 1), np.float32)
    for share in _SHARES:
        group = _weighted(
            values[::share],
            gradients[::share] / factor[::share],
            factor[::share],
            place[::share],
            mean,
            shape,
            finest,
        )
        if share > 1:
            factor = np.exp2(group.features(values @ group.encoder) @ group.weigher)[:, None]
    return group


def _weighted(
    values: Array,
    gradients: Array,
    factor: Array,
    place: Array,
    mean: Array,
    shape: tuple[int, int, int],
    finest: float,
) -> LayerGroup:
    """The group for given weights, with the weigher that it gives. Values are centred, gradients
    are those of the weighted values."""
    layers, heads, dim = shape
    metric = _metric(gradients.reshape(-1, layers * heads, dim))
    basis = _basis(values * factor, metric)
    group = LayerGroup(layers, basis, mean, metric, mean, mean)
    components = values @ group.encoder
    order, spread = _order(components * factor, finest)
    group = replace(group, basis=np.ascontiguousarray(basis[order]), spread=spread)
    cost = np.square(gradients * factor / _root_mean_square(gradients)).mean(axis=1)
    return replace(group, weigher=_weigher(group.features(components[:, order]), place, cost))


def _metric(gradients: Array) -> Array:
    """float32 [blocks, dim, dim] of gradients [tokens, blocks, dim]."""
    _, blocks, dim = gradients.shape
    found = np.empty((blocks, dim, dim), np.float32)
    for number in range(blocks):
        own = np.ascontiguousarray(gradients[:, number])
        covariance = (own.T @ own).astype(np.float64) / len(own)
        diagonal = np.diagonal(covariance)
        floor = max(_FLOOR * diagonal.max(), 1e-30)
        covariance *= 1 - _SHRINK
        covariance += np.diag(_SHRINK * diagonal + floor)
        found[number] = covariance
    return found


def _basis(vectors: Array, metric: Array) -> Array:
    """float32 [width, width]: principal components in the metric, as rows in the vectors' units."""
    blocks, dim, _ = metric.shape
    powers, turns = np.linalg.eigh(metric.astype(np.float64))
    root = np.matmul(turns * np.sqrt(powers)[:, None], turns.swapaxes(1, 2)).astype(np.float32)
    inverse = np.matmul(turns / np.sqrt(powers)[:, None], turns.swapaxes(1, 2)).astype(np.float32)
    covariance = (vectors.T @ vectors) / np.float32(len(vectors))
    covariance = covariance.reshape(blocks, dim, blocks, dim)
    covariance = np.einsum("iab,ibjc,jcd->iajd", root, covariance, root, optimize=True)
    _, found = np.linalg.eigh(covariance.reshape(blocks * dim, -1))
    basis = np.matmul(found.T.reshape(-1, blocks, 1, dim), inverse)
    return np.ascontiguousarray(basis.reshape(-1, blocks * dim))


def _order(components: Array, finest: float) -> tuple[Array, Array]:
    """Which components to keep, the most spread first, and their spreads."""
    spread = np.abs(components).mean(axis=0)
    order = np.argsort(-spread, kind="stable")
    order = order[: max(1, int((spread >= finest * DROPPED).sum()))]
    return order, np.maximum(spread[order], np.float32(1e-30))


def _root_mean_square(gradients: Array) -> Array:
    """Of each channel, never zero."""
    found: Array = np.sqrt(np.square(gradients).mean(axis=0))
    return np.maximum(found, max(1e-15, float(found.max()) * 1e-6))


def _weigher(features: Array, place: Array, cost: Array) -> Array:
    """Coefficients of log2 of the weight: half the logarithm of what an error costs.

    With costs w and predictions e^p, steps as 1 / sqrt(e^p) cost mean(w e^-p) at the same number of
    bits where mean(p) = 0: their sum is minimised, a gamma regression, by Newton's method.
    """
    matrix = np.concatenate([place, features], axis=1).astype(np.float64)  # the constant last
    cost = np.maximum(cost.astype(np.float64), 1e-4 * cost.mean())
    ridge = np.full(matrix.shape[1], _RIDGE)
    ridge[-1] = 1e-9
    found = np.linalg.solve(matrix.T @ matrix + np.diag(ridge), matrix.T @ np.log(cost))

    def loss(at: Array) -> float:
        told = matrix @ at
        return float((cost * np.exp(-told) + told).sum() + 0.5 * ridge @ np.square(at))

    for _ in range(10):
        error = cost * np.exp(-(matrix @ found))
        slope = matrix.T @ (1 - error) + ridge * found
        curve = (matrix * np.clip(error, 0.2, 5)[:, None]).T @ matrix + np.diag(ridge)
        move = np.linalg.solve(curve, slope)
        sizes = [
            size for size in (1.0, 0.5, 0.25, 0.125) if loss(found - size * move) < loss(found)
        ]
        if not sizes:
            break
        found -= sizes[0] * move
    weigher = found[place.shape[1] :]
    weigher[-1] -= float((features @ weigher).mean())
    weigher *= 0.5 / np.log(2)
    return weigher.astype(np.float32)
