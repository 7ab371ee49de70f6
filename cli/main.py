"""`kvsnap`: global options, the table of commands, and errors to exit codes, in one place each."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from importlib import import_module
from keyword import iskeyword
from typing import Any

import click

from kvsnap.cli import interrupt
from kvsnap.cli.foreign import MAX_LINE, printable, without_secrets
from kvsnap.cli.output import Output
from kvsnap.formats.errors import Damaged, KvsnapError, StoreFull, UsageError

COMMANDS = {
    "bench": "Measure this machine.",
    "calibrate": "Teach codec kvtc a model.",
    "demo": "The whole job on the bundled model, with its timings.",
    "doctor": "What is wrong with the store, the engines or another tool's folder.",
    "explain": "Why a prompt would hit or miss, token by token at the break.",
    "export": "Write a session into one file, or into another tool's.",
    "gc": "Evict the least recently used blocks, and clean up.",
    "import": "Take a session from a file that export or another tool wrote.",
    "keygen": "Make a new tenant key, or a signing key.",
    "ls": "List the sessions, here or in a remote.",
    "pin": "Keep a session or block from eviction.",
    "proxy": "A disk prefix cache in front of a llama-server.",
    "pull": "Take a session from a remote; only what is missing moves.",
    "push": "Bring a session to a remote; only what is missing moves.",
    "recompress": "Store a session's blocks by another codec.",
    "resume": "Restore a session (or a prompt's stored prefix) and continue it.",
    "rm": "Remove a session.",
    "save": "Restore what is stored of a prompt, compute the rest, store it.",
    "show": "Show one session or block in full.",
    "simulate": "Replay a workload or trace through the store's own eviction policy.",
    "stats": "Sizes, sharing, hits.",
    "trust": "Use only what trusted machines computed and signed.",
    "unpin": "Let go of what was pinned.",
    "verify": "Check the files of the store, of one session, or of a remote.",
}
"""Name → one line of help; cli/commands/NAME.py is imported when the command runs (import_.py for
`import`, which Python could not import by name)."""

INTERRUPTED = 130
_DAMAGED = "kvsnap verify lists what is damaged; saving the prompt again replaces it"
_HELP = "kvsnap --help says more"
"""Hints of errors that come without one: every error has two lines."""


class LazyGroup(click.Group):
    """Help for all commands without importing any: NAME is in cli/commands/PREFIX + NAME.py."""

    def __init__(self, *args: Any, table: dict[str, str], prefix: str = "", **more: Any) -> None:
        super().__init__(*args, **more)
        self.table, self.prefix = table, prefix

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(self.table)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.table:
            return None
        file = f"{cmd_name}_" if iskeyword(cmd_name) else cmd_name
        module = import_module(f"kvsnap.cli.commands.{self.prefix}{file}")
        command: click.Command = module.command
        own = {option.name for option in command.params}  # simulate has a --capacity of blocks
        if "json" not in own:
            command.params += [o for o in global_options(hidden=True) if o.name not in own]
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(sorted(self.table.items()))


def _set(ctx: click.Context, option: click.Parameter, value: object) -> None:
    """Global options are taken before and after the command's name alike."""
    if value:
        assert option.name is not None
        ctx.ensure_object(App).settings[option.name] = value
    elif value == "":
        raise UsageError(f"--{option.name} is empty", "give a value, or leave the option away")


def global_options(hidden: bool) -> list[click.Option]:
    """Fresh option objects, for the group (shown) and for each command (hidden)."""
    return [
        click.Option(
            ["--store"],
            metavar="PATH",
            envvar=None if hidden else "KVSNAP_STORE",
            help="Folder of the store (or KVSNAP_STORE). Default: the user's cache folder.",
            expose_value=False,
            callback=_set,
            hidden=hidden,
        ),
        click.Option(
            ["--capacity"],
            metavar="SIZE",
            help="What the store may take, like 20GB (or KVSNAP_CAPACITY). Default: 10 % of the"
            " disk, 1 to 50 GB.",
            expose_value=False,
            callback=_set,
            hidden=hidden,
        ),
        *(
            click.Option(
                names, is_flag=True, help=text, expose_value=False, callback=_set, hidden=hidden
            )
            for names, text in (
                (["--json"], "Data as JSON on stdout."),
                (["--quiet", "-q"], "No talk on stderr but warnings and errors."),
                (["--verbose", "-v"], "More detail on stderr."),
            )
        ),
    ]


