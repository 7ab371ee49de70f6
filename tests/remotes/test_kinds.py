"""Which remote a URL names, and what is said where it names none."""

from __future__ import annotations

import importlib
import subprocess
import sys
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest

from kvsnap.formats.errors import KvsnapError, Unsupported, UsageError
from kvsnap.kvstore import remotes
from kvsnap.kvstore.remotes import KINDS, default_url, is_remote_url, open_remote, redact
from kvsnap.kvstore.remotes.base import Remote
from kvsnap.kvstore.remotes.folder import Folder


@pytest.mark.parametrize(
    "text",
    ["", "name", "s3:/bucket", "://x", "S3://canary:canary@bucket", "3s://x", "http://[canary"],
)
def test_what_is_no_url_is_refused_and_not_repeated(text: str) -> None:
    with pytest.raises(UsageError) as raised:
        open_remote(text)
    assert "file:///" in raised.value.hint
    assert "canary" not in f"{raised.value} {raised.value.__context__}"


def test_an_unknown_scheme_is_named_with_those_that_are_known() -> None:
    with pytest.raises(Unsupported, match="'ftp'") as raised:
        open_remote("ftp://canary:canary@host/x")
    assert set(KINDS) <= set(raised.value.hint.removeprefix("known: ").split(", "))
    assert "canary" not in str(raised.value)


@pytest.mark.parametrize("scheme", ["s3", "gs", "az", "http", "https", "redis", "rediss"])
def test_a_missing_package_is_asked_for(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    package = "redis" if scheme.startswith("redis") else "obstore"

    def fail(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {package!r}", name=package)

    monkeypatch.setattr(importlib, "import_module", fail)
    with pytest.raises(Unsupported, match=f"needs the package {package}") as raised:
        open_remote(f"{scheme}://host/x")
    assert "kvsnap[remote]" in raised.value.hint


@pytest.mark.parametrize("scheme", KINDS)
def test_every_kind_of_the_table_is_there(scheme: str) -> None:
    module, _, name = KINDS[scheme].partition(":")
    kind = getattr(importlib.import_module(module), name)
    assert issubclass(kind, Remote)


def test_a_folder_is_opened_by_its_url(tmp_path: Path) -> None:
    with open_remote((tmp_path / "kv").as_uri()) as remote:
        remote.put("a", b"x")
        assert remote.get("a", 10).data == b"x"
        assert remote.url == (tmp_path / "kv").as_uri()


class Foreign(Folder):
    """A third party's kind."""

    def __init__(self, url: str, timeout: float) -> None:
        super().__init__(url.replace("theirs", "file", 1), timeout)


def test_third_parties_add_kinds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("theirs", f"{__name__}:Foreign", "kvsnap.remotes")
    monkeypatch.setattr(
        remotes, "entry_points", lambda **which: EntryPoints([point]).select(**which)
    )
    with open_remote(tmp_path.as_uri().replace("file", "theirs", 1)) as remote:
        remote.put("a", b"x")
    assert (tmp_path / "a").read_bytes() == b"x"
    with pytest.raises(Unsupported, match="'others'"):
        open_remote("others://host")


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://:canary@host:6379/0", "redis://host:6379/0"),
        ("https://user:canary@host/a%20b?sig=canary#canary", "https://host/a%20b"),
        ("https://user:can@ary@host/", "https://host/"),
        ("s3://bucket/prefix", "s3://bucket/prefix"),
        ("file:///mnt/kv", "file:///mnt/kv"),
    ],
)
def test_a_url_is_shown_without_what_may_be_secret(url: str, shown: str) -> None:
    assert redact(url) == shown


def test_names_of_sessions_are_no_urls() -> None:
    assert [is_remote_url(text) for text in ("a", "a/b", "a:b", "C:\\x", "a ://b", "s3://b")] == [
        False, False, False, False, False, True,
    ]  # fmt: skip


def test_the_default_is_taken_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert default_url() is None
    monkeypatch.setenv("KVSNAP_REMOTE", "")
    assert default_url() is None
    monkeypatch.setenv("KVSNAP_REMOTE", "file:///mnt/kv")
    assert default_url() == "file:///mnt/kv"


def test_packages_of_remotes_are_loaded_when_one_is_opened() -> None:
    program = (
        "import sys, kvsnap.kvstore.remotes as r; r.open_remote('file:///none')\n"
        "print([name for name in ('obstore', 'redis', 'boto3', 'torch') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "[]\n"


def test_opening_sends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A remote that is down is found out by the first operation, within its timeout."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    for url in ("s3://bucket/x", "http://127.0.0.1:1/x"):
        with open_remote(url) as remote, pytest.raises(KvsnapError):
            remote.get("a", 1)
