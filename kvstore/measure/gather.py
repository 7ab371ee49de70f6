"""What a calibration is computed from: rows of K and V of many texts, and their gradients.

Half of the texts the model writes itself, at temperature 1 from one opening word each: they are in
the languages and on the subjects that it knows, whoever has nothing at hand but the model. On text
that it had written, calibrations without such took 19 % more bytes. The other half is the caller's,
or what every Python brings along: its language reference and its library's sources.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from importlib import import_module

import numpy as np

from kvsnap.formats.errors import UsageError
from kvsnap.formats.layout import Array
from kvsnap.formats.names import TokenIds
from kvsnap.kvstore.measure.calibrate import Samples
from kvsnap.kvstore.measure.float32 import Float32Model

LENGTH = 512
"""Tokens of one text: gradients of a longer one take more memory, and teach no more."""
OPENINGS = (
    "The", "In", "#", "def", "Once", "How", "import", "A", "What", "1.", "It", "We", "To", "<",
    "Dear", "When", "Question:", "Chapter", '"', "public", "Title:", "This", "For", "Hello",
    "User:", "Yes", "Il", "Der", "La", "SELECT", "Abstract", "-",
)  # fmt: skip
_SUBJECTS = (
    "formatstrings", "compound", "types", "assignment", "typesseq", "naming", "strings", "try",
    "string-methods", "debugger", "specialnames", "numeric-types",
)  # fmt: skip
_MODULES = (
    "textwrap", "json.decoder", "pathlib", "email.message", "argparse", "statistics", "http.client",
    "turtle", "difflib", "locale", "calendar", "random", "ast", "asyncio.tasks", "html.parser",
    "smtplib", "logging", "csv", "zipfile", "shutil",
)  # fmt: skip


def own_texts() -> list[str]:
    """The language reference and library sources that come with every Python."""
    topics = import_module("pydoc_data.topics").topics
    texts = [topics[subject] for subject in _SUBJECTS if subject in topics]
    for name in _MODULES:
        try:
            texts.append(inspect.getsource(import_module(name)))
        except (ImportError, OSError):  # not on every platform, or without its source
            continue
    return texts


def gather(
    model: Float32Model,
    texts: Sequence[str],
    tokens: int,
    step: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Samples]:
    """Plane → samples of about `tokens` tokens, half of them written by the model. Deterministic.

    Raises `UsageError` where no text has `LENGTH` tokens.
    """
    count = max(2, tokens // LENGTH)
    given = _pieces(model, texts, count - count // 2)
    written = model.write(OPENINGS, count - len(given), LENGTH, seed=1)
    values: dict[str, list[Array]] = {}
    gradients: dict[str, list[Array]] = {}
    every = [*given, *written]
    for number, ids in enumerate(every):
        step(number, len(every))
        for found, kept in zip(model.gradients(ids, number), (values, gradients), strict=True):
            for name, array in found.items():
                kept.setdefault(name, []).append(array.astype(np.float16))
    step(len(every), len(every))
    positions = np.concatenate([np.arange(len(ids)) for ids in every])
    planes = model.layout.planes()
    return {
        name: Samples(
            np.concatenate(values[name]),
            np.concatenate(gradients[name]),
            positions,
            planes[name][1].rope,
        )
        for name in planes
    }


def _pieces(model: Float32Model, texts: Sequence[str], count: int) -> list[TokenIds]:
    """`count` pieces of `LENGTH` tokens, the same number of each text as far as it goes."""
    ids = [model.tokenize(text) for text in texts]
    found: list[TokenIds] = []
    for start in range(0, max(map(len, ids), default=0) - LENGTH + 1, LENGTH):
        found += [own[start : start + LENGTH] for own in ids if len(own) >= start + LENGTH]
        if len(found) >= count:
            break
    if not found:
        raise UsageError(f"no text has {LENGTH} tokens", "give longer ones")
    return found[:count]
