"""`kvsnap resume`: put the longest stored prefix into the engine, continue, save what came."""

from __future__ import annotations

import codecs
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvsnap.cli import interrupt, units
from kvsnap.cli.inputs import (
    engine_options,
    read_source,
    read_tenant,
    source_options,
    store_options,
)
from kvsnap.cli.main import App
from kvsnap.formats.errors import (
    KvsnapError,
    PartlyDone,
    UsageError,
)

if TYPE_CHECKING:
    from kvsnap.formats.session import SessionRecord

EXAMPLES = """\b
Examples:
  kvsnap resume support --model m.gguf --prompt "And then?" --max-tokens 40
  kvsnap resume --model m.gguf --messages chat.json --max-tokens 100
"""


ALLOW = " (--allow-lossy uses them)"


@click.command("resume", epilog=EXAMPLES)
@click.argument("session", required=False)
@source_options
@click.option(
    "--max-tokens",
    metavar="N",
    type=click.IntRange(min=0),
    default=128,
    show_default=True,
    help="How many tokens to generate.",
)
@click.option(
    "--temperature",
    metavar="X",
    type=click.FloatRange(min=0.0),
    default=0.0,
    show_default=True,
    help="0 is greedy.",
)
@click.option(
    "--seed",
    metavar="N",
    type=click.IntRange(0, 2**32 - 1),
    default=0,
    show_default=True,
    help="Seed of the sampler.",
)
@click.option("--no-save", is_flag=True, help="Do not store what was computed and generated.")
@click.option(
    "--allow-lossy",
    is_flag=True,
    help="Use blocks that were stored by a lossy codec, where no exact ones reach as far.",
)
@store_options
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
    max_tokens: int,
    temperature: float,
    seed: int,
    no_save: bool,
    tenant_key_file: Path | None,
    **options: Any,
) -> None:
    """Restore SESSION (or a new prompt's stored prefix) and continue it.

    With SESSION the prompt is its next user turn (chat) or appended text (raw); without one it
    goes on generating. The sampler's state (its random numbers) is not part of a session.
    """
    from kvsnap.cli.engine import Loaded, count_all_tokens, require_engine
    from kvsnap.kvstore.answer import generate
    from kvsnap.kvstore.conversation import answered, new_prompt, next_prompt, readable

    started = time.perf_counter()
    source = read_source(prompt, prompt_file, messages, token_ids)
    tenant = read_tenant(tenant_key_file)
    if session is None and not source.given:
        raise UsageError(
            "there is nothing to resume", "name a session (kvsnap ls), or give a prompt"
        )
    require_engine(options["engine"])
    tokens = count_all_tokens(
        app, options["model"], session, tenant, source, options["engine"], read_through=True
    )
    loaded = Loaded(
        app,
        options,
        tokens + max_tokens,
        session,
        tenant,
        read_through=True,
        saves=not no_save,
    )
    record: SessionRecord | None = None
    try:
        if session is not None:
            loaded.session.stored_token_ids()  # raises where there is none
            assert loaded.session.stored is not None
            record = loaded.session.stored.record
            made = next_prompt(
                loaded.engine, record, source, same_weights=loaded.session.same_weights(record)
            )
        else:
            made = new_prompt(loaded.engine, source, answer=True)
        if made.warning:
            app.out.warn(made.warning)
        result = loaded.prefill(app, made, leave=1, store_on_the_way=False)
        report = result.report
        if report.reused_tokens == 0 and report.stopped_by.startswith("identity"):
            app.out.warn(
                f"nothing reused: {report.stopped_by}"
                + ALLOW * loaded.session.has_lossy_only(report)
            )
        closed = False
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        decoder.decode(made.open_bytes)
        for token in generate(
            loaded.engine,
            made.token_ids,
            result,
            max_tokens=max_tokens,
            temperature=temperature,
            seed=seed,
        ):
            interrupt.check()
            piece = decoder.decode(loaded.engine.detokenize([token]))
            # Whoever reads stdout may have gone (| head): the turn is finished and saved for them.
            closed = closed or not app.out.stream(piece)
        closed = closed or not app.out.stream("\n")
        if result.context_full and not result.ended:
            app.out.warn(
                f"the context is full after {units.count(len(result.new_ids), 'new token')}"
            )
        writing = time.perf_counter()
        problem: KvsnapError | None = None
        if not no_save:
            after = answered(made, loaded.engine, result.new_ids, result.ended)
            try:
                loaded.session.save({**_kept(record), **after.notes(loaded.model)})
            except PartlyDone as partly:
                problem, session = partly, loaded.session.name
            except KvsnapError as error:
                problem = PartlyDone(f"answered, but not saved: {error.what}", error.hint)
        text = readable(made.open_bytes + loaded.engine.detokenize(result.new_ids))
    finally:
        loaded.close()
    done = time.perf_counter()
    if app.out.as_json:
        app.out.json(
            {
                "session": session,
                "model": loaded.model,
                "prompt_tokens": report.prompt_tokens,
                "reused_tokens": report.reused_tokens,
                "computed_tokens": result.computed_tokens,
                "reuse_stopped_by": report.stopped_by,
                "generated_tokens": len(result.new_ids),
                "token_ids": result.new_ids,
                "text": text,
                "fidelity": report.fidelity,
                "seconds": {
                    "load_model": loaded.load_seconds,
                    "restore": result.seconds.restore,
                    "prefill": result.seconds.prefill,
                    "first_token": result.seconds.first_token,
                    "generate": result.seconds.generate,
                    "write": done - writing,
                    "total": done - started,
                },
            }
        )
    first = result.seconds.first_token
    app.out.say(
        f"{report.prompt_tokens} prompt tokens: {report.reused_tokens} reused ({report.fidelity}),"
        f" {result.computed_tokens} computed; {units.count(len(result.new_ids), 'new token')}"
        + (f"; first after {units.seconds(first)}" if first is not None else "")
    )
    app.out.detail(f"reuse ended by {report.stopped_by}")
    if problem is None and closed:
        problem = PartlyDone(
            "stdout was closed before the end of the answer", "it is saved" if not no_save else ""
        )
    if problem is not None:
        raise problem


def _kept(record: SessionRecord | None) -> dict[str, Any]:
    """Of the notes of a session what still holds after another turn: how its codec was chosen."""
    return {k: v for k, v in record.notes.items() if k == "max_kl"} if record is not None else {}
