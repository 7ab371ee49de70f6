"""kvsnap proxy in front of the real llama-server: disk, seconds to the first token, overhead.

    python tests/bench/proxy.py build/bin/llama-server [--chats 20] [--asked 20] [--pairs 20]

Chats that share a system prompt ask one question each through the proxy; each slot is saved as a plain
slot file as well. Then they ask their next one twice: of the server with an empty slot, and through the
proxy after the server was started anew. Last, prompts that nothing is stored of go alternately to the
server and through the proxy.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np

from kvsnap.cli.bundled import bundled_model

SYSTEM = (Path(__file__).parents[2] / "samples" / "system-prompt.md").read_text()
THINGS = ["brake", "saddle", "lamp", "chain", "pump", "basket", "tyre", "bell", "lock", "helmet"]
SERVER, PROXY = "http://127.0.0.1:18180", "http://127.0.0.1:18181"
ANSWER = 32


def question(chat: int, turn: int) -> str:
    picked = np.random.default_rng([chat, turn]).choice(THINGS, 6)
    return f"This is customer {chat}. I have a question about the {', the '.join(picked)}."


@contextlib.contextmanager
def running(command: list[str], url: str) -> Iterator[None]:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(1200):
            with contextlib.suppress(httpx2.HTTPError):
                if httpx2.get(url + "/health").status_code == 200:
                    break
            time.sleep(0.05)
        yield
    finally:
        process.terminate()
        process.wait()


def ask(url: str, messages: Any, **more: Any) -> tuple[float, float, str, dict[str, Any]]:
    """Seconds to the first text, seconds to the end, the text, the timings."""
    body = {"messages": messages, "max_tokens": ANSWER, "temperature": 0, "stream": True, **more}
    first, text, timings = 0.0, "", {}
    begun = time.perf_counter()
    with httpx2.stream("POST", url + "/v1/chat/completions", json=body, timeout=600) as answer:
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            piece = event["choices"][0]["delta"].get("content") if event["choices"] else None
            if piece and not first:
                first = time.perf_counter() - begun
            text += piece or ""
            timings = event.get("timings", timings)
    return first, time.perf_counter() - begun, text, timings


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def quiet() -> None:
    """What a request left in its slot is stored by now."""
    time.sleep(0.5)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("binary")
    parser.add_argument("--chats", type=int, default=20)
    parser.add_argument("--asked", type=int, default=20, help="how many ask a second time")
    parser.add_argument("--pairs", type=int, default=20)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "slots").mkdir()
        (folder / "plain").mkdir()
        port = SERVER.rsplit(":", 1)[1]
        server = [options.binary, "-m", str(bundled_model()), "--port", port, "-t", "1", "-np", "1"]
        server += ["--slot-save-path", str(folder / "slots")]
        kvsnap = Path(sys.executable).parent / "kvsnap"
        proxy = [str(kvsnap), "proxy", "--upstream", SERVER, "--slot-dir", str(folder / "slots")]
        proxy += ["--port", PROXY.rsplit(":", 1)[1], "--store", str(folder / "store")]
        with running(server, SERVER), running(proxy, PROXY):
            disk(folder, options.chats)
        with running(server, SERVER), running(proxy, PROXY):
            first_token(options.asked)
            overhead(options.pairs)


def disk(folder: Path, chats: int) -> None:
    for chat in range(chats):
        ask(PROXY, _first(chat))
        quiet()
        file = f"chat{chat}"
        httpx2.post(SERVER + "/slots/0?action=save", json={"filename": file}).raise_for_status()
        os.replace(folder / "slots" / file, folder / "plain" / file)
    plain, store = size_of(folder / "plain"), size_of(folder / "store")
    print(f"{chats} chats: slot files {plain / 1e6:.1f} MB, store {store / 1e6:.1f} MB", end="")
    print(f", {plain / store:.1f}x less")


def first_token(chats: int) -> None:
    found: dict[str, list[float]] = {"server": [], "proxy": []}
    counts = []
    for chat in range(chats):
        messages = [*_first(chat), {"role": "assistant", "content": "Yes."}]
        messages.append({"role": "user", "content": question(chat, 1)})
        seconds, *_ = ask(SERVER, messages, cache_prompt=False, id_slot=0)
        found["server"].append(seconds)
        seconds, _, _, timings = ask(PROXY, messages)
        found["proxy"].append(seconds)
        counts.append((timings["cache_n"], timings["prompt_n"]))
        quiet()
    cold, warm = (statistics.median(found[key]) for key in ("server", "proxy"))
    reused, computed = (statistics.median(values) for values in zip(*counts, strict=True))
    print(
        f"first token: computed {cold:.2f} s, restored {warm:.3f} s, {cold / warm:.1f}x sooner",
        end="",
    )
    print(f"; {reused:.0f} tokens reused, {computed:.0f} evaluated")


def overhead(pairs: int) -> None:
    """Of prompts that nothing is stored of. The server's own count of what it did is taken off, which
    leaves what everything else took; machines with other work beside tell no two seconds alike."""
    rest: dict[str, list[float]] = {SERVER: [], PROXY: []}
    whole: dict[str, list[float]] = {SERVER: [], PROXY: []}
    words = np.array(["oak", "elm", "ash", "fir", "yew", "bay", "fig", "box"])
    for number in range(2 * pairs):
        url = (SERVER, PROXY)[number % 2]
        picked = " ".join(np.random.default_rng(number).choice(words, 300))
        messages = [{"role": "user", "content": f"{number}. {picked}"}]
        more = {"cache_prompt": False, "id_slot": 0} if url == SERVER else {}
        _, seconds, _, timings = ask(url, messages, **more)
        rest[url].append(seconds - (timings["prompt_ms"] + timings["predicted_ms"]) / 1000)
        whole[url].append(seconds)
        quiet()
    added = statistics.median(rest[PROXY]) - statistics.median(rest[SERVER])
    request = statistics.median(whole[SERVER])
    print(
        f"without reuse: a request of {request:.2f} s takes {1000 * added:.1f} ms more,"
        f" {100 * added / request:.2f} %; medians of the whole"
        f" {statistics.median(whole[PROXY]) / request:.3f}x"
    )


def _first(chat: int) -> list[dict[str, str]]:
    return [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": question(chat, 0)},
    ]


if __name__ == "__main__":
    main()
