"""A web server's files as a remote that is only read: `https://host/path`, any static server.

Redirects are followed, at most ten, as mirrors and downloads in front of object stores need them: no
password goes along to another host, and https never leads to plain http. What comes back is checked
as from any remote. `user:password@` in the URL is sent as basic authentication and never shown.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from obstore.store import HTTPStore

from kvsnap.formats.errors import Unsupported, UsageError
from kvsnap.kvstore.remotes.base import Abilities, Buffer, Entry
from kvsnap.kvstore.remotes.obstore_remote import NO_RETRY, ObstoreRemote, digest

_HINT = "push to where the server takes its files from, or to another kind of remote"


class Http(ObstoreRemote):
    abilities = Abilities(write=False, list=False, replace_if=False)

    def __init__(self, url: str, timeout: float) -> None:
        parts = urlsplit(url)
        user, _, host = parts.netloc.rpartition("@")
        if not host or parts.query or parts.fragment:
            raise UsageError(
                "the URL of an HTTP remote has a host, a path and nothing else",
                "for example https://mirror.example/kv",
            )
        shown = f"{parts.scheme}://{host}{quote(unquote(parts.path), safe='/~')}".rstrip("/")

        def store(client: dict[str, Any]) -> HTTPStore:
            options: Any = {**client, "allow_http": parts.scheme == "http"}
            if user:
                options["default_headers"] = {"authorization": _basic(user)}
            return HTTPStore(shown, client_options=options, retry_config=NO_RETRY)

        super().__init__(shown, "give user:password@ before the host's name", timeout, store)

    def put(self, key: str, data: Buffer) -> None:
        raise self._read_only()

    def replace(self, key: str, data: Buffer, version: str | None) -> bool:
        raise self._read_only()

    def delete(self, key: str) -> None:
        raise self._read_only()

    def list(self, prefix: str) -> Iterator[Entry]:
        raise Unsupported(
            f"{self.url}: a web server does not list what it has",
            "name a session, or use the folder or bucket behind it",
        )

    def _version(self, meta: Any, data: bytes) -> str:
        """Tags of web servers follow length and seconds: two files of one second may share theirs."""
        return digest(data)

    def _read_only(self) -> Unsupported:
        return Unsupported(f"{self.url}: a web server is only read", _HINT)


def _basic(user: str) -> str:
    name, _, password = user.partition(":")
    pair = f"{unquote(name)}:{unquote(password)}".encode()
    return "Basic " + base64.b64encode(pair).decode("ascii")
