"""A float32 engine to measure codecs with: transformers on a GGUF file's dequantized weights.

llama.cpp quantizes activations, and moves by a KL of 2.4e-3 on the bundled model when only the last
bits of its rows change: below that it cannot rank codecs. Here two runs over equal rows are equal, so
that what is measured is the codec's alone. Rows have the layout of the engine that reads the same
file, so a calibration made here fits there. Needs the extra `hf`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np

from kvsnap.engines.gguf import check_model
from kvsnap.formats.errors import EngineError, Unsupported
from kvsnap.formats.interchange.element_order import MOVED
from kvsnap.formats.layout import Array, Group, Layout, Plane, PlaneRope, Rows
from kvsnap.formats.names import TokenIds, token_array

OUTLIER_PAIRS, OUTLIER_FACTOR = (3, 11, 27), 30.0
"""Outlier channels as some models have them by nature: 4-bit codecs that share a scale between
channels fall apart there."""
OUTLIERS = "+outliers"
"""Added to the weights' digest: the calibration of a model with scaled channels is another."""


@dataclass(frozen=True)
class _Layers:
    """One group: the model's layers of one kind of attention, in order."""

    name: str
    numbers: tuple[int, ...]
    rope: PlaneRope | None


class Float32Model:
    """One model in float32 on the CPU; `dtype` F16, BF16 or F32 is what its rows are kept in."""

    def __init__(self, path: Path, dtype: str = "F16") -> None:
        check_model(path)
        try:
            import torch
            import transformers
        except ImportError as error:
            raise Unsupported(
                f"a float32 engine needs {error.name}, which is not installed",
                "pip install 'kvsnap[hf]'",
            ) from error
        self.torch, self.dtype = torch, dtype
        self._element = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}[dtype]
        self._bits = torch.uint32 if dtype == "F32" else torch.uint16
        self._cache_class: Any = transformers.DynamicCache
        talk: Any = transformers.utils.logging
        talk.set_verbosity_error()
        talk.disable_progress_bar()
        place = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
        try:
            with _quiet(), redirect_stderr(StringIO()):  # a bar that no setting turns off
                self.tokenizer: Any = transformers.AutoTokenizer.from_pretrained(**place)
                self.model: Any = transformers.AutoModelForCausalLM.from_pretrained(
                    **place, dtype=torch.float32
                )
        except ImportError as error:
            raise Unsupported(
                f"transformers lacks a package to read GGUF files: {_line(error)}",
                "pip install 'kvsnap[hf]'",
            ) from error
        except Exception as error:  # whatever a cut file makes a parser raise
            raise EngineError(
                f"transformers cannot load {path.name}: {_line(error)}",
                "the file may be cut; and it reads fewer architectures from GGUF than llama.cpp",
            ) from error
        self.model.eval()
        self.config: Any = self.model.config
        self._groups = _groups(self.config)
        self.heads = int(self.config.num_key_value_heads)
        self.dim = int(self.config.head_dim)
        self.layout = _layout(self._groups, self.heads, self.dim, dtype)

    def tokenize(self, text: str) -> TokenIds:
        return token_array(self.tokenizer(text).input_ids)

    def rows(self, token_ids: TokenIds) -> dict[str, Array]:
        """K and V of a text, as an engine of this element type would keep them."""
        cache = self._cache_class()
        with self.torch.no_grad(), _quiet():
            self.model(self._batch(token_ids), past_key_values=cache, logits_to_keep=1)
        return self._export([(layer.keys, layer.values) for layer in cache.layers])

    def log_probs(self, context: TokenIds, rows: Rows, token_ids: TokenIds) -> Any:
        """Logarithms of the next-token distributions after each of `token_ids`, which follow
        `context`, whose rows are `rows`: a tensor [tokens, vocabulary]."""
        cache = self._cache_class()
        for number, (keys, values) in enumerate(self._import(rows)):
            cache.update(keys, values, number)
        with self.torch.no_grad(), _quiet():
            logits = self.model(self._batch(token_ids), past_key_values=cache).logits
        return self.torch.log_softmax(logits[0].float(), -1)

    def scale_keys(
        self, pairs: tuple[int, ...] = OUTLIER_PAIRS, factor: float = OUTLIER_FACTOR
    ) -> None:
        """Multiply these pairs of K's channels in every layer and head, and divide Q's: the same
        function, with the outlier channels that some models have by nature."""
        channels = [j for pair in pairs for j in (pair, pair + self.dim // 2)]
        with self.torch.no_grad():
            for layer in self.model.model.layers:
                attention = layer.self_attn
                norms = [getattr(attention, name, None) for name in ("k_norm", "q_norm")]
                for part, norm, by in zip(
                    (attention.k_proj, attention.q_proj), norms, (factor, 1 / factor), strict=True
                ):
                    if norm is not None:  # Gemma's norm multiplies by 1 + weight
                        norm.weight[channels] = (1 + norm.weight[channels]) * by - 1
                    else:
                        part.weight.view(-1, self.dim, part.weight.shape[1])[:, channels] *= by

    def gradients(
        self, token_ids: TokenIds, seed: int
    ) -> tuple[dict[str, Array], dict[str, Array]]:
        """(values, gradients) of K and V, float32 [tokens, layers, heads, dim] by plane: of the
        log-likelihood of tokens that are drawn from the model's own distributions. The mean square
        of such a gradient is the Fisher information: how much KL a small error costs."""
        torch, kept = self.torch, []

        class Recording(self._cache_class):  # type: ignore[name-defined, misc]
            def update(self, keys: Any, values: Any, number: int, *more: Any, **named: Any) -> Any:
                keys.retain_grad()
                values.retain_grad()
                kept.append((keys, values))
                return super().update(keys, values, number, *more, **named)

        with _quiet():
            logits = self.model(self._batch(token_ids), past_key_values=Recording()).logits[0]
        log_probs = torch.log_softmax(logits, -1)
        source = torch.Generator().manual_seed(seed)
        drawn = torch.multinomial(log_probs.detach().exp(), 1, generator=source)
        log_probs.gather(1, drawn).sum().backward()
        self.model.zero_grad(set_to_none=True)
        values = self._by_plane([(k.detach(), v.detach()) for k, v in kept])
        return values, self._by_plane([(k.grad, v.grad) for k, v in kept])

    def write(self, openings: Sequence[str], count: int, length: int, seed: int) -> list[TokenIds]:
        """`count` texts of `length` tokens that the model makes up, each from one opening word."""
        torch, cache = self.torch, self._cache_class()
        source = torch.Generator().manual_seed(seed)
        ends = {self.tokenizer.bos_token_id, self.tokenizer.eos_token_id, self.config.eos_token_id}
        ends = {number for number in ends if isinstance(number, int)}
        starts = [self.tokenize(openings[n % len(openings)])[:2] for n in range(count)]
        shortest = min(map(len, starts), default=0)
        current = torch.from_numpy(np.stack([ids[:shortest] for ids in starts]).astype(np.int64))
        written = [current]
        with torch.no_grad(), _quiet():
            for _ in range(length - shortest):
                logits = self.model(current, past_key_values=cache, logits_to_keep=1).logits[:, -1]
                logits[:, sorted(ends)] = -torch.inf  # a text that ends early teaches nothing
                current = torch.multinomial(torch.softmax(logits, -1), 1, generator=source)
                written.append(current)
        return [token_array(row) for row in torch.cat(written, 1).numpy()]

    def _batch(self, token_ids: TokenIds) -> Any:
        return self.torch.from_numpy(token_ids.astype(np.int64))[None]

    def _by_plane(self, layers: list[tuple[Any, Any]]) -> dict[str, Array]:
        """Per layer [1, heads, tokens, dim] → plane → [tokens, layers, heads, dim]."""
        planes: dict[str, Array] = {}
        for group in self._groups:
            for which, plane in enumerate("kv"):
                stack = self.torch.stack([layers[n][which][0] for n in group.numbers])
                whole = stack.permute(2, 0, 1, 3)
                if plane == "k":
                    whole = self._paired(whole, group)
                planes[f"{group.name}.{plane}"] = whole.contiguous().numpy()
        return planes

    def _export(self, layers: list[tuple[Any, Any]]) -> dict[str, Array]:
        rows = {}
        for name, array in self._by_plane(layers).items():
            cast = self.torch.from_numpy(array).to(self._element).transpose(0, 1)
            flat = cast.reshape(cast.shape[0], cast.shape[1], -1).contiguous()
            rows[name] = flat.view(self._bits).numpy()
        return rows

    def _import(self, rows: Rows) -> list[tuple[Any, Any]]:
        layers: dict[int, list[Any]] = {}
        for group in self._groups:
            for plane in "kv":
                bits = self.torch.from_numpy(np.ascontiguousarray(rows[f"{group.name}.{plane}"]))
                array = bits.view(self._element).float()
                whole = array.reshape(*array.shape[:2], self.heads, self.dim)
                if plane == "k":
                    whole = self._halved(whole, group)
                for number, layer in zip(group.numbers, whole, strict=True):
                    layers.setdefault(number, []).append(layer.transpose(0, 1)[None].contiguous())
        return [(layers[n][0], layers[n][1]) for n in sorted(layers)]

    def _paired(self, keys: Any, group: _Layers) -> Any:
        if group.rope is None or group.rope.pairing == "halves":
            return keys
        dims = group.rope.dims
        front = keys[..., :dims].unflatten(-1, (2, dims // 2)).transpose(-1, -2).flatten(-2)
        return self.torch.cat([front, keys[..., dims:]], -1)

    def _halved(self, keys: Any, group: _Layers) -> Any:
        if group.rope is None or group.rope.pairing == "halves":
            return keys
        dims = group.rope.dims
        front = keys[..., :dims].unflatten(-1, (dims // 2, 2)).transpose(-1, -2).flatten(-2)
        return self.torch.cat([front, keys[..., dims:]], -1)


def _line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def _groups(config: Any) -> list[_Layers]:
    """Layers of one kind of attention are one group: they share RoPE facts."""
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    parameters = config.rope_parameters
    pairing = "interleaved" if config.model_type in MOVED else "halves"
    groups = []
    for kind in dict.fromkeys(kinds):
        numbers = tuple(n for n, own in enumerate(kinds) if own == kind)
        facts: Mapping[str, Any] = parameters.get(kind, parameters)
        rope = None
        if facts.get("rope_type", "default") in ("default", "linear"):
            share = float(facts.get("partial_rotary_factor", 1.0))
            rope = PlaneRope(
                pairing=pairing,
                dims=int(config.head_dim * share) // 2 * 2,
                base=float(facts["rope_theta"]),
                scale=1.0 / float(facts.get("factor", 1.0)),
            )
        groups.append(_Layers(kind.removesuffix("_attention"), numbers, rope))
    return groups


def _layout(groups: list[_Layers], heads: int, dim: int, dtype: str) -> Layout:
    def plane(name: str, rope: PlaneRope | None) -> Plane:
        kind = dtype.lower()
        return Plane(
            name=name,
            kind="elements",
            dtype=dtype,
            row=(heads, dim),
            source_type=kind,
            rope=rope,
        )

    return Layout(
        groups=tuple(
            Group(
                name=group.name,
                layers=len(group.numbers),
                planes=(plane("k", group.rope), plane("v", None)),
            )
            for group in groups
        )
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """transformers renames its arguments from release to release, and warns of it at each call."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
