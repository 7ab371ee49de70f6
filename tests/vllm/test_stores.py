"""Real engines on stores of other kinds: one that cannot be written, and an encrypted one."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from kvsnap.formats.sealed import is_sealed
from tests.vllm.engines import PAGE, ids, serve
from tests.vllm.files import block_files, damage

pytestmark = [pytest.mark.engine, pytest.mark.slow]
BLOCKS = 300 // PAGE
ALONE: dict[str, Any] = {"prompts": [ids(300)]}
READ_ONLY = 'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0" && exec "$@"'


def cannot_mount() -> bool:
    if shutil.which("unshare") is None:
        return True
    command = ["unshare", "--mount", "mount", "-t", "tmpfs", "none", "/mnt"]
    return subprocess.run(command, capture_output=True, check=False).returncode != 0


@pytest.fixture
def job(models: dict[str, Path], tmp_path: Path) -> dict[str, Any]:
    return {
        "model": str(models["llama"]),
        "store": str(tmp_path / "store"),
        "extra": {"block_size": PAGE},
    }


@pytest.mark.skipif(cannot_mount(), reason="needs a mount of its own")
def test_a_store_that_cannot_be_written_is_read(job: dict[str, Any], tmp_path: Path) -> None:
    store = tmp_path / "store"
    (first,) = serve(tmp_path, job | {"steps": [{**ALONE, "stored": BLOCKS}]})
    damage(block_files(store)[4], "flip")
    files = {path: path.read_bytes() for path in store.rglob("*") if path.is_file()}
    before = ["unshare", "--mount", "sh", "-c", READ_ONLY, str(store)]
    other = {"prompts": [ids(200, 9)]}
    (engine,) = serve(tmp_path, job | {"steps": [ALONE, ALONE, other]}, before=before)
    broken, again, new = engine.steps
    assert broken.tokens == again.tokens == first.steps[0].tokens
    assert broken.counted("kvsnap_load_failures") == 1
    assert again.counted("kvsnap_load_failures") == 0  # it is not tried again for a while
    assert again.restored == 4 * PAGE
    assert new.restored == 0
    assert files == {path: path.read_bytes() for path in store.rglob("*") if path.is_file()}


def test_an_encrypted_store_is_written_and_read(job: dict[str, Any], tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("5a" * 32)
    extra = {"block_size": PAGE, "encrypt": True, "tenant_key_file": str(key)}
    other = tmp_path / "other"
    other.write_text("a5" * 32)
    cold, warm, another = serve(
        tmp_path,
        [
            job | {"extra": extra, "steps": [ALONE]},
            job | {"extra": extra, "steps": [ALONE]},
            job | {"extra": {**extra, "tenant_key_file": str(other)}, "steps": [ALONE]},
        ],
    )
    assert warm.steps[0].restored == BLOCKS * PAGE
    assert warm.steps[0].same(cold.steps[0])
    assert another.steps[0].restored == 0
    files = [path for path in (tmp_path / "store" / "blocks").rglob("*") if path.is_file()]
    assert len(files) == 2 * BLOCKS
    assert all(is_sealed(memoryview(path.read_bytes())) for path in files)
