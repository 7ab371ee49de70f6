"""`kvsnap doctor DIR`: text, JSON and exit codes, and names that mean harm come out escaped."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.cli.in_process import Ran, run

SAMPLES = Path(__file__).parents[1] / "golden" / "foreign"
SLOT = SAMPLES / "llama_server_slot_v4_f16_np1.bin"
EVIL = "\x1b[2J\x07\x7f\x9b31m\u202eexe.\u2066\r\nproblem INJECTED\n"


def harmless(ran: Ran) -> None:
    assert not ran.complaint(), ran.complaint()
    for line in (ran.out + ran.err).split("\n"):
        assert line.isprintable(), line
        assert not line.startswith("problem INJECTED")


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("sglang_hicache_file", "SGLang HiCacheFile, model 'llama4L': 2 pages"),
        ("lmcache_fs", "LMCache fs, model 'llama4L': one chunk"),
        ("vllm_example_connector", "vLLM ExampleConnector: one prompt"),
        ("vllm_fs_tier", "vLLM fs tier, model 'llama4L', bfloat16: 2 files"),
        ("", "llama-server slot file: 5 files"),
    ],
)
def test_folders_of_samples_are_fine_in_text_and_json(name: str, told: str) -> None:
    ran = run("doctor", SAMPLES / name)
    harmless(ran)
    assert ran.code == 0
    assert told in ran.out
    assert "\n        -> " in ran.out
    found = run("--json", "doctor", SAMPLES / name)
    assert found.code == 0
    assert [set(one) for one in found.json] == [{"level", "what", "advice"}] * len(found.json)
    assert any(told in one["what"] and one["level"] == "ok" for one in found.json)


def test_a_cut_slot_file_is_exit_code_1_in_text_and_json(tmp_path: Path) -> None:
    (tmp_path / "slot.bin").write_bytes(SLOT.read_bytes()[:5000])
    ran = run("doctor", tmp_path)
    harmless(ran)
    assert ran.code == 1
    assert "llama-server process" in ran.out
    asked = run("doctor", tmp_path, "--json")
    assert asked.code == 1
    assert [one["level"] for one in asked.json].count("problem") == 1


def test_the_line_for_import_is_quoted_for_a_shell(tmp_path: Path) -> None:
    folder = tmp_path / "a b'; rm -rf $HOME"
    folder.mkdir()
    shutil.copy(SLOT, folder / "x'$(id)")
    ran = run("doctor", folder)
    harmless(ran)
    assert ran.code == 0
    (line,) = (line for line in ran.out.split("\n") if "-> kvsnap import" in line)
    import shlex

    words = shlex.split(line.partition("-> ")[2])
    assert words[2] == str(folder / "x'$(id)")
    assert words[3:] == ["--from", "llama-server", "--model", "MODEL", "--session", "NAME"]


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_names_with_escapes_come_out_escaped(tmp_path: Path, form: tuple[str, ...]) -> None:
    folder = tmp_path / f"in{EVIL}"
    (folder / f"{EVIL}{'a' * 32}").mkdir(parents=True)
    key = "b" * 64
    for name, content in (
        (f"{key}_{EVIL}_0_1.bin", b"x"),
        (f"{'c' * 64}_{EVIL}_0_1.bin", b"xy"),
        (f"{EVIL}@0x01000100@0@{key}.data", b""),
        (f"{EVIL}{'a' * 32}/model.layers.1.attn.safetensors", b"x"),
        (f"slot{EVIL}", SLOT.read_bytes()[:999]),
        (f"ok{EVIL}", SLOT.read_bytes()),
        (f"{EVIL}.tmp", b"x"),
        (f"text{EVIL}", b"x"),
    ):
        (folder / name).write_bytes(content)
    (folder / f"link{EVIL}").symlink_to("/")
    os.mkfifo(folder / f"fifo{EVIL}")
    (folder / os.fsdecode(b"not\xff\xfeutf8")).write_bytes(b"x")
    base = folder / f"m{EVIL}_{'0' * 12}"
    base.mkdir()
    (base / "config.json").write_text('{"model_name": "\\u001b[2J"}')
    ran = run(*form, "doctor", folder)
    harmless(ran)
    assert ran.code == 1
    assert "INJECTED" in ran.out
    assert ran.out.count("link") >= 1
    if form:
        assert any(EVIL in one["what"] for one in ran.json)


def test_where_there_is_no_folder_the_error_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for path, code in ((tmp_path / f"no{EVIL}", 1), (tmp_path / "file", 2), (SLOT, 2)):
        ran = run("doctor", path)
        harmless(ran)
        assert ran.code == code
        assert not ran.out


def test_without_a_folder_it_looks_at_the_store_as_before(tmp_path: Path) -> None:
    ran = run("--store", tmp_path / "store", "doctor", "--engine", "sglang")
    assert "nothing there yet" in ran.out
    assert "SGLang" in ran.out or "sglang" in ran.out


def test_a_store_s_own_folder_is_told_as_one(tmp_path: Path) -> None:
    (tmp_path / "kvsnap.json").write_text("{}")
    ran = run("doctor", tmp_path)
    assert ran.code == 0
    assert f"kvsnap doctor --store {tmp_path}" in ran.out
