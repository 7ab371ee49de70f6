"""Damage in any file: no wrong token, a shorter reuse with a warning, and verify tells of it."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.engine

IDS = list(range(4000, 4000 + 3 * 64 + 20))


@pytest.fixture
def saved(kvsnap: Any, model: Path, tmp_path: Path) -> dict[str, Any]:
    """A session of three blocks and a tail; its greedy answer; its blocks' files in order."""
    (tmp_path / "ids.json").write_text(json.dumps(IDS))
    kvsnap("save", "--model", model, "--token-ids", tmp_path / "ids.json", "--session", "s")
    answer = kvsnap("--json", "resume", "s", "--model", model, "--max-tokens", 8, "--no-save").json[
        "token_ids"
    ]
    chain = [block["name"] for block in kvsnap("--json", "show", "s").json["blocks"]]
    files = {path.stem: path for path in (tmp_path / "store").rglob("*.safetensors")}
    return {"answer": answer, "files": [files[name] for name in chain], "tail": files["s"]}


def flip(path: Path, at: float) -> None:
    data = bytearray(path.read_bytes())
    data[int(at * (len(data) - 1))] ^= 0x10
    path.write_bytes(data)


def flip_token_ids(path: Path) -> None:
    data = bytearray(path.read_bytes())
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    data[8 + size + header["token_ids"]["data_offsets"][0]] ^= 0x10
    path.write_bytes(data)


class Canary:
    def __reduce__(self) -> Any:
        return (Path("canary-was-run").touch, ())


DAMAGE: dict[str, Callable[[Path], object]] = {
    "length prefix": lambda path: flip(path, 0.0),
    "header": lambda path: flip(path, 0.0005),
    "first rows": lambda path: flip(path, 0.01),
    "last byte": lambda path: flip(path, 1.0),
    "half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "empty": lambda path: path.write_bytes(b""),
    "folder": lambda path: (path.unlink(), path.mkdir()),
    "pickle": lambda path: path.write_bytes(pickle.dumps(Canary())),
    "link": lambda path: (path.unlink(), path.symlink_to("/etc/passwd")),
    "gone": lambda path: path.unlink(),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_block_shortens_the_reuse_and_is_computed_again(
    kvsnap: Any, model: Path, saved: dict[str, Any], tmp_path: Path, kind: str
) -> None:
    DAMAGE[kind](saved["files"][1])
    verify = kvsnap("--json", "verify")
    assert verify.code == 1
    assert saved["files"][1].stem in [bad["name"] for bad in verify.json["bad"]]
    assert kvsnap("verify", "s").code == 1
    again = ["--json", "resume", "s", "--model", model, "--max-tokens", 8]
    resumed = kvsnap(*again, "--no-save")
    assert resumed.code == 0
    assert resumed.json["reused_tokens"] == 64
    assert resumed.json["reuse_stopped_by"].startswith("damaged: block ")
    assert "warning: block" in resumed.err
    assert resumed.json["computed_tokens"] == len(IDS) - 64
    assert not (tmp_path / "canary-was-run").exists()
    # Nobody stored it again yet: verify still tells of it, and of what waits behind it.
    assert kvsnap("--json", "verify").json["unreachable"] == [saved["files"][2].stem]
    saving = kvsnap(*again)
    assert saving.code == 0
    assert kvsnap("--json", "verify").json["bad"] == []
    mended = kvsnap(*again, "--no-save").json
    assert mended["computed_tokens"] <= 1


@pytest.mark.parametrize("kind", [k for k in DAMAGE if k not in ("header", "last byte", "gone")])
def test_a_damaged_session_file_is_an_error_of_one_line_and_loses_no_block(
    kvsnap: Any, model: Path, saved: dict[str, Any], tmp_path: Path, kind: str
) -> None:
    if kind == "first rows":
        flip_token_ids(saved["tail"])  # without them there is no conversation
    else:
        DAMAGE[kind](saved["tail"])
    verify = kvsnap("--json", "verify")
    assert verify.code == 1
    assert "s" in [bad["name"] for bad in verify.json["bad"]]
    resumed = kvsnap("resume", "s", "--model", model)
    assert resumed.code == 1
    assert resumed.err.startswith("error: ")
    assert len(resumed.err.strip().splitlines()) <= 2
    assert not (tmp_path / "canary-was-run").exists()
    saved_again = kvsnap(
        "--json", "save", "--model", model, "--token-ids", tmp_path / "ids.json", "--session", "s"
    ).json
    assert saved_again["reused_tokens"] == 3 * 64
    assert kvsnap("verify").code == 0


def test_damage_to_a_sessions_tail_rows_costs_the_tail_only(
    kvsnap: Any, model: Path, saved: dict[str, Any]
) -> None:
    flip(saved["tail"], 0.9)
    assert kvsnap("verify").code == 1
    found = kvsnap("--json", "resume", "s", "--model", model, "--max-tokens", 8)
    assert found.code == 0
    assert found.json["reused_tokens"] == 3 * 64
    assert "warning: tail of session 's'" in found.err
    assert kvsnap("verify").code == 0


@pytest.mark.parametrize("kind", ["header", "first rows", "half", "empty", "pickle", "gone"])
def test_a_damaged_index_is_built_anew_from_the_files(
    kvsnap: Any, model: Path, saved: dict[str, Any], store: Path, kind: str
) -> None:
    DAMAGE[kind](store / "index.sqlite3")
    found = kvsnap("--json", "resume", "s", "--model", model, "--max-tokens", 8, "--no-save")
    assert found.code == 0, found.err
    assert found.json["reused_tokens"] == len(IDS) - 1
    assert found.json["token_ids"] == saved["answer"]
    assert kvsnap("verify").code == 0


def test_damaged_settings_are_passed_over_with_a_warning(
    kvsnap: Any, model: Path, saved: dict[str, Any], store: Path
) -> None:
    (store / "kvsnap.json").write_text('{"format": "1", "block_size": ')
    assert kvsnap("verify").code == 1
    found = kvsnap("--json", "resume", "s", "--model", model, "--max-tokens", 8)
    assert found.code == 0
    assert found.json["reused_tokens"] == len(IDS) - 1
    assert found.json["token_ids"] == saved["answer"]
    assert "kvsnap.json is damaged" in found.err
    assert kvsnap("verify").code == 0  # the save wrote them anew


def test_a_store_of_a_newer_format_is_refused_by_name(
    kvsnap: Any, model: Path, saved: dict[str, Any], store: Path
) -> None:
    del saved
    (store / "kvsnap.json").write_text('{"format": "7", "block_size": 64}')
    for command in (["ls"], ["resume", "s", "--model", model]):
        done = kvsnap(*command)
        assert done.code == 1
        assert "format version '7'" in done.err
