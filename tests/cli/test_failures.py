"""What goes wrong around kvsnap: one clear error, nothing lost, and the next run works."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.engine


def one_error(done: Any, code: int, *words: str) -> None:
    lines = done.err.strip().splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    assert done.code == code, done.err
    assert len(errors) == 1, done.err
    assert lines[-1].startswith("  "), "a line that says what to do"
    for word in words:
        assert word in done.err


def test_a_missing_model_is_one_error(kvsnap: Any, tmp_path: Path) -> None:
    done = kvsnap("save", "--model", tmp_path / "none.gguf", "--prompt", "Hello")
    one_error(done, 1, "no model file", "none.gguf")


@pytest.mark.parametrize("content", [b"", b"GGU", b"PK\x03\x04 a zip", b"GGUF\x03\0\0\0 cut"])
def test_a_model_that_is_no_gguf_is_one_error(kvsnap: Any, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "bad.gguf").write_bytes(content)
    done = kvsnap("save", "--model", tmp_path / "bad.gguf", "--prompt", "Hello")
    one_error(done, 1, "bad.gguf")


def test_a_context_smaller_than_the_prompt_is_one_error(
    kvsnap: Any, model: Path, chat: Path, store: Path
) -> None:
    for command in (["save", "--session", "s"], ["resume"]):
        done = kvsnap(*command, "--model", model, "--messages", chat, "--ctx", 64)
        one_error(done, 1, "context", "--ctx")
    assert not list(store.rglob("*.safetensors"))


def test_an_unknown_session_is_one_error(kvsnap: Any, model: Path) -> None:
    for command in (["resume", "none", "--model", model], ["show", "none"], ["rm", "none"]):
        one_error(kvsnap(*command), 1, "'none'")
    one_error(kvsnap("verify", "none"), 1, "'none'")


def test_usage_errors_leave_with_2(kvsnap: Any, model: Path, tmp_path: Path) -> None:
    (tmp_path / "m.json").write_text('[{"role": "user"}]')
    (tmp_path / "t.json").write_text("[1, -2]")
    for command, word in (
        (["save", "--model", model], "no prompt"),
        (["resume", "--model", model], "nothing to resume"),
        (["save", "--model", model, "--prompt", "a", "--prompt-file", "b"], "more than one"),
        (["save", "--model", model, "--messages", tmp_path / "m.json"], "content"),
        (["save", "--model", model, "--token-ids", tmp_path / "t.json"], "token id"),
        (["save", "--model", model, "--prompt", "a", "--session", ""], "session name"),
        (["save", "--model", model, "--prompt", "a", "--pin"], "--pin"),
    ):
        one_error(kvsnap(*command), 2, word)
    assert kvsnap("save", "--modell", model).code == 2
    assert kvsnap("nonsense").code == 2


def test_an_unknown_codec_or_engine_or_type_is_named(kvsnap: Any, model: Path) -> None:
    for flags, words in (
        (["--codec", "zip"], ("'zip'", "raw", "zstd")),
        (["--engine", "mlx"], ("'mlx'", "llama.cpp")),
        (["--cache-type-k", "q1"], ("'q1'", "f16", "q8_0")),
    ):
        one_error(kvsnap("save", "--model", model, "--prompt", "Hello", *flags), 2, *words)


def long_save(store: Path, model: Path, ids: Path) -> subprocess.Popen[str]:
    """A save that has stored blocks of its first batch and is busy with the next."""
    process = subprocess.Popen(
        [sys.executable, "-m", "kvsnap", "--store", str(store), "save", "--model", str(model),
         "--token-ids", str(ids), "--session", "long"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    deadline = time.monotonic() + 120
    while not list(store.rglob("blocks/*/*")) and time.monotonic() < deadline:
        assert process.poll() is None, "the save was over before it could be interrupted"
        time.sleep(0.01)
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_save_keeps_what_it_stored(
    kvsnap: Any, model: Path, store: Path, tmp_path: Path, number: signal.Signals
) -> None:
    ids = tmp_path / "ids.json"
    ids.write_text(json.dumps([1000 + n % 20000 for n in range(3000)]))
    process = long_save(store, model, ids)
    process.send_signal(number)
    _, err = process.communicate(timeout=120)
    if number == signal.SIGINT:
        assert process.returncode == 130
        assert err.strip() == "interrupted; what was stored before is kept"
        assert not list((store / "tmp").iterdir())
    assert kvsnap("verify").code == 0
    assert kvsnap("show", "long").code == 1  # never reported, never half there
    ids.write_text(json.dumps(json.loads(ids.read_text())[:600]))
    again = kvsnap("--json", "save", "--model", model, "--token-ids", ids, "--session", "long").json
    assert again["reused_tokens"] >= 64
    assert again["reused_tokens"] + again["computed_tokens"] == 600
    assert kvsnap("verify", "long").code == 0


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that another user can reach; pytest's own are closed."""
    folder = Path(tempfile.mkdtemp(prefix="kvsnap-test-"))
    folder.chmod(0o755)
    yield folder
    for path in (folder, *folder.rglob("*")):
        if path.is_dir():
            path.chmod(0o700)
    shutil.rmtree(folder)


