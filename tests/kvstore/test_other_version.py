"""A store of another format version: refused by name, told about, left as it is."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from kvsnap.formats.errors import Unsupported
from kvsnap.kvstore.doctor import examine
from kvsnap.kvstore.store import Store

V0 = Path(__file__).parents[1] / "golden" / "v0"


@pytest.fixture
def old_store(tmp_path: Path) -> Path:
    """A store as version 0 had it, of one block and one session."""
    path = tmp_path / "old"
    block = path / "blocks" / "1b" / f"1b51{'0' * 60}.safetensors"
    session = path / "sessions" / "default" / "%41lice%2f42.safetensors"
    for place, file in ((block, "block-zstd"), (session, "session-zstd")):
        place.parent.mkdir(parents=True)
        shutil.copy(V0 / f"{file}.safetensors", place)
    (path / "kvsnap.json").write_text('{"block_size": 16, "created": 1, "format": "0"}')
    return path


def everything(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}


@pytest.mark.parametrize("version", ["0", "2", "1.1", 1, None, "1" * 1000])
def test_a_store_of_another_version_is_refused_by_name(tmp_path: Path, version: object) -> None:
    import json

    (tmp_path / "kvsnap.json").write_text(json.dumps({"format": version, "block_size": 16}))
    with pytest.raises(Unsupported, match="is a store of format version") as refused:
        Store(tmp_path)
    assert len(refused.value.what) < 500 + len(str(tmp_path))


def test_doctor_says_what_a_store_of_version_0_holds(old_store: Path) -> None:
    before = everything(old_store)
    problem, note = list(examine(old_store))[:2]
    assert problem.level == "problem"
    assert "format version '0', this kvsnap reads '1'" in problem.what
    size = (V0 / "block-zstd.safetensors").stat().st_size
    assert note.what == (
        f"it holds 1 block files of {size} bytes, 1 sessions of format version 0: 'Alice/42'"
    )
    assert "save these prompts again in a new store" in note.advice
    assert everything(old_store) == before


def test_doctor_survives_what_it_cannot_read(old_store: Path) -> None:
    (old_store / "sessions" / "default" / "x.safetensors").write_bytes(b"\xff" * 40)
    note = list(examine(old_store))[1]
    assert "2 sessions of format version 0, ?" in note.what
