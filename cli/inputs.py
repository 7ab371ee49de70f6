"""Options that several commands share: the prompt's source, the engine's settings, the tenant."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from kvsnap.cli.main import App
from kvsnap.formats.errors import NotFound, UsageError

MAX_INPUT = 256_000_000
MAX_CONTEXT = 2**27
MAX_THREADS = 512
"""ggml takes no more (GGML_MAX_N_THREADS); with thousands a run does not end."""
F = TypeVar("F", bound=Callable[..., Any])

_SOURCE = [
    click.option("--prompt", metavar="TEXT", help="A prompt; for resume SESSION its next turn."),
    click.option(
        "--prompt-file",
        metavar="F",
        type=click.Path(path_type=Path),
        help="The same from a UTF-8 file.",
    ),
    click.option(
        "--messages",
        metavar="F.json",
        type=click.Path(path_type=Path),
        help="Messages in OpenAI chat form.",
    ),
    click.option(
        "--token-ids",
        metavar="F.json",
        type=click.Path(path_type=Path),
        help="A JSON list of token ids.",
    ),
]
_MODEL = "The model: a GGUF file, or a folder of Hugging Face's form for transformers."
_ENGINE = [
    click.option(
        "--model",
        metavar="M",
        required=True,
        type=click.Path(path_type=Path),
        help=_MODEL,
    ),
    click.option(
        "--engine",
        metavar="NAME",
        default="llama.cpp",
        show_default=True,
        help="The engine to run it with: llama.cpp or transformers.",
    ),
    click.option(
        "--ctx",
        metavar="N",
        type=click.IntRange(1, MAX_CONTEXT),
        help="Context length. Default: what the work needs, at most the trained length.",
    ),
    click.option(
        "--threads",
        metavar="N",
        type=click.IntRange(1, MAX_THREADS),
        help="Default: the physical cores.",
    ),
    click.option(
        "--flash-attn",
        type=click.Choice(["on", "off"]),
        default="off",
        show_default=True,
        help="Flash attention.",
    ),
    click.option(
        "--cache-type-k",
        metavar="T",
        default="f16",
        show_default=True,
        help="Type of K in the cache: f32, f16, bf16, q8_0, q4_0 …",
    ),
    click.option(
        "--cache-type-v",
        metavar="T",
        default="f16",
        show_default=True,
        help="Type of V; quantized ones need --flash-attn on.",
    ),
    click.option(
        "--rope-scaling",
        type=click.Choice(["none", "linear", "yarn"]),
        help="RoPE scaling method. Default: as the model says.",
    ),
    click.option(
        "--rope-scale",
        metavar="X",
        type=float,
        help="Context scaling factor, 1 / --rope-freq-scale.",
    ),
    click.option(
        "--rope-freq-base",
        metavar="X",
        type=float,
        default=0.0,
        help="RoPE base frequency. Default: as the model says.",
    ),
    click.option(
        "--rope-freq-scale",
        metavar="X",
        type=float,
        default=0.0,
        help="RoPE frequency scaling factor. Default: as the model says.",
    ),
    click.option(
        "--yarn-orig-ctx", metavar="N", type=int, default=0, help="YaRN: original context."
    ),
    click.option(
        "--yarn-ext-factor", metavar="X", type=float, default=-1.0, help="YaRN: extrapolation mix."
    ),
    click.option(
        "--yarn-attn-factor", metavar="X", type=float, default=1.0, help="YaRN: scale of attention."
    ),
    click.option(
        "--yarn-beta-fast", metavar="X", type=float, default=32.0, help="YaRN: low correction dim."
    ),
    click.option(
        "--yarn-beta-slow", metavar="X", type=float, default=1.0, help="YaRN: high correction dim."
    ),
    click.option("--lora", metavar="F[:SCALE]", help="A LoRA adapter file and its scale."),
]
encrypt_option = click.option(
    "--encrypt",
    is_flag=True,
    help="Seal what goes there by the tenant's key; an encrypted store always does.",
)
sign_option = click.option(
    "--sign",
    is_flag=True,
    help="Sign it with this machine's key, so that stores which trust that take it; what nobody"
    " trusted signed is replaced there. A store that trusts somebody always signs.",
)
tenant_option = click.option(
    "--tenant-key-file",
    metavar="F",
    type=click.Path(path_type=Path),
    help="The tenant's 32-byte key: who may share. Default: one tenant, no key.",
)
_STORE = [
    click.option(
        "--codec",
        metavar="ID",
        help="How rows become bytes: zstd (default) and raw are exact; q8, q4 and kvtc lose a little"
        " and are kept apart. A stored lossy session keeps its own.",
    ),
    tenant_option,
]


def _apply(options: list[Callable[[F], F]]) -> Callable[[F], F]:
    def decorate(function: F) -> F:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


source_options = _apply(_SOURCE)
engine_options = _apply(_ENGINE)
model_is_optional = _apply(
    [
        click.option("--model", metavar="M", type=click.Path(path_type=Path), help=_MODEL),
        *_ENGINE[1:],
    ]
)
"""The engine's options where a command needs no engine at times."""
store_options = _apply(_STORE)


def read_source(
    prompt: str | None, prompt_file: Path | None, messages: Path | None, token_ids: Path | None
) -> Any:
    """The `Source` that the options give; more than one is a usage error."""
    from kvsnap.kvstore.conversation import Source, check_messages

    given = [x for x in (prompt, prompt_file, messages, token_ids) if x is not None]
    if len(given) > 1:
        raise UsageError(
            "more than one prompt was given",
            "give one of --prompt, --prompt-file, --messages, --token-ids",
        )
    if messages is not None:
        return Source(messages=check_messages(_json(messages)))
    if token_ids is not None:
        ids = _json(token_ids)
        if not isinstance(ids, list):
            raise UsageError(f"{token_ids} is not a JSON list of token ids", "e.g. [1, 504, 2365]")
        return Source(token_ids=ids)
    return Source(text=_text(prompt_file) if prompt_file is not None else prompt)


def read_tenant(path: Path | None) -> Any:
    """The key in the file given by `tenant_option`, or in the environment; None where there is none."""
    from kvsnap.kvstore.tenant_key import find_tenant

    tenant = find_tenant(path)
    context = click.get_current_context(silent=True)
    if context is not None and tenant is not None:
        context.ensure_object(App).tenant = tenant  # the store opens sealed files with it
    return tenant


def _json(path: Path) -> Any:
    try:
        return json.loads(_text(path))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not JSON: {error}", "check the file") from error


def _text(path: Path) -> str:
    try:
        return _bytes(path).decode("utf-8-sig")  # Windows editors begin with a mark
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text", "convert it to UTF-8") from error


def _bytes(path: Path) -> bytes:
    try:
        if path.exists() and not path.is_file():
            raise UsageError(f"{path} is not a regular file", "give the path of a file")
        if path.stat().st_size > MAX_INPUT:
            raise UsageError(f"{path} is larger than {MAX_INPUT} bytes", "no prompt is that long")
        return path.read_bytes()
    except OSError as error:
        raise NotFound(f"cannot read {path}: {error.strerror}", "check the path") from error
