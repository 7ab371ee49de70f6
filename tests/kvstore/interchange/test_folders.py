"""What doctor says of folders of other tools: each kind by name, what is cut or odd, and nothing opened or
followed that should not be."""

from __future__ import annotations

import json
import os
import shutil
import socket
import time
from collections.abc import Iterable
from pathlib import Path

import pytest

from kvsnap.formats.errors import KvsnapError, NotFound, UsageError
from kvsnap.kvstore.doctor import Finding
from kvsnap.kvstore.interchange import folder_walk, folders
from kvsnap.kvstore.interchange.folders import examine_folder
from kvsnap.kvstore.store import Store

SAMPLES = Path(__file__).parents[2] / "golden" / "foreign"
SLOTS = sorted(SAMPLES.glob("llama_server_slot*.bin"))
MD5 = "a475f74bc6b0a16263dbf44a39b82c72"
BASE = "llama4L_7e6fc280d529"


def copied(tmp_path: Path, name: str) -> Path:
    return Path(shutil.copytree(SAMPLES / name, tmp_path / name))


def slots(tmp_path: Path) -> Path:
    folder = tmp_path / "slots"
    folder.mkdir()
    for path in SLOTS:
        shutil.copy(path, folder)
    return folder


def findings(folder: Path) -> list[Finding]:
    before = snapshot(folder)
    found = list(examine_folder(folder))
    assert snapshot(folder) == before
    assert all(one.level in ("ok", "note", "problem") for one in found)
    return found


def snapshot(folder: Path) -> list[tuple[str, int, int]]:
    stats = [(path, path.lstat()) for path in sorted(folder.rglob("*"))]
    return [(str(path), stat.st_mode, stat.st_mtime_ns) for path, stat in stats]


def of(found: Iterable[Finding], level: str) -> list[str]:
    return [f"{one.what} -> {one.advice}" for one in found if one.level == level]


def only(found: Iterable[Finding], level: str) -> str:
    (line,) = of(found, level)
    return line


def test_sglang_s_pages_are_told(tmp_path: Path) -> None:
    found = findings(copied(tmp_path, "sglang_hicache_file"))
    assert not of(found, "problem")
    assert not of(found, "note")
    told = of(found, "ok")[1]
    assert "SGLang HiCacheFile, model 'llama4L': 2 pages, 131.1 kB (rank 0 of 1)" in told
    assert "--from sglang --model MODEL --block-tokens PAGE --token-ids FILE" in told
    assert str(tmp_path) in told


def test_lmcache_s_chunks_are_told(tmp_path: Path) -> None:
    found = findings(copied(tmp_path, "lmcache_fs"))
    assert not of(found, "problem") + of(found, "note")
    assert "LMCache fs, model 'llama4L': one chunk" in of(found, "ok")[1]
    assert "--chunk-tokens CHUNK" in of(found, "ok")[1]


@pytest.mark.parametrize("below", ["", MD5])
def test_vllm_s_example_folders_are_told(tmp_path: Path, below: str) -> None:
    found = findings(copied(tmp_path, "vllm_example_connector") / below)
    assert not of(found, "problem") + of(found, "note")
    assert "vLLM ExampleConnector: one prompt" in of(found, "ok")[1]


@pytest.mark.parametrize("below", ["", f"{BASE}_r0"])
def test_vllm_s_fs_tier_is_told(tmp_path: Path, below: str) -> None:
    found = findings(copied(tmp_path, "vllm_fs_tier") / below)
    assert not of(found, "problem")
    told = of(found, "ok")[1]
    assert "2 files" in told
    assert "cannot be imported" in told
    if below:
        assert "config.json is missing" in only(found, "note")
    else:
        assert "model 'llama4L', bfloat16" in told
        assert "4 layers in blocks of 32 tokens" in told
        assert not of(found, "note")


def test_slot_files_are_walked_through(tmp_path: Path) -> None:
    found = findings(slots(tmp_path))
    assert not of(found, "problem") + of(found, "note")
    assert f"{len(SLOTS)} files" in of(found, "ok")[1]
    assert "tokens in the 5 that are whole" in of(found, "ok")[1]
    assert "--from llama-server" in of(found, "ok")[1]


@pytest.mark.parametrize("length", [20, 200, 4096, 40000, 82707])
def test_a_slot_file_that_is_cut_is_said_to_end_its_server(tmp_path: Path, length: int) -> None:
    folder = slots(tmp_path)
    whole = (folder / SLOTS[0].name).read_bytes()
    (folder / "cut.bin").write_bytes(whole[:length])
    told = only(findings(folder), "problem")
    assert told.startswith("slots/cut.bin: ")
    assert "can end the llama-server process" in told


