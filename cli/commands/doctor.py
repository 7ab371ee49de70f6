"""`kvsnap doctor`: what is wrong, and what to do."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import click

from kvsnap.cli.main import App


@click.command("doctor")
@click.argument("folder", metavar="[DIR]", required=False, type=click.Path(path_type=Path))
@click.option(
    "--engine",
    type=click.Choice(["llama.cpp", "transformers", "vllm", "sglang"]),
    default="llama.cpp",
    show_default=True,
    help="Which engine to look at: whether what is installed here fits.",
)
@click.pass_context
def command(ctx: click.Context, folder: Path | None, engine: str) -> int:
    """Say what is wrong with the store or an engine, and what to do. Nothing is changed.

    Of blocks of one model that do not serve one another (another engine, a server that was started
    otherwise) it says in which fields they differ. Exit code 1 if there is a problem.

    With DIR, a folder where another tool keeps KV caches (vLLM, SGLang, LMCache, llama-server, mlx-lm,
    transformers): what it is, of which models, which files are cut, and how to import from it.
    """
    app: App = ctx.obj
    if folder is not None:
        from kvsnap.kvstore.interchange.folders import examine_folder

        findings = list(examine_folder(folder.expanduser()))
    else:
        from kvsnap.kvstore.doctor import examine

        findings = list(examine(app.store_path, app.settings.get("capacity"), engine))
    if app.out.as_json:
        app.out.json([dataclasses.asdict(finding) for finding in findings])
    for finding in findings:
        app.out.text(f"{finding.level:8}{finding.what}")
        if finding.advice:
            app.out.text(f"{'':8}-> {finding.advice}")
    return 1 if any(finding.level == "problem" for finding in findings) else 0
