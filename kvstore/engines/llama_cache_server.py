"""llama-cpp-python's own server, with a `LlamaCache` on each model that it loads.

That server knows the library's two caches (`--cache`, `--cache_type`) and no way to give it another.
Its app, routes, API key and settings stay as they are; models get their cache when they are loaded.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvsnap.engines.llama_cache import LlamaCache
from kvsnap.engines.llama_cache_tenant import TenantOf
from kvsnap.formats.codecs import chosen_codec
from kvsnap.formats.errors import KvsnapError, NotFound, Unsupported, UsageError
from kvsnap.formats.tenant import Tenant
from kvsnap.kvstore.place import write_settings
from kvsnap.kvstore.remotes import default_url
from kvsnap.kvstore.store import Store
from kvsnap.kvstore.tenant_key import find_tenant

logger = logging.getLogger("kvsnap")


def create_app(
    settings: Any = None,
    server_settings: Any = None,
    model_settings: Any = None,
    *,
    store: Store | None = None,
    tenant: Tenant | TenantOf | None = None,
    codec: str | None = None,
) -> Any:
    """`llama_cpp.server.app.create_app` with its arguments, and `store`: by default KVSNAP_STORE or
    the user's cache folder. Also for `uvicorn --factory kvsnap.llama_server:create_app`.

    `tenant`: a key for all requests, or a callback as `LlamaCache` takes it; by default the key of the
    environment, if there is one. Nothing that a client sends has a say in it: whoever serves several
    tenants has the callback ask what authenticated the request.

    Where a model's settings ask for a cache of the library's own, this one takes its place. A model
    that kvsnap refuses is served as without kvsnap, and a warning says why.
    """
    from llama_cpp.server import app as server

    if codec is not None:
        chosen_codec(codec)  # a wrong name is no refusal of a model
    served = tenant if tenant is not None else find_tenant()
    app = server.create_app(settings, server_settings, model_settings)
    proxy = server._llama_proxy
    kept = store if store is not None else Store()

    def with_cache(llm: Any) -> Any:
        try:
            llm.set_cache(LlamaCache(kept, llm, tenant=served, codec=codec))
        except Unsupported as refusal:
            logger.warning("kvsnap: nothing is kept of %s: %s", llm.model_path, refusal)
        return llm

    load: Callable[[Any], Any] = proxy.load_llama_from_model_settings
    # The proxy calls it whenever it changes its model; the first one it has loaded by now.
    proxy.load_llama_from_model_settings = lambda settings: with_cache(load(settings))
    with_cache(proxy._current_model)
    return app


def main(arguments: Sequence[str] | None = None) -> None:
    """`python -m kvsnap.llama_server`: the library's options, and kvsnap's beside them."""
    try:
        _serve(arguments)
    except KvsnapError as error:
        hint = f"\nhint: {error.hint}" if error.hint else ""
        print(f"error: {error.what}{hint}", file=sys.stderr)
        sys.exit(error.exit_code)


def _serve(arguments: Sequence[str] | None) -> None:
    try:
        import uvicorn
        from llama_cpp.server import app  # noqa: F401  it imports the other packages
        from yaml import safe_load  # type: ignore[import-untyped]  # noqa: F401  for config files
    except ImportError as error:
        raise NotFound(
            f"the server's packages are not installed: {error}", "pip install 'kvsnap[server]'"
        ) from error
    options = _options(arguments)
    _show_reuse()
    server, models = _settings(options)
    _check_models(models)
    tenant = find_tenant(options.kvsnap_tenant_key_file, "--kvsnap-tenant-key-file")
    remote = options.kvsnap_remote or default_url()
    with Store(
        options.kvsnap_store,
        capacity=options.kvsnap_capacity,
        remote=remote,
        write_behind=options.kvsnap_write_behind,
    ) as store:
        write_settings(store.place)  # raises where nothing can be kept, before hours of serving
        uvicorn.run(
            create_app(
                None, server, models, store=store, tenant=tenant, codec=options.kvsnap_codec
            ),
            host=os.getenv("HOST", server.host),
            port=int(os.getenv("PORT", server.port)),
            ssl_keyfile=server.ssl_keyfile,
            ssl_certfile=server.ssl_certfile,
        )


def _show_reuse() -> None:
    """A line for each prompt, beside the server's own for each request."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s:     %(message)s"))  # as uvicorn's
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    from llama_cpp.server.cli import add_args_from_model
    from llama_cpp.server.settings import Settings

    parser = argparse.ArgumentParser(
        prog="python -m kvsnap.llama_server",
        description="llama-cpp-python's server; what it computes is kept on disk.",
        allow_abbrev=False,
    )
    ours = parser.add_argument_group("kvsnap")
    ours.add_argument("--kvsnap-store", metavar="PATH", help="default: KVSNAP_STORE, or ~/.cache")
    ours.add_argument("--kvsnap-capacity", metavar="SIZE", help='how large it may get: "20GB"')
    ours.add_argument(
        "--kvsnap-remote", metavar="URL", help="what is missing is looked for there; KVSNAP_REMOTE"
    )
    ours.add_argument(
        "--kvsnap-write-behind", action="store_true", help="what is stored goes to the remote, too"
    )
    ours.add_argument("--kvsnap-codec", metavar="CODEC", help="default: zstd, without loss")
    ours.add_argument(
        "--kvsnap-tenant-key-file",
        metavar="F",
        type=Path,
        help="32 bytes, or 64 hex characters; KVSNAP_TENANT_KEY_FILE, KVSNAP_TENANT_KEY",
    )
    add_args_from_model(parser, Settings)
    parser.add_argument("--config_file", help="Path to a config file to load.")
    return parser.parse_args(arguments)


def _settings(options: argparse.Namespace) -> tuple[Any, list[Any]]:
    """Of the server and its models: from the options, or all of them from a config file."""
    from llama_cpp.server.cli import parse_model_from_args
    from llama_cpp.server.settings import ConfigFileSettings, ModelSettings, ServerSettings

    file = os.environ.get("CONFIG_FILE", options.config_file)
    try:
        if not file:
            server = parse_model_from_args(ServerSettings, options)
            return server, [parse_model_from_args(ModelSettings, options)]
        config = ConfigFileSettings.model_validate_json(_json_of(Path(file)))
        return ServerSettings.model_validate(config), config.models
    except OSError as error:
        raise NotFound(f"{file} cannot be read: {error.strerror}", "check --config_file") from error
    except ValueError as error:  # pydantic's ValidationError is one
        raise UsageError(
            f"the server's settings are not right: {' '.join(str(error).split())}",
            "see --help; a model is needed: --model FILE.gguf, or a config file",
        ) from error


def _check_models(models: Sequence[Any]) -> None:
    """The library says the first by an assertion, and the second after all others were loaded."""
    if not models:
        raise UsageError("the config file names no model", 'it needs a list "models"')
    for model in models:
        if not getattr(model, "hf_model_repo_id", None) and not Path(model.model).is_file():
            raise NotFound(f"no model file {model.model}", "give the path of a GGUF file")


def _json_of(path: Path) -> str:
    if path.suffix not in (".yaml", ".yml"):
        return path.read_text()
    from yaml import YAMLError, safe_load

    try:
        return json.dumps(safe_load(path.read_text()))
    except YAMLError as error:
        raise ValueError(f"{path} is no YAML: {error}") from error
