"""Google's and Azure's object stores: the contract against stand-ins, and how they are named."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvsnap.formats.errors import RemoteDenied, RemoteError, UsageError
from kvsnap.kvstore.remotes.base import Remote
from kvsnap.kvstore.remotes.objects import S3, Azure, Gcs
from kvsnap.testing.remote_suite import RemoteSuite
from tests.remotes.answers import answering, reply
from tests.remotes.fake_clouds import FakeAzure, FakeGcs

SECRET = base64.b64encode(b"canary of azure").decode()


class TestGcs(RemoteSuite):
    secrets = ("canarytoken",)

    @pytest.fixture(autouse=True)
    def place(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        with answering(FakeGcs()) as server:
            monkeypatch.setenv("GOOGLE_BASE_URL", server.url)
            monkeypatch.setenv("GOOGLE_BEARER_TOKEN", "canarytoken")
            yield

    def make(self) -> Remote:
        return Gcs("gs://bucket/prefix", timeout=20)


class TestAzure(RemoteSuite):
    secrets = (SECRET,)

    @pytest.fixture(autouse=True)
    def place(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        with answering(FakeAzure()) as server:
            monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", server.url)
            monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
            monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", SECRET)
            yield

    def make(self) -> Remote:
        return Azure("az://container/prefix", timeout=20)


def test_a_signature_in_an_address_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Azure's tokens stand in the query of each request, which obstore's errors quote."""
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", "sv=1&sig=canarysignature")
    with answering(lambda _, connection: reply(connection, 400)) as server:
        monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", server.url)
        remote = Azure("az://container/prefix", timeout=5)
        with pytest.raises(RemoteError) as raised:
            remote.get("blocks/x", 10)
    assert "canarysignature" in server.requests[0].target
    assert "canary" not in f"{raised.value} {raised.value.hint} {raised.value.__context__}"


@pytest.mark.parametrize("kind", [S3, Gcs, Azure])
@pytest.mark.parametrize(
    "rest",
    [
        "",
        "/path",
        "user:canary@bucket/x",
        "bucket:80/x",
        "bucket/x?canary",
        "bucket/x#canary",
        "bucket/a//b",
        "bucket/../x",
        "bucket/%2e%2e/x",
        "bucket/a%0ab",
    ],
)
def test_urls_that_name_no_place_in_a_bucket(kind: type[Remote], rest: str) -> None:
    with pytest.raises(UsageError) as raised:
        kind(f"{kind.__name__.lower()}://{rest}", 5)  # type: ignore[call-arg]
    assert "canary" not in f"{raised.value} {raised.value.hint}"


def test_key_files_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "key.json"
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(path))
    for text in (None, "", "{", json.dumps({"type": "service_account", "private_key": "canary"})):
        if text is not None:
            path.write_text(text)
        with pytest.raises(RemoteDenied, match="gs://bucket") as raised:
            Gcs("gs://bucket/x", 5)
        assert "GOOGLE_APPLICATION_CREDENTIALS" in raised.value.hint
        assert "canary" not in f"{raised.value} {raised.value.__context__}"


def test_an_account_is_asked_for() -> None:
    with pytest.raises(RemoteDenied) as raised:
        Azure("az://container/x", 5)
    assert "AZURE_STORAGE_ACCOUNT_NAME" in raised.value.hint
