"""Remotes by URL: the one table of kinds, and `open_remote`.

Kinds are imported when they are first asked for: obstore and redis belong to the extra `remote`.
Third parties add theirs through the entry point group `kvsnap.remotes`: scheme = "module:Class".
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Callable
from importlib.metadata import entry_points
from urllib.parse import SplitResult, urlsplit, urlunsplit

from kvsnap.formats.errors import Unsupported, UsageError
from kvsnap.kvstore.remotes.base import Options as Options
from kvsnap.kvstore.remotes.base import Remote

KINDS: dict[str, str] = {
    "file": "kvsnap.kvstore.remotes.folder:Folder",
    "s3": "kvsnap.kvstore.remotes.objects:S3",
    "gs": "kvsnap.kvstore.remotes.objects:Gcs",
    "az": "kvsnap.kvstore.remotes.objects:Azure",
    "http": "kvsnap.kvstore.remotes.http:Http",
    "https": "kvsnap.kvstore.remotes.http:Http",
    "redis": "kvsnap.kvstore.remotes.redis:Redis",
    "rediss": "kvsnap.kvstore.remotes.redis:Redis",
}
ENTRY_POINTS = "kvsnap.remotes"
VARIABLE = "KVSNAP_REMOTE"


def is_remote_url(text: str) -> bool:
    """Whether a word of the command line names a remote and not a session."""
    return re.match(r"[a-z][a-z0-9+.-]*://", text) is not None


def open_remote(url: str, options: Options | None = None) -> Remote:
    """The remote of a URL, with retries and limits around it. Nothing is sent before it is used.

    Raises `UsageError` for what is no URL of a remote, `Unsupported` for a scheme that is not known or
    whose package is missing.
    """
    from kvsnap.kvstore.remotes.limited import Limited
    from kvsnap.kvstore.remotes.retried import Retried

    options = options or Options()
    scheme = check_url(url)
    kind = KINDS.get(scheme) or _foreign(scheme)
    if kind is None:
        raise Unsupported(
            f"remotes of scheme {scheme!r} are not known", "known: " + ", ".join(sorted(KINDS))
        )
    module, _, name = kind.partition(":")
    try:
        found: Callable[[str, float], Remote] = getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        raise Unsupported(
            f"{scheme}:// needs the package {error.name}", "pip install 'kvsnap[remote]'"
        ) from error
    return Retried(Limited(found(url, options.timeout), options), options)


def check_url(url: str, source: str = "this") -> str:
    """The scheme of a remote's URL. `UsageError` for what is none, which is not shown: there may be a
    key in it. `source` says where it came from."""
    found = _parsed(url) if is_remote_url(url) else None
    if found is None:
        raise UsageError(
            f"{source} is not the URL of a remote",
            "for example file:///mnt/kv or s3://bucket/kv; in a user or password a slash is %2F, an"
            " @ is %40",
        )
    return found.scheme


def _parsed(url: str) -> SplitResult | None:
    """None for what cannot be told apart. A password with a slash ends the host's name, and its rest
    would count as a path, and be shown."""
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        return None
    return parts if parts.scheme == "file" or "@" not in parts.path else None


def redact(url: str) -> str:
    """A URL without what may be secret in it: user, password, query, fragment."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit((parts.scheme, host, parts.path, "", ""))


def default_url() -> str | None:
    """KVSNAP_REMOTE, or none."""
    return os.environ.get(VARIABLE) or None


def _foreign(scheme: str) -> str | None:
    found = [point.value for point in entry_points(group=ENTRY_POINTS, name=scheme)]
    return found[0] if found else None
