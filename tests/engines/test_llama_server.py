"""`python -m kvsnap.llama_server`, asked through HTTP on the loopback; every token that it decodes is
counted inside the server."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvsnap.kvstore.store import Store
from kvsnap.kvstore.whose_blocks import own_roots
from tests.tenants import ALICE, BOB, assert_not_in, written

pytest.importorskip("llama_cpp")
pytest.importorskip("uvicorn", reason="the server's packages are not installed")
pytest.importorskip("sse_starlette", reason="the server's packages are not installed")

pytestmark = [pytest.mark.engine, pytest.mark.slow]

COUNTING = """
import sys
from llama_cpp._internals import LlamaContext
decode = LlamaContext.decode
def counting(self, batch):
    decode(self, batch)
    print("decoded", batch.batch.n_tokens, flush=True)
LlamaContext.decode = counting
from kvsnap.llama_server import main
main(sys.argv[1:])
"""
QUIET = ("--n_threads", "1", "--n_threads_batch", "1", "--verbose", "false")
SYSTEM = (
    "You help the customers of a small bicycle rental by the river. Be brief and friendly. " * 8
)
FIRST = [
    {"role": "system", "content": SYSTEM},
    {"role": "user", "content": "What does a day cost?"},
]


class Server:
    """One running server; its log is a file."""

    def __init__(self, log: Path, store: Path, *options: str, code: str = COUNTING) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        command = [sys.executable, "-c", code, *options, "--kvsnap-store", str(store)]
        self.log = log
        clean = {k: v for k, v in os.environ.items() if k != "CONFIG_FILE"}
        clean |= {"HOST": "127.0.0.1", "PORT": str(self.port)}  # above options and config files
        with log.open("wb") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=file, env=clean)
        self.key: str | None = None
        self.headers: dict[str, str] = {}

    def wait(self) -> None:
        until = time.monotonic() + 200
        while "Uvicorn running" not in self.log.read_text():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < until, self.log.read_text()
            time.sleep(0.1)

    def request(self, path: str, body: dict[str, Any] | None = None) -> Any:
        headers = {"Content-Type": "application/json", **self.headers}
        if self.key is not None:
            headers["Authorization"] = f"Bearer {self.key}"
        data = None if body is None else json.dumps(body).encode()
        url = f"http://127.0.0.1:{self.port}{path}"
        with urllib.request.urlopen(
            urllib.request.Request(url, data, headers), timeout=200
        ) as answer:
            return answer.read().decode()

    def chat(self, messages: list[dict[str, str]], **options: Any) -> tuple[str, int, int]:
        """(text, prompt tokens, tokens decoded for it)"""
        before = self.decoded()
        body = {"messages": messages, "max_tokens": 1, "temperature": 0.0, **options}
        found = json.loads(self.request("/v1/chat/completions", body))
        text = found["choices"][0]["message"]["content"]
        return text, found["usage"]["prompt_tokens"], self.decoded() - before

    def decoded(self) -> int:
        lines = self.log.read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith("decoded "))

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            self.process.wait(60)


@pytest.fixture
def start(model: Path, tmp_path: Path) -> Iterator[Any]:
    servers: list[Server] = []

    def run(*options: str, wait: bool = True, code: str = COUNTING) -> Server:
        common = () if "--config_file" in options else ("--model", str(model), "--n_ctx", "512")
        log = tmp_path / f"log-{len(servers)}"
        servers.append(Server(log, tmp_path / "store", *common, *options, code=code))
        if wait:
            servers[-1].wait()
        return servers[-1]

    yield run
    for server in servers:
        server.stop()


def test_a_restarted_server_goes_on_from_the_store(start: Any) -> None:
    server = start(*QUIET)
    text, prompt, decoded = server.chat(FIRST)
    assert decoded == prompt
    server.stop()
    assert "Finished server process" in server.log.read_text()

    again = start(*QUIET)
    going_on = [*FIRST, {"role": "assistant", "content": text}, {"role": "user", "content": "Two?"}]
    _, longer, decoded = again.chat(going_on)
    assert longer > prompt
    reused = longer - decoded
    assert reused >= prompt - prompt % 64  # all of the first prompt's filled blocks
    assert f"{reused} of {longer} prompt tokens reused, {reused} of them" in again.log.read_text()


def test_a_stream_and_a_dropped_stream(start: Any) -> None:
    server = start(*QUIET)
    body = {"messages": FIRST, "max_tokens": 200, "temperature": 0.0, "stream": True}
    url = f"http://127.0.0.1:{server.port}/v1/chat/completions"
    request = urllib.request.Request(url, json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request, timeout=200) as answer:
        assert next(line for line in answer if line.startswith(b"data: "))  # pings go before
    other = [{"role": "user", "content": "A word, please, about the weather in the mountains."}]
    server.chat(other)  # it takes the context of the chat that nobody waited for
    server.stop()
    again = start(*QUIET)
    _, prompt, decoded = again.chat(FIRST)
    assert prompt - decoded >= prompt - prompt % 64 - 64


def test_models_of_a_config_file_have_a_cache_each_and_the_key_is_asked_for(
    start: Any, model: Path, tmp_path: Path
) -> None:
    common = {"model": str(model), "n_ctx": 512, "n_threads": 1, "n_threads_batch": 1}
    models = [
        {**common, "model_alias": "plain", "cache": True},  # the library's: ours takes its place
        {**common, "model_alias": "small", "type_k": 8, "logits_all": False},
        {**common, "model_alias": "refused", "embedding": True},
    ]
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"api_key": "secret", "models": models}))
    server = start("--config_file", str(config))
    with pytest.raises(urllib.error.HTTPError, match="401"):
        server.request("/v1/models")
    server.key = "secret"
    names = [entry["id"] for entry in json.loads(server.request("/v1/models"))["data"]]
    assert names == ["plain", "small", "refused"]
    for first in ("plain", "small"):
        _, prompt, decoded = server.chat(FIRST, model=first)
        assert decoded == prompt  # nothing of the other one's rows
    for again in ("plain", "small"):
        _, prompt, decoded = server.chat(FIRST, model=again)
        assert prompt - decoded == min(prompt - prompt % 64, prompt - 1)
    server.request("/v1/embeddings", {"input": "a word", "model": "refused"})
    assert "nothing is kept of" in server.log.read_text()


CLIENTS_SAY = {
    "user": "bob",
    "tenant": BOB.tenant_id,
    "tenant_key": BOB.key.hex(),
    "tenant_key_file": "/tmp/bob.key",
    "kvsnap_tenant_key": BOB.key.hex(),
    "cache_salt": BOB.key.hex(),
    "kvsnap_store": "/tmp",
}
"""Fields of a request's body, and headers, by which somebody might choose another tenant."""


