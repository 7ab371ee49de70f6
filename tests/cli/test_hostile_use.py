"""What people and other programs do to a command: closed pipes, lost Ctrl-C, other models."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from kvsnap.cli import interrupt

pytestmark = pytest.mark.engine


def test_a_reader_that_goes_away_does_not_cost_the_answer(
    kvsnap: Any, model: Path, chat: Path, store: Path
) -> None:
    kvsnap("save", "--model", model, "--messages", chat, "--session", "s")
    command = [
        sys.executable, "-m", "kvsnap", "--store", str(store), "resume", "s",
        "--model", str(model), "--max-tokens", "12",
    ]  # fmt: skip
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert done.returncode == 3
    assert "stdout was closed before the end" in done.stderr
    assert kvsnap("show", "s", "--json").json["revision"] == 2


def test_metadata_that_cannot_be_read_is_refused_by_name(
    kvsnap: Any, model: Path, tmp_path: Path
) -> None:
    data = bytearray(model.read_bytes())
    at = data.index(b"Smollm2 135M")
    data[at] = 0xFF  # llama-cpp-python gives no metadata at all where one value is no UTF-8
    (tmp_path / "bad.gguf").write_bytes(data)
    done = kvsnap("save", "--model", tmp_path / "bad.gguf", "--prompt", "Hello")
    assert done.code == 1
    assert "metadata cannot be read" in done.err


def test_a_chat_of_another_model_is_tokenized_anew(
    kvsnap: Any, model: Path, chat: Path, tmp_path: Path
) -> None:
    kvsnap("save", "--model", model, "--messages", chat, "--session", "s")
    data = bytearray(model.read_bytes())
    data[-1000] ^= 1
    other = tmp_path / "other.gguf"
    other.write_bytes(data)
    done = kvsnap("resume", "s", "--model", other, "--prompt", "And?", "--max-tokens", 2, "--json")
    assert done.code == 0
    assert "tokenized anew" in done.err
    assert done.json["reused_tokens"] == 0


def test_replacing_another_conversation_is_said(kvsnap: Any, model: Path) -> None:
    save = ["save", "--model", model, "--session", "s", "--prompt"]
    assert "warning" not in kvsnap(*save, "One two three").err
    assert "warning" not in kvsnap(*save, "One two three four").err
    assert "held another conversation" in kvsnap(*save, "Something else").err


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (["--threads", "10000"], "512"),
        (["--ctx", "99999999999"], "--ctx"),
        (["--rope-freq-base", "nan"], "finite"),
        (["--rope-freq-base", "-5"], "more than 0"),
        (["--rope-scale", "0"], "more than 0"),
        (["--store", ""], "--store is empty"),
        (["--prompt-file", "/dev/zero"], "regular file"),
    ],
    ids=lambda value: "".join(value) if isinstance(value, list) else None,
)
def test_settings_that_cannot_be_meant_are_usage_errors(
    kvsnap: Any, model: Path, flags: list[str], word: str
) -> None:
    prompt = [] if "--prompt-file" in flags else ["--prompt", "Hello"]
    done = kvsnap("save", "--model", model, *prompt, *flags, timeout=60)
    assert done.code == 2
    assert word in done.err
    assert len(done.err.strip().splitlines()) == 2


def test_a_fifo_as_model_is_an_error_and_no_hang(kvsnap: Any, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.gguf")
    done = kvsnap("save", "--model", tmp_path / "fifo.gguf", "--prompt", "x", timeout=60)
    assert done.code == 2


def test_json_with_a_byte_order_mark_is_read(kvsnap: Any, model: Path, tmp_path: Path) -> None:
    path = tmp_path / "bom.json"
    path.write_text(json.dumps([1000, 1001]), encoding="utf-8-sig")
    assert kvsnap("save", "--model", model, "--token-ids", path).code == 0


def test_an_interrupt_that_c_code_swallowed_is_asked_for_again() -> None:
    before = signal.getsignal(signal.SIGINT)
    try:
        interrupt.watch()
        interrupt.check()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            interrupt.check()
    finally:
        signal.signal(signal.SIGINT, before)
        interrupt._seen = threading.Event()
