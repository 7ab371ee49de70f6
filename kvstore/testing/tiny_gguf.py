"""Random models of a few hundred kilobytes, as GGUF files that llama.cpp loads in milliseconds.

They answer nonsense, but their memories are those of real models: full attention, sliding windows,
recurrent states, and mixtures of them. Needs the `gguf` package.

Tensor names and shapes are those of llama.cpp's src/models/*.cpp; numpy's order of the axes is the
reverse of ggml's, so a matrix here is [outputs, inputs].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np

_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
_PIECES = ["▁", "\n", *"etaoinsrhldcumfpgwybvkxjqz.,"]
_EPSILON = 1e-6


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What `write_tiny` takes by name. `window` 0 means full attention."""

    layers: int = 4
    width: int = 64
    heads: int = 4
    kv_heads: int = 2
    feed_forward: int = 96
    context: int = 8192
    window: int = 32
    pattern: int = 3
    """Every so many layers one has full attention; more than `layers`: none has."""
    attention_every: int = 2
    """In a hybrid, every so many layers one has attention instead of a recurrent state."""
    state: int = 16
    kernel: int = 4


class _Model:
    """A GGUF file in the making."""

    def __init__(self, path: Path, architecture: str, seed: int, sizes: Sizes) -> None:
        self.file = gguf.GGUFWriter(path, architecture)
        self.sizes = sizes
        self._random = np.random.default_rng(seed)

    def matrix(self, name: str, outputs: int, inputs: int) -> None:
        """Of a size that keeps activations near one from layer to layer."""
        values = self._random.standard_normal((outputs, inputs)) / np.sqrt(inputs)
        self.file.add_tensor(f"{name}.weight", values.astype(np.float16))

    def vector(self, name: str, length: int, mean: float = 1.0) -> None:
        values = mean + 0.1 * self._random.standard_normal(length)
        self.file.add_tensor(name, values.astype(np.float32))

    def single(self, name: str, values: np.ndarray) -> None:
        """What llama.cpp's kernels take in single precision only."""
        self.file.add_tensor(name, values.astype(np.float32))

    def kernel(self, name: str, channels: int) -> None:
        values = self._random.standard_normal((channels, self.sizes.kernel))
        self.single(f"{name}.weight", values / np.sqrt(self.sizes.kernel))

    def close(self) -> None:
        self.file.write_header_to_file()
        self.file.write_kv_data_to_file()
        self.file.write_tensors_to_file()
        self.file.close()


def _tokenizer(model: _Model) -> None:
    """SentencePiece with a piece for each byte: every text has tokens, and nothing is unknown."""
    tokens = ["<unk>", "<s>", "</s>", *_BYTES, *_PIECES]
    kind = gguf.TokenType
    types = [kind.UNKNOWN, kind.CONTROL, kind.CONTROL, *[kind.BYTE] * 256]
    types += [kind.NORMAL] * len(_PIECES)
    model.file.add_tokenizer_model("llama")
    model.file.add_token_list(tokens)
    model.file.add_token_scores([0.0] * (3 + 256) + [-float(n) for n in range(len(_PIECES))])
    model.file.add_token_types([int(item) for item in types])
    model.file.add_unk_token_id(0)
    model.file.add_bos_token_id(1)
    model.file.add_eos_token_id(2)
    model.file.add_add_bos_token(True)


VOCABULARY = 3 + len(_BYTES) + len(_PIECES)
"""Token ids of every tiny model are below this; those from 3 on are pieces of text."""


def _common(model: _Model, kv_heads: int | list[int], output_norm: str = "output_norm") -> None:
    sizes, file = model.sizes, model.file
    file.add_name("tiny")
    file.add_context_length(sizes.context)
    file.add_embedding_length(sizes.width)
    file.add_block_count(sizes.layers)
    file.add_feed_forward_length(sizes.feed_forward)
    file.add_head_count(sizes.heads if kv_heads else 0)
    file.add_head_count_kv(kv_heads)
    file.add_layer_norm_rms_eps(_EPSILON)
    file.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    _tokenizer(model)
    model.matrix("token_embd", VOCABULARY, sizes.width)
    model.vector(f"{output_norm}.weight", sizes.width)


def _attention(model: _Model, layer: str, *, norms: bool = False) -> None:
    """`norms`: of each head's queries and keys."""
    sizes = model.sizes
    head = sizes.width // sizes.heads
    model.matrix(f"{layer}.attn_q", sizes.width, sizes.width)
    model.matrix(f"{layer}.attn_k", sizes.kv_heads * head, sizes.width)
    model.matrix(f"{layer}.attn_v", sizes.kv_heads * head, sizes.width)
    model.matrix(f"{layer}.attn_output", sizes.width, sizes.width)
    if norms:
        model.vector(f"{layer}.attn_q_norm.weight", head)
        model.vector(f"{layer}.attn_k_norm.weight", head)


def _feed_forward(model: _Model, layer: str) -> None:
    sizes = model.sizes
    model.vector(f"{layer}.ffn_norm.weight", sizes.width)
    model.matrix(f"{layer}.ffn_gate", sizes.feed_forward, sizes.width)
    model.matrix(f"{layer}.ffn_up", sizes.feed_forward, sizes.width)
    model.matrix(f"{layer}.ffn_down", sizes.width, sizes.feed_forward)


