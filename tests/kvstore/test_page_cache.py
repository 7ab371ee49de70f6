"""Cold files: the system's advice is checked, and said where it was not taken."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvsnap.kvstore.measure.page_cache import drop


def test_a_system_without_the_call_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "posix_fadvise", raising=False)
    (tmp_path / "file").write_bytes(b"x")
    assert "no call" in drop([tmp_path / "file"])


@pytest.mark.skipif(not hasattr(os, "RWF_NOWAIT"), reason="Linux only")
def test_files_in_memory_are_not_called_cold() -> None:
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("no file system in memory")
    path = Path("/dev/shm") / f"kvsnap-test-{os.getpid()}"
    path.write_bytes(bytes(100_000))
    try:
        assert "keeps its files in memory" in drop([path])
    finally:
        path.unlink()


@pytest.mark.skipif(not hasattr(os, "RWF_NOWAIT"), reason="Linux only")
@pytest.mark.parametrize("cached", [True, False])
def test_what_the_system_says_is_believed_not_assumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cached: bool
) -> None:
    (tmp_path / "file").write_bytes(b"x" * 5000)
    asked: list[int] = []

    def preadv(handle: int, buffers: list[bytearray], offset: int, flags: int) -> int:
        asked.append(flags)
        if cached:
            return 1
        raise BlockingIOError

    monkeypatch.setattr(os, "preadv", preadv)
    assert bool(drop([tmp_path / "file"])) is cached
    assert asked == [os.RWF_NOWAIT]
