"""`kvsnap doctor`: what is wrong, and what to do."""

from __future__ import annotations

import dataclasses

import click

from kvsnap.cli.main import App


@click.command("doctor")
@click.option(
    "--engine",
    type=click.Choice(["llama.cpp", "transformers", "vllm", "sglang"]),
    default="llama.cpp",
    show_default=True,
    help="Which engine to look at: whether what is installed here fits.",
)
@click.pass_context
def command(ctx: click.Context, engine: str) -> int:
    """Say what is wrong with the store or an engine, and what to do. Nothing is changed.

    Of blocks of one model that do not serve one another (another engine, a server that was started
    otherwise) it says in which fields they differ. Exit code 1 if there is a problem.
    """
    from kvsnap.kvstore.doctor import examine

    app: App = ctx.obj
    findings = list(examine(app.store_path, app.settings.get("capacity"), engine))
    if app.out.as_json:
        app.out.json([dataclasses.asdict(finding) for finding in findings])
    for finding in findings:
        app.out.text(f"{finding.level:8}{finding.what}")
        if finding.advice:
            app.out.text(f"{'':8}-> {finding.advice}")
    return 1 if any(finding.level == "problem" for finding in findings) else 0
