"""The remote of a command: its argument, and opening it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from kvsnap.formats.errors import UsageError

if TYPE_CHECKING:
    from kvsnap.kvstore.remotes.base import Remote

F = TypeVar("F", bound=Callable[..., Any])
REMOTE_HELP = """\b
REMOTE is a URL:
  file:///mnt/kv            a folder, also of a network file system
  s3://bucket/path          also gs:// and az://
  redis://host:6379/0       also rediss://
  https://host/path         for reading only
Keys and passwords come from where each of these has them (see docs/sharing.md).
"""
remote_argument = click.argument("remote", required=False, metavar="[REMOTE]")
remote_option = click.option("--remote", metavar="URL", help="Do it in this remote, not here.")


@contextlib.contextmanager
def opened(url: str | None) -> Iterator[Remote]:
    """The remote of that URL, or of KVSNAP_REMOTE where a command names none; closed at the end."""
    from kvsnap.kvstore.remotes import VARIABLE, check_url, default_url, open_remote

    source = "REMOTE" if url is not None else VARIABLE
    url = url if url is not None else default_url()
    if url is None:
        raise UsageError(
            "no remote was named", f"give its URL, like s3://bucket/kv, or set {VARIABLE}"
        )
    check_url(url, source)
    with contextlib.closing(open_remote(url)) as remote:
        yield remote


def is_url(word: str) -> bool:
    """Whether a word of the command line is a remote and no session; also one that is mistyped."""
    return "://" in word


def local_file(word: str) -> Path:
    """The path of an archive; a URL is refused, as a path it would lose one of its slashes."""
    if is_url(word):
        raise UsageError("a file belongs here, not a remote", "remotes are for push and pull")
    return Path(word)


def require_session(session: str, remote: str | None) -> None:
    """Refuse a command line whose only word is a URL: it names no session."""
    if remote is None and is_url(session):
        raise UsageError("a remote was named, and no session", "give both: SESSION REMOTE")
