"""Text, chat templates and sampling of a `llama_cpp.Llama`."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import llama_cpp
import numpy as np
from llama_cpp.llama_chat_format import Jinja2ChatFormatter

from kvsnap.engines.text import TextEngine
from kvsnap.formats.errors import DoesNotFit, EngineError, Unsupported, UsageError
from kvsnap.formats.names import TokenIds, token_array


class LlamaText(TextEngine):
    """The text half of the adapter."""

    llm: llama_cpp.Llama

    def tokenize(self, text: str, *, first: bool, chat: bool = False) -> TokenIds:
        if not text:
            return token_array([])
        return token_array(
            self.llm.tokenize(text.encode("utf-8"), add_bos=first and not chat, special=True)
        )

    def detokenize(self, token_ids: Sequence[int]) -> bytes:
        # Piece by piece: the library's detokenize() drops a leading space, and its
        # token_to_piece() gives back the whole 32-byte buffer, padding included.
        vocabulary = llama_cpp.llama_model_get_vocab(self.llm.model)
        return b"".join(_piece(vocabulary, int(token)) for token in token_ids)

    def render(self, messages: Sequence[Mapping[str, Any]], *, answer: bool) -> str:
        template = self.llm.metadata.get("tokenizer.chat_template")
        if not template:
            raise Unsupported(
                "this model has no chat template", "give its prompt as text: --prompt-file"
            )
        try:
            formatter = Jinja2ChatFormatter(
                template,
                eos_token=self._text_of(self.llm.token_eos()),
                bos_token=self._text_of(self.llm.token_bos()),
                add_generation_prompt=answer,
            )
            prompt: str = formatter(messages=[dict(m) for m in messages]).prompt
        except Exception as error:  # a template is a program of the model's author
            raise UsageError(
                f"the model's chat template refuses these messages: {error}",
                "check the roles and their order",
            ) from error
        return prompt

    def log_probs(self, token_ids: TokenIds) -> np.ndarray:
        """As `Llama.eval`, which copies logits only where it was made with `logits_all`."""
        llm = self.llm
        found: list[np.ndarray] = [np.empty((0, llm.n_vocab()), np.float32)]
        if llm.n_tokens + len(token_ids) > self.capacity:
            raise DoesNotFit(
                f"{llm.n_tokens + len(token_ids)} tokens do not fit a context of {self.capacity}",
                "make the context larger (--ctx)",
            )
        for start in range(0, len(token_ids), llm.n_batch):
            batch, past = token_ids[start : start + llm.n_batch].tolist(), llm.n_tokens
            llm._ctx.kv_cache_seq_rm(-1, past, -1)
            llm._batch.set_batch(batch=batch, n_past=past, logits_all=True)
            try:
                llm._ctx.decode(llm._batch)
            except RuntimeError as error:
                raise EngineError(f"llama.cpp could not evaluate: {error}") from error
            shape = (len(batch), llm.n_vocab())
            found.append(_log_softmax(np.ctypeslib.as_array(llm._ctx.get_logits(), shape=shape)))
            llm.input_ids[past : past + len(batch)] = batch
            llm.n_tokens += len(batch)
            llm._requires_eval = False
            self.evaluated += len(batch)
        return np.concatenate(found)

    def generate(self, token_ids: TokenIds, *, temperature: float, seed: int) -> Iterator[int]:
        vocabulary = llama_cpp.llama_model_get_vocab(self.llm.model)
        self.llm.set_seed(seed)
        for token in self.llm.generate(token_ids.tolist(), temp=temperature):
            if llama_cpp.llama_vocab_is_eog(vocabulary, token):
                return
            yield int(token)

    def _text_of(self, token: int) -> str:
        """A special token as templates write it."""
        return str(self.llm._model.token_get_text(token)) if token >= 0 else ""


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted: np.ndarray = logits - logits.max(-1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(-1, keepdims=True))
    return shifted


def _piece(vocabulary: Any, token: int) -> bytes:
    """The bytes of one token; special tokens have none."""
    size = 64
    while True:
        buffer = ctypes.create_string_buffer(size)
        length = llama_cpp.llama_token_to_piece(vocabulary, token, buffer, size, 0, False)
        if length >= 0:
            return buffer.raw[:length]
        size = -length
