"""`kvsnap import`: a session out of a file that `kvsnap export` wrote, or out of another tool's."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvsnap.cli.inputs import model_is_optional, read_tenant, source_options, tenant_option
from kvsnap.cli.main import App
from kvsnap.cli.remote import local_file
from kvsnap.formats.errors import NotFound, UsageError

if TYPE_CHECKING:
    from kvsnap.kvstore.remotes.base import Remote

EXAMPLES = """\b
Examples:
  kvsnap import support.kvsnap
  kvsnap import support.kvsnap --as support-of-the-team
  kvsnap import slot.bin --model m.gguf --session support
  kvsnap import cache.safetensors --model m.gguf --prompt-file p.txt --session s
"""


@click.command("import", epilog=EXAMPLES)
@click.argument("file", metavar="FILE")
@click.argument("session", required=False)
@click.option(
    "--as", "new_name", metavar="NAME", help="kvsnap's own file: store it here under another name."
)
@click.option(
    "--force",
    is_flag=True,
    help="kvsnap's own file: also over a session of other or more tokens here.",
)
@click.option(
    "--dry-run", is_flag=True, help="kvsnap's own file: show what would come; write nothing."
)
@click.option(
    "--from",
    "format_name",
    metavar="FORMAT",
    help="Another tool's file or folder: llama.cpp, llama.cpp-session, llama-server, mlx-lm,"
    " mlx-lm-0.31, transformers, safetensors, vllm-example, sglang, lmcache or quant.cpp. Default:"
    " what the file itself says.",
)
@click.option(
    "--session",
    "own_name",
    metavar="NAME",
    help="Of another tool's file: the name that it gets here.",
)
@click.option(
    "--unverified",
    is_flag=True,
    help="Do not compare with what the model computes: the rows are kept for this session alone.",
)
@click.option(
    "--check-all",
    is_flag=True,
    help="Compute all of it to compare, as slow as a prefill; else some blocks, and each id once.",
)
@click.option(
    "--block-tokens",
    metavar="N",
    type=click.IntRange(1, 65536),
    help="vLLM, LMCache: tokens of the engine's block; SGLang: of a page.",
)
@click.option(
    "--chunk-tokens", metavar="N", type=click.IntRange(1, 65536), help="LMCache: of a chunk."
)
@click.option("--page-layout", metavar="L", help="SGLang: hicache_mem_layout.")
@click.option(
    "--model-name", metavar="NAME", help="SGLang, LMCache: whose files, of several models'."
)
@click.option(
    "--batch-row", metavar="N", type=click.IntRange(0), help="Which sequence of a batch to take."
)
@source_options
@model_is_optional
@tenant_option
@click.pass_obj
def command(
    app: App,
    /,
    file: str,
    session: str | None,
    new_name: str | None,
    force: bool,
    dry_run: bool,
    own_name: str | None,
    tenant_key_file: Path | None,
    **options: Any,
) -> None:
    """Take SESSION out of FILE, which kvsnap export wrote; without SESSION the only one in it.

    Each file in it is checked against the session's own tokens and decoded once before it counts.

    Or take the KV cache in another tool's FILE (or folder) as a new session. Such files do not say
    which weights made them: --model computes both ends, some blocks between and each token id once, and
    what differs by more than the engine's own rounding is refused.
    """
    from kvsnap.cli.moving import pull_session, tell
    from kvsnap.kvstore.interchange.gathering import is_portable
    from kvsnap.kvstore.remotes.archive import Archive

    tenant, path = read_tenant(tenant_key_file), local_file(file)
    if options["format_name"] is not None or not is_portable(path):
        if new_name is not None or force or dry_run:
            raise UsageError(
                f"{path} is another tool's file: it becomes a new session, or is refused",
                "leave out --as, --force and --dry-run, which are for files of kvsnap export",
            )
        if session is not None:
            raise UsageError(
                f"{path} is another tool's file: it holds no named session",
                "name the new session: --session NAME",
            )
        from kvsnap.cli.importing import import_foreign

        import_foreign(app, path, own_name, tenant, options)
        return
    if path.exists() and (own_name is not None or options["model"] is not None):
        raise UsageError(
            f"{path} was written by kvsnap export: it needs no model",
            "name its session as a word, and --as NAME for another name here",
        )
    with Archive.open(path) as archive:
        name = session if session is not None else _only_session(archive, tenant)
        done = pull_session(
            app, archive, name, tenant, new_name=new_name, force=force, dry_run=dry_run
        )
    tell(app.out, done, "import", "imported", "from")


def _only_session(archive: Remote, tenant: Any) -> str:
    from kvsnap.formats.tenant import tenant_id
    from kvsnap.kvstore.keyring import Keyring
    from kvsnap.kvstore.sharing.manifests import every

    keys = Keyring()
    keys.add(tenant)
    found = [pushed.manifest for pushed in every(archive, keys)]
    there = [manifest for manifest in found if manifest is not None]
    names = sorted(one.name for one in there if one.tenant_id == tenant_id(tenant))
    if len(names) > 1:
        shown = ", ".join(map(repr, names[:10]))
        raise UsageError(
            f"{archive.url} holds {len(names)} sessions: {shown}", "name the one to take"
        )
    if not names:
        raise NotFound(
            f"{archive.url} holds no session that can be taken",
            "give the key that it was saved with: --tenant-key-file"
            if there
            else "export it again from where it is whole",
        )
    return names[0]