def test_of_many_cut_slots_twenty_are_listed(tmp_path: Path) -> None:
    folder = slots(tmp_path)
    whole = (folder / SLOTS[0].name).read_bytes()
    for number in range(25):
        (folder / f"cut{number}").write_bytes(whole[: 1000 + number])
    told = of(findings(folder), "problem")
    assert len(told) == 21
    assert told[-1].startswith("5 more files")


def test_a_slot_of_several_memories_or_a_sparse_giant_is_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = slots(tmp_path)
    whole = (folder / SLOTS[0].name).read_bytes()
    (folder / "windows.bin").write_bytes(whole + bytes(64))
    monkeypatch.setattr("kvsnap.kvstore.interchange.folders_single.LARGEST_SLOT", 10**6)
    with (folder / "giant.bin").open("wb") as file:
        file.write(whole[:100])
        file.truncate(2**42)
    found = findings(folder)
    assert not of(found, "problem")
    notes = "\n".join(of(found, "note"))
    assert "slots/windows.bin: 64 bytes follow" in notes
    assert "slots/giant.bin: too large" in notes


def test_single_caches_are_told_by_their_first_bytes(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    for name in ("mlx_lm_0.32.2_kvcache.safetensors", "mlx_lm_0.31.0_kvcache.safetensors", "hf_v5_kv.safetensors",
                 "hf_v5_tuple.pt", "quantcpp_f32.kv", "llama_cpp_session_v10_f16_vt0.ggsn",
                 "llama_cpp_seq_v3_f16_vt0.ggsq", "llama_cpp_2025_seq_v2_f16_vt0.ggsq"):  # fmt: skip
        shutil.copy(SAMPLES / name, folder / f"{name}.x")
    found = findings(folder)
    assert not of(found, "problem") + of(found, "note")
    lines = "\n".join(of(found, "ok")[1:])
    for kind in ("mlx-lm", "mlx-lm-0.31", "safetensors", "transformers", "quant.cpp", "llama.cpp-session",
                 "llama.cpp"):  # fmt: skip
        assert f"--from {kind} " in lines, kind


def test_a_safetensors_file_that_is_cut_is_a_problem(tmp_path: Path) -> None:
    whole = (SAMPLES / "mlx_lm_0.31.0_kvcache.safetensors").read_bytes()
    folder = tmp_path / "mlx"
    folder.mkdir()
    (folder / "a").write_bytes(whole)
    (folder / "b").write_bytes(whole[:-1])
    assert "mlx/b" in only(findings(folder), "problem")


@pytest.mark.parametrize("name", ["sglang_hicache_file", "vllm_fs_tier"])
@pytest.mark.parametrize("length", [1, 65535, 0])
def test_a_page_short_by_a_byte_or_empty_is_a_problem(
    tmp_path: Path, name: str, length: int
) -> None:
    folder = copied(tmp_path, name)
    path = min(folder.rglob("*.bin"))
    path.write_bytes(path.read_bytes()[:length])
    told = of(findings(folder), "problem")
    assert told
    assert path.name in told[0]
    assert "delete them" in told[0]


def test_files_of_many_lengths_are_a_note(tmp_path: Path) -> None:
    for number in range(9):
        (tmp_path / f"{number:064x}_m_0_1.bin").write_bytes(bytes(64 << number % 3))
    found = findings(tmp_path)
    assert not of(found, "problem")
    assert "3 lengths" in only(found, "note")


def test_models_ranks_and_pools_are_named(tmp_path: Path) -> None:
    for number in range(3):
        for rest in ("_a_0_2", "_a_1_2", "_org-b_0_1", ".mamba_c_0_1", "_mla"):
            if (number, rest) != (2, "_a_1_2"):
                (tmp_path / f"{number:064x}{rest}.bin").write_bytes(bytes(64))
    found = findings(tmp_path)
    told = "\n".join(of(found, "ok"))
    assert "model 'a': 5 pages, 320 bytes (rank 0 of 2, rank 1 of 2)" in told
    assert "model 'org-b': 3 pages, 192 bytes (rank 0 of 1)" in told
    assert "pool mamba" in told
    assert "latent attention" in told
    assert told.count("--from sglang") == 1
    assert "--session NAME --model-name org-b" in told
    assert "one device only" in told
    assert "1 pages of 'a' are not there for every rank" in only(found, "note")


def test_chunks_and_pages_of_ranks_stages_and_salts_are_named(tmp_path: Path) -> None:
    for number in range(2):
        (tmp_path / f"{number:064x}_m_0_2_2_1.bin").write_bytes(bytes(64))
        for rank in ("02000200", "02010201"):
            if (number, rank) != (1, "02010201"):
                (tmp_path / f"a-SEP-b@0x{rank}@0@{number:064x}@salt.data").write_bytes(bytes(64))
    found = findings(tmp_path)
    told = "\n".join(of(found, "ok"))
    assert "rank 0 of 2, stage 1 of 2" in told
    assert (
        "model 'a/b': 3 chunks, 192 bytes (rank 0 of 2, group 0, rank 1 of 2, group 0; one salt)"
        in told
    )
    assert "kvsnap import /" not in told
    assert "1 chunks of 'a/b' are not there for every rank" in only(found, "note")


def test_a_prompt_without_a_layer_or_with_a_cut_one_is_a_problem(tmp_path: Path) -> None:
    folder = copied(tmp_path, "vllm_example_connector")
    for number, name in enumerate(("b" * 32, "c" * 32, "d" * 32)):
        shutil.copytree(folder / MD5, folder / name)
        path = sorted((folder / name).iterdir())[number]
        if number == 0:
            path.unlink()
        elif number == 1:
            path.write_bytes(path.read_bytes()[:-1])
        else:
            path.write_bytes(path.read_bytes().replace(b"[64,2,128]", b"[64,4,064]"))
    first, second = of(findings(folder), "problem")
    assert f"{'b' * 32} (3 of 4)" in first
    assert "takes them for whole" in first
    assert "c" * 32 in second
    assert "d" * 32 in second
    assert MD5 not in first + second


def test_a_damaged_or_renamed_fs_tier_is_told(tmp_path: Path) -> None:
    folder = copied(tmp_path, "vllm_fs_tier")
    (folder / f"{BASE}_r0").rename(folder / "llama4L_000000000000_r0")
    found = findings(folder)
    notes = "\n".join(of(found, "note"))
    assert "config.json is missing" in notes
    (folder / BASE).rename(folder / "llama4L_000000000000")
    assert "belongs to a folder 'llama4L_7e6fc280d529'" in only(findings(folder), "note")
    config = folder / "llama4L_000000000000" / "config.json"
    config.write_text(config.read_text().replace('"tp_size": 1', '"tp_size": 2'))
    assert "1 ranks of 2" in "\n".join(of(findings(folder), "note"))
    config.write_text("{")
    assert "not JSON" in only(findings(folder), "problem")
    config.write_text(" " * 2**21)
    assert "too long" in only(findings(folder), "problem")


def test_blocks_of_unknown_groups_in_wrong_folders_or_too_short_are_told(tmp_path: Path) -> None:
    folder = copied(tmp_path, "vllm_fs_tier")
    block = next(folder.rglob("6b_g0"))
    block.rename(block.parent / "6c_g7")
    for path in folder.rglob("*.bin"):
        path.write_bytes(b"x")
    found = findings(folder)
    notes, problems = "\n".join(of(found, "note")), "\n".join(of(found, "problem"))
    assert "group 7 is none of config.json's" in notes
    assert "not in the folders of their hash" in notes
    assert "shorter than 128 bytes" in problems


def test_left_over_and_unknown_and_empty_files_are_notes(tmp_path: Path) -> None:
    folder = copied(tmp_path, "sglang_hicache_file")
    page = next(folder.iterdir()).name
    (folder / f"{page}.tmp.12.34567.{'ab' * 16}").write_bytes(b"x" * 10)
    (folder / f"{page}_{2**62}.tmp").write_bytes(b"x")
    (folder / "notes.txt").write_text("mine")
    (folder / "nothing").write_text("")
    notes = of(findings(folder), "note")
    assert len(notes) == 3
    assert notes[0].startswith("2 unfinished files, 11 bytes")
    assert "one empty file: sglang_hicache_file/nothing" in notes[1]
    assert "notes.txt" in notes[2]


def test_links_are_not_followed_and_fifos_not_opened(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    shutil.copy(SLOTS[0], outside)
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "link").symlink_to(outside)
    (folder / "file").symlink_to(outside / SLOTS[0].name)
    (folder / "loop").symlink_to(folder)
    (folder / f"{'a' * 64}_m_0_1.bin").symlink_to("/etc/passwd")
    os.mkfifo(folder / "fifo.bin")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(folder / "socket"))
        found = findings(folder)
    assert not of(found, "problem")
    assert of(found, "ok") == [f"{folder}: 0 files, 0 bytes -> "]
    notes = "\n".join(of(found, "note"))
    assert "4 symbolic links" in notes
    assert "2 neither files nor folders: in/fifo.bin, in/socket" in notes
    assert "nothing here is a KV cache" in notes


