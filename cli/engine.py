"""Load the engine that the options ask for, with a context as long as the work needs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvsnap.cli import interrupt
from kvsnap.cli.main import App
from kvsnap.cli.progress import bar
from kvsnap.formats.errors import NotFound, Unsupported, UsageError

if TYPE_CHECKING:
    from kvsnap.kvstore.conversation import Prompt

ANSWER_ROOM = 64
"""Tokens that a chat template may put around one more turn and its answer."""

_PACKAGES = {"llama.cpp": ("llama_cpp", "llama"), "transformers": ("transformers", "hf")}
"""Engine → the package that it needs, and the extra that installs it."""

_LLAMA_ONLY = {
    "flash_attn": "off",
    "cache_type_k": "f16",
    "cache_type_v": "f16",
    "rope_scaling": None,
    "rope_scale": None,
    "rope_freq_base": 0.0,
    "rope_freq_scale": 0.0,
    "yarn_orig_ctx": 0,
    "yarn_ext_factor": -1.0,
    "yarn_attn_factor": 1.0,
    "yarn_beta_fast": 32.0,
    "yarn_beta_slow": 1.0,
    "lora": None,
}
"""Options that other engines do not have, and what they are where nobody gave them."""


class Loaded:
    """An engine, a session on it and how long loading took (weights digest included)."""

    def __init__(
        self,
        app: App,
        options: Mapping[str, Any],
        tokens: int,
        session: str | None,
        tenant: Any,
        *,
        read_through: bool = False,
        saves: bool = False,
    ) -> None:
        from kvsnap.formats.codecs import chosen_codec
        from kvsnap.formats.interchange.ggml import ggml_type_named
        from kvsnap.formats.tenant import tenant_id
        from kvsnap.kvstore.session import Session

        try:
            load = _loader(options["engine"])
            if options["codec"] is not None:
                chosen_codec(options["codec"])
            for option in ("cache_type_k", "cache_type_v"):
                ggml_type_named(options[option])
        except Unsupported as error:
            raise UsageError(error.what, error.hint) from error
        started = time.perf_counter()
        self.store = app.store(read_through=read_through)
        if saves:
            self.store.check_tenant(tenant_id(tenant))
        self.engine, self._close = load(options, tokens)
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

    def prefill(self, app: App, prompt: Prompt, *, leave: int, store_on_the_way: bool) -> Any:
        """Restore and compute with a bar, warn of damage; the `Answer` so far."""
        from kvsnap.kvstore.answer import Answer, prefill
        from kvsnap.kvstore.boundaries import boundaries

        result = Answer()
        needs_state = self.session.layout.needs_state
        places = boundaries(self.engine, prompt) if needs_state else []
        with bar(app.out, "prefill", "tokens") as draw:

            def update(done: int, total: int) -> None:
                interrupt.check()
                draw(done, total)

            prefill(
                self.session,
                self.engine,
                prompt.token_ids,
                result,
                update,
                leave=leave,
                store_on_the_way=store_on_the_way,
                places=places,
            )
        assert result.report is not None
        for line in result.report.damage:
            app.out.warn(line)
        return result

    def close(self) -> None:
        self._close()
        self.store.close()


def _loader(name: str) -> Callable[[Mapping[str, Any], int], tuple[Any, Callable[[], None]]]:
    """What loads an engine with the options and for so many tokens: (engine, what closes it)."""
    from kvsnap.engines import get_engine

    loaders = {"llama.cpp": _load_llama, "transformers": _load_transformers}
    get_engine(name)  # raises where it is not known
    return loaders[name]


def _load_llama(options: Mapping[str, Any], tokens: int) -> tuple[Any, Callable[[], None]]:
    from kvsnap.engines.llamacpp import LlamaCpp
    from kvsnap.engines.llamacpp_load import load_llama

    llm = load_llama(options["model"], load_options(options), tokens)
    return LlamaCpp(llm), llm.close


def _load_transformers(options: Mapping[str, Any], tokens: int) -> tuple[Any, Callable[[], None]]:
    """A cache grows as it needs: the number of tokens does not matter."""
    refuse_options(options, _LLAMA_ONLY)
    from kvsnap.engines.transformers_load import load_transformers

    engine = load_transformers(options["model"], context=options["ctx"], threads=options["threads"])
    return engine, lambda: None


def refuse_options(options: Mapping[str, Any], absent: Mapping[str, Any]) -> None:
    """Raise `UsageError` for an option that the engine does not have, and that was given."""
    for name, value in absent.items():
        if options[name] != value:
            raise UsageError(
                f"--{name.replace('_', '-')} is an option of llama.cpp, not of {options['engine']}",
                "leave it away: the model itself says how it is computed",
            )


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


def count_tokens(model: Path, source: Any, engine: str = "llama.cpp") -> int:
    """How many tokens a new prompt has, at most, before the engine is loaded; 0 where that makes no
    difference to the engine.

    Ids are counted; text goes through the model's own tokenizer, which loads in 60 ms. Messages are
    counted as text, with room for the template's words around each.
    """
    from kvsnap.engines.gguf import check_model
    from kvsnap.engines.llamacpp_load import vocabulary

    if engine != "llama.cpp":
        return 0
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


def count_all_tokens(
    app: App,
    model: Path,
    session: str | None,
    tenant: Any,
    source: Any,
    engine: str = "llama.cpp",
    *,
    read_through: bool = False,
) -> int:
    """The same for what may be a session's next turn."""
    if session is None:
        return count_tokens(model, source, engine)
    with app.store(read_through=read_through) as store:
        return _count_more_tokens(store.find_session(session, tenant).record, source)


def _count_more_tokens(record: Any, source: Any) -> int:
    """Tokens that a session and its next turn have at most: a token has at least one byte."""
    more = len(source.token_ids or ())
    if source.text is not None:
        more += len(source.text.encode())
    for message in source.messages or ():
        more += ANSWER_ROOM + len(message["content"].encode())
    return int(len(record.token_ids) + more + ANSWER_ROOM)


def require_engine(name: str) -> None:
    """One clear line where the engine's package is missing; an unknown engine is refused later."""
    if name not in _PACKAGES:
        return
    package, extra = _PACKAGES[name]
    named = package.replace("llama_cpp", "llama-cpp-python")
    try:
        import_module(package)
    except ImportError as error:
        raise Unsupported(f"{named} is not installed", f"pip install 'kvsnap[{extra}]'") from error
    except OSError as error:
        raise NotFound(f"{named} cannot be loaded: {error}", "reinstall it") from error
