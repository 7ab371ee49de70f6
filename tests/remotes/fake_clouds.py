"""Just enough of Google's and Azure's object stores to run the remotes' suite against: no signature
is checked, all is kept in memory. They answer what the stores' documentation says, for the requests
that obstore sends.
"""

from __future__ import annotations

import re
import socket
import threading
from datetime import UTC, datetime
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from tests.remotes.answers import Request, reply

PAGE = 100
"""Names in one answer to a listing."""


class Cloud:
    """Objects with a number that goes up with every write. Subclasses speak a dialect."""

    def __init__(self) -> None:
        self._objects: dict[str, tuple[bytes, int]] = {}
        self._number, self._lock = 1000, threading.Lock()

    def __call__(self, request: Request, connection: socket.socket) -> None:
        parts = urlsplit(request.target)
        _, _, name = unquote(parts.path).lstrip("/").partition("/")
        query = {key: values[0] for key, values in parse_qs(parts.query).items()}
        with self._lock:
            if query.get("comp") == "batch":
                self._delete_batch(request, connection)
            elif not name:
                reply(connection, 200, self._page(query).encode())
            elif request.method == "PUT":
                self._put(name, request, connection)
            elif name not in self._objects:
                reply(connection, 404, self._missing() if request.method == "GET" else b"")
            elif request.method == "DELETE":
                del self._objects[name]
                reply(connection, 202)
            else:
                self._get(name, request, connection)

    def _put(self, name: str, request: Request, connection: socket.socket) -> None:
        status = self._refused(self._objects.get(name), request.headers)
        if status:
            reply(connection, status)
            return
        self._number += 1
        self._objects[name] = (request.body, self._number)
        reply(connection, 201, **self._tags(self._number))

    def _get(self, name: str, request: Request, connection: socket.socket) -> None:
        data, number = self._objects[name]
        asked = request.headers.get("range", request.headers.get("x-ms-range", ""))
        tags = self._tags(number)
        if request.method == "HEAD":
            reply(connection, 200, length=len(data), **tags)
        elif not asked:
            reply(connection, 200, data, **tags)
        elif not data:
            reply(connection, 416)
        else:
            last = min(int(asked.rpartition("-")[2]), len(data) - 1)
            reply(
                connection,
                206,
                data[: last + 1],
                **tags,
                Content_Range=f"bytes 0-{last}/{len(data)}",
            )

    def _delete_batch(self, request: Request, connection: socket.socket) -> None:
        """Azure's way of deleting: requests in the parts of one, answers in the parts of one."""
        parts = []
        for number, target in enumerate(re.findall(rb"^DELETE (\S+) ", request.body, re.MULTILINE)):
            name = unquote(target.decode()).lstrip("/").partition("/")[2]
            status = 202 if self._objects.pop(name, None) else 404
            code = "" if status == 202 else "x-ms-error-code: BlobNotFound\r\n"
            parts.append(
                "--answers\r\nContent-Type: application/http\r\n"
                f"Content-ID: {number}\r\n\r\nHTTP/1.1 {status} Said\r\n{code}\r\n\r\n"
            )
        body = "".join(parts) + "--answers--\r\n"
        reply(connection, 202, body.encode(), Content_Type="multipart/mixed; boundary=answers")

    def _found(self, query: dict[str, str], after: str) -> tuple[list[tuple[str, int, int]], bool]:
        names = sorted(
            n for n in self._objects if n.startswith(query.get("prefix", "")) and n > after
        )
        page = [
            (name, len(self._objects[name][0]), self._objects[name][1]) for name in names[:PAGE]
        ]
        return page, len(names) > PAGE

    def _tags(self, number: int) -> dict[str, str]:
        raise NotImplementedError

    def _refused(self, found: tuple[bytes, int] | None, headers: dict[str, str]) -> int:
        """The status for a write whose condition does not hold; 0 where it holds."""
        raise NotImplementedError

    def _page(self, query: dict[str, str]) -> str:
        raise NotImplementedError

    def _missing(self) -> bytes:
        raise NotImplementedError


class FakeGcs(Cloud):
    """The XML interface of Google Cloud Storage. Tags follow the content only, generations count."""

    def _tags(self, number: int) -> dict[str, str]:
        return {"ETag": '"same"', "x-goog-generation": str(number)}

    def _refused(self, found: tuple[bytes, int] | None, headers: dict[str, str]) -> int:
        wanted = headers.get("x-goog-if-generation-match")
        return 0 if wanted is None or int(wanted) == (found[1] if found else 0) else 412

    def _page(self, query: dict[str, str]) -> str:
        page, more = self._found(query, query.get("continuation-token", ""))
        now = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
        rows = "".join(
            f"<Contents><Key>{escape(name)}</Key><Generation>{number}</Generation><Size>{size}</Size>"
            f"<LastModified>{now}</LastModified><ETag>same</ETag></Contents>"
            for name, size, number in page
        )
        token = (
            f"<NextContinuationToken>{escape(page[-1][0])}</NextContinuationToken>" if more else ""
        )
        return f"<ListBucketResult><Prefix/>{token}{rows}</ListBucketResult>"

    def _missing(self) -> bytes:
        return b"<Error><Code>NoSuchKey</Code></Error>"


class FakeAzure(Cloud):
    """Blob storage. A create that comes too late is a 409, an update a 412."""

    def _tags(self, number: int) -> dict[str, str]:
        return {"ETag": f'"0x{number:X}"'}

    def _refused(self, found: tuple[bytes, int] | None, headers: dict[str, str]) -> int:
        if headers.get("if-none-match") == "*" and found:
            return 409
        wanted = headers.get("if-match")
        return 412 if wanted and (not found or wanted != self._tags(found[1])["ETag"]) else 0

    def _page(self, query: dict[str, str]) -> str:
        page, more = self._found(query, query.get("marker", ""))
        now = datetime.now(UTC).strftime("%a, %d %b %Y %H:%M:%S GMT")
        rows = "".join(
            f"<Blob><Name>{escape(name)}</Name><Properties><Last-Modified>{now}</Last-Modified>"
            f"<Etag>0x{number:X}</Etag><Content-Length>{size}</Content-Length>"
            "<Content-Type>application/octet-stream</Content-Type></Properties></Blob>"
            for name, size, number in page
        )
        marker = f"<NextMarker>{escape(page[-1][0])}</NextMarker>" if more else "<NextMarker/>"
        return f"<EnumerationResults><Blobs>{rows}</Blobs>{marker}</EnumerationResults>"

    def _missing(self) -> bytes:
        return b"<Error><Code>BlobNotFound</Code></Error>"
