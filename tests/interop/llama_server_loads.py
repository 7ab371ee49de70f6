"""Whether a real llama-server restores what `kvsnap export` writes, and `kvsnap import` takes what it saves.

    python tests/interop/llama_server_loads.py LLAMA_SERVER

LLAMA_SERVER is the binary (docs/llama-server.md says how it was built). With the bundled model, on loopback,
half a minute on two cores. Of each way to run the server: the slot file that fits it is restored, one token
of the prompt is evaluated, and the greedy text is that of the server's own prefill; one that does not fit is
refused; what the server then saves is imported, and verified by the model. The last line is the result.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT))

from kvsnap.cli.bundled import bundled_model

TEXT = (
    "The old library by the river opens at nine and closes at five, but on Sundays it rests. " * 6
)
NEW = 16
CASES: dict[str, tuple[list[str], list[str]]] = {
    "default": ([], []),
    "-np 1 -fa off": (["-np", "1", "-fa", "off"], ["--v-transposed"]),
    "-np 2, not unified": (["-np", "2", "--no-kv-unified"], ["--streams", "2"]),
    "-ctk q8_0 -ctv q8_0": (["-ctk", "q8_0", "-ctv", "q8_0"], []),
    "as a sequence file": ([], ["--to", "llama.cpp", "--format-version", "4"]),
}
"""Options of the server, and of the export."""


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        passed = [run(folder, case, *options) for case, options in CASES.items()]
    print("passed" if all(passed) else "FAILED")
    sys.exit(not all(passed))


def run(folder: Path, case: str, server: list[str], export: list[str]) -> bool:
    store, slots = folder / f"store {case}", folder / f"slots {case}"
    slots.mkdir()
    model = ["--model", str(bundled_model())]
    if "-ctk" in server:
        model += ["--flash-attn", "on", "--cache-type-k", "q8_0", "--cache-type-v", "q8_0"]
    saved = kvsnap(store, "save", *model, "--prompt", TEXT, "--session", "s")
    to = [] if "--to" in export else ["--to", "llama-server"]
    kvsnap(store, "export", "s", *to, *export, str(slots / "ours.bin"))
    wrong = ["--streams", "3"] if "--v-transposed" in export else ["--v-transposed"]
    if "-ctk" in server:  # quantized V cannot be transposed
        wrong = ["--streams", "3"]
    kvsnap(store, "export", "s", "--to", "llama-server", *wrong, str(slots / "wrong.bin"))
    with Server([*server, "--slot-save-path", str(slots)]) as running:
        native = running.complete(cache_prompt=False)
        running.post("/slots/0?action=erase", {})
        refused = running.post("/slots/0?action=restore", {"filename": "wrong.bin"})[0]
        status, answer = running.post("/slots/0?action=restore", {"filename": "ours.bin"})
        ours = running.complete(cache_prompt=True)
        running.post("/slots/0?action=save", {"filename": "theirs.bin"})
    taken = kvsnap(store, "import", str(slots / "theirs.bin"), *model, "--session", "theirs")
    passed = (
        (status, refused) == (200, 400)
        and answer["n_restored"] == saved["tokens"]
        and ours["timings"]["prompt_n"] == 1
        and ours["content"] == native["content"]
        and taken["verified"]
    )
    told = {
        "restored": answer.get("n_restored"),
        "prompt_n": ours["timings"]["prompt_n"],
        "same_text": ours["content"] == native["content"],
        "wrong_kind": refused,
        "imported_tokens": taken["tokens"],
        "difference": round(taken["difference"], 4),
    }
    print(f"{case:22}{json.dumps(told)}", flush=True)
    return bool(passed)


def kvsnap(store: Path, *arguments: str) -> Any:
    command = [sys.executable, "-m", "kvsnap", "--store", str(store), "--json", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(arguments)}: {done.stderr}")
    return json.loads(done.stdout)


class Server:
    def __init__(self, options: list[str]) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        command = [sys.argv[1], "-m", str(bundled_model()), "-c", "1024", "--port", str(port)]
        quiet = subprocess.DEVNULL
        self.process = subprocess.Popen([*command, *options], stdout=quiet, stderr=quiet)

    def __enter__(self) -> Self:
        for _ in range(300):
            try:
                with urllib.request.urlopen(f"{self.url}/health"):
                    return self
            except OSError:
                time.sleep(0.1)
        sys.exit("the server does not start")

    def __exit__(self, *problem: object) -> None:
        self.process.kill()
        self.process.wait()

    def complete(self, *, cache_prompt: bool) -> Any:
        more = {"n_predict": NEW, "temperature": 0, "id_slot": 0, "cache_prompt": cache_prompt}
        return self.post("/completion", {"prompt": TEXT, **more})[1]

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        data, kind = json.dumps(body).encode(), {"content-type": "application/json"}
        try:
            with urllib.request.urlopen(
                urllib.request.Request(self.url + path, data, kind)
            ) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, {}


if __name__ == "__main__":
    main()
