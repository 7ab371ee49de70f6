"""Parts of a `kvtc` block: up to 64 tokens of a group of layers as integers, and as bytes.

    y = means * step / FINER + integers * step / f      f: the token's weight

A component's mean over the tokens is coded on its own, finer, and last: it takes up what rounding
made of the mean of the integers. Errors that tokens share add up in attention where others cancel.
Components that a step leaves little of keep their mean only.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvsnap.formats.codecs import entropy
from kvsnap.formats.codecs.calibration import LayerGroup
from kvsnap.formats.errors import Damaged
from kvsnap.formats.layout import Array

TOKENS = 64
FINER = 4
"""Of the means: the fraction of a step that they are rounded to."""
DROPPED = 0.125
"""Of a step: components whose mean magnitude is less have no integers."""
FORGOTTEN = 0.03
"""Of a step: components whose mean magnitude is less are left out."""
_MEANS_FROM = 16
"""Tokens: fewer have no means."""
_LARGEST = 32767
_WEIGHTS = (-12, 24)
"""Quarters of an octave, as are all of these."""
_LOUDNESS = (-40, 16)
_LOUD_FROM = 0.4
"""Steps: components with a smaller mean magnitude say nothing of how loud a token is."""
_SIDE_CLASS = 26
"""Entropy class of weights and loudness: magnitudes of 6."""
_EDGE = math.sqrt(math.sqrt(math.sqrt(2.0)))


@dataclass(frozen=True)
class Part:
    """`weights` int8 [tokens], quarters of an octave; `means` int16 [components]; `integers` int16
    [tokens, components], fewer of them."""

    weights: Array
    means: Array
    integers: Array


def make_part(group: LayerGroup, step: float, components: Array, weights: Array) -> Part:
    """From unweighted components float32 [tokens, kept] that are `possible`. Integers that int16
    cannot hold are cut: the caller compares what comes back."""
    count, told = _counts(group, step)
    scale = _factor(weights)[:, None] / np.float32(step)
    fine = np.float32(FINER / step)
    found = np.zeros(told, np.int16)
    if len(components) >= _MEANS_FROM:
        found = _whole(components[:, :told].mean(axis=0) * fine)
    integers = _whole((components[:, :count] - found[:count] / fine) * scale)
    if len(components) >= _MEANS_FROM:
        found[:count] = _whole((components[:, :count] - integers / scale).mean(axis=0) * fine)
    return Part(weights, found, integers)


def vectors(group: LayerGroup, step: float, part: Part) -> Array:
    """float32 [tokens, width] that a part stands for."""
    (tokens, count), told = part.integers.shape, len(part.means)
    means = part.means * np.float32(step / FINER)
    scaled = np.empty((tokens + 1, count), np.float32)
    np.multiply(part.integers, deviations(step, part.weights)[:, None], out=scaled[:tokens])
    scaled[tokens] = means[:count]
    again = scaled @ group.basis[:count]
    shared = again[tokens] + means[count:] @ group.basis[count:told] + group.mean
    again[:tokens] += shared
    return again[:tokens]


def possible(step: float, components: Array) -> Array:
    """bool [tokens]: whether unweighted components are such that int16 holds their means; false for
    NaN. One token of others would spoil the means of all."""
    found: Array = np.abs(components).max(axis=1) <= step * (_LARGEST / FINER)
    return found


def told_weights(group: LayerGroup, components: Array) -> Array:
    """int8 [tokens] for unweighted components [tokens, kept]."""
    found: Array = np.rint(group.features(components) @ group.weigher * entropy.PER_OCTAVE)
    return np.nan_to_num(found).clip(*_WEIGHTS).astype(np.int8)  # a weigher's sum may have no value


def deviations(step: float, weights: Array) -> Array:
    """float32 [tokens]: a step at each token's weight."""
    found: Array = np.float32(step) / _factor(weights)
    return found


def pack_part(group: LayerGroup, step: float, part: Part) -> list[bytes]:
    """Two entropy codes: what is told of tokens and means; integers, with the means in them."""
    spread = group.spread / np.float32(step)
    integers = part.integers
    loudness = _level(np.abs(integers.astype(np.float32)), spread[: integers.shape[1]])
    own = spread[: len(part.means)] * np.float32(FINER)
    level = _level(np.abs(part.means[None].astype(np.float32)), own)
    side = np.concatenate([part.weights.astype(np.int16), loudness, level])
    means = entropy.encode(part.means, _classes(group, step / FINER, len(part.means), level))
    classes = _classes(group, step, integers.shape[1], loudness)
    return [
        entropy.encode(side, np.full(len(side), _SIDE_CLASS, np.uint8)),
        entropy.encode(integers.T.reshape(-1), classes, means),
    ]


def unpack_part(
    group: LayerGroup, step: float, tokens: int, take: Callable[[], memoryview]
) -> Part:
    """Inverse of `pack_part`; `take` gives one code after the other."""
    count, told = _counts(group, step)
    side, _ = entropy.decode(take(), np.full(2 * tokens + 1, _SIDE_CLASS, np.uint8))
    weights, loudness, level = side[:tokens], side[tokens:-1], side[-1:]
    for numbers, (low, high) in ((weights, _WEIGHTS), (side[tokens:], _LOUDNESS)):
        if numbers.min() < low or numbers.max() > high:
            raise Damaged("a token's weight or loudness is out of range")
    integers, code = entropy.decode(take(), _classes(group, step, count, loudness))
    means, _ = entropy.decode(memoryview(code), _classes(group, step / FINER, told, level))
    return Part(weights.astype(np.int8), means, integers.reshape(-1, tokens).T)


def _level(sizes: Array, expected: Array) -> Array:
    """int16 [tokens]: how much larger than expected the sizes [tokens, components] are."""
    telling = max(1, int(np.count_nonzero(expected >= _LOUD_FROM)))
    ratio = (sizes[:, :telling] / expected[:telling]).mean(axis=1)
    level: Array = np.rint(np.log2(np.maximum(ratio, 1e-6)) * entropy.PER_OCTAVE)
    return level.clip(*_LOUDNESS).astype(np.int16)


def _counts(group: LayerGroup, step: float) -> tuple[int, int]:
    """How many components have integers, and means."""
    spread = group.spread.astype(np.float64)
    kept, told = (int((spread >= step * share).sum()) for share in (DROPPED, FORGOTTEN))
    return max(1, kept), max(1, told)


def _classes(group: LayerGroup, step: float, count: int, levels: Array) -> Array:
    """Entropy classes [count * levels]. Only products and comparisons: the same everywhere."""
    own = np.searchsorted(_edges() * step, group.spread[:count].astype(np.float64))
    classes = own.astype(np.int16)[:, None] + levels
    return classes.clip(0, entropy.CLASSES - 1).astype(np.uint8).reshape(-1)


@functools.cache
def _edges() -> Array:
    """Where one class ends and the next begins."""
    return np.array([entropy.mean_magnitude(n) * _EDGE for n in range(entropy.CLASSES - 1)])


def _whole(values: Array) -> Array:
    return np.rint(values).clip(-_LARGEST, _LARGEST).astype(np.int16)


def _factor(weights: Array) -> Array:
    """float32 [tokens]: what a token's components are multiplied by."""
    found: Array = np.exp2(weights.astype(np.float32) / np.float32(entropy.PER_OCTAVE))
    return found
