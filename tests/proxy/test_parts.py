"""The proxy's decisions, without a server."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsnap.formats.errors import Damaged
from kvsnap.formats.interchange.ggml import ggml_type
from kvsnap.formats.interchange.llama_server_slot import assemble_slot, parse_slot
from kvsnap.formats.interchange.llamacpp import LayerType, StateType
from kvsnap.formats.layout import Group, Layout, Plane
from kvsnap.formats.names import token_array
from kvsnap.kvstore.proxy.answer import Outcome, Tail, timings_of
from kvsnap.kvstore.proxy.choosing import Chosen
from kvsnap.kvstore.proxy.ending import _is_ours
from kvsnap.kvstore.proxy.forward import passed_on
from kvsnap.kvstore.proxy.measure import Rates
from kvsnap.kvstore.proxy.rows import SlotLanding, SlotRows
from kvsnap.kvstore.proxy.save import Ended, new_blocks, sure_tokens
from kvsnap.kvstore.proxy.slots import Known, Slots
from kvsnap.kvstore.proxy.told import Told
from kvsnap.kvstore.proxy.truth import Truth
from kvsnap.kvstore.proxy.upstream import SlotNow

IDS = token_array(range(100, 140))


def slot(number: int, tokens: int = 0, task: int = -1, busy: bool = False) -> SlotNow:
    return SlotNow(number=number, busy=busy, tokens=tokens, task=task)


def held_slots(*known: Known | None) -> Slots:
    slots = Slots(len(known))
    for number, one in enumerate(known):
        slots.note(number, one)
    return slots


def test_a_slot_that_somebody_else_used_holds_nothing_that_is_known() -> None:
    slots = held_slots(Known(IDS, 40, 7))
    assert slots.held([slot(0, 40, 7)], IDS) == (0, 40)
    for other in (slot(0, 41, 7), slot(0, 40, 8), slot(0, 0, 7), slot(0, 40, 7, busy=True)):
        assert slots.held([other], IDS) == (-1, 0)


def test_a_slot_is_not_spoiled_for_less_than_half_of_what_it_holds() -> None:
    """Of such a slot the server may put another of its copies in its place."""
    slots = held_slots(Known(IDS, 40, 7))
    for common, expected in ((40, 40), (22, 22), (21, 0), (3, 0)):
        prompt = token_array([*IDS[:common], *[9] * 20])
        assert slots.held([slot(0, 40, 7)], prompt)[1] == expected


def test_the_spare_slot_is_an_empty_one_else_the_one_used_longest_ago() -> None:
    slots = Slots(3)
    for number in (1, 0, 2):
        slots.taken(number)
        slots.let_go(number)
    assert slots.spare([slot(0, 5), slot(1, 5), slot(2)]) == 2
    assert slots.spare([slot(0, 5), slot(1, 5), slot(2, 5)]) == 1
    slots.taken(1)
    assert slots.spare([slot(0, 5), slot(1, 5), slot(2, 5)]) == 0
    assert slots.spare([slot(0, 5, busy=True), slot(1, 5), slot(2, 5)]) == 2


def test_a_server_that_counts_its_tasks_anew_was_started_anew() -> None:
    slots = Slots(2)
    assert not slots.went_back([slot(0, 1, 5), slot(1)])
    assert not slots.went_back([slot(0, 1, 5), slot(1, 1, 9)])
    assert slots.went_back([slot(0), slot(1)])


def test_no_request_is_started_between_the_end_of_another_and_its_saving() -> None:
    async def run() -> list[str]:
        slots, happened = Slots(2), []
        ends = asyncio.Event()

        async def look() -> Sequence[SlotNow]:
            return [slot(0, 9, 1, busy=not ends.is_set()), slot(1)]

        async with slots.launch():
            await slots.start(look, 0)
            happened.append("first runs")

        async def second() -> None:
            async with slots.launch():
                happened.append("second looks")
                await slots.start(look, 1)
                happened.append("second starts")

        ends.set()  # in the server; the proxy has not seen the end of its response
        waiting = asyncio.ensure_future(second())
        await asyncio.sleep(0.05)
        async with slots.saving(0):
            await asyncio.sleep(0.02)
            happened.append("first saved")
        await waiting
        return happened

    found = asyncio.run(run())
    assert found == ["first runs", "second looks", "first saved", "second starts"]


def test_a_next_turn_waits_for_the_slot_of_the_one_before_and_nobody_else_does() -> None:
    async def run() -> None:
        slots = Slots(2)
        slots.asks(0, IDS[:10])
        for other in (IDS[:10], IDS[:9], IDS[5:]):
            assert not await slots.settled(other)
        waiting = asyncio.ensure_future(slots.settled(IDS[:20]))
        await asyncio.sleep(0.02)
        assert not waiting.done()
        slots.ending(0)
        await asyncio.sleep(0.02)
        assert not waiting.done()
        slots.has_ended(0)
        assert await waiting
        assert not await slots.settled(IDS[:20])

    asyncio.run(run())


def test_claims_are_as_many_as_slots() -> None:
    async def run() -> None:
        slots = Slots(1)
        claim = await slots.claim()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(slots.claim(), 0.01)
        claim.release()
        claim.release()
        again = await asyncio.wait_for(slots.claim(), 1)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(slots.claim(), 0.01)
        again.release()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("restored", "held", "cached", "ours"),
    [
        (0, 0, 0, True),
        (0, 0, 1, False),
        (64, 0, 64, True),
        (64, 0, 0, True),
        (64, 0, 65, False),
        (0, 30, 40, True),
        (0, 0, None, True),
    ],
)
def test_rows_that_the_server_reused_from_elsewhere_are_not_ours(
    restored: int, held: int, cached: int | None, ours: bool
) -> None:
    assert _is_ours(Chosen(0, restored, held), cached) == ours


def test_restoring_pays_from_a_length_on_that_is_measured() -> None:
    rates = Rates()
    assert rates.is_worth(0, 1)  # nobody knows better
    assert not rates.is_worth(5, 5)
    rates.saw_prompt({"prompt_n": 100, "prompt_ms": 100.0})
    assert not rates.is_worth(0, 10)
    assert rates.is_worth(0, 1000)
    assert not rates.is_worth(995, 1000)
    for _ in range(50):
        rates.saw_restore(1000, 3.0)
        rates.saw_restore(100, 0.4)
    assert rates.restoring(1000) == pytest.approx(3.0, rel=0.1)
    assert not rates.is_worth(0, 1000)
    assert rates.saved(1000, 1000) == 0
    assert rates.saved(1000, 0) == pytest.approx(1.0)


@given(st.lists(st.tuples(st.integers(1, 10**6), st.floats(0, 100)), max_size=30))
def test_no_measurement_makes_a_restore_take_less_than_nothing(seen: Any) -> None:
    rates = Rates()
    for tokens, seconds in seen:
        rates.saw_restore(tokens, seconds)
    assert all(rates.restoring(tokens) >= 0 for tokens in (1, 1000, 10**6))


def test_timings_that_are_no_numbers_teach_nothing() -> None:
    rates = Rates()
    for wrong in ({}, {"prompt_n": "9"}, {"prompt_n": 3, "prompt_ms": 1.0}, {"prompt_n": 99}):
        rates.saw_prompt(wrong)
    assert rates.per_token is None
    assert Outcome(timings={"cache_n": -1}).count("cache_n") is None
    assert timings_of(b"[") == timings_of(b"[]") == timings_of(b'{"timings": 3}') == {}


@given(st.binary(max_size=300), st.integers(1, 40))
def test_timings_of_a_stream_are_found_however_it_is_cut(text: bytes, step: int) -> None:
    last = b'data: {"timings":{"cache_n":5}}\n\ndata: [DONE]\n\n'
    whole = text.replace(b'"timings"', b"") + b"\n" + last
    tail = Tail()
    for start in range(0, len(whole), step):
        tail.add(whole[start : start + step])
    assert tail.timings() == {"cache_n": 5}


def test_two_failures_in_a_row_end_restoring_once() -> None:
    truth = Truth()
    assert [truth.saw(100, n) for n in (100, 0, 99, 0, 0, 0)] == [False] * 4 + [True, False]
    assert truth.stopped


def test_a_warning_is_said_once_until_it_is_over(caplog: Any) -> None:
    told = Told()
    for _ in range(3):
        told.once("down", "it is down")
    told.over("down")
    told.once("down", "it is down")
    assert len(caplog.records) == 2


def test_headers_of_the_connection_are_not_passed_on() -> None:
    headers = [
        (b"Connection", b"close, X-One"),
        (b"x-one", b"1"),
        (b"Host", b"a"),
        (b"Transfer-Encoding", b"chunked"),
        (b"content-length", b"5"),
        (b"x-two", b"2"),
    ]
    assert passed_on(headers) == [(b"content-length", b"5"), (b"x-two", b"2")]
    assert passed_on(headers, body_changed=True) == [(b"x-two", b"2")]


F16 = ggml_type(1)
KIND = StateType(4, False, (LayerType(F16, 8, F16, 8),) * 2)
PLANES = tuple(
    Plane(name=name, kind="elements", dtype="F16", row=(2, 2), source_type="f16") for name in "kv"
)
LAYOUT = Layout(groups=(Group(name="full", layers=2, planes=PLANES),))


def written(tokens: int) -> Any:
    """A slot file of `tokens` tokens, whose every element says where it belongs."""
    engine = SlotLanding(LAYOUT, [KIND], IDS)
    landing = engine.landing(tokens)
    for name, array in landing.rows.items():
        layers, count, width = array.shape
        array[...] = np.arange(layers * count * width).reshape(array.shape) + (name == "full.v")
    engine.load(landing, IDS[:tokens])
    assert engine.draft is not None
    return engine.draft.buffer


def test_what_is_loaded_into_a_landing_comes_out_of_its_file() -> None:
    found = parse_slot(memoryview(written(20).tobytes()))
    assert found.token_ids.tolist() == IDS[:20].tolist()
    rows = SlotRows(LAYOUT, found, 18)
    assert len(rows.token_ids()) == 18
    part = rows.export(3, 5)
    assert part["full.k"].shape == (2, 2, 4)
    assert part["full.k"][0, 0].tolist() == [12, 13, 14, 15]
    assert part["full.v"][1, 1].tolist() == [1 + 80 + 16 + n for n in range(4)]


def test_rows_that_are_no_numbers_are_refused() -> None:
    draft = assemble_slot(IDS, KIND)
    for array in (*draft.k, *draft.v):
        array[...] = 0
    draft.v[1][7, 2] = 0x7C00
    rows = SlotRows(LAYOUT, parse_slot(memoryview(draft.buffer.tobytes())), 40)
    rows.export(0, 7)
    with pytest.raises(Damaged, match=r"full\.v"):
        rows.export(0, 8)


@pytest.mark.parametrize(
    ("prompt", "generated", "inside", "sure"),
    [
        (30, 11, 40, 40),  # the last token was sampled and never computed
        (30, 11, 39, 30),  # a context that was shifted holds fewer
        (40, 1, 40, 40),
        (40, 0, 40, 40),
        (30, None, 35, 30),  # cut off: nobody says what was generated
        (40, None, 25, 25),
    ],
)
def test_only_tokens_whose_rows_are_sure_are_kept(
    prompt: int, generated: int | None, inside: int, sure: int
) -> None:
    file: Any = SimpleNamespace(token_ids=IDS[:inside])
    assert sure_tokens(Ended(IDS[:prompt], generated), file) == sure


def test_a_slot_that_holds_another_prompt_keeps_what_they_share() -> None:
    other = IDS.copy()
    other[12] += 1
    file: Any = SimpleNamespace(token_ids=other)
    assert sure_tokens(Ended(IDS[:30], 11), file) == 12


def test_a_slot_is_saved_only_for_a_new_filled_block() -> None:
    ended = Ended(IDS[:30], 3)
    assert new_blocks(ended, 0, 16)
    assert new_blocks(ended, 31, 16)
    assert not new_blocks(ended, 32, 16)
    assert not new_blocks(Ended(IDS[:30], 2), 20, 16)
