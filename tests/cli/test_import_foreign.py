"""`kvsnap import` and `export --to` with other tools' files, on the bundled model."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from kvsnap.formats.interchange import FORMATS
from kvsnap.formats.interchange.mlx_states import NEW
from kvsnap.formats.interchange.safetensors_file import parse_tensors, write_tensors
from kvsnap.kvstore.store import Store

pytestmark = pytest.mark.engine
SAMPLES = Path(__file__).parents[1] / "golden" / "foreign"
SLOT = SAMPLES / "llama_server_slot_v4_smollm2.bin"
GREEDY = json.loads((SAMPLES / "expected.json").read_text())["files"][SLOT.name]["greedy"]["greedy"]


@pytest.fixture
def saved(kvsnap: Any, model: Path, chat: Path) -> Any:
    done = kvsnap("--json", "save", "--model", model, "--messages", chat, "--session", "s")
    assert done.code == 0, done.err
    return done.json


def test_a_slot_of_the_real_server_becomes_a_session_that_goes_on_as_the_server_did(
    kvsnap: Any, model: Path
) -> None:
    done = kvsnap("--json", "import", SLOT, "--model", model, "--session", "a")
    assert done.code == 0, done.err
    found = done.json
    assert (found["format"], found["tokens"], found["fidelity"]) == ("llama-server", 20, "exact")
    assert found["verified"]
    assert 0 < found["difference"] < found["bound"] < 0.36
    assert found["computed_tokens"] == 20 + 16 + 4
    resumed = kvsnap("--json", "resume", "a", "--model", model, "--max-tokens", 8).json
    assert resumed["reused_tokens"] == 19
    assert resumed["token_ids"] == GREEDY[:8]


@pytest.mark.parametrize("to", ["llama-server", "llama.cpp", "llama.cpp-session"])
def test_what_is_exported_comes_back_whole_into_another_store(
    kvsnap: Any, model: Path, saved: Any, tmp_path: Path, to: str
) -> None:
    out = tmp_path / "out.bin"
    done = kvsnap("--json", "export", "s", "--to", to, out)
    assert done.code == 0, done.err
    assert done.json["bytes"] == out.stat().st_size
    assert not list(tmp_path.glob(".out*"))
    again = ["--store", tmp_path / "other", "import", out, "--model", model, "--session", "t"]
    back = kvsnap("--json", *again)
    assert back.code == 0, back.err
    assert (back.json["format"], back.json["tokens"]) == (to, saved["tokens"])
    shown = [
        kvsnap("--store", store, "--json", "show", name).json["blocks"]
        for store, name in ((tmp_path / "store", "s"), (tmp_path / "other", "t"))
    ]
    assert [block["name"] for block in shown[0]] == [block["name"] for block in shown[1]]


def test_a_file_without_ids_needs_the_tokens_it_was_made_from_and_gets_them_checked(
    kvsnap: Any, model: Path, saved: Any, chat: Path, tmp_path: Path
) -> None:
    out = tmp_path / "cache.safetensors"
    assert kvsnap("export", "s", "--to", "mlx-lm", out).code == 0
    take = ["import", out, "--model", model, "--session", "t"]
    missing = kvsnap(*take)
    assert missing.code == 2
    assert "--prompt-file" in missing.err
    done = kvsnap("--json", *take, "--messages", chat)
    assert done.code == 0, done.err
    assert done.json["format"] == "mlx-lm"
    assert done.json["blocks_written"] == 0  # the same rows, so the same blocks, which are there
    asked = kvsnap("--json", "resume", "t", "--model", model, "--prompt", "Now?", "--max-tokens", 1)
    assert asked.json["reused_tokens"] == saved["tokens"]

    messages = json.loads(chat.read_text())
    listed = messages if isinstance(messages, list) else messages["messages"]
    listed[0]["content"] = listed[0]["content"].replace("small", "large", 1)
    chat.write_text(json.dumps(messages))
    wrong = kvsnap(*take[:-1], "u", "--messages", chat)
    assert wrong.code == 1
    assert "not what" in wrong.err or "rows of" in wrong.err


def test_the_model_of_an_import_must_be_given_and_the_session_be_new(
    kvsnap: Any, model: Path, saved: Any
) -> None:
    del saved
    for arguments, told in [
        (["import", SLOT, "--session", "a"], "--model"),
        (["import", SLOT, "--model", model], "--session"),
        (["import", SLOT, "s", "--model", model], "--session NAME"),
        (["import", SLOT, "--model", model, "--session", "s"], "another name"),
        (["import", SLOT, "--from", "mlx", "--model", model, "--session", "a"], "mlx-lm"),
        (["import", SLOT, "--model", model, "--session", "a", "--dry-run"], "leave out"),
        (["import", SLOT, "--model", model, "--session", "s", "--force"], "leave out"),
    ]:
        done = kvsnap(*arguments)
        assert done.code == 2, (arguments, done.err)
        assert told in done.err
        assert len(done.err.strip().splitlines()) == 2


def test_what_a_file_says_of_itself_never_stands_for_what_was_checked(
    kvsnap: Any, model: Path, saved: Any, chat: Path, tmp_path: Path
) -> None:
    out, store = tmp_path / "cache.safetensors", tmp_path / "other"
    assert kvsnap("export", "s", "--to", "mlx-lm", out).code == 0
    file = parse_tensors(memoryview(out.read_bytes()))
    said = {f"{NEW.user}{key}": "true" for key in ("verified", "format", "note")}
    out.write_bytes(write_tensors({**file.metadata, **said}, file.tensors))
    given = ["--model", model, "--session", "t", "--messages", chat, "--unverified"]
    done = kvsnap("--store", store, "import", out, *given)
    assert done.code == 0, done.err
    with Store(store) as opened:
        notes = opened.find_session("t", None).record.notes["imported"]
    assert (notes["verified"], notes["format"], notes["note"]) == (False, "mlx-lm", "true")


def test_a_portable_file_is_still_taken_as_one(kvsnap: Any, saved: Any, tmp_path: Path) -> None:
    del saved
    out = tmp_path / "s.kvsnap"
    assert kvsnap("export", "s", out).code == 0
    refused = kvsnap("import", out, "--session", "t")
    assert refused.code == 2
    assert "--as NAME" in refused.err
    assert kvsnap("--store", tmp_path / "other", "import", out).code == 0


@pytest.mark.parametrize("name", ["nothing", "empty", "text", "folder", "fifo", "cut", "missing"])
def test_what_cannot_be_read_is_one_clear_line(
    kvsnap: Any, model: Path, tmp_path: Path, name: str
) -> None:
    path = tmp_path / name
    if name == "empty":
        path.touch()
    elif name == "text":
        path.write_text("no cache at all\n" * 100)
    elif name == "folder":
        path.mkdir()
    elif name == "fifo":
        os.mkfifo(path)
    elif name == "cut":
        path.write_bytes(SLOT.read_bytes()[:-5])
    done = kvsnap("import", path, "--model", model, "--session", "a", timeout=60)
    assert done.code in (1, 2)
    assert name in done.err
    assert "written by kvsnap" not in done.err
    assert len(done.err.strip().splitlines()) == 2, done.err
    assert "kvsnap verify" not in done.err  # it looks at the store, and that is whole
    assert kvsnap("--json", "ls").json == []


@pytest.mark.usefixtures("saved")
def test_an_export_is_there_whole_or_not_at_all(kvsnap: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.write_text("mine")
    assert kvsnap("export", "s", "--to", "llama.cpp", out).code == 2
    assert out.read_text() == "mine"
    assert kvsnap("export", "s", "--to", "quant.cpp", tmp_path / "q.kv").code in (1, 2)
    versioned = kvsnap("export", "s", "--to", "mlx-lm", "--format-version", 3, tmp_path / "m")
    assert versioned.code == 2
    assert "no versions" in versioned.err
    assert not (tmp_path / "m").exists()
    assert not (tmp_path / "q.kv").exists()
    assert kvsnap("export", "s", "--to", "llama.cpp", "--force", out).code == 0
    assert out.read_bytes()[:4] == b"qsgg"
    shutil.rmtree(next((tmp_path / "store" / "blocks").iterdir()))
    lost = kvsnap("export", "s", "--to", "llama.cpp", tmp_path / "lost")
    assert lost.code == 1
    assert "resume the session" in lost.err
    assert not (tmp_path / "lost").exists()
    assert not list(tmp_path.glob(".*unfinished"))


def test_the_help_names_every_format(kvsnap: Any) -> None:
    for command in ("import", "export"):
        text = "".join(kvsnap(command, "--help").out.split())
        assert [name for name in FORMATS if name not in text] == []
