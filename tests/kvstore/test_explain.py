"""explain says why a prompt would hit or miss, and is right about what a resume then does."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from kvsnap.engines.text import TextEngine
from kvsnap.formats.tenant import Tenant
from kvsnap.kvstore import break_even
from kvsnap.kvstore.break_even import Record, key_of, this_machine
from kvsnap.kvstore.curve import curve
from kvsnap.kvstore.explain.explain import ADVICE, Explanation, explain
from kvsnap.kvstore.gc import gc
from kvsnap.kvstore.session import Session
from kvsnap.kvstore.store import Store
from kvsnap.testing.faults import flip
from kvsnap.testing.stamped import StampedEngine
from kvsnap.testing.turns import some_ids, turn

Opener = Callable[[], Store]
IDS = some_ids(70)
"""Four blocks of 16 and a tail of 6."""


def explained(
    store: Store,
    ids: Sequence[int],
    name: str | None = None,
    *,
    tenant: Tenant | None = None,
    check: bool = False,
    **engine: object,
) -> Explanation:
    """The explanation, in one line of text, with the engine left alone."""
    session = Session(store, StampedEngine(**engine), name, tenant=tenant)
    found = explain(session, ids, check=check)
    assert (session.engine.held, session.engine.evaluated) == (0, 0)
    assert found.advice in ADVICE.values()
    assert "\n" not in found.text
    return found


def in_block_order(store: Store) -> list[bytes]:
    return [name for (name,) in store.index.query("SELECT name FROM blocks ORDER BY start")]


def test_a_prompt_that_is_stored_is_a_whole_prompt_and_lists_its_blocks(store: Store) -> None:
    turn(store, StampedEngine(), IDS, "chat")
    found = explained(store, IDS[:65])
    assert (found.verdict, found.prompt_tokens, found.matched_tokens) == ("whole prompt", 65, 64)
    assert [block.name for block in found.blocks] == [n.hex() for n in in_block_order(store)]
    assert [(block.start, block.tokens) for block in found.blocks] == [
        (0, 16), (16, 16), (32, 16), (48, 16),
    ]  # fmt: skip
    sizes = dict(store.index.query("SELECT hex(name), bytes FROM blocks"))
    assert [b.bytes for b in found.blocks] == [sizes[b.name.upper()] for b in found.blocks]
    assert (found.block, found.differing_token, found.identity, found.damage) == (
        None, None, None, (),
    )  # fmt: skip


@pytest.mark.parametrize("length", [2, 15, 16, 17, 32, 64, 69, 70])
def test_the_last_token_of_a_stored_prompt_is_always_left(store: Store, length: int) -> None:
    turn(store, StampedEngine(), IDS, "chat")
    found = explained(store, IDS[:length], "chat")
    assert (found.verdict, found.matched_tokens) == ("whole prompt", length - 1)
    assert sum(block.tokens for block in found.blocks) + found.tail_tokens == length - 1


def test_the_part_of_the_sessions_own_tail_is_counted_apart(store: Store) -> None:
    turn(store, StampedEngine(), IDS, "chat")
    more = [*IDS, *some_ids(30, seed=2)]
    found = explained(store, more, "chat")
    assert (found.matched_tokens, found.tail_tokens, len(found.blocks)) == (70, 6, 4)
    assert (found.verdict, found.text) == ("end of stored chain", "session 'chat' ends there")
    stranger = explained(store, more)
    assert (stranger.matched_tokens, stranger.tail_tokens) == (64, 0)
    assert (stranger.verdict, stranger.text) == (
        "end of stored chain", "nothing that follows is stored",
    )  # fmt: skip
    assert stranger.advice.startswith("save the whole prompt")


def test_what_fills_no_block_is_no_reason_to_save_again(store: Store) -> None:
    turn(store, StampedEngine(), IDS, "chat")
    found = explained(store, IDS)
    assert (found.verdict, found.matched_tokens) == ("end of stored chain", 64)
    assert found.text.startswith("the other 6 fill no block")
    assert found.advice.startswith("nothing to do")


@pytest.mark.parametrize("at", [1, 15, 16, 17, 40, 63])
def test_the_first_differing_token_is_named_with_its_stored_sibling(store: Store, at: int) -> None:
    turn(store, StampedEngine(), IDS)
    other = [*IDS[:at], IDS[at] ^ 1, *some_ids(30, seed=2)]
    found = explained(store, other)
    parting = found.differing_token
    assert found.verdict == "differing token"
    assert parting is not None
    assert (parting.position, parting.token_id, parting.stored_token_id) == (
        at, IDS[at] ^ 1, IDS[at],
    )  # fmt: skip
    assert found.matched_tokens == at
    sibling = in_block_order(store)[at // 16].hex()
    assert parting.stored_in == f"block {sibling[:12]}"
    assert [b.tokens for b in found.blocks] == [16] * (at // 16) + [at % 16] * (at % 16 > 0)


def test_of_many_siblings_the_one_that_shares_most_is_compared(store: Store) -> None:
    front = IDS[:24].tolist()
    for end in ([9, 9, 9, 9, 9, 9, 9, 9], [5, 5, 5, 5, 1, 1, 1, 1], [5, 7, 7, 7, 7, 7, 7, 7]):
        turn(store, StampedEngine(), [*front, *end])
    parting = explained(store, [*front, 5, 5, 5, 5, 5, 5, 5, 5, 5]).differing_token
    assert parting is not None
    assert (parting.position, parting.token_id, parting.stored_token_id) == (28, 5, 1)


def test_a_sessions_own_ids_are_compared_beyond_its_last_block(store: Store) -> None:
    turn(store, StampedEngine(), IDS, "chat")
    other = [*IDS[:67], IDS[67] ^ 1, *some_ids(9, seed=2)]
    found = explained(store, other, "chat")
    assert found.differing_token is not None
    assert (found.differing_token.position, found.differing_token.stored_in) == (
        67, "session 'chat'",
    )  # fmt: skip
    assert (found.matched_tokens, found.tail_tokens) == (67, 3)


class Spelling(StampedEngine, TextEngine):
    """Tokens are letters; 0 is a special token without text."""

    def tokenize(self, text, *, first, chat=False): ...
    def render(self, messages, *, answer): ...
    def generate(self, token_ids, *, temperature, seed): ...

    def detokenize(self, token_ids: Sequence[int]) -> bytes:
        return b"".join(b"" if token == 0 else b"%c" % token for token in token_ids)


def test_both_sides_are_given_as_text_with_what_stands_around(store: Store) -> None:
    stored, asked = list(b"it opens at nine o'clock on Monday"), list(b"it opens at ten o'clock")
    turn(store, Spelling(), stored, "hours")
    found = explain(Session(store, Spelling(), "hours"), asked).differing_token
    assert found is not None
    assert (found.before, found.text, found.after) == ("pens at ", "t", "en o'cl")
    assert (found.stored_text, found.stored_after) == ("n", "ine o'c")


def test_a_special_token_has_no_text_and_half_a_character_is_shown_as_such(store: Store) -> None:
    stored = [*b"0123456789", 0, *"ä and more of it".encode()]
    turn(store, Spelling(), stored, "s")
    found = explain(Session(store, Spelling(), "s"), [*stored[:10], 0xC3, 0xA4, 65])
    assert found.differing_token is not None
    assert (found.differing_token.text, found.differing_token.stored_text) == ("\ufffd", "")


@pytest.mark.parametrize("name", [None, "chat"], ids=["prompt alone", "session"])
def test_the_identity_field_that_differs_is_named_with_both_values(
    store: Store, name: str | None
) -> None:
    turn(store, StampedEngine(), IDS, "chat")
    found = explained(store, IDS, name, rotation_k=64)
    assert (found.verdict, found.matched_tokens, found.blocks) == ("identity", 0, ())
    assert found.identity is not None
    assert (found.identity.field, found.identity.here, found.identity.stored) == (
        "rotation_k", "64", "0",
    )  # fmt: skip


def test_a_tail_of_another_identity_counts_for_nothing(store: Store) -> None:
    turn(store, StampedEngine(), IDS[:9], "short")
    assert explained(store, IDS[:20], "short").tail_tokens == 9
    found = explained(store, IDS[:20], "short", rotation_k=64)
    assert (found.verdict, found.matched_tokens) == ("identity", 0)


def test_a_shared_first_token_does_not_hide_that_another_identity_has_the_prompt(
    store: Store,
) -> None:
    turn(store, StampedEngine(), IDS)
    turn(store, StampedEngine(weights="other"), [int(IDS[0]), *some_ids(20, seed=2)])
    found = explained(store, IDS, weights="other")
    assert (found.verdict, found.matched_tokens) == ("identity", 1)


def test_what_a_bench_found_too_slow_to_restore_is_not_worth_it(open_store: Opener) -> None:
    store = open_store()
    session = turn(store, StampedEngine(), IDS).session
    record = Record(
        prefill=curve([(64, 0.001)]),
        restore={"disk": curve([(64, 9.0)])},
        model="m",
        codec="raw",
        measured=int(time.time()),
        machine=this_machine(),
    )
    break_even.write(store.place, key_of(session.root.identity), record)
    store = open_store()
    found = explained(store, IDS)
    assert (found.verdict, found.matched_tokens, found.reused_tokens) == ("not worth it", 64, 0)
    assert found.text.startswith("restoring 64 tokens takes about 9.0 s")
    resumed = turn(store, StampedEngine(), IDS, save=False).resumed
    assert (resumed.reused_tokens, resumed.stopped_by) == (0, f"not worth it: {found.text}")
    assert explained(store, some_ids(70, seed=3)).verdict == "nothing stored"


@pytest.mark.parametrize("ids", [[], [7]], ids=["empty", "one token"])
def test_a_prompt_of_which_nothing_can_be_restored_is_whole(store: Store, ids: list[int]) -> None:
    assert (explained(store, ids).verdict, explained(store, ids).matched_tokens) == (
        "whole prompt", 0,
    )  # fmt: skip


KEYS = [Tenant(bytes([n]) * 32) for n in (1, 2)]


@pytest.mark.parametrize("asker", [KEYS[1], None], ids=["another key", "no key"])
@pytest.mark.parametrize("state", ["stored", "evicted", "damaged"])
def test_another_tenants_prompt_is_explained_like_never_seen_tokens(
    store_path: Path, asker: Tenant | None, state: str
) -> None:
    with Store(store_path) as store:
        turn(store, StampedEngine(), IDS, "chat", tenant=KEYS[0])
        used = store.space.used()
        if state == "damaged":
            flip(store.place.block(in_block_order(store)[0]), -1)
            turn(store, StampedEngine(), IDS, tenant=KEYS[0], save=False)
    with Store(store_path, capacity=used // 2 if state == "evicted" else None) as store:
        if state == "evicted":
            gc(store, dry_run=False)
        never_seen = explained(store, some_ids(70, seed=9), "chat", tenant=asker)
        assert explained(store, IDS, "chat", tenant=asker) == never_seen
        assert never_seen.verdict == "nothing stored"
        # Paired: whoever has the key is told.
        own = explained(store, [*IDS, 1], "chat", tenant=KEYS[0])
        told = {"stored": "end of stored chain"}.get(state, state)
        assert own.verdict == ("whole prompt" if state == "stored" else told)


def test_another_identity_under_another_key_is_not_named(store: Store) -> None:
    turn(store, StampedEngine(), IDS, tenant=KEYS[0])
    for asker in (KEYS[1], None):
        assert explained(store, IDS, tenant=asker, rotation_k=64).verdict == "nothing stored"
    assert explained(store, IDS, tenant=KEYS[0], rotation_k=64).verdict == "identity"


def test_nothing_is_changed_moved_or_counted(store: Store, store_path: Path) -> None:
    turn(store, StampedEngine(), IDS, "chat")
    flip(store.place.block(in_block_order(store)[2]), -1)
    state = "SELECT name, used, hits, holds, reachable, lost, synced FROM blocks ORDER BY name"

    def look() -> object:
        files = {
            path.relative_to(store_path): path.read_bytes()
            for path in store_path.rglob("*")
            if path.is_file() and not path.name.startswith("index.sqlite3")
        }
        return files, store.index.query(state), store.index.query("SELECT * FROM counters")

    before = look()
    for check in (False, True):
        explained(store, IDS, "chat", check=check)
        explained(store, some_ids(40, seed=3), check=check)
    assert look() == before
    assert not store.blocks.misses
    # The next resume finds the damage by itself, and every block before it.
    assert turn(store, StampedEngine(), IDS, save=False).resumed.reused_tokens == 32


@pytest.mark.parametrize("seed", range(40))
def test_a_resume_reuses_what_the_explanation_said(open_store: Opener, seed: int) -> None:
    """Prompts that part from stored ones anywhere, on a store with damage."""
    store = open_store()
    turn(store, StampedEngine(), IDS, "chat")
    turn(store, StampedEngine(), [*IDS[:40], *some_ids(40, seed=2)])
    if seed % 3 == 0:
        store.place.block(in_block_order(store)[seed % 5]).unlink()
    at = seed * 13 % 81
    asked = [*(IDS if seed % 2 else [*IDS[:40], *some_ids(40, seed=2)])[:at], *some_ids(9, seed=3)]
    name = "chat" if seed % 4 < 2 else None
    found = explained(store, asked, name)
    report = turn(open_store(), StampedEngine(), asked, name, save=False).resumed
    assert found.reused_tokens == report.reused_tokens
    if report.stopped_by.startswith(("whole prompt", "damaged")):
        assert report.stopped_by.startswith(found.verdict)


def test_the_explanation_is_plain_data(store: Store) -> None:
    turn(store, StampedEngine(), IDS)
    for ids in (IDS, [*IDS[:20], 1, 2, 3], some_ids(40, seed=4)):
        assert json.loads(json.dumps(dataclasses.asdict(explained(store, ids))))
