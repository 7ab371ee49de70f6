"""`kvsnap export`: a session and its blocks in one file, or its KV cache in another tool's form."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from kvsnap.cli.inputs import encrypt_option, read_tenant, sign_option, tenant_option
from kvsnap.cli.main import App
from kvsnap.cli.remote import local_file
from kvsnap.formats.errors import UsageError

EXAMPLES = """\b
Examples:
  kvsnap export support support.kvsnap
  kvsnap export support --to llama-server slots/support.bin
  kvsnap export support --to mlx-lm support.safetensors
"""


@click.command("export", epilog=EXAMPLES)
@click.argument("session")
@click.argument("out", metavar="OUT")
@click.option("--force", is_flag=True, help="Write over a file that is there.")
@click.option(
    "--to",
    "format_name",
    metavar="FORMAT",
    help="Another tool's form: llama.cpp, llama.cpp-session, llama-server, mlx-lm, mlx-lm-0.31,"
    " transformers, safetensors, vllm-example, sglang, lmcache or quant.cpp.",
)
@click.option(
    "--format-version",
    "version",
    metavar="N",
    type=click.IntRange(1),
    help="llama.cpp: version of the sequence state that the target reads (3, 4).",
)
@click.option(
    "--streams",
    metavar="N",
    type=click.IntRange(1, 256),
    default=1,
    help="llama.cpp: slots of a server that does not unify its KV.",
)
@click.option(
    "--v-transposed",
    is_flag=True,
    help="llama.cpp: for a context without flash attention (llama-server -fa off).",
)
@click.option(
    "--block-tokens",
    "block",
    metavar="N",
    type=click.IntRange(1, 65536),
    help="vLLM, LMCache: tokens of the engine's block; SGLang: of a page.",
)
@click.option(
    "--chunk-tokens",
    "chunk",
    metavar="N",
    type=click.IntRange(1, 65536),
    help="LMCache: of a chunk.",
)
@click.option("--page-layout", metavar="L", help="SGLang: hicache_mem_layout.")
@click.option(
    "--model-name", metavar="NAME", help="SGLang, LMCache, mlx-lm: as the tool was told to load it."
)
@sign_option
@encrypt_option
@tenant_option
@click.pass_obj
def command(
    app: App,
    /,
    session: str,
    out: str,
    force: bool,
    format_name: str | None,
    sign: bool,
    encrypt: bool,
    tenant_key_file: Path | None,
    **options: Any,
) -> None:
    """Write SESSION and its blocks into the file OUT: a plain tar, which kvsnap import takes.

    Exit code 3 where blocks of the session were evicted here.

    With --to the rows of its KV cache are written as another tool keeps them, all or none. Such a file
    says neither which weights made it nor whether it is intact: give it to the same model only.
    """
    from kvsnap.cli.moving import push_session, tell
    from kvsnap.kvstore.remotes.archive import Archive

    tenant, path = read_tenant(tenant_key_file), local_file(out)
    if not force and os.path.lexists(path):
        raise UsageError(f"{path} is there already", "choose another name, or --force")
    if format_name is not None:
        if sign or encrypt:
            raise UsageError(
                "another tool's file can be neither signed nor sealed", "leave out --to, or those"
            )
        from kvsnap.cli.exporting import export_foreign

        export_foreign(app, session, path, format_name, tenant, options, force=force)
        return
    with Archive.create(path) as archive:
        done = push_session(app, archive, session, tenant, force=force, sign=sign, encrypt=encrypt)
    tell(app.out, done, "export", "exported", "to")
