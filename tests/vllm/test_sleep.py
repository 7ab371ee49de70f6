"""An engine in one process that is put to sleep: its requests end and its pages are lost without a step between."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from tests.vllm.lockstep import PAGE, Lockstep, make_config
from tests.vllm.stored import Stored
from tests.vllm.walk import SALTS

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.mark.parametrize("in_flight", [1, 2])
def test_pages_that_are_lost_in_a_sleep_are_not_stored(
    tiny_llama: Path, tmp_path: Path, in_flight: int
) -> None:
    engine = Lockstep(
        make_config(tiny_llama),
        tmp_path,
        ranks=1,
        in_process=True,
        in_flight=in_flight,
        pages=64,
        budget=64,
    )
    stored = Stored(tmp_path, engine.right, SALTS)
    prompt = [0, 1, 2, 2, 1, 0, 1, 1, 2, 0, 0, 2, 1, 0, 2, 1, 1]
    name = engine.add(prompt, 40)
    for _ in range(9):
        engine.step()
    engine.abort(name)
    sleep(engine)
    engine.add([2, 2, 2, 1, 0], 2)
    engine.finish()
    stored.check()
    assert len(stored.files()) >= len(prompt) // PAGE
    engine.close()


def sleep(engine: Any) -> None:
    """What `LLM.sleep` does to the pages."""
    for rank in engine.ranks:
        for tensor in rank.tensors:
            tensor.zero_()