def roots_of(store: Path) -> tuple[int, int, int]:
    """How many roots have blocks in a store: all, Alice's, Bob's."""
    with Store(store) as opened:
        count = opened.index.query("SELECT COUNT(*) FROM roots")[0][0]
        own = [len(own_roots(opened, tenant) or ()) for tenant in (ALICE, BOB)]
    return count, own[0], own[1]


@pytest.mark.parametrize("how", ["option", "variable"])
def test_the_operators_key_wins_whatever_a_client_sends(
    start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    key = tmp_path / "alice.key"
    key.write_text(ALICE.key.hex())
    options = ["--kvsnap-tenant-key-file", str(key)]
    if how == "variable":
        options = []
        monkeypatch.setenv("KVSNAP_TENANT_KEY", ALICE.key.hex())
    server = start(*QUIET, *options)
    _, prompt, decoded = server.chat(FIRST)
    assert decoded == prompt
    server.stop()

    again = start(*QUIET, *options)
    again.headers = {f"X-{name.replace('_', '-')}": value for name, value in CLIENTS_SAY.items()}
    _, prompt, decoded = again.chat(FIRST, **CLIENTS_SAY)
    assert prompt - decoded == prompt - prompt % 64, "still Alice's blocks"
    again.chat([{"role": "user", "content": SYSTEM}], **CLIENTS_SAY)
    again.stop()
    assert roots_of(tmp_path / "store") == (1, 1, 0)
    assert_not_in(ALICE.key, [server.log.read_text(), again.log.read_text()])
    assert_not_in(ALICE.key, written(tmp_path / "store"))

    # Paired: it is the operator's key that decides.
    monkeypatch.delenv("KVSNAP_TENANT_KEY", raising=False)
    key.write_text(BOB.key.hex())
    other = start(*QUIET, "--kvsnap-tenant-key-file", str(key))
    _, prompt, decoded = other.chat(FIRST)
    assert decoded == prompt


SEVERAL = """
import sys
from contextvars import ContextVar
from llama_cpp._internals import LlamaContext
decode = LlamaContext.decode
def counting(self, batch):
    decode(self, batch)
    print("decoded", batch.batch.n_tokens, flush=True)
LlamaContext.decode = counting

import os
import uvicorn
from llama_cpp.server.settings import Settings
from kvsnap import Store, Tenant
from kvsnap.llama_server import create_app

model, store = sys.argv[2], sys.argv[-1]
keys = {"alice": Tenant(bytes(range(200, 232))), "bob": Tenant(bytes(range(40, 72)))}
users = {"Bearer a-token": "alice", "Bearer b-token": "bob"}
who = ContextVar("who", default="")
settings = Settings(model=model, n_ctx=512, n_threads=1, n_threads_batch=1, verbose=False)
app = create_app(
    settings, store=Store(store, encrypt=True), tenant=lambda: keys.get(who.get())
)
class Whose:
    "What authenticates a request says whose it is."
    def __init__(self, app):
        self.app = app
    async def __call__(self, scope, receive, send):
        sent = dict(scope.get("headers", ()))
        who.set(users.get(sent.get(b"authorization", b"").decode(), ""))
        await self.app(scope, receive, send)
app.add_middleware(Whose)
uvicorn.run(app, host=os.environ["HOST"], port=int(os.environ["PORT"]))
"""


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_server_of_several_tenants_chooses_for_each_request(
    start: Any, tmp_path: Path, stream: bool
) -> None:
    server = start(code=SEVERAL)

    def ask(token: str, **options: Any) -> tuple[int, int]:
        server.key = f"{token}-token"
        if not stream:
            return server.chat(FIRST, **options)[1:]
        before = server.decoded()
        body = {"messages": FIRST, "max_tokens": 1, "temperature": 0.0, "stream": True, **options}
        server.request("/v1/chat/completions", body)
        return 0, server.decoded() - before

    _, whole = ask("a")
    assert ask("b")[1] == whole, "nothing of what Alice asked just before"
    assert ask("c")[1] == ask("c")[1] == whole, "of somebody unknown nothing is kept"
    assert ask("a", **CLIENTS_SAY)[1] < whole / 2
    assert ask("b", user="alice")[1] < whole / 2
    server.stop()
    assert roots_of(tmp_path / "store") == (2, 1, 1)
    for tenant in (ALICE, BOB):
        assert_not_in(tenant.key, [server.log.read_text()])
        assert_not_in(tenant.key, written(tmp_path / "store"))


def run_main(code: str, *arguments: str) -> tuple[int, list[str]]:
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=200)
    return done.returncode, done.stderr.splitlines()


