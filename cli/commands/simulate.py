"""`kvsnap simulate`: replay a workload through the store's own policy."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvsnap.cli import units
from kvsnap.cli.main import App
from kvsnap.cli.progress import bar
from kvsnap.formats.errors import UsageError

if TYPE_CHECKING:
    from kvsnap.kvstore.simulation.replay import Row
    from kvsnap.kvstore.simulation.request import Workload

NO_LIMIT = "unlimited"
MAX_REQUESTS = 1_000_000
EXAMPLES = """\b
Lines of a trace, all of one form (docs/simulate.md):
  {"hash_ids": [46, 47, 48], "input_length": 1300}   Mooncake: an id a block
  {"token_ids": [1, 504, 2365, 7]}                   plain: a prompt's tokens

\b
Examples:
  kvsnap simulate --policy leaf-lru,lru,fifo,opt --plot policies.png
  kvsnap simulate --trace requests.jsonl --capacity 1000,5000,unlimited
  kvsnap simulate --replicas 4
"""


@click.command("simulate", epilog=EXAMPLES)
@click.option(
    "--workload", type=click.Choice(["chat"]), help="Synthetic traffic. This is the default."
)
@click.option(
    "--trace",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Recorded traffic instead: a request a line, as JSON.",
)
@click.option(
    "--policy",
    metavar="P,P",
    default="leaf-lru",
    show_default=True,
    help="Who goes first: leaf-lru (the store's own), lru, fifo, opt (the offline optimum).",
)
@click.option(
    "--capacity",
    metavar="N,N",
    help=f"Blocks that each replica keeps, or {NO_LIMIT}. Default: a sweep, from a hundredth of the"
    " distinct blocks (all replicas together) to no limit.",
)
@click.option(
    "--replicas",
    metavar="N",
    type=click.IntRange(1, 1024),
    default=1,
    show_default=True,
    help="How many serve, each with its own blocks.",
)
@click.option(
    "--routing",
    metavar="R,R",
    help="Who serves a request: prefix, round-robin, least-loaded. Default: compare all.",
)
@click.option(
    "--requests",
    metavar="N",
    type=click.IntRange(1, MAX_REQUESTS),
    help="How many. Default: 2000 of a chat, all of a trace.",
)
@click.option(
    "--block-size",
    metavar="N",
    type=click.IntRange(1, 2**20),
    help="Tokens a block. Default: 64; 512 for hash_ids.",
)
@click.option("--seed", metavar="N", type=click.IntRange(min=0), help="chat: default 0.")
@click.option(
    "--system-prompts",
    metavar="N",
    type=click.IntRange(1, 10_000),
    help="chat: how many chats choose from. Default: 8.",
)
@click.option(
    "--turns", metavar="N", type=click.IntRange(1, 1000), help="chat: mean of a chat. Default: 3."
)
@click.option(
    "--plot",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Draw hit rate against capacity into a .png or .svg file.",
)
@click.pass_obj
def command(
    app: App,
    /,
    workload: str | None,
    trace: Path | None,
    policy: str,
    capacity: str | None,
    replicas: int,
    routing: str | None,
    plot: Path | None,
    requests: int | None,
    block_size: int | None,
    **chat: int | None,
) -> None:
    """Replay a workload through the store's own eviction policy, without payloads.

    Prints how much of the prompts is found, for each capacity: nothing is stored, and no engine
    runs. With several replicas each keeps its own blocks, and capacities are those of one.
    """
    from kvsnap.kvstore.pictures import check_plot
    from kvsnap.kvstore.simulation.plot import draw
    from kvsnap.kvstore.simulation.sweep import cases, default_capacities, sweep

    if "capacity" in app.settings:
        raise UsageError(
            "--capacity before the command is the store's, in bytes",
            "put it behind: kvsnap simulate --capacity N,N",
        )
    chosen = _capacities(capacity) if capacity is not None else None
    policies = _names("--policy", policy)
    routings = _names("--routing", routing) if routing is not None else []
    cases([], policies, replicas, routings)  # a wrong name is told before a long trace is read
    if plot is not None:
        check_plot(plot)
    made = _workload(workload, trace, requests=requests, block_size=block_size, **chat)
    if chosen is None:
        chosen = default_capacities(made, replicas)
    with bar(app.out, "simulate", "replays") as update:
        rows = sweep(made, cases(chosen, policies, replicas, routings), update)
    if app.out.as_json:
        app.out.json([dataclasses.asdict(row) for row in rows])
    app.out.text(_summary(rows[0], made))
    app.out.text()
    if replicas > 1:
        _side_by_side(app, rows)
    else:
        _table(app, rows)
    if plot is not None:
        draw(rows, plot)
        app.out.say(f"drawn: {plot}")


def _workload(kind: str | None, trace: Path | None, **settings: int | None) -> Workload:
    """The trace, or synthetic traffic with the settings that were given."""
    given = {name: value for name, value in settings.items() if value is not None}
    if trace is None:
        from kvsnap.kvstore.simulation.chat import ChatTraffic

        return ChatTraffic(**given).workload()
    if kind is not None:
        raise UsageError("both --workload and --trace were given", "give one of them")
    for name in given.keys() - {"requests", "block_size"}:
        option = f"--{name.replace('_', '-')}"
        raise UsageError(f"{option} is for synthetic chats, not for a trace", f"leave out {option}")
    from kvsnap.kvstore.simulation.trace import read_trace

    return read_trace(trace, given.get("block_size"), given.get("requests"))


def _names(option: str, text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise UsageError(f"{option} is empty", "name one, or several with commas between")
    return list(dict.fromkeys(names))


def _capacities(text: str) -> list[int | None]:
    """In ascending order, as curves are read; no limit is the last."""
    parts, numbers = _names("--capacity", text), set()
    for part in parts:
        if part == NO_LIMIT:
            continue
        if not (part.isascii() and part.isdecimal() and len(part) < 16 and int(part)):
            raise UsageError(
                f"--capacity: {part!r} is not a number of blocks",
                f"e.g. --capacity 1000,5000,{NO_LIMIT}",
            )
        numbers.add(int(part))
    return [*sorted(numbers), *([None] if NO_LIMIT in parts else [])]


def _summary(row: Row, workload: Workload) -> str:
    return (
        f"{row.workload}: {units.count(row.requests, 'request')}, {row.prompt_tokens} tokens;"
        f" {row.blocks_asked} blocks of {row.block_size} tokens asked for, {row.distinct_blocks}"
        " of them distinct"
    )


def _table(app: App, rows: Sequence[Row]) -> None:
    known = rows[0].shared_hit_rate is not None
    app.out.table(
        ["capacity", "policy", "blocks hit", "tokens reused", "evictions", "stranded"]
        + (["shared prefix hit"] if known else []),
        [
            [
                _capacity(row),
                row.policy,
                f"{row.block_hit_rate:.2%}",
                f"{row.token_reuse:.2%}",
                str(row.evictions),
                str(row.stranded_blocks),
            ]
            + ([f"{row.shared_hit_rate:.2%}"] if known else [])
            for row in rows
        ],
    )


def _side_by_side(app: App, rows: Sequence[Row]) -> None:
    """Block hit rates of the routings beside each other, and how uneven each one's load was."""
    routings = list(dict.fromkeys(row.routing or "" for row in rows))
    lines: dict[tuple[int | None, str], list[Row]] = {}
    for row in rows:
        lines.setdefault((row.capacity_blocks, row.policy), []).append(row)
    app.out.table(
        ["capacity", "policy", *routings, *(f"load {name}" for name in routings)],
        [
            [_capacity(line[0]), line[0].policy]
            + [f"{row.block_hit_rate:.2%}" for row in line]
            + [f"{row.load_imbalance:.2f}" for row in line]
            for line in lines.values()
        ],
    )
    app.out.text()
    app.out.text(
        f"blocks hit, by routing; capacity of each of {rows[0].replicas} replicas; load: tokens of"
        " the busiest replica, divided by the mean"
    )


def _capacity(row: Row) -> str:
    return NO_LIMIT if row.capacity_blocks is None else f"{row.capacity_blocks:{len(NO_LIMIT)}}"
