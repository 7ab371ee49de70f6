"""`kvsnap explain`: why a prompt would hit or miss, token by token at the break."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import click

from kvsnap.cli import units
from kvsnap.cli.inputs import (
    engine_options,
    read_source,
    read_tenant,
    source_options,
    tenant_option,
)
from kvsnap.cli.main import App
from kvsnap.formats.errors import UsageError

ANSWER = 128
"""As `resume` has it by default: whether a context is a long one can be part of the identity."""
EXAMPLES = """\b
Examples:
  kvsnap explain --model m.gguf --prompt-file system.md
  kvsnap explain support --model m.gguf --prompt "And then?" --check
"""


@click.command("explain", epilog=EXAMPLES)
@click.argument("session", required=False)
@source_options
@click.option("--check", is_flag=True, help="Read and check the files of the matched blocks, too.")
@tenant_option
@engine_options
@click.pass_obj
def command(
    app: App,
    /,
    session: str | None,
    prompt: str | None,
    prompt_file: Path | None,
    messages: Path | None,
    token_ids: Path | None,
    check: bool,
    tenant_key_file: Path | None,
    **options: Any,
) -> None:
    """Say what is stored of a prompt, and why no more: the first differing token, a setting,
    eviction, damage.

    With SESSION the prompt is its next turn, as for resume; without a prompt its own tokens.
    Nothing is computed, restored or changed. A miss is an answer: the exit code is 0.
    """
    from kvsnap.cli.engine import Loaded, count_all_tokens, require_engine
    from kvsnap.kvstore.conversation import new_prompt, next_prompt
    from kvsnap.kvstore.explain.explain import explain

    source = read_source(prompt, prompt_file, messages, token_ids)
    tenant = read_tenant(tenant_key_file)
    if session is None and not source.given:
        raise UsageError("there is nothing to explain", "name a session, or give a prompt")
    require_engine(options["engine"])
    tokens = count_all_tokens(app, options["model"], session, tenant, source, options["engine"])
    options["codec"] = None
    loaded = Loaded(app, options, tokens + ANSWER, session, tenant)
    try:
        if session is None:
            made = new_prompt(loaded.engine, source, answer=True)
            ids, warning = made.token_ids, made.warning
        else:
            ids, warning = loaded.session.stored_token_ids(), ""  # raises where there is none
            assert loaded.session.stored is not None
            record = loaded.session.stored.record
            if source.given:
                same = loaded.session.same_weights(record)
                made = next_prompt(loaded.engine, record, source, same_weights=same)
                ids, warning = made.token_ids, made.warning
        if warning:
            app.out.warn(warning)
        found = explain(loaded.session, ids, check=check)
    finally:
        loaded.close()
    if app.out.as_json:
        app.out.json({"session": session, "model": loaded.model, **dataclasses.asdict(found)})
    _text(app, found)


def _text(app: App, found: Any) -> None:
    size = sum(block.bytes for block in found.blocks)
    parts = [f"{units.count(len(found.blocks), 'block')}, {units.size(size)}"] * bool(found.blocks)
    if found.tail_tokens:
        parts.append(f"{units.count(found.tail_tokens, 'token')} in the session's own file")
    computed = found.prompt_tokens - found.reused_tokens
    lines = [
        ("prompt", units.count(found.prompt_tokens, "token")),
        ("stored", f"{found.matched_tokens or 'none'} of them: {'; '.join(parts)}".rstrip(": ")),
        ("resume", f"restores {found.reused_tokens}, computes {computed}"),
        ("ends", f"{found.verdict}: {found.text}"),
    ]
    if found.differing_token is not None:
        lines += _sides(found.differing_token)
    lines += [("damage", line) for line in found.damage if line != found.text]
    lines.append(("do", found.advice))
    for label, value in lines:
        app.out.text(f"{label:10}{value}")
    for block in found.blocks:
        app.out.detail(
            f"block {block.name[:12]} from {block.start}:"
            f" {units.count(block.tokens, 'token')}, {units.size(block.bytes)}"
        )


def _sides(parting: Any) -> list[tuple[str, str]]:
    """Both texts as literals, so that line ends and control characters show and do nothing."""
    here = (parting.token_id, parting.text, parting.after)
    there = (parting.stored_token_id, parting.stored_text, parting.stored_after)
    lines = [("  before", repr(parting.before))] if parting.before else []
    for label, (token, text, after) in (("  here", here), ("  stored", there)):
        shown = repr(text) if text else "(no text)"
        lines.append((label, f"{token} {shown}" + (f" then {after!r}" if after else "")))
    return lines
