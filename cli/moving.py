"""Push and pull as a command shows them: the plan, a bar of bytes, what moved."""

from __future__ import annotations

import dataclasses
import functools
import shlex
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

from kvsnap.cli import units
from kvsnap.cli.foreign import printable
from kvsnap.cli.main import App
from kvsnap.cli.output import Output
from kvsnap.cli.progress import in_turn
from kvsnap.formats.errors import PartlyDone

if TYPE_CHECKING:
    from kvsnap.kvstore.remotes.base import Remote
    from kvsnap.kvstore.sharing.pull import PullReport
    from kvsnap.kvstore.sharing.pull_plan import PullPlan
    from kvsnap.kvstore.sharing.push import PushReport
    from kvsnap.kvstore.sharing.push_plan import PushPlan

_Report = TypeVar("_Report", "PushReport", "PullReport")


@dataclasses.dataclass(frozen=True)
class Moved:
    """A report, what was left undone, and what a person may do next."""

    report: PushReport | PullReport
    partly: PartlyDone | None
    next: str = ""


def push_session(
    app: App,
    remote: Remote,
    session: str,
    tenant: Any,
    *,
    force: bool,
    sign: bool,
    encrypt: bool,
    dry_run: bool = False,
) -> Moved:
    """Raises what push does, but `PartlyDone`."""
    from kvsnap.formats.tenant import tenant_id
    from kvsnap.kvstore.sharing.push import push

    with app.store() as store, in_turn(app.out, {"push": "push"}, "bytes") as step:
        move = functools.partial(
            push,
            store,
            remote,
            tenant_id(tenant),
            session,
            force=force,
            dry_run=dry_run,
            sign=sign,
            encrypt=encrypt,
            show=functools.partial(_show_plan, app.out, f"to {remote.url}"),
            progress=functools.partial(step, "push"),
        )
        return Moved(*_done(move))


def pull_session(
    app: App,
    remote: Remote,
    session: str,
    tenant: Any,
    *,
    new_name: str | None,
    force: bool,
    dry_run: bool,
) -> Moved:
    """The same for pull."""
    from kvsnap.kvstore.sharing.pull import pull

    models = list[str]()

    def show(plan: PullPlan) -> None:
        models[:] = [plan.manifest.model]
        _show_plan(app.out, f"from {remote.url}", plan)

    with app.store() as store, in_turn(app.out, {"pull": "pull"}, "bytes") as step:
        move = functools.partial(
            pull,
            store,
            remote,
            session,
            tenant=tenant,
            new_name=new_name,
            force=force,
            dry_run=dry_run,
            show=show,
            progress=functools.partial(step, "pull"),
        )
        report, partly = _done(move)
    return Moved(report, partly, _how_to_resume(report.session, models[0], tenant is not None))


def tell(out: Output, moved: Moved, verb: str, done: str, where: str) -> None:
    """Print the report, as in "push", "pushed", "to"; then raise what was left undone."""
    report = moved.report
    what = (
        f"{report.session!r} {where} {report.remote}: {report.moved_files} of"
        f" {units.count(report.files, 'file')}, {units.size(report.moved_bytes)}"
    )
    if out.as_json:
        out.json(dataclasses.asdict(report))
    elif report.dry_run:
        out.text(f"would {verb} {what}")
    else:
        out.text(f"{done} {what}")
        out.say(f"{done} in {units.seconds(report.seconds)}")
    if moved.next and not report.dry_run:
        out.say(moved.next)
    if moved.partly is not None:
        raise moved.partly


def _done(move: Callable[[], _Report]) -> tuple[_Report, PartlyDone | None]:
    try:
        return move(), None
    except PartlyDone as error:
        if error.report is None:
            raise
        return cast("_Report", error.report), error


def _show_plan(out: Output, where: str, plan: PushPlan | PullPlan) -> None:
    count = units.count(plan.files, "file")
    out.say(
        f"{plan.manifest.name!r} {where}: {len(plan.missing)} of {count} to move,"
        f" {units.size(plan.bytes)}"
    )


def _how_to_resume(session: str, model: str, tenant: bool) -> str:
    key = " --tenant-key-file F" if tenant else ""
    told = f" (it was saved with {printable(model)})" if model else ""
    return f"go on with: kvsnap resume {shlex.quote(session)} --model M{key}{told}"
