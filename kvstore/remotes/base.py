"""What a remote is: a place elsewhere that keeps whole objects under text keys. A new kind is one
file that keeps this contract, a row in the table of `__init__.py`, and its run of
`kvsnap.testing.remote_suite`.

Keys are the store's own relative paths (`blocks/ab/ab12….safetensors`): lower-case ASCII, see
`check_key`. Objects are whole: a reader sees all of one or none, also where its writer was killed.
Nothing is interpreted here, and nothing that comes back is believed: callers check digests and
records. Many threads may use one remote at once.

Each operation ends within the remote's timeout and raises only
  NotFound        there is no such object: a verdict, which a failure never is
  RemoteDown      no connection, no answer in time, 5xx: may pass, says nothing about the object
  RemoteDenied    credentials
  RemoteError     anything else that the remote said no to
  Damaged         an object that is longer than the caller's limit, or was cut on its way
  Unsupported     an operation that this kind does not have (see `Abilities`)
and no message holds a secret. What cuts across (retry, a limit on concurrency, dry-run, counting) is
a wrapper with this interface: retried.py, limited.py, …
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

from kvsnap.formats.errors import Damaged, NotFound

Buffer = bytes | bytearray | memoryview

_KEY = re.compile(r"[a-z0-9_.%~-]+(/[a-z0-9_.%~-]+){0,4}")
MAX_KEY = 512


@dataclass(frozen=True)
class Abilities:
    """What a kind of remote has, as data. Asking for what it lacks raises `Unsupported`."""

    write: bool = True
    list: bool = True
    """Without it `ls`, `gc` and `verify` of the whole remote are refused; `pull` needs none."""
    replace_if: bool = True
    """`replace` compares and writes in one step. Without it the version is read just before the
    write, and two writers within that moment are not told apart."""
    in_turn: bool = False
    """Objects stand in the order of their being put, as in a file: equal content gives equal bytes
    only if one is put after the other."""


@dataclass(frozen=True)
class Options:
    """`timeout`: seconds that one operation may take, tries not counted. `tries`: how often one is
    begun before its failure counts. `at_once`: operations under way at one time."""

    timeout: float = 30.0
    tries: int = 3
    at_once: int = 16


@dataclass(frozen=True)
class Entry:
    """One object of a listing. `changed` is in unix seconds, by the remote's clock."""

    key: str
    size: int
    changed: float


@dataclass(frozen=True)
class Object:
    """A whole object. `version` tells it from any other that stood or will stand under its key."""

    data: bytes
    version: str


class Remote(ABC):
    """`url` is as a person may read it: no password, no token, no signature."""

    url: str
    abilities: Abilities = Abilities()

    @abstractmethod
    def get(self, key: str, limit: int) -> Object:
        """The object, read whole. `Damaged` as soon as more than `limit` bytes come or are
        announced, with no more than that in memory. Where fewer come than were announced, `Damaged`,
        or `RemoteDown` where the connection broke."""

    def get_start(self, key: str, count: int) -> bytes:
        """The first `count` bytes, or all where it has fewer. Slow unless overridden."""
        return self.get(key, 2**31).data[:count]

    @abstractmethod
    def size(self, key: str) -> int | None:
        """Length in bytes; None where there is no such object."""

    @abstractmethod
    def put(self, key: str, data: Buffer) -> None:
        """Store a whole object over whatever stands there. `data` is not held after the return."""

    def replace(self, key: str, data: Buffer, version: str | None) -> bool:
        """The same where the object is still the one of `version` (None: where there is none);
        False, and nothing stored, where it is not."""
        try:
            found: str | None = self.get(key, 2**31).version
        except NotFound:
            found = None
        if found != version:
            return False
        self.put(key, data)
        return True

    @abstractmethod
    def list(self, prefix: str) -> Iterator[Entry]:
        """Objects whose key starts with `prefix` (a folder, with its `/`; empty: all), in any order.
        What cannot be a key of ours is left out. A large listing is not held in memory."""

    @abstractmethod
    def delete(self, key: str) -> None:
        """Remove an object; fine where there is none."""

    def close(self) -> None:  # noqa: B027 - most have nothing to let go
        """Let connections go. Using the remote afterwards is undefined."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def is_key(key: str) -> bool:
    """Whether it can be a key of ours: no way up, no absolute path, no empty part, nothing that a
    file system or a URL reads in its own way."""
    return (
        len(key) <= MAX_KEY
        and _KEY.fullmatch(key) is not None
        and not any(part in (".", "..") for part in key.split("/"))
    )


def check_key(key: str) -> str:
    """The key; `Damaged` where it is none. Keys may come from a manifest that somebody else wrote."""
    if not is_key(key):
        raise Damaged(f"not a key of a remote: {key[:80]!r}")
    return key


def check_prefix(prefix: str) -> str:
    """The prefix of a listing: empty, or a folder with its `/`; `Damaged` where it is neither."""
    if prefix and not (prefix.endswith("/") and is_key(prefix + "x")):
        raise Damaged(f"not a folder of a remote: {prefix[:80]!r}")
    return prefix


def no_object(key: str) -> NotFound:
    return NotFound(f"the remote has no {key}")


def too_long(key: str, limit: int) -> Damaged:
    return Damaged(f"{key} has more than the {limit} bytes that it can need")
