"""Seconds to the first token, cold against resumed, each in a process of its own.

    python tests/bench/first_token.py [--tokens 500,1500,4000]

Cold: `kvsnap resume --no-save` of a prompt in an empty store. Resumed: the same prompt, saved by
another process, as an unchanged session. Both from the command's own JSON (`first_token` counts
from the prompt being known; loading the model is in neither).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from kvsnap.cli.bundled import bundled_model


def run(store: Path, *arguments: object) -> Any:
    command = [sys.executable, "-m", "kvsnap", "--json", "--store", str(store)]
    command += [str(argument) for argument in arguments]
    return json.loads(subprocess.run(command, check=True, capture_output=True).stdout)


def measure(tokens: int, rounds: int, flags: list[str]) -> None:
    model = bundled_model()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ids = np.random.default_rng(tokens).integers(1000, 20000, tokens)
        (folder / "ids.json").write_text(json.dumps(ids.tolist()))
        source = ["--model", model, "--token-ids", folder / "ids.json", *flags]
        end = ["--max-tokens", 1, "--no-save"]
        saved = run(folder / "s", "save", *source, "--session", "bench")
        cold = [run(folder / "none", "resume", *source, *end) for _ in range(min(rounds, 3))]
        resumed = [
            run(folder / "s", "resume", "bench", "--model", model, *flags, *end)
            for _ in range(rounds)
        ]
        assert all(found["computed_tokens"] == 1 for found in resumed)
        slow = min(found["seconds"]["first_token"] for found in cold)
        best = min(resumed, key=lambda found: found["seconds"]["first_token"])["seconds"]
        median = float(np.median([found["seconds"]["first_token"] for found in resumed]))
        print(
            f"{tokens} tokens: cold {slow:.2f} s; resumed {best['first_token'] * 1e3:.1f} ms"
            f" (restore {best['restore'] * 1e3:.1f}, one token {best['prefill'] * 1e3:.1f};"
            f" median {median * 1e3:.1f}): {slow / best['first_token']:.0f}x"
            f" (median {slow / median:.0f}x); {saved['bytes_written'] / 1e6:.1f} MB in"
            f" {saved['blocks']} blocks, written in {saved['seconds']['write'] * 1e3:.0f} ms"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", default="500,1500,4000")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("flags", nargs="*", help="further options of kvsnap, after --")
    options = parser.parse_args()
    for count in options.tokens.split(","):
        measure(int(count), options.rounds, options.flags)
