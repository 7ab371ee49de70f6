"""Keys and passwords in the URL of a remote, and in the environment: never shown again."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvsnap.cli.foreign import printable, without_secrets
from kvsnap.kvstore.store import Store
from kvsnap.testing.stamped import StampedEngine
from kvsnap.testing.turns import some_ids, turn
from tests.remotes.redis_server import PASSWORD, redis_server

CANARY = "Kan4rien/Vogel"
ESCAPED = CANARY.replace("/", "%2F")
PARTS = ("Kan4rien", "Vogel", CANARY, ESCAPED)
Run = Callable[..., Any]


@pytest.fixture
def closed() -> Iterator[str]:
    """An address that refuses connections, and that nobody else gets meanwhile."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{held.getsockname()[1]}"


@pytest.fixture
def saved(store: Path) -> Path:
    with Store(store) as opened:
        turn(opened, StampedEngine(), some_ids(150), "s")
    return store


def shows_nothing(done: Any, *secrets: str) -> None:
    told = done.out + done.err
    assert not [part for part in secrets or PARTS if part in told], told


@pytest.mark.parametrize(
    "url",
    [
        "redis://:{secret}@{address}/0",
        "rediss://user:{secret}@{address}/0",
        "https://user:{secret}@{address}/kv",
        "http://{address}/kv?token={secret}",
        "s3://AKIA:{secret}@bucket/kv",
        "s3://bucket/kv?X-Amz-Signature={secret}",
        "az://container/kv?sig={secret}",
        "S3://AKIA:{secret}@bucket/kv",
        "ftp://user:{secret}@{address}/kv",
        "redis://user:{secret}@[bad/0",
        "redis://user:{secret}@{address}:port/0",
    ],
)
@pytest.mark.parametrize("secret", [CANARY, ESCAPED])
def test_a_secret_of_a_url_is_in_no_message(
    kvsnap: Run, saved: Path, closed: str, url: str, secret: str
) -> None:
    pytest.importorskip("obstore", reason="kvsnap[remote] is not installed")
    remote = url.format(secret=secret, address=closed)
    environment = {
        "AWS_ENDPOINT_URL": f"http://{closed}",
        "AWS_ACCESS_KEY_ID": "AKIA",
        "AWS_SECRET_ACCESS_KEY": CANARY,
        "AWS_EC2_METADATA_DISABLED": "true",
        "AZURE_STORAGE_ACCOUNT_NAME": "account",
        "AZURE_STORAGE_ACCOUNT_KEY": "S2FuNHJpZW4vVm9nZWw=",
        "AZURE_ENDPOINT": f"http://{closed}",
        "AZURE_ALLOW_HTTP": "true",
    }
    for command in (["push", "s", remote, "--json"], ["ls", remote, "--verbose"]):
        done = kvsnap(*command, timeout=120, **environment)
        assert done.code in (1, 2), done.out
        assert len(done.err.splitlines()) == 2, done.err
        shows_nothing(done)


def test_words_in_the_wrong_place_are_not_repeated_with_their_secret(
    kvsnap: Run, saved: Path, closed: str
) -> None:
    url = f"redis://user:{CANARY}@{closed}/0"
    for command in (
        ["push", url],
        ["push", "s", "more", url],
        ["pull", url, "s"],
        ["import", url],
        ["verify", "s", "more", url],
        ["verify", url, "more"],
        ["rm", url],
        ["rm", "s", "--remote", url],
        ["gc", "--remote", url],
        ["show", url],
        ["pin", url],
        [url],
        ["push", "s", f"--remote={url}"],
    ):
        done = kvsnap(*command)
        assert done.code in (1, 2), command
        assert done.err
        shows_nothing(done)
    for remote in (url, url.upper(), url.replace("://", ":/")):
        shows_nothing(kvsnap("push", "s", KVSNAP_REMOTE=remote))


def test_a_push_that_works_reports_the_remote_without_its_password(
    kvsnap: Run, saved: Path, tmp_path: Path
) -> None:
    (tmp_path / "server").mkdir()
    other = tmp_path / "other"
    with redis_server(tmp_path / "server") as server:
        url, bare = server.url("/0/kv"), f"redis://127.0.0.1:{server.port}/0/kv"
        assert PASSWORD in url
        for done in (
            kvsnap("push", "s", url, "--json", "--verbose"),
            kvsnap("push", "s", url),
            kvsnap("push", "s", bare, KVSNAP_REDIS_PASSWORD=PASSWORD),
            kvsnap("ls", url),
            kvsnap("ls", url, "--json"),
            kvsnap("verify", url),
            kvsnap("pull", "s", url, "--json", "--store", other),
            kvsnap("gc", "--remote", url),
            kvsnap("rm", "s", "--remote", url),
        ):
            assert done.code == 0, done.err
            shows_nothing(done, PASSWORD)
        wrong = kvsnap("ls", bare, KVSNAP_REDIS_PASSWORD=CANARY)
        assert wrong.code == 1
        shows_nothing(wrong, PASSWORD, *PARTS)
    for path in (*other.rglob("*"), *saved.rglob("*")):
        assert not path.is_file() or PASSWORD.encode() not in path.read_bytes()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("no session 'redis://u:p@h/0' in", "no session 'redis://…@h/0' in"),
        ("S3://KEY:a/b@c@bucket", "S3://…@bucket"),
        ("az://box/kv?sig=x&y=z here", "az://box/kv?… here"),
        ("file:///mnt/team@home/kv", "file:///mnt/team@home/kv"),
        ("alice@example.org of s3://bucket/kv", "alice@example.org of s3://bucket/kv"),
    ],
)
def test_users_passwords_and_queries_of_urls_are_left_out(text: str, shown: str) -> None:
    assert without_secrets(text) == shown


def test_control_characters_show_as_escapes_and_long_text_is_cut() -> None:
    assert printable("plain ü 模型") == "plain ü 模型"
    assert printable("a\x1b[2J\n\u202eb\ud800") == r"a\x1b[2J\n\u202eb\ud800"
    assert printable("x" * 200, 10) == "x" * 9 + "…"
