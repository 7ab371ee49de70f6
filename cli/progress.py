"""Progress bars: on a terminal, for work that takes a while, gone when it is done."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from kvsnap.cli.output import Output


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
    columns = (TextColumn(title), BarColumn(), amount, TextColumn(unit), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(title, total=1)
        yield lambda done, total: progress.update(task, completed=done, total=total)
