"""`kvsnap keygen`: a key that the other commands take, readable by its owner alone, never shown."""

from __future__ import annotations

import re
import stat
from pathlib import Path
from typing import Any

from kvsnap.formats.tenant import parse_key


def test_a_new_key_is_one_that_the_library_takes(kvsnap: Any, tmp_path: Path) -> None:
    file = tmp_path / "team.key"
    done = kvsnap("keygen", file, "--json")
    assert (done.code, done.json["file"]) == (0, str(file))
    text = file.read_text()
    assert re.fullmatch(r"[0-9a-f]{64}\n", text)
    assert parse_key(file.read_bytes()).tenant_id == done.json["tenant_id"]
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_the_key_is_in_nothing_that_is_printed(kvsnap: Any, tmp_path: Path) -> None:
    done = kvsnap("keygen", tmp_path / "k", "--verbose")
    assert (tmp_path / "k").read_text().strip() not in done.out + done.err
    assert done.out.startswith(f"wrote a new key to {tmp_path}/k; its tenant id is ")


def test_two_keys_differ(kvsnap: Any, tmp_path: Path) -> None:
    for name in ("a", "b"):
        assert kvsnap("keygen", tmp_path / name).code == 0
    assert (tmp_path / "a").read_text() != (tmp_path / "b").read_text()


def test_a_key_that_is_there_is_never_written_over(kvsnap: Any, tmp_path: Path) -> None:
    file = tmp_path / "k"
    kvsnap("keygen", file)
    before = file.read_bytes()
    done = kvsnap("keygen", file)
    assert done.code == 2
    assert "is there already" in done.err
    assert file.read_bytes() == before


def test_a_folder_that_is_missing_is_said(kvsnap: Any, tmp_path: Path) -> None:
    done = kvsnap("keygen", tmp_path / "no" / "k")
    assert done.code == 1
    assert len(done.err.splitlines()) == 2
