"""Text, chat templates and sampling with a transformers tokenizer."""

from __future__ import annotations

import functools
import json
import re
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from kvsnap.engines.text import TextEngine
from kvsnap.formats.errors import DoesNotFit, EngineError, Unsupported, UsageError
from kvsnap.formats.names import TokenIds, token_array

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


class TransformersText(TextEngine):
    """The text half of the adapter."""

    model: Any
    tokenizer: Any
    batch_size: int
    _ids: TokenIds
    _logits: torch.Tensor | None

    @abstractmethod
    def _forward(self, token_ids: TokenIds, **more: Any) -> torch.Tensor | None: ...

    def tokenize(self, text: str, *, first: bool, chat: bool = False) -> TokenIds:
        if not text:
            return token_array([])
        ids = self._tokenizer()(text, add_special_tokens=False).input_ids
        if first and not chat:
            # Some tokenizers close a sequence, too: of theirs only the beginning is wanted.
            whole, begin = self._tokenizer()(text).input_ids, self.tokenizer.bos_token_id
            if begin is not None and whole[:1] == [begin] != ids[:1]:
                ids = [begin, *ids]
        return token_array(ids)

    def detokenize(self, token_ids: Sequence[int]) -> bytes:
        return b"".join(self._piece(int(token)) for token in token_ids)

    def render(self, messages: Sequence[Mapping[str, Any]], *, answer: bool) -> str:
        tokenizer = self._tokenizer()
        if not getattr(tokenizer, "chat_template", None):
            raise Unsupported(
                "this model has no chat template", "give its prompt as text: --prompt-file"
            )
        try:
            text = tokenizer.apply_chat_template(
                [dict(m) for m in messages], tokenize=False, add_generation_prompt=answer
            )
        except Exception as error:  # a template is a program of the model's author
            raise UsageError(
                f"the model's chat template refuses these messages: {error}",
                "check the roles and their order",
            ) from error
        return str(text)

    def log_probs(self, token_ids: TokenIds) -> np.ndarray:
        found = []
        if len(self._ids) + len(token_ids) > self.capacity:
            raise DoesNotFit(
                f"{len(self._ids) + len(token_ids)} tokens do not fit a context of {self.capacity}",
                "make the context larger (--ctx)",
            )
        for start in range(0, len(token_ids), self.batch_size):
            logits = self._forward(token_ids[start : start + self.batch_size])
            if logits is None:
                raise Unsupported("this model has no head that predicts tokens")
            found.append(torch.log_softmax(logits.float(), -1).cpu().numpy())
            self._logits = logits[-1:]
        width = int(self.model.get_input_embeddings().weight.shape[0])
        return np.concatenate([*found, np.empty((0, found[0].shape[1] if found else width), "f4")])

    def generate(self, token_ids: TokenIds, *, temperature: float, seed: int) -> Iterator[int]:
        held = self.token_ids()
        if len(held) >= len(token_ids) and self._logits is None:
            self.truncate(len(token_ids) - 1)  # a restored cache has no logits
        self.evaluate(token_ids[len(self._ids) :])
        ends, source = self._ends(), torch.Generator().manual_seed(seed)
        while True:
            if self._logits is None:
                raise EngineError("this model gives no logits", "load it with its language head")
            logits = self._logits[-1].float().cpu()
            if temperature > 0:
                chances = torch.softmax(logits / temperature, -1)
                token = int(torch.multinomial(chances, 1, generator=source))
            else:
                token = int(logits.argmax())
            if token in ends:
                return
            yield token
            self.evaluate(token_array([token]))

    def _ends(self) -> set[int]:
        """End-of-generation tokens, from wherever a model names them."""
        named: set[int] = set()
        for place in (getattr(self.model, "generation_config", None), self.model.config):
            found = getattr(place, "eos_token_id", None)
            named |= {found} if isinstance(found, int) else set(found or ())
        own = getattr(self.tokenizer, "eos_token_id", None)
        return named | ({own} if own is not None else set())

    def _tokenizer(self) -> Any:
        if self.tokenizer is None:
            raise Unsupported(
                "the engine was made without a tokenizer",
                "give it one: Transformers(model, tokenizer=AutoTokenizer.from_pretrained(…))",
            )
        return self.tokenizer

    def _piece(self, token: int) -> bytes:
        """The bytes of one token, perhaps a part of a character; special tokens have none."""
        tokenizer = self._tokenizer()
        added = tokenizer.added_tokens_decoder.get(token)
        if added is not None:
            return b"" if added.special else str(added.content).encode()
        text = tokenizer.convert_ids_to_tokens(token)
        if text is None or token in tokenizer.all_special_ids:
            return b""
        if self._is_byte_level:
            return bytes(_alphabet()[letter] for letter in text)
        found = _BYTE.fullmatch(text)
        return bytes.fromhex(found[1]) if found else str(text).replace("▁", " ").encode()

    @functools.cached_property
    def _is_byte_level(self) -> bool:
        """Whether its tokens are written in GPT-2's alphabet of bytes, or in SentencePiece's."""
        backend = getattr(self._tokenizer(), "backend_tokenizer", None)
        if backend is None:
            raise Unsupported(
                f"tokenizers of class {type(self.tokenizer).__name__} are not handled",
                "use a model with a tokenizer.json",
            )
        decoder = json.dumps(json.loads(backend.to_str())["decoder"])
        if "ByteLevel" in decoder:
            return True
        if "▁" in decoder.encode().decode("unicode_escape") or "Metaspace" in decoder:
            return False
        raise Unsupported(
            "this tokenizer's tokens cannot be turned into bytes one by one",
            "use a model with a byte-level or SentencePiece tokenizer",
        )


@functools.cache
def _alphabet() -> dict[str, int]:
    """GPT-2's letters for bytes: printable ones stand for themselves, the others follow from 256."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(256 + n): byte for n, byte in enumerate(others)}
