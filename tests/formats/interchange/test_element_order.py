"""K's elements between GGUF's order and transformers': by a table, and never by a guess."""

from __future__ import annotations

import numpy as np
import pytest

from kvsnap.formats.errors import Unsupported
from kvsnap.formats.interchange.element_order import is_moved, reordered
from kvsnap.formats.interchange.foreign import GGUF, HALVES

HEADS, DIM = 3, 8
ROWS = np.arange(5 * HEADS * DIM, dtype=np.uint16).reshape(5, HEADS * DIM)


def turned(order: str, wanted: str, architecture: str = "llama", rotated: int = DIM) -> np.ndarray:
    return reordered(
        ROWS,
        order=order,
        wanted=wanted,
        architecture=architecture,
        head_dim=DIM,
        rotated=rotated,
    )


def test_pairs_become_halves_head_by_head() -> None:
    first = turned(GGUF, HALVES)[0].reshape(HEADS, DIM)
    assert first[0].tolist() == [0, 2, 4, 6, 1, 3, 5, 7]
    assert first[2].tolist() == [16, 18, 20, 22, 17, 19, 21, 23]


def test_there_and_back_is_the_same() -> None:
    there = turned(HALVES, GGUF)
    assert not np.array_equal(there, ROWS)
    back = reordered(
        there, order=GGUF, wanted=HALVES, architecture="mistral", head_dim=DIM, rotated=DIM
    )
    np.testing.assert_array_equal(back, ROWS)


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "gemma3", "phi3", "qwen3_moe"])
def test_architectures_that_rotate_halves_everywhere_are_left_as_they_are(
    architecture: str,
) -> None:
    assert turned(GGUF, HALVES, architecture) is ROWS


@pytest.mark.parametrize("architecture", ["command-r", "cohere2", "llama4", "deepseek2", "", "x"])
def test_an_architecture_that_nobody_looked_at_is_refused(architecture: str) -> None:
    with pytest.raises(Unsupported, match="nobody told"):
        is_moved(architecture)
    assert turned(HALVES, HALVES, architecture) is ROWS


def test_heads_that_are_rotated_in_part_are_refused() -> None:
    with pytest.raises(Unsupported, match="4 of 8"):
        turned(GGUF, HALVES, rotated=4)
