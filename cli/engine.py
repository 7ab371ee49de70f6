"""Load the engine that the options ask for, with a context as long as the work needs."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvsnap.cli import interrupt
from kvsnap.cli.main import App
from kvsnap.cli.progress import bar
from kvsnap.formats.errors import NotFound, Unsupported, UsageError

ANSWER_ROOM = 64
"""Tokens that a chat template may put around one more turn and its answer."""


class Loaded:
    """An engine, a session on it and how long loading took (weights digest included)."""

    def __init__(
        self, app: App, options: Mapping[str, Any], tokens: int, session: str | None, tenant: Any
    ) -> None:
        from kvsnap.engines import get_engine
        from kvsnap.formats.codecs import get_codec
        from kvsnap.formats.interchange.ggml import ggml_type_named

        try:
            adapter = get_engine(options["engine"])
            if options["codec"] is not None:
                get_codec(options["codec"])
            for option in ("cache_type_k", "cache_type_v"):
                ggml_type_named(options[option])
        except Unsupported as error:
            raise UsageError(error.what, error.hint) from error
        from kvsnap.engines.llamacpp_load import load_llama
        from kvsnap.kvstore.session import Session

        started = time.perf_counter()
        self.store = app.store()
        self.llm = load_llama(options["model"], load_options(options), tokens)
        self.engine = adapter(self.llm)
        with bar(app.out, "hashing the model", "bytes") as update:
            self.store.file_digest.progress = update
            self.session = Session(
                self.store,
                self.engine,
                session,
                tenant=tenant,
                codec=options["codec"],
                allow_lossy=options.get("allow_lossy", False),
            )
        interrupt.check()
        self.model = Path(options["model"]).name
        self.load_seconds = time.perf_counter() - started

    def prefill(self, app: App, token_ids: Any, *, leave: int, store_on_the_way: bool) -> Any:
        """Restore and compute with a bar, warn of damage; the `Answer` so far."""
        from kvsnap.kvstore.answer import Answer, prefill

        result = Answer()
        with bar(app.out, "prefill", "tokens") as draw:

            def update(done: int, total: int) -> None:
                interrupt.check()
                draw(done, total)

            prefill(
                self.session,
                self.engine,
                token_ids,
                result,
                update,
                leave=leave,
                store_on_the_way=store_on_the_way,
            )
        assert result.report is not None
        for line in result.report.damage:
            app.out.warn(line)
        return result

    def close(self) -> None:
        self.llm.close()
        self.store.close()


def load_options(options: Mapping[str, Any]) -> Any:
    """`LoadOptions` from the command line's."""
    from kvsnap.engines.llamacpp_load import LoadOptions

    names = (
        "ctx",
        "threads",
        "cache_type_k",
        "cache_type_v",
        "rope_scaling",
        "rope_freq_base",
        "rope_freq_scale",
        "yarn_orig_ctx",
        "yarn_ext_factor",
        "yarn_attn_factor",
        "yarn_beta_fast",
        "yarn_beta_slow",
        "lora",
    )
    values = {name: options[name] for name in names}
    for name, value in options.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise UsageError(f"--{name.replace('_', '-')} is {value}", "give a finite number")
    for name in ("rope_freq_base", "rope_freq_scale", "rope_scale", "yarn_orig_ctx"):
        if (options[name] or 0) < 0 or (name == "rope_scale" and options[name] == 0):
            raise UsageError(f"--{name.replace('_', '-')} is {options[name]}", "give more than 0")
    if options["rope_scale"]:
        if options["rope_freq_scale"]:
            raise UsageError("--rope-scale and --rope-freq-scale say the same", "give one of them")
        values["rope_freq_scale"] = 1.0 / options["rope_scale"]
    return LoadOptions(flash_attn=options["flash_attn"] == "on", **values)


def count_tokens(model: Path, source: Any) -> int:
    """How many tokens a new prompt has, at most, before the engine is loaded.

    Ids are counted; text goes through the model's own tokenizer, which loads in 60 ms. Messages are
    counted as text, with room for the template's words around each.
    """
    from kvsnap.engines.gguf import check_model
    from kvsnap.engines.llamacpp_load import vocabulary

    check_model(model)
    if source.token_ids is not None:
        return len(source.token_ids)
    with vocabulary(model) as tokenizer:
        if source.messages is not None:
            texts = [f"{m['role']}\n{m['content']}" for m in source.messages]
            # The template may put in a system prompt of its own (some take 100 tokens).
            room = ANSWER_ROOM * (len(texts) + 2)
        else:
            texts, room = [source.text or ""], 1
        return room + sum(len(tokenizer.tokenize(t.encode(), True, True)) for t in texts if t)


def count_all_tokens(app: App, model: Path, session: str | None, tenant: Any, source: Any) -> int:
    """The same for what may be a session's next turn."""
    from kvsnap.formats.tenant import tenant_id

    if session is None:
        return count_tokens(model, source)
    with app.store() as store:
        return count_more_tokens(store, tenant_id(tenant), session, source)


def count_more_tokens(store: Any, tenant_id: str, session: str, source: Any) -> int:
    """Tokens that a session and its next turn have at most: a token has at least one byte."""
    record = store.sessions.load(tenant_id, session).record
    more = len(source.token_ids or ())
    if source.text is not None:
        more += len(source.text.encode())
    for message in source.messages or ():
        more += ANSWER_ROOM + len(message["content"].encode())
    return int(len(record.token_ids) + more + ANSWER_ROOM)


def require_llama() -> None:
    """One clear line where the engine's package is missing."""
    try:
        import llama_cpp  # noqa: F401
    except ImportError as error:
        raise Unsupported(
            "llama-cpp-python is not installed", "pip install 'kvsnap[llama]'"
        ) from error
    except OSError as error:
        raise NotFound(f"llama-cpp-python cannot be loaded: {error}", "reinstall it") from error
