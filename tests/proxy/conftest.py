"""An upstream in a process of its own, which tests kill, and a proxy in a thread of theirs."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

httpx2 = pytest.importorskip("httpx2")
pytest.importorskip("starlette")
uvicorn = pytest.importorskip("uvicorn")
pytest.importorskip("llama_cpp")

from kvsnap.kvstore.place import Place, write_settings
from kvsnap.kvstore.proxy.app import ProxyOptions, create_app
from kvsnap.kvstore.store import Store
from kvsnap.testing.tiny_gguf import write_tiny

BLOCK = 16
ROOT = Path(__file__).parents[2]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class Upstream:
    """The small server of tests/proxy/upstream.py."""

    def __init__(self, model: Path, folder: Path, arguments: tuple[str, ...]) -> None:
        self.model, self.folder, self.arguments = model, folder, arguments
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = folder.parent / f"upstream-{self.port}.log"
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self, *more: str, model: Path | None = None) -> None:
        command = [sys.executable, "-m", "tests.proxy.upstream", str(model or self.model)]
        command += ["--port", str(self.port), "--slot-save-path", str(self.folder)]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*command, *self.arguments, *more],
                cwd=ROOT,
                stdout=log,
                stderr=log,
            )
        for _ in range(600):
            with contextlib.suppress(httpx2.HTTPError):
                if httpx2.get(self.url + "/health").status_code == 200:
                    return
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.05)
        raise AssertionError("the upstream does not start")

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def restart(self, *more: str, model: Path | None = None) -> None:
        self.kill()
        self.start(*more, model=model)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        answer = httpx2.post(self.url + path, json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def get(self, path: str) -> Any:
        return httpx2.get(self.url + path, timeout=60).json()

    def slots(self) -> Any:
        return self.get("/slots")

    def seen(self) -> Any:
        """The completions that it was asked for, but for the proxy's probe."""
        return [one for one in self.get("/seen") if one.get("n_predict") != 0]


class Proxy:
    """`kvsnap proxy` in a thread."""

    def __init__(self, store: Store, options: ProxyOptions) -> None:
        self.store, self.slot_dir = store, options.slot_dir
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.app = create_app(store, options)
        config = uvicorn.Config(
            self.app,
            port=self.port,
            log_level="error",
            timeout_keep_alive=120,
            server_header=False,
            date_header=False,
        )
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()
        for _ in range(400):
            if self.server.started:
                break
            time.sleep(0.01)
        assert self.server.started

    def post(self, path: str, body: dict[str, Any], **more: Any) -> Any:
        return httpx2.post(self.url + path, json=body, timeout=60, **more)

    def chat(self, text: str, **more: Any) -> Any:
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 4, **more}
        return self.post("/v1/chat/completions", body)

    def settle(self) -> None:
        """Wait until what requests left in slots is stored: no slot file is there any more."""
        deadline = time.monotonic() + 20
        turns = self.app.routes[0].app.turns  # type: ignore[attr-defined]
        while turns.at_work and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not turns.at_work
        assert not list(self.slot_dir.glob("kvsnap-*"))

    def close(self) -> None:
        self.server.should_exit = True
        self.thread.join(20)
        assert not self.thread.is_alive()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny") / "tiny.gguf", "llama", context=1024)


@pytest.fixture
def slot_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "slots"
    folder.mkdir()
    return folder


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    path = tmp_path / "store"
    write_settings(Place(path, BLOCK))
    with Store(path, min_free=0) as opened:
        yield opened


@pytest.fixture
def start_upstream(slot_dir: Path) -> Iterator[Callable[..., Upstream]]:
    running: list[Upstream] = []

    def start(model: Path, *arguments: str, folder: Path | None = None) -> Upstream:
        running.append(Upstream(model, folder or slot_dir, arguments))
        return running[-1]

    yield start
    for upstream in running:
        upstream.kill()


@pytest.fixture
def start_proxy(store: Store, slot_dir: Path) -> Iterator[Callable[..., Proxy]]:
    running: list[Proxy] = []

    def start(upstream: Upstream, *, folder: Path | None = None, **more: Any) -> Proxy:
        own = more.pop("store", store)
        options = ProxyOptions(upstream=upstream.url, slot_dir=folder or slot_dir, **more)
        running.append(Proxy(own, options))
        return running[-1]

    yield start
    for proxy in running:
        proxy.close()
    assert not list(slot_dir.iterdir()), "files of the proxy are left in the server's folder"
