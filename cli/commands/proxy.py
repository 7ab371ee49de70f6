"""`kvsnap proxy`: a disk prefix cache for a stock llama-server."""

from __future__ import annotations

import ipaddress
import logging
import os
import socket
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click

from kvsnap.cli.inputs import read_tenant, tenant_option
from kvsnap.cli.main import App
from kvsnap.cli.output import Output
from kvsnap.formats.errors import KvsnapError, Unsupported, UsageError

EXAMPLES = """\b
Examples:
  llama-server -m m.gguf --slot-save-path /dev/shm/slots
  kvsnap proxy --upstream http://127.0.0.1:8080 --slot-dir /dev/shm/slots
"""
KEY_VARIABLE = "LLAMA_API_KEY"
KEEP_ALIVE = 120
"""Seconds; longer than clients keep a connection that waits, so that they are who closes it."""
_PACKAGES = ("httpx2", "starlette", "uvicorn", "llama_cpp")


@click.command("proxy", epilog=EXAMPLES)
@click.option(
    "--upstream",
    metavar="URL",
    default="http://127.0.0.1:8080",
    show_default=True,
    help="The llama-server. Its --api-key, where it has one, is read from LLAMA_API_KEY.",
)
@click.option(
    "--slot-dir",
    metavar="DIR",
    required=True,
    type=click.Path(path_type=Path),
    help="The folder of the server's --slot-save-path; in memory (/dev/shm) it is fastest.",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Where to listen.")
@click.option(
    "--port", default=8081, show_default=True, type=click.IntRange(0, 65535), help="And its port."
)
@click.option(
    "--expose",
    is_flag=True,
    help="Listen where other machines can connect: whoever can connect can use the server.",
)
@click.option(
    "--model",
    metavar="M",
    type=click.Path(path_type=Path),
    help="The server's GGUF file. Default: where the server says that it is.",
)
@click.option(
    "--rope-scaling",
    type=click.Choice(["none", "linear", "yarn"]),
    help="As the server was started with; so are the next ones.",
)
@click.option("--rope-scale", metavar="X", type=float)
@click.option("--rope-freq-base", metavar="X", type=float, default=0.0)
@click.option("--rope-freq-scale", metavar="X", type=float, default=0.0)
@click.option("--yarn-orig-ctx", metavar="N", type=int, default=0)
@click.option("--yarn-ext-factor", metavar="X", type=float, default=-1.0)
@click.option("--yarn-attn-factor", metavar="X", type=float, default=1.0)
@click.option("--yarn-beta-fast", metavar="X", type=float, default=32.0)
@click.option("--yarn-beta-slow", metavar="X", type=float, default=1.0)
@click.option("--codec", metavar="ID", help="zstd (default) or raw: how rows become bytes.")
@click.option(
    "--write-behind",
    is_flag=True,
    help="What is stored goes to KVSNAP_REMOTE, too, in the background.",
)
@tenant_option
@click.pass_obj
def command(
    app: App,
    /,
    upstream: str,
    slot_dir: Path,
    host: str,
    port: int,
    expose: bool,
    model: Path | None,
    codec: str | None,
    write_behind: bool,
    tenant_key_file: Path | None,
    **rope: Any,
) -> None:
    """Stand in front of a llama-server and keep what its slots compute in the store.

    Clients talk to the proxy as to the server. A prompt whose beginning is stored is restored into a
    slot, where that beats computing it; new blocks are stored after the answer. What is missing here is
    looked for in KVSNAP_REMOTE, where that is set. Everything else is passed on as it comes.
    """
    for package in _PACKAGES:
        if find_spec(package) is None:
            raise Unsupported(f"{package} is not installed", "pip install 'kvsnap[proxy]'")
    if not _is_loopback(host) and not expose:
        raise UsageError(
            f"{host} is no loopback address, and whoever can connect can use the server",
            "add --expose if that is meant, or leave --host away",
        )
    if _is_own(upstream, host, port):
        raise UsageError(
            f"{upstream} is where the proxy itself would listen",
            "give the server's address with --upstream, or another --port",
        )
    import uvicorn

    from kvsnap.formats.codecs import DEFAULT_CODEC
    from kvsnap.kvstore.place import write_settings
    from kvsnap.kvstore.proxy.app import ProxyOptions, create_app
    from kvsnap.kvstore.remotes import default_url
    from kvsnap.kvstore.store import Store

    tenant, remote = read_tenant(tenant_key_file), default_url()
    if write_behind and remote is None:
        raise UsageError("--write-behind needs a remote", "set KVSNAP_REMOTE to its URL")
    options = ProxyOptions(
        upstream=upstream,
        slot_dir=slot_dir,
        model=model,
        load=_load(rope),
        tenant=tenant,
        codec=codec or DEFAULT_CODEC,
        key=os.environ.get(KEY_VARIABLE) or None,
    )
    _log_to(app.out)
    with Store(
        app.store_path,
        capacity=app.settings.get("capacity"),
        remote=remote,
        write_behind=write_behind,
    ) as store:
        write_settings(store.place)  # raises where nothing can be kept, before hours of serving
        with _listener(host, port) as listener:  # first: an application has files in the folder
            application = create_app(store, options)
            port = listener.getsockname()[1]
            app.out.say(f"http://{host}:{port} in front of {upstream}, store {store.path}")
            config = uvicorn.Config(
                application,
                log_level="warning",
                timeout_graceful_shutdown=10,
                timeout_keep_alive=KEEP_ALIVE,
                server_header=False,
                date_header=False,
            )
            uvicorn.Server(config).run(sockets=[listener])


def _load(rope: dict[str, Any]) -> Any:
    """`LoadOptions` of the server's RoPE."""
    from kvsnap.cli.engine import load_options

    own = {"cache_type_k": "f16", "cache_type_v": "f16", "flash_attn": "off"}
    return load_options({**own, "ctx": None, "threads": None, "lora": None, **rope})


def _listener(host: str, port: int) -> socket.socket:
    try:
        (family, *_), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise KvsnapError(
            f"cannot listen on {host}:{port}: {error.strerror or error}",
            "give another --port, or --host",
        ) from error


def _is_own(upstream: str, host: str, port: int) -> bool:
    """Whether requests would go from the proxy to itself, and on, until it has no file handles left."""
    try:
        url = urlsplit(upstream)
        there = url.port or (443 if url.scheme == "https" else 80)
    except ValueError:
        return False
    name = url.hostname or ""
    return there == port and (name == host or (_is_loopback(name) and _is_here(host)))


def _is_here(host: str) -> bool:
    return _is_loopback(host) or host in ("0.0.0.0", "::")


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _log_to(out: Output) -> None:
    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            out.warn(record.getMessage().removeprefix("kvsnap: "))

    logger = logging.getLogger("kvsnap")
    logger.addHandler(Handler())
    logger.setLevel(logging.WARNING)
