"""What a failure of obstore means, without what obstore says of it: that quotes addresses, which may
be signed or hold a password, and whatever the server wrote. All that passes is the status and, from
object stores, their word for what went wrong.

obstore tells little by type; the status and the kind of a broken connection stand in its text, which
is held against the real servers' answers by the tests.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from kvsnap.formats.errors import KvsnapError, RemoteDenied, RemoteDown, RemoteError
from kvsnap.kvstore.remotes.base import no_object

LISTING = "a listing"
_STATUS = re.compile(r"(?:status code: |\(code: )(\d{3})")  # the latter from Azure's batches
_CODE = re.compile(r"<Code>([A-Za-z]{1,40})</Code>")
_NO_BUCKET = ("NoSuchBucket", "ContainerNotFound")
_SLOW_DOWN = ("SlowDown", "RequestTimeout", "ServerBusy", "OperationTimedOut", "InternalError")
_OTHER_REGION = ("AuthorizationHeaderMalformed", "PermanentRedirect")
_METADATA = ("169.254.169.254", "169.254.170.2", "metadata.google.internal")
"""Where a cloud's machines get credentials when nothing else gives any."""


@dataclass(frozen=True)
class Explainer:
    """`url` is as a person may read it; `credentials` says how they are given; `timeout` in seconds."""

    url: str
    credentials: str
    timeout: float

    def explain(self, error: Exception, what: str, reads: bool) -> KvsnapError:
        """The error to raise for one of obstore about `what`, a key or a listing. Only who `reads`
        an object can learn that there is none."""
        text = str(error)
        status, word = status_of(text), next(iter(_CODE.findall(text)), "")
        said = f"{self.url}: {what}: the server said {status} {word}".rstrip()
        if any(host in text for host in _METADATA):
            return RemoteDenied(f"{self.url}: no credentials are found", self.credentials)
        if word in _NO_BUCKET or (status == 404 and what == LISTING):
            return RemoteError(said, "check the bucket's name and the endpoint")
        if status == 404 and reads:
            return no_object(what)
        if word in _OTHER_REGION:
            return RemoteError(said, "the bucket is in another region: set AWS_REGION")
        if word in _SLOW_DOWN or (
            status is not None and (status in (408, 425, 429) or status >= 500)
        ):
            return RemoteDown(said, "try again later")
        if status in (401, 403, 407):
            return RemoteDenied(said, self.credentials)
        if status is not None:
            return RemoteError(said, "check the URL and the endpoint")
        return self._no_answer(text, what)

    def _no_answer(self, text: str, what: str) -> KvsnapError:
        """The error for a request that got no answer, or a part of one."""
        where = f"{self.url}: {what}: "
        if "EmptySegment" in text or "BadSegment" in text:
            return RemoteError(
                where + "a name there has empty parts, '..' or control characters",
                "remove the object, or use a folder of the bucket that is kvsnap's alone",
            )
        if "redirect without LOCATION" in text or "TooManyRedirects" in text:
            return RemoteError(
                where + "redirected without end or aim",
                "check the URL; a bucket in another region needs AWS_REGION",
            )
        if re.search(r"InvalidCertificate|UnknownIssuer|HandshakeFailure", text):
            return RemoteError(
                f"{self.url}: its TLS certificate is not trusted",
                "check the host's name, or name its authority's certificate in SSL_CERT_FILE",
            )
        if "BadScheme" in text:
            return RemoteError(
                where + "https leads to plain http", "check the URL and the endpoint"
            )
        if re.search(r"dns error|failed to lookup", text):
            return RemoteDown(f"{self.url}: the host's name is not found", "check the URL")
        if re.search(r"kind: Timeout|TimedOut", text):
            return RemoteDown(
                f"{where}no whole answer within {self.timeout:g} s", "try again, or allow more time"
            )
        if re.search(r"HttpError \{|reqwest::|hyper::|hyper_util::", text):
            return RemoteDown(where + "no connection, or it broke", "check that the server runs")
        return RemoteError(
            where + "no answer as such servers give it",
            "check the URL, the endpoint and the settings",
        )


def status_of(text: str) -> int | None:
    """The HTTP status in the text of an obstore exception, where it has one."""
    found = _STATUS.search(text)
    return int(found[1]) if found else None