def test_a_link_to_the_folder_itself_is_what_was_asked_for(tmp_path: Path) -> None:
    folder = slots(tmp_path)
    (tmp_path / "link").symlink_to(folder)
    assert "5 files" in of(findings(tmp_path / "link"), "ok")[1]


def test_a_folder_exchanged_for_a_link_meanwhile_is_not_left(tmp_path: Path) -> None:
    (tmp_path / "in" / "sub").mkdir(parents=True)
    shutil.copy(SLOTS[0], tmp_path / "in" / "sub" / "a.bin")
    contents = folder_walk.walk(tmp_path / "in")
    (found,) = contents.files
    assert bytes(contents.head(found)[:4]) == b"qsgg"
    (tmp_path / "in" / "sub").rename(tmp_path / "away")
    (tmp_path / "in" / "sub").symlink_to(tmp_path / "away")
    assert contents.head(found) == b""
    with pytest.raises(OSError):  # noqa: PT011 - ENOTDIR or ELOOP, as the system has it
        contents.whole(found, 10**9)


def test_directories_named_like_files_are_no_files(tmp_path: Path) -> None:
    for name in (f"{'a' * 64}_m_0_1.bin", "config.json", f"m@0x01000100@0@{'a' * 64}.data"):
        (tmp_path / name).mkdir()
    assert "nothing here" in only(findings(tmp_path), "note")


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_what_cannot_be_read_is_a_problem(tmp_path: Path) -> None:
    folder = slots(tmp_path)
    (folder / SLOTS[0].name).chmod(0)
    (folder / "closed").mkdir(mode=0)
    told = only(findings(folder), "problem")
    assert "2 cannot be read" in told
    (folder / "closed").chmod(0o700)


