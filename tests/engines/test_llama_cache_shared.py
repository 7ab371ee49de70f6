"""Two machines' LlamaCaches with one remote: what one computed, the other one does not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.engine

CHILD = """
import json, sys
import llama_cpp, kvsnap
model, store, remote, messages = json.loads(sys.argv[1])
llm = llama_cpp.Llama(model, n_ctx=512, n_threads=1, n_threads_batch=1, verbose=False)
with kvsnap.Store(store, remote=remote, write_behind=True) as kept:
    llm.set_cache(kvsnap.LlamaCache(kept, llm))
    decoded, decode = [], llm._ctx.decode
    llm._ctx.decode = lambda batch: (decoded.append(batch.batch.n_tokens), decode(batch))
    said = llm.create_chat_completion(messages, max_tokens=4, temperature=0.0)
    print(json.dumps([said["choices"][0]["message"]["content"], sum(decoded)]))
    llm.set_cache(None)
"""
SYSTEM = {"role": "system", "content": "A bicycle rental keeps its bicycles in two halls. " * 20}


def ask(model: Path, store: Path, remote: str, question: str) -> Any:
    job = json.dumps(
        [str(model), str(store), remote, [SYSTEM, {"role": "user", "content": question}]]
    )
    command = [sys.executable, "-c", CHILD, job]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_blocks_without_a_session_go_to_the_remote_and_are_read_through_elsewhere(
    model: Path, tmp_path: Path
) -> None:
    remote = f"file://{tmp_path}/remote"
    _, cold = ask(model, tmp_path / "a", remote, "Where are the bicycles?")
    assert cold > 200
    assert not list((tmp_path / "remote").glob("manifests/**/*.safetensors"))
    text, decoded = ask(model, tmp_path / "b", remote, "Where are the bicycles?")
    assert decoded < 64 + 4
    assert (text, decoded) == tuple(ask(model, tmp_path / "c", remote, "Where are the bicycles?"))
    _, other = ask(model, tmp_path / "b", f"file://{tmp_path}/empty", "How many halls are there?")
    assert other < 64 + 4, "from its own store, where the remote has nothing"
