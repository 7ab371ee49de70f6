"""What explain, doctor and reports say of blocks that no trusted key signed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvsnap.kvstore.doctor import examine
from kvsnap.kvstore.explain.explain import DAMAGED, explain
from kvsnap.kvstore.session import Session
from kvsnap.kvstore.store import Store
from kvsnap.testing.stamped import StampedEngine
from kvsnap.testing.turns import some_ids, turn
from tests.planting import PLANTS, chain_files, plant

IDS = some_ids(57)
MORE = np.concatenate([IDS, some_ids(9, 1)])
SOMEBODY = "ab" * 32
UNSIGNED = "no trusted key signed it"


@pytest.fixture
def planted(store_path: Path) -> Iterator[Store]:
    """A store with a list, opened anew after its second block was planted."""
    with Store(store_path, trust=[SOMEBODY]) as store:
        turn(store, StampedEngine(), IDS, "chat", codec="raw")
    files = chain_files(store_path)
    plant(files[1], files[0], PLANTS["signed by a stranger"])
    with Store(store_path, trust=[SOMEBODY]) as store:
        yield store


def test_explain_says_that_nobody_trusted_signed_it(planted: Store) -> None:
    found = explain(Session(planted, StampedEngine(), "chat"), MORE, check=True)
    assert found.verdict == DAMAGED
    assert found.matched_tokens == 16
    assert UNSIGNED in " ".join((found.text, *found.damage))
    assert len(chain_files(planted.path)) == 3, "it moves nothing"


def test_so_it_does_once_the_block_was_set_aside(planted: Store, store_path: Path) -> None:
    done = turn(planted, StampedEngine(), MORE, "chat", save=False).resumed
    assert any(UNSIGNED in line for line in done.damage)
    with Store(store_path, trust=[SOMEBODY]) as store:
        found = explain(Session(store, StampedEngine(), "chat"), MORE)
        assert found.matched_tokens == 16
        assert UNSIGNED in " ".join((found.text, *found.damage))


def test_explain_of_a_planted_tail(store_path: Path, planted: Store) -> None:
    from tests.planting import session_with_other_tail

    turn(planted, StampedEngine(), IDS, "chat", codec="raw")
    path = planted.sessions.path("default", "chat")
    path.write_bytes(session_with_other_tail(path.read_bytes()))
    found = explain(Session(planted, StampedEngine(), "chat"), MORE)
    assert found.matched_tokens == 48
    assert any(f"tail of session 'chat': {UNSIGNED}" in line for line in found.damage)


def test_a_trusting_store_is_as_healthy_as_any(planted: Store, store_path: Path) -> None:
    turn(planted, StampedEngine(), IDS, "chat")
    planted.close()
    found = [finding for finding in examine(store_path) if finding.level == "problem"]
    assert found == []


def test_the_index_names_signers_and_verdicts(planted: Store) -> None:
    turn(planted, StampedEngine(), MORE, "chat", save=False)
    rows = planted.index.query("SELECT lost, reachable FROM blocks ORDER BY start")
    assert rows == [(None, 1), (UNSIGNED, 0), (None, 0)]
    assert UNSIGNED in planted.blocks.misses.values()