def _mamba_block(model: _Model, layer: str, *, norms: bool = False) -> None:
    """Mamba's selective state space of width 2 x `width`. `norms`: Jamba's, of step, B and C."""
    sizes = model.sizes
    inner, rank = 2 * sizes.width, max(1, sizes.width // 16)
    model.matrix(f"{layer}.ssm_in", 2 * inner, sizes.width)
    model.kernel(f"{layer}.ssm_conv1d", inner)
    model.vector(f"{layer}.ssm_conv1d.bias", inner, 0.0)
    model.matrix(f"{layer}.ssm_x", rank + 2 * sizes.state, inner)
    model.matrix(f"{layer}.ssm_dt", inner, rank)
    # Steps near softplus(-5) = 0.007: the slowest of the states remembers some hundred tokens.
    model.vector(f"{layer}.ssm_dt.bias", inner, -5.0)
    decay = -np.tile(np.arange(1.0, sizes.state + 1), (inner, 1))
    model.single(f"{layer}.ssm_a", decay)
    model.vector(f"{layer}.ssm_d", inner)
    model.matrix(f"{layer}.ssm_out", sizes.width, inner)
    if norms:
        model.vector(f"{layer}.ssm_dt_norm.weight", rank)
        model.vector(f"{layer}.ssm_b_norm.weight", sizes.state)
        model.vector(f"{layer}.ssm_c_norm.weight", sizes.state)


def _mamba_keys(model: _Model) -> None:
    sizes = model.sizes
    model.file.add_ssm_conv_kernel(sizes.kernel)
    model.file.add_ssm_inner_size(2 * sizes.width)
    model.file.add_ssm_state_size(sizes.state)
    model.file.add_ssm_time_step_rank(max(1, sizes.width // 16))


def _llama(model: _Model) -> None:
    """Full attention with grouped queries."""
    _common(model, model.sizes.kv_heads)
    for layer in _layers(model):
        model.vector(f"{layer}.attn_norm.weight", model.sizes.width)
        _attention(model, layer)
        _feed_forward(model, layer)


def _gemma3(model: _Model) -> None:
    """Sliding windows; the last of every `pattern` layers has full attention."""
    sizes = model.sizes
    _common(model, sizes.kv_heads)
    model.file.add_key_length(sizes.width // sizes.heads)
    model.file.add_value_length(sizes.width // sizes.heads)
    model.file.add_sliding_window(sizes.window)
    model.file.add_sliding_window_pattern(sizes.pattern)
    for layer in _layers(model):
        model.vector(f"{layer}.attn_norm.weight", sizes.width)
        _attention(model, layer, norms=True)
        model.vector(f"{layer}.post_attention_norm.weight", sizes.width)
        _feed_forward(model, layer)
        model.vector(f"{layer}.post_ffw_norm.weight", sizes.width)


def _mamba(model: _Model) -> None:
    """A recurrent state in every layer, no attention."""
    _common(model, 0)
    _mamba_keys(model)
    for layer in _layers(model):
        model.vector(f"{layer}.attn_norm.weight", model.sizes.width)
        _mamba_block(model, layer)


def _jamba(model: _Model) -> None:
    """Mamba layers, and among them layers of full attention."""
    kv_heads = _hybrid_heads(model.sizes)
    _common(model, kv_heads)
    _mamba_keys(model)
    for layer, heads in zip(_layers(model), kv_heads, strict=True):
        model.vector(f"{layer}.attn_norm.weight", model.sizes.width)
        if heads:
            _attention(model, layer)
        else:
            _mamba_block(model, layer, norms=True)
        _feed_forward(model, layer)


def _lfm2(model: _Model) -> None:
    """Short convolutions, and among them layers of attention; `window` 0 makes it full."""
    sizes = model.sizes
    kv_heads = _hybrid_heads(sizes)
    _common(model, kv_heads, output_norm="token_embd_norm")
    model.file.add_shortconv_l_cache(sizes.kernel)
    if sizes.window:
        model.file.add_sliding_window(sizes.window)
    for layer, heads in zip(_layers(model), kv_heads, strict=True):
        model.vector(f"{layer}.attn_norm.weight", sizes.width)
        if heads:
            _attention(model, layer, norms=True)
        else:
            model.kernel(f"{layer}.shortconv.conv", sizes.width)
            model.matrix(f"{layer}.shortconv.in_proj", 3 * sizes.width, sizes.width)
            model.matrix(f"{layer}.shortconv.out_proj", sizes.width, sizes.width)
        _feed_forward(model, layer)


def _layers(model: _Model) -> list[str]:
    return [f"blk.{number}" for number in range(model.sizes.layers)]


def _hybrid_heads(sizes: Sizes) -> list[int]:
    """llama.cpp takes a layer without KV heads for a recurrent one."""
    every = sizes.attention_every
    return [sizes.kv_heads if n % every == every - 1 else 0 for n in range(sizes.layers)]


ARCHITECTURES: dict[str, Callable[[_Model], None]] = {
    "llama": _llama,
    "gemma3": _gemma3,
    "mamba": _mamba,
    "jamba": _jamba,
    "lfm2": _lfm2,
}


def write_tiny(path: Path, architecture: str, seed: int = 0, **sizes: int) -> Path:
    """Writes a random model of one of `ARCHITECTURES` to `path`, which it returns.

    Equal arguments give equal bytes. `sizes` are fields of `Sizes`. Raises `KeyError` for another
    architecture and `TypeError` for another size.
    """
    build = ARCHITECTURES[architecture]
    model = _Model(path, architecture, seed, Sizes(**sizes))
    build(model)
    model.close()
    return path