def make_read_only(store: Path, how: str) -> list[str]:
    """Returns what to put before a command, so that it runs where `store` cannot be written."""
    if how == "modes":  # root passes all modes, unless its capabilities are taken away
        for path in (*store.rglob("*"), store):
            path.chmod(0o500 if path.is_dir() else 0o400)
        return ["setpriv", "--bounding-set=-all", "--inh-caps=-all"]
    subprocess.run(["mount", "--bind", str(store), str(store)], check=True)
    subprocess.run(["mount", "-o", "remount,ro,bind", str(store)], check=True)
    return []


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("setpriv") is None, reason="needs root and setpriv"
)
@pytest.mark.parametrize("how", ["modes", "mount"])
def test_a_read_only_store_is_read_and_says_so_when_written(
    kvsnap: Any, model: Path, open_folder: Path, how: str
) -> None:
    store, ids = open_folder / "store", open_folder / "ids.json"
    ids.write_text(json.dumps(list(range(5000, 5150))))
    save = ["--store", store, "save", "--model", model, "--token-ids", ids, "--session", "s"]
    assert kvsnap(*save).code == 0
    before = {path: path.read_bytes() for path in store.rglob("*") if path.is_file()}
    ids.write_text(json.dumps(list(range(5000, 5300))))
    prefix = make_read_only(store, how)
    try:
        one_error(kvsnap(*save, prefix=prefix), 1, "cannot write to the store")
        resume = ["--store", store, "--json", "resume", "s", "--model", model, "--max-tokens", 4]
        answered = kvsnap(*resume, prefix=prefix)
        assert answered.code == 3, answered.err
        assert answered.json["reused_tokens"] == 149
        assert "answered, but not saved" in answered.err
        for command in (["ls"], ["stats"], ["show", "s"], ["verify"]):
            assert kvsnap("--store", store, *command, prefix=prefix).code == 0
    finally:
        if how == "mount":
            subprocess.run(["umount", str(store)], check=True)
    for path in (store, *store.rglob("*")):
        path.chmod(0o700 if path.is_dir() else 0o600)
    assert {path: path.read_bytes() for path in before} == before
    assert kvsnap(*save).code == 0


@pytest.fixture
def small_disk(open_folder: Path) -> Iterator[Path]:
    """A disk of 3 MB: room for two blocks of 64 tokens."""
    disk = open_folder / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no file system can be mounted here")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk_is_one_error_and_keeps_what_was_stored(
    kvsnap: Any, model: Path, small_disk: Path, tmp_path: Path
) -> None:
    ids = tmp_path / "ids.json"
    store = ["--store", small_disk / "store"]

    def save(count: int) -> Any:
        ids.write_text(json.dumps(list(range(6000, 6000 + count))))
        return kvsnap(
            *store, "--json", "save", "--model", model, "--token-ids", ids, "--session", "s"
        )

    assert save(64).code == 0
    # The conversation is saved with the blocks that fit: partly done, and nothing is lost.
    one_error(save(640), 3, "the store is full", "of 10 blocks")
    assert not list((small_disk / "store" / "tmp").iterdir())
    assert kvsnap(*store, "verify").code == 0
    resumed = kvsnap(*store, "--json", "resume", "s", "--model", model, "--max-tokens", 4)
    assert resumed.code == 3, resumed.err
    assert resumed.json["prompt_tokens"] == 640
    assert resumed.json["reused_tokens"] in (64, 128)
    assert resumed.json["generated_tokens"] > 0
    again = save(64).json
    assert (again["computed_tokens"], again["blocks_written"]) == (0, 0)