class App:
    """What every command gets: the sink, and the store on demand."""

    def __init__(self) -> None:
        self.settings: dict[str, Any] = {}
        self.tenant: Any = None
        """Whose key was given."""
        self.encrypt = False
        """Whether the store is to become an encrypted one."""

    @property
    def out(self) -> Output:
        given = self.settings
        return Output(as_json="json" in given, quiet="quiet" in given, verbose="verbose" in given)

    @property
    def store_path(self) -> str | None:
        return self.settings.get("store")

    def store(self, *, min_free: str | None = None, read_through: bool = False) -> Any:
        """`read_through`: what is missing in it is looked for in KVSNAP_REMOTE, where that is set."""
        from kvsnap.cli.progress import when_it_starts
        from kvsnap.kvstore.store import Store

        remote = None
        if read_through:
            from kvsnap.kvstore.remotes import VARIABLE, check_url, default_url

            remote = default_url()
            if remote is not None:
                check_url(remote, VARIABLE)
        store = Store(
            self.store_path,
            capacity=self.settings.get("capacity"),
            min_free=min_free,
            remote=remote,
            encrypt=self.encrypt,
        )
        store.keys.add(self.tenant)
        if store.problem:
            self.out.warn(store.problem)
        store.progress = when_it_starts(self.out, "building the index anew", "files")
        return store


@click.group(
    cls=LazyGroup,
    table=COMMANDS,
    params=global_options(hidden=False),
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(package_name="kvsnap")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Keep filled KV-cache blocks on disk and resume conversations without prefill.

    The options below may also stand after the command. Exit codes: 0 done, 1 it did not work,
    2 usage, 3 partly done, 130 interrupted.
    """
    ctx.ensure_object(App)


def main(arguments: list[str] | None = None) -> None:
    """Run, and leave with the exit code of the contract; no traceback for what a person can mend."""
    interrupt.watch()
    # numpy's matrix products in kvtc: blocks are decoded on all cores already, and threads of BLAS
    # below each of them took two to three times the processor's time.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    try:
        code = cli.main(arguments, prog_name="kvsnap", standalone_mode=False) or 0
    except KvsnapError as error:
        code = _report(error)
    except click.exceptions.Abort:
        code = _interrupted()
    except KeyboardInterrupt:
        code = _interrupted()
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        code = error.exit_code
    except click.ClickException as error:
        ctx = getattr(error, "ctx", None)
        name = ctx.command_path if ctx is not None else "kvsnap"
        code = _report(UsageError(error.format_message().rstrip("."), f"{name} --help says more"))
    except BrokenPipeError:
        # The reader of stdout went away; point it elsewhere so that shutdown does not fail too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    except OSError as error:
        code = _report(_as_ours(error))
    except Exception as error:
        if {"-v", "--verbose"} & set(sys.argv if arguments is None else arguments):
            raise
        what = " ".join(f"{type(error).__name__}: {error}".split())
        code = _report(
            KvsnapError(f"unexpected: {what}", "--verbose shows where; please report it")
        )
    sys.exit(code)


def _report(error: KvsnapError) -> int:
    """`what` may quote what a remote says, and what stood on the command line."""
    click.echo(f"error: {printable(without_secrets(error.what), MAX_LINE)}", err=True)
    hint = error.hint or (_DAMAGED if isinstance(error, Damaged) else _HELP)
    click.echo(f"  {printable(hint, MAX_LINE)}", err=True)
    return error.exit_code


def _interrupted() -> int:
    click.echo("interrupted; what was stored before is kept", err=True)
    # Requests of a remote that does not answer: at its end Python would wait for their timeout.
    if sum(not thread.daemon for thread in threading.enumerate()) > 1:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        os._exit(INTERRUPTED)
    return INTERRUPTED


def _as_ours(error: OSError) -> KvsnapError:
    import errno

    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StoreFull(f"no space left ({error})", "free some space and run it again")
    return KvsnapError(str(error), "check the path and its mode")
