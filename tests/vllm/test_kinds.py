"""Real engines of other kinds: layers with a sliding window, and adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from tests.vllm.adapter import make_adapter
from tests.vllm.engines import PAGE, Engine, ids, serve

pytestmark = [pytest.mark.engine, pytest.mark.slow]
BLOCKS = 300 // PAGE
ALONE: dict[str, Any] = {"prompts": [ids(300)]}


@pytest.fixture(scope="module")
def kinds(
    models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Engine, Engine, Engine]:
    """Gemma 3, one adapter after the plain model, and another adapter of the same name later."""
    folder = tmp_path_factory.mktemp("kinds")
    extra = {"block_size": PAGE}
    adapter, other = (str(make_adapter(folder / f"adapter{seed}", seed)) for seed in range(2))
    gemma = {
        "model": str(models["gemma3"]),
        "store": str(folder / "gemma"),
        "extra": extra,
        "steps": [{**ALONE, "stored": BLOCKS}, ALONE],
    }
    lora = {
        "model": str(models["llama"]),
        "store": str(folder / "lora"),
        "extra": extra,
        "args": {"enable_lora": True, "max_lora_rank": 8},
    }
    adapted = {**ALONE, "lora": adapter}
    steps = [{**ALONE, "stored": BLOCKS}, {**adapted, "stored": 2 * BLOCKS}, adapted, ALONE]
    later = [{**ALONE, "lora": other}]
    one, two, three = serve(folder, [gemma, lora | {"steps": steps}, lora | {"steps": later}])
    return one, two, three


def test_layers_with_a_window_are_restored(kinds: tuple[Engine, Engine, Engine]) -> None:
    cold, warm = kinds[0].steps
    assert warm.restored == BLOCKS * PAGE
    assert warm.same(cold)


def test_an_adapter_has_its_own_blocks(kinds: tuple[Engine, Engine, Engine]) -> None:
    plain, adapted, adapted_again, plain_again = kinds[1].steps
    assert adapted.restored == 0
    assert adapted.tokens != plain.tokens
    assert adapted_again.restored == plain_again.restored == BLOCKS * PAGE
    assert adapted_again.same(adapted)
    assert plain_again.same(plain)


def test_another_adapter_of_the_same_name_finds_nothing(
    kinds: tuple[Engine, Engine, Engine],
) -> None:
    assert kinds[2].steps[0].restored == 0
