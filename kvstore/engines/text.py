"""What the command line needs of an engine beyond rows: text to ids and back, and new tokens."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from kvsnap.engines.base import Engine
from kvsnap.formats.errors import Unsupported
from kvsnap.formats.names import TokenIds


class TextEngine(Engine):
    """An engine with a tokenizer, a chat template and a sampler."""

    @abstractmethod
    def tokenize(self, text: str, *, first: bool, chat: bool = False) -> TokenIds:
        """Ids of a text. `first`: it begins a sequence (a BOS is added where the model has one);
        `chat`: it was rendered by the template, which writes the BOS itself."""

    @abstractmethod
    def detokenize(self, token_ids: Sequence[int]) -> bytes:
        """UTF-8 bytes; the last character may be incomplete."""

    @abstractmethod
    def render(self, messages: Sequence[Mapping[str, Any]], *, answer: bool) -> str:
        """Messages through the model's own chat template; `answer` adds the generation prompt.

        Raises `UsageError` where the template refuses them, `Unsupported` where there is none.
        """

    def log_probs(self, token_ids: TokenIds) -> np.ndarray:
        """Evaluate the next tokens, and give the logarithms of the next-token distributions after
        each: float32 [tokens, vocabulary]. Raises `Unsupported` where an adapter does not say."""
        raise Unsupported(
            "this engine does not tell its next-token distributions", "save without --max-kl"
        )

    @abstractmethod
    def generate(self, token_ids: TokenIds, *, temperature: float, seed: int) -> Iterator[int]:
        """New tokens after `token_ids`, of which the engine may hold any prefix; 0.0 is greedy.

        The sampler starts afresh: its state is not part of a session. Ends by itself at an end-of-generation token, which is
        not yielded."""
