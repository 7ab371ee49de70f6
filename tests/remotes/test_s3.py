"""S3 against a real server, its credentials, and listings that no honest server sends."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Callable
from pathlib import Path
from xml.sax.saxutils import escape

import pytest

from kvsnap.formats.errors import KvsnapError, RemoteDenied, RemoteError
from kvsnap.kvstore.remotes.aws_files import from_profile
from kvsnap.kvstore.remotes.base import Remote
from kvsnap.kvstore.remotes.objects import S3
from kvsnap.testing.remote_suite import RemoteSuite
from tests.remotes.answers import Request, answering, reply
from tests.remotes.servers import S3Server

KEY = "blocks/ab/x"
_places = itertools.count()


@pytest.fixture
def server(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    for name, value in s3_server.environment().items():
        monkeypatch.setenv(name, value)
    return s3_server


class TestSeaweed(RemoteSuite):
    races = 1  # SeaweedFS lets each loser wait for up to three seconds

    @pytest.fixture(autouse=True)
    def place(self, server: S3Server) -> None:
        self.url = f"s3://{server.bucket}/suite/{next(_places)}"
        self.secrets = (server.secret_key, server.access_key)

    def make(self) -> Remote:
        return S3(self.url, timeout=20)


def operations(remote: Remote) -> list[Callable[[], object]]:
    return [
        lambda: remote.get(KEY, 100),
        lambda: remote.get_start(KEY, 10),
        lambda: remote.size(KEY),
        lambda: remote.put(KEY, b"new"),
        lambda: remote.replace(KEY, b"new", None),
        lambda: list(remote.list("")),
        lambda: remote.delete(KEY),
    ]


def test_prefixes_keep_objects_apart(server: S3Server) -> None:
    first, second = (S3(f"s3://{server.bucket}/apart/{name}", 20) for name in ("one", "one2"))
    first.put(KEY, b"x")
    assert second.size(KEY) is None
    assert list(second.list("")) == []
    whole = S3(f"s3://{server.bucket}", 20)
    assert whole.get(f"apart/one/{KEY}", 10).data == b"x"
    assert [entry.key for entry in whole.list("apart/")] == [f"apart/one/{KEY}"]


@pytest.mark.parametrize("name", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"])
def test_wrong_credentials_are_denied_and_not_repeated(
    server: S3Server, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "CANARYCANARY")
    for operation in operations(S3(f"s3://{server.bucket}/x", 20)):
        with pytest.raises(RemoteDenied) as raised:
            operation()
        assert "AWS_ACCESS_KEY_ID" in raised.value.hint
        shown = f"{raised.value} {raised.value.__context__} {raised.value.__cause__}"
        assert "CANARY" not in shown
        assert server.access_key not in shown


def test_a_bucket_that_is_not_there_is_no_missing_object(server: S3Server) -> None:
    remote = S3("s3://no-such-bucket/x", 20)
    for operation in (lambda: remote.get(KEY, 10), lambda: list(remote.list(""))):
        with pytest.raises(RemoteError, match=r"NoSuchBucket|404") as raised:
            operation()
        assert "bucket" in raised.value.hint


def test_a_store_without_conditions_is_asked_for_the_version_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept: dict[str, bytes] = {}

    def answer(request: Request, connection: socket.socket) -> None:
        if "if-match" in request.headers or "if-none-match" in request.headers:
            reply(connection, 501, b"<Error><Code>NotImplemented</Code></Error>")
        elif request.method == "PUT":
            kept[request.target] = request.body
            reply(connection, 200, ETag='"tag"')
        elif request.target in kept:
            tag = str(len(kept[request.target]))
            reply(connection, 200, kept[request.target], ETag=f'"{tag}"')
        else:
            reply(connection, 404)

    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    with answering(answer) as store:
        monkeypatch.setenv("AWS_ENDPOINT_URL", store.url)
        remote = S3("s3://bucket/x", 5)
        assert remote.abilities.replace_if
        assert remote.replace(KEY, b"1", None)
        assert not remote.abilities.replace_if
        assert not remote.replace(KEY, b"22", None)
        version = remote.get(KEY, 10).version
        assert remote.replace(KEY, b"22", version)
        assert not remote.replace(KEY, b"333", version)
        assert remote.get(KEY, 10).data == b"22"


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["ABC", "blocks/ä", "k" * 5000, "blocks/" + "a/" * 6 + "b"], ["blocks/x"]),
        (["a%2e%2e%2fb"], ["a%2e%2e%2fb", "blocks/x"]),
        (["../x"], None),
        (["blocks//x"], None),
        (["blocks/./x"], None),
        (["blocks/a\tb"], None),
    ],
)
def test_names_that_are_no_keys_do_not_come_through(
    monkeypatch: pytest.MonkeyPatch, names: list[str], found: list[str] | None
) -> None:
    """Left out, or, where obstore cannot take them, refused in a line that says what to remove."""
    rows = "".join(
        f"<Contents><Key>{escape('prefix/' + name)}</Key><Size>1</Size>"
        "<LastModified>2015-10-21T07:28:00.000Z</LastModified></Contents>"
        for name in [*names, "blocks/x"]
    )
    body = f"<ListBucketResult><IsTruncated>false</IsTruncated>{rows}</ListBucketResult>".encode()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    with answering(lambda _, connection: reply(connection, 200, body)) as store:
        monkeypatch.setenv("AWS_ENDPOINT_URL", store.url)
        listing = S3("s3://bucket/prefix", 5).list("")
        if found is not None:
            assert [entry.key for entry in listing] == found
            return
        with pytest.raises(RemoteError, match="a name there") as raised:
            list(listing)
    assert "remove the object" in raised.value.hint


@pytest.mark.parametrize(
    "body", [b"", b"<a><b", b"<ListBucketResult>" + b"<a>" * 10_000, b"\0" * 99]
)
def test_listings_that_are_none_are_refused(monkeypatch: pytest.MonkeyPatch, body: bytes) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    with answering(lambda _, connection: reply(connection, 200, body)) as store:
        monkeypatch.setenv("AWS_ENDPOINT_URL", store.url)
        with pytest.raises(RemoteError):
            list(S3("s3://bucket/prefix", 5).list(""))


def test_keys_of_a_profile_are_used(
    server: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in server.environment():
        monkeypatch.delenv(name)
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws/credentials").write_text(
        f"[default]\naws_access_key_id = x\naws_secret_access_key = y\n\n[team]\n"
        f"aws_access_key_id = {server.access_key}\naws_secret_access_key = {server.secret_key}\n"
    )
    (tmp_path / ".aws/config").write_text(
        f"[profile team]\nregion = us-east-1\nendpoint_url = {server.url}\n[default]\n"
        f"endpoint_url = {server.url}\n"
    )
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(RemoteDenied):
        S3(f"s3://{server.bucket}/profile", 20).put(KEY, b"x")
    monkeypatch.setenv("AWS_PROFILE", "team")
    remote = S3(f"s3://{server.bucket}/profile", 20)
    remote.put(KEY, b"x")
    assert remote.get(KEY, 10).data == b"x"


def test_the_environment_goes_before_a_profile(tmp_path: Path) -> None:
    path = tmp_path / "credentials"
    path.write_text(
        "[default]\naws_access_key_id=a%b\naws_secret_access_key=c\naws_session_token=d\n"
    )
    given = {"HOME": str(tmp_path), "AWS_SHARED_CREDENTIALS_FILE": str(path)}
    keys = {"access_key_id": "a%b", "secret_access_key": "c", "session_token": "d"}
    assert from_profile(given) == keys
    assert from_profile(given | {"AWS_ACCESS_KEY_ID": "x"}) == {}
    assert from_profile(given | {"AWS_WEB_IDENTITY_TOKEN_FILE": "x"}) == {}
    assert from_profile(given | {"AWS_PROFILE": "other"}) == {}
    for damaged in (b"no section", b"[default\n\xff\xfe", b"[default]\n[default]\n"):
        path.write_bytes(damaged)
        assert from_profile(given) == {}


def test_nothing_is_sent_in_the_clear_unless_the_endpoint_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    with answering(lambda _, connection: reply(connection, 404)) as store:
        monkeypatch.setenv("AWS_ENDPOINT_URL", store.url.replace("http", "https"))
        with pytest.raises(KvsnapError):
            S3("s3://bucket/x", 1).get(KEY, 10)
        assert not store.requests
