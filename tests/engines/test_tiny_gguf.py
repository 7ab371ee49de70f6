"""The tiny random models load, and their logits depend on what they should depend on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
pytest.importorskip("gguf", reason="gguf is not installed")

import numpy as np

from kvsnap.testing.tiny_gguf import ARCHITECTURES, VOCABULARY, write_tiny

pytestmark = pytest.mark.engine

TOKENS = 80
Load = Callable[..., "llama_cpp.Llama"]


@pytest.fixture
def load(tmp_path: Path) -> Iterator[Load]:
    loaded: list[llama_cpp.Llama] = []

    def write_and_load(architecture: str, **sizes: int) -> llama_cpp.Llama:
        path = write_tiny(tmp_path / f"{len(loaded)}.gguf", architecture, **sizes)
        loaded.append(
            llama_cpp.Llama(
                str(path), n_ctx=256, n_threads=1, n_threads_batch=1, logits_all=True, verbose=False
            )
        )
        return loaded[-1]

    yield write_and_load
    for llm in loaded:
        llm.close()


def token_ids(*, first: int = 3) -> list[int]:
    return [first, *np.random.default_rng(7).integers(3, VOCABULARY, TOKENS - 1).tolist()]


def logits(llm: llama_cpp.Llama, tokens: list[int]) -> np.ndarray:
    """Of the last token, [vocabulary]."""
    llm.reset()
    llm.eval(tokens)
    return np.array(llm.scores[len(tokens) - 1])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
class TestEachArchitecture:
    def test_logits_are_finite_and_depend_on_the_first_token(
        self, load: Load, architecture: str
    ) -> None:
        llm = load(architecture, window=0 if architecture == "lfm2" else 32)
        one, again, other = (logits(llm, token_ids(first=first)) for first in (3, 3, 4))
        assert np.isfinite(one).all()
        assert one.std() > 0.1
        assert np.array_equal(one, again)
        assert np.abs(one - other).max() > 0.01

    def test_its_file_is_small_and_follows_the_seed(
        self, tmp_path: Path, architecture: str
    ) -> None:
        files = [write_tiny(tmp_path / str(n), architecture, n // 2) for n in range(3)]
        assert files[0].stat().st_size < 500_000
        assert files[0].read_bytes() == files[1].read_bytes() != files[2].read_bytes()

    def test_text_comes_back_from_its_tokens(self, load: Load, architecture: str) -> None:
        llm = load(architecture)
        for text in ("a red bicycle", "Größe: 1 €", "two\nlines", ""):
            ids = llm.tokenize(text.encode(), special=True)
            assert llm.detokenize(ids).decode() == text
            assert max(ids) < VOCABULARY == llm.n_vocab()


@pytest.mark.parametrize(
    ("architecture", "sizes", "window", "recurrent", "hybrid"),
    [
        ("llama", {}, 0, False, False),
        ("gemma3", {}, 32, False, False),
        ("gemma3", {"window": 16, "pattern": 9}, 16, False, False),
        ("mamba", {}, 0, True, False),
        ("jamba", {}, 0, False, True),
        ("lfm2", {"window": 0}, 0, False, True),
        ("lfm2", {"window": 32}, 32, False, True),
    ],
)
def test_llama_cpp_sees_the_kind_of_memory(
    load: Load,
    architecture: str,
    sizes: dict[str, int],
    window: int,
    recurrent: bool,
    hybrid: bool,
) -> None:
    model = load(architecture, **sizes).model
    assert llama_cpp.llama_model_n_swa(model) == window
    assert llama_cpp.llama_model_is_recurrent(model) == recurrent
    assert llama_cpp.llama_model_is_hybrid(model) == hybrid


@pytest.mark.parametrize(("architecture", "reach"), [("gemma3", 31), ("lfm2", 31 + 2 * 3)])
def test_a_window_hides_what_lies_before_it(load: Load, architecture: str, reach: int) -> None:
    """One layer looks back over a window of 32: the token itself and 31 before it. In lfm2 two
    layers more look back, each by the 3 tokens of its short convolution."""
    layers = {"gemma3": {"layers": 1, "pattern": 9}, "lfm2": {"layers": 3, "attention_every": 2}}
    llm = load(architecture, window=32, **layers[architecture])
    tokens = token_ids()
    before = logits(llm, tokens)
    differs = []
    for place in (TOKENS - 1 - reach, TOKENS - 2 - reach):
        changed = [*tokens]
        changed[place] = 3 + (tokens[place] - 2) % (VOCABULARY - 3)
        differs.append(not np.array_equal(before, logits(llm, changed)))
    assert differs == [True, False]


def test_what_there_is_not_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KeyError):
        write_tiny(tmp_path / "x", "no-such-model")
    with pytest.raises(TypeError):
        write_tiny(tmp_path / "x", "llama", depth=3)
