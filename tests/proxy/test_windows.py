"""Models with sliding windows: whatever a slot file leaves out is fetched, and nothing else is kept."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsnap.engines.llamacpp import LlamaCpp
from kvsnap.engines.llamacpp_load import LoadOptions, load_llama
from kvsnap.formats.errors import Damaged
from kvsnap.formats.interchange.llama_server_slot import SlotFile, parse_slot
from kvsnap.formats.names import TokenIds, token_array
from kvsnap.kvstore.proxy.slots import Known, Slots
from kvsnap.kvstore.proxy.upstream import SlotNow
from kvsnap.kvstore.proxy.windows import with_rows_from
from kvsnap.testing.tiny_gguf import write_tiny
from tests.formats.interchange.windowed_slots import parsed
from tests.proxy.conftest import BLOCK
from tests.proxy.test_failures import TEXT, blocks_of, text_of, twice, warnings_of

LONG = TEXT * 2  # several windows of 32 tokens


@given(st.integers(1, 90), st.integers(1, 20), st.data())
def test_rows_are_fetched_a_window_at_a_time_and_no_slot_is_cut_by_half(
    tokens: int, window: int, data: Any
) -> None:
    start = data.draw(st.integers(0, tokens))
    ids = token_array(range(tokens))
    held = tokens

    async def cut(front: TokenIds) -> SlotFile:
        nonlocal held
        assert held > len(front) >= held / 2
        held = len(front)
        return parsed(front, window)

    found = asyncio.run(with_rows_from(parsed(ids, window), start, window, cut))
    assert found.window is not None
    first = int(found.window.positions[0])
    assert first <= max(start, tokens - window)
    assert found.window.positions.tolist() == list(range(first, tokens))
    for rows in (*found.window.k, *found.window.v):
        assert (rows == np.arange(first, tokens)[:, None]).all()


@pytest.mark.parametrize("lost", [30, 55])
def test_of_a_slot_that_lost_rows_nothing_is_kept(lost: int) -> None:
    async def cut(front: TokenIds) -> SlotFile:
        return parsed(front, 10, lost)

    with pytest.raises(Damaged, match="lost rows"):
        asyncio.run(with_rows_from(parsed(token_array(range(60)), 10, lost), 0, 10, cut))


def test_a_slot_that_holds_something_else_meanwhile_is_not_taken() -> None:
    async def cut(front: TokenIds) -> SlotFile:
        return parsed(front + 1, 10)

    with pytest.raises(Damaged, match="lost rows"):
        asyncio.run(with_rows_from(parsed(token_array(range(60)), 10), 0, 10, cut))


def test_a_slot_with_windows_is_gone_on_from_and_never_cut() -> None:
    ids = token_array(range(40))
    now = SlotNow(number=0, busy=False, tokens=40, task=7)
    for windows, prompt, held in ((True, ids, 40), (True, ids[:39], 0), (False, ids[:39], 39)):
        slots = Slots(1, windows=windows)
        slots.note(0, Known(ids, 40, 7))
        assert slots.held([now], prompt)[1] == held


def test_a_slot_is_taken_again_only_as_it_was_left() -> None:
    async def run() -> None:
        slots = Slots(2, windows=True)
        known = Known(token_array(range(40)), 40, 7)
        left = SlotNow(number=0, busy=False, tokens=40, task=7)
        slots.note(0, known)
        claim = await slots.claim()
        for other in (
            dataclasses.replace(left, busy=True),
            dataclasses.replace(left, task=8),
            dataclasses.replace(left, tokens=0),
        ):
            assert not slots.take_again(claim, 0, known, [other])
        assert not slots.take_again(claim, 0, Known(known.token_ids, 40, 7), [left])
        assert slots.take_again(claim, 0, known, [left])
        assert slots.held([left], known.token_ids) == (-1, 0)
        assert claim.release()
        assert not claim.release()

    asyncio.run(run())


@pytest.fixture(scope="session")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("windowed")
    return write_tiny(folder / "tiny.gguf", "gemma3", context=1024)


def next_turn(answer: Any, turn: int) -> list[dict[str, str]]:
    return [
        {"role": "assistant", "content": text_of(answer)},
        {"role": "user", "content": f"and {turn}?"},
    ]


@pytest.mark.engine
def test_a_prompt_of_many_windows_is_kept_and_restored(
    windowed: Path, start_upstream: Any, start_proxy: Any, store: Any, caplog: Any
) -> None:
    upstream = start_upstream(windowed)
    timings = twice(upstream, start_proxy(upstream), LONG)
    tokens = timings["cache_n"] + timings["prompt_n"]
    assert tokens > 4 * 32
    assert timings["prompt_n"] <= BLOCK
    assert blocks_of(store) >= (tokens - 1) // BLOCK
    assert not warnings_of(caplog)


@pytest.mark.engine
def test_what_is_restored_is_what_an_engine_computes(
    windowed: Path, start_upstream: Any, start_proxy: Any, tmp_path: Path
) -> None:
    """Rows of all tokens in all layers, as of an engine that was never cut."""
    kept = tmp_path / "kept"
    kept.mkdir()
    upstream = start_upstream(windowed, "--keep", str(kept))
    twice(upstream, start_proxy(upstream), LONG)
    found = parse_slot(
        memoryview(max(kept.iterdir(), key=lambda path: int(path.stem)).read_bytes())
    )
    assert found.window is not None
    assert len(found.token_ids) == len(found.window.positions) > 4 * 32
    options = LoadOptions(flash_attn=True, threads=1)
    engine = LlamaCpp(load_llama(windowed, options, 1024))
    engine.evaluate(found.token_ids)
    rows = engine.export(0, len(found.token_ids))
    for group, state in (("full", found.state), ("window", found.window)):
        for name, layers in (("k", state.k), ("v", state.v)):
            theirs = np.stack(layers).view(np.float16).astype(np.float32)
            ours = rows[f"{group}.{name}"].view(np.float16).astype(np.float32)
            np.testing.assert_allclose(theirs, ours, atol=0.03)


@pytest.mark.engine
def test_a_conversation_goes_on_in_its_slot_and_after_a_restart(
    windowed: Path, start_upstream: Any, start_proxy: Any
) -> None:
    upstream = start_upstream(windowed)
    proxy = start_proxy(upstream)
    messages = [{"role": "user", "content": LONG}]
    seen = 0
    for turn in range(4):
        body = {"messages": messages, "max_tokens": 4}
        answer = proxy.post("/v1/chat/completions", body)
        timings = answer.json()["timings"]
        tokens = timings["cache_n"] + timings["prompt_n"]
        if turn:
            assert timings["prompt_n"] <= BLOCK + tokens - seen
        proxy.settle()
        seen = tokens
        messages += next_turn(answer, turn)
        if turn == 2:
            upstream.restart()


@pytest.mark.engine
def test_a_next_question_at_once_finds_its_slot_as_it_was(
    windowed: Path, start_upstream: Any, start_proxy: Any, store: Any
) -> None:
    proxy = start_proxy(start_upstream(windowed))
    messages = [{"role": "user", "content": LONG}]
    before = 0
    for turn in range(3):
        body = {"messages": messages, "max_tokens": 4}
        answer = proxy.post("/v1/chat/completions", body)
        timings = answer.json()["timings"]
        assert timings["cache_n"] >= before - BLOCK
        before = timings["cache_n"] + timings["prompt_n"]
        messages += next_turn(answer, turn)
    proxy.settle()
    assert blocks_of(store) >= before // BLOCK


@pytest.mark.engine
def test_a_server_that_keeps_the_last_window_only_is_told_and_left_alone(
    windowed: Path, start_upstream: Any, start_proxy: Any, store: Any, caplog: Any
) -> None:
    upstream = start_upstream(windowed, "--ignore-restore")
    proxy = start_proxy(upstream)
    answer = proxy.chat(LONG)
    assert "x-kvsnap-slot" not in answer.headers
    assert any("--swa-full" in line for line in warnings_of(caplog))
    assert blocks_of(store) == 0


@pytest.mark.engine
def test_slots_with_another_memory_are_told_once_and_left_alone(
    windowed: Path, start_upstream: Any, start_proxy: Any, store: Any, caplog: Any
) -> None:
    proxy = start_proxy(start_upstream(windowed, "--spoil", "tail"))
    for _ in range(2):
        assert "x-kvsnap-slot" not in proxy.chat(LONG).headers
    (line,) = warnings_of(caplog)
    assert "recurrent layers" in line
    assert blocks_of(store) == 0


@pytest.mark.engine
def test_rows_that_a_server_lost_are_said_and_not_kept(
    windowed: Path, start_upstream: Any, start_proxy: Any, store: Any, caplog: Any
) -> None:
    upstream = start_upstream(windowed, "--lose", "100")
    proxy = start_proxy(upstream)
    assert text_of(proxy.chat(LONG))
    proxy.settle()
    assert blocks_of(store) == 0
    for _ in range(2):
        proxy.chat("once more " + LONG)
        proxy.settle()
    asked = len(upstream.get("/seen"))
    proxy.chat("and again " + LONG)
    proxy.settle()
    assert len(upstream.get("/seen")) == asked + 1  # nothing is cut any more
    assert blocks_of(store) == 0
    assert any("lost rows" in line for line in warnings_of(caplog))


@pytest.mark.engine
@pytest.mark.parametrize("clear", [(), ("--clear-idle",)])
def test_two_clients_of_a_windowed_model_get_what_one_would(
    windowed: Path, start_upstream: Any, start_proxy: Any, clear: tuple[str, ...]
) -> None:
    import concurrent.futures

    upstream = start_upstream(windowed, "--slots", "2", *clear)
    proxy = start_proxy(upstream)
    prompts = [f"{name} {LONG}" for name in ("ann", "bob")]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        first = list(pool.map(lambda text: text_of(proxy.chat(text)), prompts))
    proxy.settle()
    upstream.restart()
    assert [text_of(proxy.chat(text)) for text in prompts] == first
    proxy.settle()