def test_what_the_system_does_not_let_read_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = slots(tmp_path)
    real = os.access

    def access(name: str, mode: int, **more: int) -> bool:
        return name != SLOTS[0].name and real(name, mode, **more)

    monkeypatch.setattr(os, "access", access)
    assert f"1 cannot be read: slots/{SLOTS[0].name}" in only(findings(folder), "problem")


@pytest.mark.parametrize(
    "name",
    [
        f"{'a' * 64}_m_{'9' * 90}_{'9' * 90}.bin",
        f"{'a' * 64}_{'_1' * 90}.bin",
        f"m@0x{'f' * 8}@{'f' * 8}@{'a' * 64}.data",
        f"model.layers.{'9' * 200}.attn.safetensors",
        "model.layers.4095.attn.safetensors",
        f"{'a' * 64}_\x1b[2J\n_0_1.bin",
    ],
)
def test_hostile_names_are_only_told(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"\x00" * 64)
    found = findings(tmp_path)
    assert len(found) >= 2


@pytest.mark.parametrize(
    "content",
    [
        b"qsgg",
        b"qsgg" + b"\xff" * 60,
        b"qsgg\x04\0\0\0\xff\xff\xff\x7f" + b"\xff" * 60,
        b"nsgg" + b"\xff" * 60,
        b"PK\x03\x04" + b"\xff" * 60,
        b"QKVC" + b"\xff" * 60,
        b"\xff" * 8 + b"{" + b"x" * 60,
        (2**22).to_bytes(8, "little") + b"{" + b"[" * 5000,
        b"\x50\0\0\0\0\0\0\0" + b'{"kv_cache":5,"x":{"data_offsets":[1]},"y":{"data_offsets":[1,"2"]}}' + b" " * 99,
        b"\x02\0\0\0\0\0\0\0{}",
    ],
    ids=range(10),
)  # fmt: skip
def test_hostile_first_bytes_are_only_told(tmp_path: Path, content: bytes) -> None:
    for name in ("a.bin", "model.layers.0.attn.safetensors", "b.safetensors", "c.pt", "d.kv"):
        (tmp_path / name).write_bytes(content)
    assert len(findings(tmp_path)) >= 2


def test_files_of_kvsnap_s_own_are_told_as_such(tmp_path: Path) -> None:
    golden = sorted((SAMPLES.parent).rglob("*.safetensors"))
    own = [path for path in golden if b'"kvsnap":"' in path.read_bytes()[:4096]]
    assert own
    shutil.copy(own[0], tmp_path / "x")
    assert "one file of kvsnap's own" in of(findings(tmp_path), "ok")[1]


