"""A stamped engine that reads and writes text: letters, pairs of letters, and a chat template.

Its tokenizer takes pairs wherever it can, from the left: what a text begins with does not decide
how its middle is cut, as with real ones. Its model does not keep to that, and writes any tokens.
"""

from __future__ import annotations

import itertools
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from kvsnap.engines.text import TextEngine
from kvsnap.formats.names import TokenIds, token_array
from kvsnap.kvstore.conversation import Message
from kvsnap.testing.stamped import StampedEngine

START, END = "<|start|>", "<|end|>"
_OTHERS = [START, END, *string.digits, *string.ascii_uppercase, *"\n :.?!<>/"]
_PIECES = [
    *_OTHERS,
    *string.ascii_lowercase,
    *map("".join, itertools.product(string.ascii_lowercase, repeat=2)),
]
_IDS = {piece: number for number, piece in enumerate(_PIECES)}
Template = Callable[[Sequence[Message], bool], str]


def plain(messages: Sequence[Message], answer: bool) -> str:
    """Each message in its own turn; earlier ones are never written differently."""
    turns = [f"{START}{m['role']}\n{m['content']}{END}\n" for m in messages]
    return "".join(turns) + (f"{START}assistant\n" if answer else "")


def forgetful(messages: Sequence[Message], answer: bool) -> str:
    """Of the answers before the last user's message what they thought is dropped."""
    users = [number for number, message in enumerate(messages) if message["role"] == "user"]
    last = users[-1] if users else 0
    kept = [
        {**m, "content": str(m["content"]).split("</think>")[-1]} if number < last else m
        for number, m in enumerate(messages)
    ]
    return plain(kept, answer)


class StampedTextEngine(StampedEngine, TextEngine):
    """`thinks`: every answer begins with a thought. `longest` tokens, and an answer ends by itself."""

    def __init__(
        self, template: Template = plain, *, thinks: bool = False, longest: int = 12, **options: Any
    ) -> None:
        super().__init__(vocabulary=len(_PIECES), **options)
        self.template, self.thinks, self.longest = template, thinks, longest

    def tokenize(self, text: str, *, first: bool, chat: bool = False) -> TokenIds:
        ids, at = list[int](), 0
        while at < len(text):
            sizes = (len(START), len(END), 2, 1)
            piece = next(text[at : at + n] for n in sizes if text[at : at + n] in _IDS)
            ids.append(_IDS[piece])
            at += len(piece)
        return token_array(ids)

    def detokenize(self, token_ids: Sequence[int]) -> bytes:
        pieces = (_PIECES[token] for token in token_ids)
        return "".join(piece for piece in pieces if piece not in (START, END)).encode()

    def spelled(self, token_ids: Sequence[int] | TokenIds) -> str:
        """All of the text, special tokens as the template writes them."""
        return "".join(_PIECES[token] for token in token_ids)

    def render(self, messages: Sequence[Mapping[str, Any]], *, answer: bool) -> str:
        return self.template(messages, answer)

    def generate(self, token_ids: TokenIds, *, temperature: float, seed: int) -> Iterator[int]:
        self.evaluate(token_ids[self.held :])
        thought = self.tokenize("<think>hm</think>", first=False) if self.thinks else ()
        for number in range(self.longest):
            sampled = len(_OTHERS) + self.sample() % (len(_PIECES) - len(_OTHERS))
            token = int(thought[number]) if number < len(thought) else sampled
            yield token
            self.evaluate(token_array([token]))
