"""Two ranks of one engine, each with its own blocks: what all of them have is restored, and no more."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from kvsnap.formats.block import parse_block
from tests.vllm.engines import PAGE, ids, serve
from tests.vllm.files import block_files

pytestmark = [pytest.mark.engine, pytest.mark.slow]
BLOCKS = 300 // PAGE


def rank_of(path: Path) -> int:
    identity = parse_block(memoryview(path.read_bytes())).record.identity
    return int(json.loads(identity)["shard"]["tensor_rank"])


def test_what_both_ranks_have_is_restored(models: dict[str, Path], tmp_path: Path) -> None:
    store, alone = tmp_path / "store", {"prompts": [ids(300)]}
    two = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    job: dict[str, Any] = {
        "model": str(models["llama"]),
        "store": str(store),
        "extra": {"block_size": PAGE},
        "args": two,
    }
    (first,) = serve(tmp_path, job | {"steps": [{**alone, "stored": 2 * BLOCKS}, alone]})
    cold, warm = first.steps
    assert warm.restored == BLOCKS * PAGE
    assert warm.same(cold)
    files = block_files(store)
    assert sorted(map(rank_of, files)) == [0] * BLOCKS + [1] * BLOCKS
    own = [path for path in files if rank_of(path) == 1]
    own[5].unlink()  # the index still has it: found out by this rank alone when it is read
    again, single = serve(
        tmp_path,
        [
            job | {"steps": [{**alone, "stored": 2 * BLOCKS}]},
            job | {"args": {}, "steps": [alone]},
        ],
    )
    broken = again.steps[0]
    assert broken.tokens == cold.tokens
    assert broken.counted("kvsnap_load_failures") == 1
    assert broken.counted("kvsnap_loaded_blocks") == BLOCKS + 5
    assert single.steps[0].restored == 0, "one rank's engine has other rows"