def test_a_file_that_grows_shorter_or_goes_while_it_is_read_is_no_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = slots(tmp_path)
    contents = folder_walk.walk(folder)
    found = contents.files[0]
    real = os.fstat

    def longer(handle: int) -> os.stat_result:
        status = list(real(handle))
        status[6] += 100
        return os.stat_result(status)

    monkeypatch.setattr(os, "fstat", longer)
    whole = contents.whole(found, 10**9)
    assert whole is not None
    assert len(whole) == found.size
    monkeypatch.undo()
    (folder / found.name).unlink()
    assert contents.head(found) == b""
    os.mkfifo(folder / found.name)
    assert contents.head(found) == b""
    with pytest.raises(OSError, match="no regular file"):
        contents.whole(found, 10**9)


def test_what_goes_or_is_closed_meanwhile_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = slots(tmp_path)
    (folder / "closed").mkdir()
    real = os.open

    def closed(path: str, *arguments: int, **more: int) -> int:
        if path in ("closed", SLOTS[0].name):
            raise PermissionError(13, "Permission denied")
        return real(path, *arguments, **more)

    monkeypatch.setattr(os, "open", closed)
    found = findings(folder)
    assert "1 cannot be read: slots/closed" in only(found, "problem")
    assert SLOTS[0].name in only(found, "note")
    monkeypatch.setattr(os, "scandir", lambda handle: closed("closed"))
    assert "1 cannot be read: slots" in only(list(examine_folder(folder)), "problem")


def test_a_slot_that_memory_does_not_hold_is_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = slots(tmp_path)

    def empty(size: int, kind: object) -> None:
        raise MemoryError

    monkeypatch.setattr(folder_walk.np, "empty", empty)
    assert "too large" in "\n".join(of(examine_folder(folder), "note"))


def test_a_store_and_its_files_are_known(tmp_path: Path) -> None:
    with Store(tmp_path / "store") as store:
        store.place.root.mkdir()
    (tmp_path / "store" / "kvsnap.json").write_text("{}")
    (found,) = examine_folder(tmp_path / "store")
    assert "store of kvsnap's" in found.what
    assert "--store" in found.advice


def test_where_there_is_no_folder_it_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(NotFound):
        list(examine_folder(tmp_path / "nothing"))
    with pytest.raises(UsageError):
        list(examine_folder(tmp_path / "file"))
    assert "nothing here" in only(examine_folder_empty(tmp_path), "note")


def examine_folder_empty(tmp_path: Path) -> list[Finding]:
    (tmp_path / "empty").mkdir()
    return findings(tmp_path / "empty")


def test_what_is_deep_or_too_much_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / "a"
    for _ in range(folder_walk.DEEPEST + 3):
        deep = deep / "x"
    deep.mkdir(parents=True)
    (deep / "file").write_text("x")
    assert "eight folders deep" in "\n".join(of(findings(tmp_path), "note"))
    monkeypatch.setattr(folder_walk, "MOST_FILES", 5)
    monkeypatch.setattr(folders, "MOST_FILES", 5)
    for number in range(9):
        (tmp_path / f"{number:064x}_m_0_1.bin").write_bytes(b"x")
    found = findings(tmp_path)
    assert "only the first 5 files" in "\n".join(of(found, "note"))


def test_of_unnamed_files_only_so_many_are_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "MOST_HEADS", 3)
    opened: list[str] = []
    real = folder_walk.Contents.open

    def counting(self: folder_walk.Contents, found: folder_walk.Found) -> int:
        opened.append(found.path)
        return real(self, found)

    monkeypatch.setattr(folder_walk.Contents, "open", counting)
    for number in range(9):
        (tmp_path / str(number)).write_text("x")
    copied(tmp_path, "vllm_example_connector")
    found = findings(tmp_path)
    assert len(opened) == 3
    assert "9 files of no kind" in "\n".join(of(found, "note"))
    assert "not all of their files" in "\n".join(of(found, "note"))


def test_twenty_thousand_pages_are_looked_at_in_seconds_and_none_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_walk.Contents, "open", lambda self, found: 1 / 0)
    for number in range(20_000):
        os.close(os.open(tmp_path / f"{number:064x}_m_0_1.bin", os.O_CREAT | os.O_WRONLY))
    start = time.perf_counter()
    found = list(examine_folder(tmp_path))
    assert time.perf_counter() - start < 10
    assert "20000 pages" in of(found, "ok")[1]
    assert "20000 empty" in only(found, "problem")


def test_findings_are_plain_records(tmp_path: Path) -> None:
    with pytest.raises(KvsnapError):
        list(examine_folder(tmp_path / "no"))
    for one in findings(slots(tmp_path)):
        assert json.dumps([one.level, one.what, one.advice])
