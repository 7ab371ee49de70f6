"""`kvsnap save`: restore what is stored of a prompt, compute the rest, store the new blocks."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from kvsnap.cli import units
from kvsnap.cli.inputs import (
    engine_options,
    read_source,
    read_tenant,
    source_options,
    store_options,
)
from kvsnap.cli.main import App
from kvsnap.formats.errors import PartlyDone, UsageError

if TYPE_CHECKING:
    from kvsnap.cli.engine import Loaded
    from kvsnap.kvstore.max_kl import Choice
    from kvsnap.kvstore.reports import SaveReport

EXAMPLES = """\b
Examples:
  kvsnap save --model m.gguf --messages chat.json --session support
  kvsnap save --model m.gguf --prompt-file system.txt
"""


@click.command("save", epilog=EXAMPLES)
@source_options
@click.option("--session", metavar="NAME", help="Save under this name; without it blocks only.")
@click.option(
    "--max-kl",
    metavar="X",
    type=click.FloatRange(min=0.0),
    help="Take the smallest lossy codec whose KL on this session's own tokens exceeds the engine's"
    " floor by at most X; exact where none does.",
)
@click.option(
    "--encrypt",
    is_flag=True,
    help="Make the store an encrypted one, for good: what is saved from now on is sealed by the"
    " tenant's key.",
)
@click.option("--pin", is_flag=True, help="Mark the session as one to keep.")
@store_options
@engine_options
@click.pass_obj
def command(
    app: App,
    /,
    prompt: str | None,
    prompt_file: Path | None,
    messages: Path | None,
    token_ids: Path | None,
    session: str | None,
    max_kl: float | None,
    encrypt: bool,
    pin: bool,
    tenant_key_file: Path | None,
    **options: Any,
) -> None:
    """Restore what is stored of a prompt, compute the rest, store the new blocks.

    The prompt is one of --prompt, --prompt-file, --messages and --token-ids.
    """
    from kvsnap.cli.engine import Loaded, count_tokens, require_engine
    from kvsnap.kvstore.conversation import new_prompt
    from kvsnap.kvstore.measure.live import require_cut

    started = time.perf_counter()
    source = read_source(prompt, prompt_file, messages, token_ids)
    if not source.given:
        raise UsageError(
            "there is no prompt to save",
            "give one of --prompt, --prompt-file, --messages, --token-ids",
        )
    tenant = read_tenant(tenant_key_file)
    if encrypt and tenant is None:
        raise UsageError(
            "--encrypt needs a tenant key", "give --tenant-key-file; kvsnap keygen makes one"
        )
    app.encrypt = encrypt
    if pin and session is None:
        raise UsageError("--pin keeps a session, and none is named", "add --session NAME")
    if max_kl is not None and not max_kl >= 0:  # NaN passes click's range
        raise UsageError(f"--max-kl is {max_kl}", "give a number, like 1e-3")
    if max_kl is not None and options["codec"] is not None:
        raise UsageError("--max-kl chooses the codec", "give --max-kl or --codec, not both")
    require_engine(options["engine"])
    tokens = count_tokens(options["model"], source, options["engine"])
    loaded = Loaded(app, options, tokens, session, tenant, read_through=True, saves=True)
    try:
        made = new_prompt(loaded.engine, source, answer=False)
        by_kl = max_kl is not None
        if by_kl:
            require_cut(loaded.engine)  # before the prefill, which may take minutes
        result = loaded.prefill(app, made, leave=0, store_on_the_way=not by_kl)
        notes = made.notes(loaded.model)
        if max_kl is not None:
            notes = {**notes, "max_kl": _choose(app, loaded, max_kl).notes()}
        writing = time.perf_counter()
        if loaded.session.replaces_another(made.token_ids):
            app.out.warn(f"session {session!r} held another conversation, which this one replaces")
        partly: PartlyDone | None = None
        try:
            report = loaded.session.save(notes, pinned=pin)
        except PartlyDone as error:
            partly, report = error, cast("SaveReport", error.report)
    finally:
        loaded.close()
    done = time.perf_counter()
    if app.out.as_json:
        app.out.json(
            {
                "session": report.session,
                "model": loaded.model,
                "tokens": report.tokens,
                "reused_tokens": result.report.reused_tokens,
                "computed_tokens": result.computed_tokens,
                "blocks": report.blocks,
                "blocks_written": report.blocks_written,
                "bytes_written": report.bytes_written,
                "bytes_raw": report.bytes_raw,
                "codec": report.codec,
                "fidelity": report.fidelity,
                "seconds": {
                    "load_model": loaded.load_seconds,
                    "restore": result.seconds.restore,
                    "prefill": result.seconds.prefill,
                    "write": done - writing,
                    "total": done - started,
                },
            }
        )
    app.out.text(
        f"saved {units.count(report.tokens, 'token')}"
        + (f" as {report.session!r}" if report.session else "")
        + f": {result.report.reused_tokens} reused, {result.computed_tokens} computed;"
        f" {report.blocks_written} of {units.count(report.blocks, 'block')} written"
        f" ({units.size(report.bytes_written)})"
    )
    app.out.say(
        f"prefill {units.seconds(result.seconds.prefill)},"
        f" restore {units.seconds(result.seconds.restore)}, write {units.seconds(done - writing)}"
    )
    if partly is not None:
        raise partly


def _choose(app: App, loaded: Loaded, limit: float) -> Choice:
    """Let the live model say which codec this session is stored by."""
    from kvsnap.kvstore.max_kl import candidates_of, choose_codec

    session = loaded.session
    candidates = candidates_of(session)
    app.out.say(f"measuring {units.count(len(candidates), 'codec')} on the session's own tokens")
    choice = choose_codec(loaded.engine, candidates, limit, loaded.store.block_size)
    if not choice.held_out:
        app.out.say("the session is too short to measure codecs on: stored exact")
        return choice
    if choice.codec is not None:
        session.store_by(choice.codec)
        told = f"{choice.codec.fidelity} is {choice.excess:.1e} above it"
    else:
        told = "no lossy codec holds the limit: stored exact"
    app.out.say(f"engine's own floor: KL {choice.floor:.1e}; {told}")
    return choice
