"""Files that kvsnap writes, loaded by the llama.cpp that is installed: as good as its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvsnap.formats.interchange.foreign import ForeignRows, Format, Given
from kvsnap.formats.interchange.llama_server_slot import SLOT
from kvsnap.formats.interchange.llamacpp_files import SEQUENCE, SESSION

pytestmark = pytest.mark.engine

WORKER = Path(__file__).with_name("foreign_files_worker.py")
SLOT_FILE = Path(__file__).parents[1] / "golden" / "foreign" / "llama_server_slot_v4_smollm2.bin"
GREEDY = 12
Q8_0 = 8
PLAIN: dict[str, Any] = {"flash_attn": True}
TRANSPOSED: dict[str, Any] = {"flash_attn": False}
QUANTIZED = {"flash_attn": True, "type_k": Q8_0, "type_v": Q8_0}


class Engine:
    """llama-cpp-python with some settings; every run is a process."""

    def __init__(self, model: Path, folder: Path, settings: dict[str, Any]) -> None:
        self.model, self.folder, self.settings = model, folder, settings

    def run(self, prompt: list[int], **files: dict[str, str]) -> dict[str, Any]:
        job = {"model": str(self.model), "settings": self.settings, "prompt": prompt}
        job |= {"greedy": GREEDY, "save": {}, "load": {}} | files
        path = self.folder / "job.json"
        path.write_text(json.dumps(job))
        command = [sys.executable, str(WORKER), str(path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def own(self) -> tuple[Path, Path]:
        """A sequence and a session file that it saved itself."""
        paths = self.folder / "own.ggsq", self.folder / "own.ggsn"
        self.run(prompt(), save=dict(zip(map(str, paths), ("sequence", "session"), strict=True)))
        return paths

    def goes_on_from(self, files: dict[str, bytes], ids: list[int]) -> dict[str, list[int]]:
        """Greedy tokens after each file, and without any; nothing but the last token of the prompt
        is decoded again."""
        load = {}
        for name, data in files.items():
            path = self.folder / name
            path.write_bytes(data)
            load[str(path)] = "session" if name.endswith(".ggsn") else "sequence"
        found = self.run(ids, load=load)
        assert len(found["loaded"]) == len(files)
        for one in found["loaded"].values():
            assert one["ids"] == ids
            assert one["decoded"] == 1 + GREEDY - 1
        tokens = {Path(path).name: one["tokens"] for path, one in found["loaded"].items()}
        return tokens | {"native": found["native"]}


def prompt() -> list[int]:
    ids = EXPECTED["token_ids_in_file"]
    return [int(token) for token in ids]


EXPECTED = json.loads(SLOT_FILE.with_name("expected.json").read_text())["files"][SLOT_FILE.name]


def read(known: Format, path: Path) -> ForeignRows:
    return known.read({path.name: memoryview(path.read_bytes())}, Given())


def write(known: Format, rows: ForeignRows, **given: Any) -> bytes:
    assert known.write is not None
    (data,) = known.write(rows, Given(architecture="llama", **given)).values()
    return data


@pytest.mark.parametrize("settings", [PLAIN, TRANSPOSED, QUANTIZED], ids=str)
def test_its_own_files_are_written_to_the_byte_and_load_as_they_do(
    model: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    engine = Engine(model, tmp_path, settings)
    sequence, session = engine.own()
    rows = read(SEQUENCE, sequence)
    transposed = not settings["flash_attn"]
    assert rows.rotation == (None if settings is QUANTIZED else (0, 0))
    files = {
        "a.ggsq": write(SEQUENCE, rows, v_transposed=transposed),
        "a.ggsn": write(SESSION, read(SESSION, session), v_transposed=transposed),
        "b.ggsn": write(SESSION, rows, v_transposed=transposed),
    }
    assert files["a.ggsq"] == sequence.read_bytes()
    assert files["a.ggsn"] == files["b.ggsn"] == session.read_bytes()
    tokens = engine.goes_on_from(files, prompt())
    assert len(tokens) == 4
    assert all(found == tokens["native"] for found in tokens.values())


@pytest.mark.parametrize(("source", "target"), [(PLAIN, TRANSPOSED), (TRANSPOSED, PLAIN)])
def test_rows_of_one_layout_of_v_go_into_a_context_of_the_other(
    model: Path, tmp_path: Path, source: dict[str, Any], target: dict[str, Any]
) -> None:
    sequence, session = Engine(model, tmp_path, source).own()
    transposed = not target["flash_attn"]
    files = {
        "turned.ggsq": write(SEQUENCE, read(SEQUENCE, sequence), v_transposed=transposed),
        "turned.ggsn": write(SESSION, read(SESSION, session), v_transposed=transposed),
    }
    assert files["turned.ggsq"] != sequence.read_bytes()
    tokens = Engine(model, tmp_path, target).goes_on_from(files, prompt())
    assert tokens["turned.ggsq"] == tokens["turned.ggsn"] == tokens["native"]


@pytest.mark.parametrize("settings", [PLAIN, TRANSPOSED], ids=str)
def test_a_slot_of_llama_server_goes_into_llama_cpp_python(
    model: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    rows, transposed = read(SLOT, SLOT_FILE), not settings["flash_attn"]
    files = {
        "slot.ggsq": write(SEQUENCE, rows, v_transposed=transposed),
        "slot.ggsn": write(SESSION, rows, v_transposed=transposed),
    }
    tokens = Engine(model, tmp_path, settings).goes_on_from(files, prompt())
    assert tokens["slot.ggsq"] == tokens["slot.ggsn"] == tokens["native"]
    assert tokens["native"] == EXPECTED["greedy"]["greedy"][:GREEDY]  # as llama-server went on


def test_other_rows_give_other_text(model: Path, tmp_path: Path) -> None:
    # That the tests above prove anything: with V of the layers exchanged the text is another.
    rows = read(SLOT, SLOT_FILE)
    exchanged = ForeignRows(**{**vars(rows), "v": rows.v[::-1]})
    tokens = Engine(model, tmp_path, PLAIN).goes_on_from(
        {"wrong.ggsq": write(SEQUENCE, exchanged)}, prompt()
    )
    assert tokens["wrong.ggsq"] != tokens["native"]
