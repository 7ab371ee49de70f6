"""Progress bars: on a terminal, for work that takes a while, gone when it is done."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import TypeAlias

from kvsnap.cli import interrupt
from kvsnap.cli.output import Output

Step: TypeAlias = Callable[[str, int, int], None]


@contextlib.contextmanager
def bar(out: Output, title: str, unit: str) -> Iterator[Callable[[int, int], None]]:
    """Yields `update(done, total)`. Nothing is drawn, nor rich imported, where bars are unwanted."""
    if not out.progress:
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    amount = (
        DownloadColumn() if unit == "bytes" else TextColumn("{task.completed:.0f}/{task.total:.0f}")
    )
    last = () if unit == "bytes" else (TextColumn(unit),)
    columns = (TextColumn(title), BarColumn(), amount, *last, TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(title, total=1)
        yield lambda done, total: progress.update(task, completed=done, total=total)


@contextlib.contextmanager
def in_turn(out: Output, titles: Mapping[str, str], unit: str) -> Iterator[Step]:
    """Bars for several kinds of work, one after the other: yields `step(kind, done, total)`, which
    Ctrl-C ends. `titles`: kind → what stands before its bar; `unit` of all, or "" for the kind."""
    drawn: dict[str, Callable[[int, int], None]] = {}
    with contextlib.ExitStack() as stack:

        def step(kind: str, done: int, total: int) -> None:
            interrupt.check()
            if kind not in drawn:
                stack.close()
                drawn[kind] = stack.enter_context(bar(out, titles[kind], unit or kind))
            drawn[kind](done, total)
            if done >= total:
                stack.close()

        yield step


def when_it_starts(out: Output, title: str, unit: str) -> Callable[[int, int], None]:
    """A bar for work that may never come: drawn at the first update, gone after the last."""
    stack = contextlib.ExitStack()
    drawn: list[Callable[[int, int], None]] = []

    def update(done: int, total: int) -> None:
        if not drawn:
            out.say(f"{title}: {total} {unit}")
            drawn.append(stack.enter_context(bar(out, title, unit)))
        drawn[0](done, total)
        if done >= total:
            stack.close()
            drawn.clear()

    return update
