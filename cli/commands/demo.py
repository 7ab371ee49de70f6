"""`kvsnap demo`: the whole job on the bundled model, in new processes, with its timings."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from importlib.resources import files as resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvsnap.cli import units
from kvsnap.cli.bundled import bundled_model, bundled_model_option
from kvsnap.cli.main import App
from kvsnap.cli.progress import bar
from kvsnap.formats.errors import KvsnapError

if TYPE_CHECKING:
    from kvsnap.formats.session import SessionRecord

QUESTION = "A customer says the lock will not open after the ride. What do I answer?"
STEPS = 5


@click.command("demo")
@bundled_model_option
@click.option(
    "--max-tokens",
    metavar="N",
    type=click.IntRange(min=1),
    default=40,
    show_default=True,
    help="How many tokens to generate.",
)
@click.pass_obj
def command(app: App, model: Path | None, max_tokens: int) -> None:
    """The whole job on the bundled model, with its timings.

    One process computes a long system prompt and saves it; a second one resumes it and answers a
    question; a third one answers the same without kvsnap. The store is a temporary folder.
    """
    from kvsnap.cli.engine import require_engine

    require_engine("llama.cpp")
    model = model or bundled_model()
    with (
        tempfile.TemporaryDirectory(prefix="kvsnap-demo-") as folder,
        bar(app.out, "demo", "steps") as update,
    ):
        run = _Runner(Path(folder), model, max_tokens)
        update(0, STEPS)
        app.out.say("1/5 a first process computes the system prompt and saves it")
        saved = run.kvsnap("save", "--messages", run.messages("system"), "--session", "demo")
        update(1, STEPS)
        record = run.record()
        app.out.say("2/5 a second process resumes it and answers")
        resumed = run.kvsnap("resume", "demo", "--prompt", QUESTION, generate=True)
        update(2, STEPS)
        app.out.say("3/5 a third process answers without kvsnap")
        cold = run.kvsnap(
            "resume",
            "--messages",
            run.messages("system", "user"),
            "--no-save",
            generate=True,
            store="empty",
        )
        update(3, STEPS)
        app.out.say("4/5 one engine evaluates the same tokens in the same batches, uninterrupted")
        same = run.same_batches(record, resumed["reused_tokens"])
        size = sum(p.stat().st_size for p in (run.folder / "store").rglob("*.safetensors"))
        update(4, STEPS)
        app.out.say("5/5 a last process resumes the conversation as it was left")
        again = run.kvsnap("resume", "demo", generate=True)
        update(5, STEPS)
    _report(app, saved, resumed, again, cold, same, size)


class _Runner:
    """Runs kvsnap in new processes, on one store and model, and reads their JSON."""

    def __init__(self, folder: Path, model: Path, max_tokens: int) -> None:
        self.folder, self.model, self.max_tokens = folder, model, max_tokens
        system = resources("kvsnap.samples").joinpath("system-prompt.md").read_text("utf-8")
        self.turns = {
            "system": {"role": "system", "content": system},
            "user": {"role": "user", "content": QUESTION},
        }

    def messages(self, *roles: str) -> str:
        path = self.folder / f"{'-'.join(roles)}.json"
        path.write_text(json.dumps([self.turns[role] for role in roles]), "utf-8")
        return str(path)

    def kvsnap(
        self, *arguments: str, engine: bool = True, generate: bool = False, store: str = "store"
    ) -> dict[str, Any]:
        command = [sys.executable, "-P", "-m", "kvsnap", "--json", "--quiet"]
        command += ["--store", str(self.folder / store), *arguments]
        command += ["--model", str(self.model)] if engine else []
        command += ["--max-tokens", str(self.max_tokens)] if generate else []
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise KvsnapError(f"kvsnap {arguments[0]} failed", done.stderr.strip().splitlines()[-1])
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def record(self) -> SessionRecord:
        from kvsnap.formats.tenant import NO_TENANT_ID
        from kvsnap.kvstore.store import Store

        with Store(self.folder / "store") as store:
            return store.sessions.load(NO_TENANT_ID, "demo").record

    def same_batches(self, record: SessionRecord, reused: int) -> list[int]:
        """The reference, in this process: one engine evaluates what `save` evaluated, forgets what
        was not reused, and evaluates the rest as `resume` did."""
        from kvsnap.engines import LlamaCpp
        from kvsnap.engines.llamacpp_load import LoadOptions, load_llama
        from kvsnap.kvstore.conversation import Source, next_prompt

        room = len(record.token_ids) + len(QUESTION) + 64 + self.max_tokens
        llm = load_llama(self.model, LoadOptions(), room)
        try:
            engine = LlamaCpp(llm)
            prompt = next_prompt(engine, record, Source(text=QUESTION)).token_ids
            engine.evaluate(record.token_ids)
            engine.truncate(reused)
            engine.evaluate(prompt[reused:])
            tokens = engine.generate(prompt, temperature=0.0, seed=0)
            return [token for _, token in zip(range(self.max_tokens), tokens, strict=False)]
        finally:
            llm.close()


def _report(
    app: App, saved: Any, resumed: Any, again: Any, cold: Any, same: list[int], size: int
) -> None:
    columns = {"cold": cold, "resumed": resumed, "as it was left": again}
    first = {name: run["seconds"]["first_token"] for name, run in columns.items()}
    pairs = enumerate(zip(cold["token_ids"], resumed["token_ids"], strict=False))
    parting = next((n for n, (a, b) in pairs if a != b), None)
    equal = resumed["token_ids"] == same
    if app.out.as_json:
        app.out.json(
            {
                "saved": saved,
                "resumed": resumed,
                "resumed_again": again,
                "cold": cold,
                "ratio": first["cold"] / first["resumed"],
                "bytes_on_disk": size,
                "equals_same_batches": equal,
                "cold_first_differing_token": parting,
            }
        )
    for line in ["", QUESTION, *resumed["text"].strip().split("\n"), ""]:
        app.out.text(line)
    rows = [
        [label, *(str(run[key]) for run in columns.values())]
        for label, key in [
            ("prompt tokens", "prompt_tokens"),
            ("  reused", "reused_tokens"),
            ("  computed", "computed_tokens"),
        ]
    ]
    rows.append(["first token after", *(units.seconds(value) for value in first.values())])
    rows.append(["  sooner by", *(f"{first['cold'] / value:.0f}x" for value in first.values())])
    app.out.table(["", *columns], rows)
    app.out.text()
    app.out.text(f"on disk {units.size(size)} for {saved['tokens']} saved tokens")
    app.out.text(
        "greedy text "
        + ("equals" if equal else "DIFFERS FROM")
        + " that of an uninterrupted engine that evaluates the same tokens in the same batches"
    )
    app.out.text(
        "plain cold run: the same text"
        if parting is None
        else f"plain cold run: parts at new token {parting + 1}, as two cold runs with other batch"
        " sizes may (the engine's own rounding)"
    )
    if not equal:
        raise KvsnapError("the resumed text is not the engine's own", "please report this")