def test_what_is_wrong_is_one_line_and_what_to_do_another(model: Path, tmp_path: Path) -> None:
    missing = "import sys; sys.modules['fastapi'] = None\n" + COUNTING
    code, lines = run_main(missing, "--model", str(model))
    assert code == 1
    assert lines[0].startswith("error: the server's packages are not installed: ")
    assert lines[1:] == ["hint: pip install 'kvsnap[server]'"]

    code, lines = run_main(COUNTING)
    assert code == 2
    assert len(lines) == 2
    assert "model Field required" in lines[0]

    code, lines = run_main(COUNTING, "--config_file", str(tmp_path / "none.json"))
    assert code == 1
    assert lines[0].endswith("none.json cannot be read: No such file or directory")

    bad = tmp_path / "bad.key"
    bad.write_text(ALICE.key.hex()[:60])
    code, lines = run_main(COUNTING, "--model", str(model), "--kvsnap-tenant-key-file", str(bad))
    assert (code, len(lines)) == (2, 2)
    assert "holds no tenant key" in lines[0]
    assert_not_in(ALICE.key, lines)

    store = ("--kvsnap-store", str(tmp_path / "store"))
    code, lines = run_main(COUNTING, "--model", str(model), "--kvsnap-codec", "nope", *store)
    assert code == 1
    assert lines[0].startswith("error: codec 'nope'")
