"""What the remotes that obstore speaks to have in common: object stores and plain HTTP servers.

obstore's calls let other threads run. Its own retries are off: those of `Retried` count for every
kind of remote. The timeout holds for each request, from connecting to the last byte; a listing is a
request a page. Proxies are those of HTTPS_PROXY and its like; certificates are checked against the
system's, or those of SSL_CERT_FILE.

`replace` is a conditional write (`If-None-Match`, `If-Match`, Google's generations). Where a store
answers that it has none, the version is read just before the write; one that ignores the condition
without a word cannot be told from one that keeps it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

import obstore
from blake3 import blake3
from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError

from kvsnap.formats.errors import Damaged, NotFound, RemoteDenied, UsageError
from kvsnap.kvstore.remotes.base import (
    Buffer,
    Entry,
    Object,
    Remote,
    check_key,
    check_prefix,
    is_key,
    too_long,
)
from kvsnap.kvstore.remotes.obstore_failure import LISTING, Explainer, status_of

NO_RETRY: Any = {"max_retries": 0, "retry_timeout": timedelta(0)}
CONNECT = 5.0
"""Seconds for a connection, at most: a host that drops packets is found out early."""
_PAGE = 1000
_BY_DIGEST = "blake3:"
_NO_RANGES = ("RangeNotSupported", "NotPartial")
_NO_CONDITIONS = 501
"""What servers say that know of conditions and do not have them."""

Result = TypeVar("Result")


class ObstoreRemote(Remote):
    """A subclass gives its URL as a person may read it, how its credentials are given, and the
    obstore store for the client options that are handed to it."""

    def __init__(
        self, shown: str, credentials: str, timeout: float, store: Callable[[dict[str, Any]], Any]
    ) -> None:
        self.url = shown
        self._explainer = Explainer(shown, credentials, timeout)
        client = {
            "timeout": timedelta(seconds=timeout),
            "connect_timeout": timedelta(seconds=min(timeout, CONNECT)),
        }
        try:
            self._store, failed = store(client), False
        except (BaseError, OSError, ValueError):
            failed = True
        if failed:  # raised out here: what obstore says may quote a key file
            raise RemoteDenied(f"{shown}: its settings or credentials cannot be read", credentials)

    def get(self, key: str, limit: int) -> Object:
        check_key(key)
        return self._run(key, lambda: self._get(key, limit))

    def get_start(self, key: str, count: int) -> bytes:
        check_key(key)
        return self._run(key, lambda: self._get_start(key, count))[:count]

    def size(self, key: str) -> int | None:
        check_key(key)
        try:
            return int(self._run(key, lambda: obstore.head(self._store, key)["size"]))
        except NotFound:
            return None

    def put(self, key: str, data: Buffer) -> None:
        check_key(key)
        self._run(key, lambda: self._put(key, data, "overwrite"), reads=False)

    def replace(self, key: str, data: Buffer, version: str | None) -> bool:
        check_key(key)
        if version is not None and version.startswith(_BY_DIGEST):
            return super().replace(key, data, version)
        mode = "create" if version is None else _condition(version)
        stored = self._run(key, lambda: self._put(key, data, mode), reads=False)
        if stored is None:
            self.abilities = replace(self.abilities, replace_if=False)
            return super().replace(key, data, version)
        return stored

    def list(self, prefix: str) -> Iterator[Entry]:
        where = check_prefix(prefix)
        pages = obstore.list(self._store, where or None, chunk_size=_PAGE)
        while page := self._run(LISTING, lambda: next(pages, None), reads=False):
            for found in page:
                key = found["path"]
                if is_key(key) and key.startswith(where):
                    yield Entry(key, found["size"], found["last_modified"].timestamp())

    def delete(self, key: str) -> None:
        check_key(key)
        try:
            self._run(key, lambda: obstore.delete(self._store, key))
        except NotFound:
            return

    def _get(self, key: str, limit: int) -> Object:
        result = obstore.get(self._store, key)
        data = _read(key, result, result.meta["size"], limit)
        return Object(data, self._version(result.meta, data))

    def _version(self, meta: Any, data: bytes) -> str:
        """Entity tag and generation, as the store gives them; a digest where it gives none."""
        tag, generation = meta["e_tag"] or "", meta["version"] or ""
        return f"{tag} {generation}" if tag else digest(data)

    def _get_start(self, key: str, count: int) -> bytes:
        count = max(count, 1)
        try:
            result = obstore.get(self._store, key, options={"range": (0, count)})
        except BaseError as error:
            text = str(error)
            if status_of(text) == 416:  # an empty object has no first byte
                return b""
            if not any(kind in text for kind in _NO_RANGES):
                raise
            result = obstore.get(self._store, key)
        first = b""
        for part in result.stream(min_chunk_size=count):
            first += bytes(part)
            if len(first) >= count:
                break
        return first

    def _put(self, key: str, data: Buffer, mode: Any) -> bool | None:
        """Whether it was stored; None where the store has no conditions.

        In one request, which is all or nothing: parts of a broken upload would stay behind, and cost.
        """
        view = memoryview(data).cast("B")
        try:
            obstore.put(self._store, key, view, mode=mode, use_multipart=False)
        except (AlreadyExistsError, PreconditionError):
            return False
        except NotImplementedError:
            return None
        except BaseError as error:
            if mode == "overwrite" or status_of(str(error)) != _NO_CONDITIONS:
                raise
            return None
        return True

    def _run(self, what: str, work: Callable[[], Result], reads: bool = True) -> Result:
        """What `work` returns. What it raises is replaced, not chained: it may hold secrets."""
        try:
            return work()
        except (BaseError, OSError, ValueError, NotImplementedError) as error:
            failure = self._explainer.explain(error, what, reads)
        raise failure


def place(url: str, example: str) -> tuple[str, str | None, str]:
    """(bucket, prefix or None, the URL to show) of `scheme://bucket/prefix`."""
    parts = urlsplit(url)
    path = unquote(parts.path).strip("/")
    named = re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}", parts.netloc)
    if named is None or parts.query or parts.fragment or not _is_prefix(path):
        raise UsageError(
            f"a URL of {parts.scheme}:// has a bucket, a path of plain names and nothing else",
            f"for example {example}; credentials are given apart from it",
        )
    return parts.netloc, path or None, f"{parts.scheme}://{parts.netloc}/{path}".rstrip("/")


def digest(data: bytes) -> str:
    """The version of an object by what is in it."""
    return _BY_DIGEST + blake3(data).hexdigest()


def is_http(environment: Mapping[str, str], *names: str) -> bool:
    """Whether the first of these variables that is set names an endpoint without TLS."""
    given = next((environment[name] for name in names if environment.get(name)), "")
    return given.lower().startswith("http://")


def _is_prefix(path: str) -> bool:
    parts = path.split("/") if path else []
    return path.isprintable() and not any(part in ("", ".", "..") for part in parts)


def _read(key: str, result: Any, announced: int, limit: int) -> bytes:
    """The body, in one piece where it is as long as announced. What comes beyond that, obstore hands
    over apart: it is not collected."""
    if announced > limit:
        raise too_long(key, limit)
    parts, count = list[bytes](), 0
    for part in result.stream(min_chunk_size=max(announced, 1)):
        count += len(part)
        if count > limit:
            raise too_long(key, limit)
        parts.append(bytes(part))
    if count != announced:
        raise Damaged(f"{key}: {announced} bytes were announced, and {count} came")
    return b"".join(parts)


def _condition(version: str) -> dict[str, str]:
    tag, _, generation = version.rpartition(" ")
    return {"e_tag": tag} | ({"version": generation} if generation else {})
