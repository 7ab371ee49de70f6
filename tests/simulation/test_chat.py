"""Synthetic chats: the same for the same seed, and with the sharing that they are there for."""

from __future__ import annotations

import pytest

from kvsnap.kvstore.simulation.chat import ChatTraffic
from kvsnap.kvstore.simulation.replay import Case, replay


def test_equal_settings_give_equal_requests_and_another_seed_others() -> None:
    once = ChatTraffic(requests=50, seed=3).workload()
    assert once == ChatTraffic(requests=50, seed=3).workload()
    assert once != ChatTraffic(requests=50, seed=4).workload()
    assert len(once.requests) == 50


def test_the_default_setting_shows_the_figures_of_the_page() -> None:
    row = replay(ChatTraffic().workload(), Case(None, "leaf-lru"))
    assert row.block_hit_rate == pytest.approx(0.80, abs=0.005)
    assert row.token_reuse == pytest.approx(0.78, abs=0.005)


@pytest.mark.parametrize("seed", [1, 2, 3, 4])
def test_other_seeds_show_about_the_same(seed: int) -> None:
    row = replay(ChatTraffic(seed=seed).workload(), Case(None, "leaf-lru"))
    assert row.block_hit_rate == pytest.approx(0.80, abs=0.02)
    assert row.token_reuse == pytest.approx(0.78, abs=0.02)


def test_leaf_lru_keeps_the_shared_prefix_longest_as_capacity_shrinks() -> None:
    workload = ChatTraffic().workload()
    full, tenth, hundredth = (
        replay(workload, Case(capacity, "leaf-lru")) for capacity in (None, 754, 75)
    )
    for small in (tenth, hundredth):
        assert full.shared_hit_rate
        assert small.shared_hit_rate
        kept_shared = small.shared_hit_rate / full.shared_hit_rate
        assert kept_shared > small.block_hit_rate / full.block_hit_rate
    assert tenth.shared_hit_rate is not None
    assert tenth.shared_hit_rate > 0.95
    plain = replay(workload, Case(75, "lru"))
    assert plain.shared_hit_rate is not None
    assert hundredth.shared_hit_rate is not None
    assert plain.shared_hit_rate < hundredth.shared_hit_rate
    assert plain.stranded_asked > 0 == hundredth.stranded_asked


def test_a_turn_sends_everything_before_it_again() -> None:
    workload = ChatTraffic(requests=1000, turns=6, block_size=16).workload()
    earlier: set[tuple[int, ...]] = set()
    following = 0
    for request in workload.requests:
        fronts = (request.chain[:n] for n in range(request.shared + 1, len(request.chain)))
        following += any(front in earlier for front in fronts)
        earlier.add(request.chain)
    assert 0.7 < following / len(workload.requests) < 0.9


def test_only_filled_blocks_are_asked_for() -> None:
    for request in ChatTraffic(requests=50, block_size=32).workload().requests:
        assert len(request.chain) == request.tokens // 32
        assert 0 < request.shared <= len(request.chain)
