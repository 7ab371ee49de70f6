"""What a remote's listing and a server's answers hold is shown as escapes."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("gguf", reason="gguf is not installed")

from kvsnap.kvstore import remotes
from kvsnap.kvstore.remotes.base import Entry
from kvsnap.kvstore.remotes.wrapped import Wrapped
from tests.cli.everything import Everything
from tests.cli.wicked import WAY, assert_harmless, make_wicked

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def wicked(tmp_path_factory: pytest.TempPathFactory) -> Everything:
    return make_wicked(tmp_path_factory.mktemp("wicked"))


class Lies(Wrapped):
    """Lists keys that nobody of us wrote."""

    def list(self, prefix: str) -> Iterator[Entry]:
        yield from super().list(prefix)
        for folder in ("manifests/default/", "blocks/ab/", "sessions/default/", ""):
            yield Entry(f"{folder}{WAY}.safetensors", 5, 1.0)


@pytest.mark.parametrize("form", ["--verbose", "--json"])
@pytest.mark.parametrize(
    "line",
    [
        "ls {url}",
        "verify {url}",
        "gc --remote {url} --grace 0",
        "push a",
        "pull a --force",
        "pull x",
    ],
)
def test_keys_of_a_remotes_listing_do_nothing(
    wicked: Everything, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, form: str
) -> None:
    honest = remotes.open_remote
    monkeypatch.setattr(remotes, "open_remote", lambda url, *more: Lies(honest(url, *more)))
    with wicked.copied(tmp_path / "on") as on:
        ran = on.run(f"{line} {form}")
    assert_harmless(ran)
    if line.startswith(("ls", "verify")):
        assert r"way\x1b[2J" in ran.out + ran.err or r"way\u001b[2J" in ran.out


class Answers(http.server.BaseHTTPRequestHandler):
    """A server that says such words with the status that its path begins with."""

    def do_GET(self) -> None:
        body = WAY.encode()
        reason = "way\x1b[2J\x9b31m\x07".encode("latin-1")
        head = b"HTTP/1.1 %s %s\r\nContent-Length: %d\r\n" % (
            self.path[1:4].encode(),
            reason,
            len(body),
        )
        self.wfile.write(
            head + b'Server: \x1b[2J\r\nETag: "\x1b[2J"\r\nConnection: close\r\n\r\n' + body
        )

    do_HEAD = do_GET

    def log_message(self, format: str, *words: Any) -> None:
        pass


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers) as found:
        thread = threading.Thread(target=found.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{found.server_port}"
        found.shutdown()
        thread.join()


@pytest.mark.parametrize("status", [200, 302, 400, 401, 403, 404, 418, 500])
@pytest.mark.parametrize("line", ["pull a", "verify a", "push a", "ls"])
def test_what_a_server_answers_does_nothing(
    wicked: Everything, tmp_path: Path, server: str, line: str, status: int
) -> None:
    pytest.importorskip("obstore")
    with wicked.copied(tmp_path / "on") as on:
        ran = on.run(f"{line} {server}/{status}")
    assert_harmless(ran)
    assert ran.code == 1
