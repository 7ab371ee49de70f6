"""One Llama that serves several tenants: the callback says whose each request is. What counts is what
the engine really decoded, so a hit in its own context counts as a hit."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kvsnap
from kvsnap.engines import LlamaCpp
from kvsnap.formats.errors import StoreError, UsageError
from kvsnap.formats.names import chain_names, token_array
from kvsnap.kvstore.session import Session
from tests.engines.test_llama_cache import BLOCK, Chat, end_by_dropped_stream, filled, ids_of
from tests.tenants import ALICE, BOB, assert_not_in, open_shared

pytestmark = pytest.mark.engine

PROMPT = ids_of(1, 100)
ASKERS = [ALICE, BOB, None]


class Desk:
    """A Llama with one cache for whoever `now` is; how often that was asked for."""

    def __init__(self, model: Path, store: kvsnap.Store) -> None:
        self.now: Any = None
        self.asked = 0
        self.chat = Chat(model, store, tenant=self.whose)
        self.store = store

    def whose(self) -> Any:
        self.asked += 1
        if isinstance(self.now, BaseException):
            raise self.now
        return self.now

    def ask(self, who: Any, prompt: list[int] = PROMPT, max_tokens: int = 4) -> int:
        """Tokens that were decoded for the prompt."""
        self.now, self.chat.decoded = who, 0
        self.chat.complete(prompt, max_tokens)
        return self.chat.decoded - (max_tokens - 1)

    def stored(self, who: kvsnap.Tenant | None, ids: list[int]) -> int:
        """Blocks of these ids under that key."""
        root = Session(self.store, LlamaCpp(self.chat.llm), tenant=who).root
        names = chain_names(root.key, token_array(ids), BLOCK)
        return sum(self.store.blocks.has(name) for name in names)

    def blocks(self) -> int:
        count: int = self.store.index.query("SELECT COUNT(*) FROM blocks")[0][0]
        return count


@pytest.fixture
def store(tmp_path: Path) -> Iterator[kvsnap.Store]:
    with open_shared(tmp_path / "shared", BLOCK) as opened:
        yield opened


@pytest.fixture
def desk(model: Path, store: kvsnap.Store) -> Desk:
    return Desk(model, store)


def test_the_callback_is_asked_once_a_request(desk: Desk) -> None:
    assert desk.asked == 0
    for count, who in enumerate([ALICE, ALICE, BOB, None], 1):
        desk.ask(who)
        assert desk.asked == count


@pytest.mark.parametrize("other", [BOB, None], ids=["another key", "no key"])
def test_a_prompt_that_another_tenant_just_asked_is_computed_like_any_other(
    desk: Desk, other: kvsnap.Tenant | None
) -> None:
    """A68 inside the engine: the context would answer at once, whatever the store says."""
    never_seen = desk.ask(ALICE)
    assert desk.ask(other) == never_seen == len(PROMPT)
    assert desk.chat.cache.report.reused_tokens == 0
    # Paired: the same tenant hits, in the context and, after somebody else, in the store; of nobody's
    # request nothing is kept.
    assert desk.ask(other) == (1 if other else len(PROMPT))
    assert desk.ask(ALICE) == len(PROMPT) - filled(len(PROMPT))
    assert desk.chat.cache.report.from_store == filled(len(PROMPT))


def test_each_tenants_completion_is_stored_under_its_own_key(desk: Desk) -> None:
    for who in ASKERS:
        desk.ask(who)
    count = (len(PROMPT) + 3) // BLOCK
    kept = len(PROMPT) // BLOCK
    assert [desk.stored(who, PROMPT) for who in ASKERS] == [kept, kept, 0]
    assert desk.blocks() == 2 * count


@pytest.mark.parametrize("follows", [BOB, None, RuntimeError()], ids=["key", "no key", "unknown"])
def test_a_stream_that_was_dropped_is_stored_for_whom_it_was(desk: Desk, follows: Any) -> None:
    desk.now = ALICE
    end_by_dropped_stream(desk.chat, ids_of(3, 60))
    held = desk.chat.held()
    assert desk.stored(ALICE, held) == 0
    desk.ask(follows, ids_of(3, 60))  # the very same prompt
    assert desk.stored(ALICE, held) == len(held) // BLOCK > 3
    for other in (BOB, None):
        assert desk.stored(other, held[: 3 * BLOCK]) == (3 if other and other is follows else 0)


def test_what_another_tenant_tried_to_store_does_not_count_as_stored(desk: Desk) -> None:
    """Bob's own dropped stream of the same tokens is stored, too."""
    for who in (ALICE, BOB):
        desk.now = who
        end_by_dropped_stream(desk.chat, PROMPT)
    desk.ask(ALICE, ids_of(4, 20))
    assert desk.stored(ALICE, PROMPT) == desk.stored(BOB, PROMPT) == len(PROMPT) // BLOCK


@pytest.mark.parametrize(
    "answer",
    [KeyError("alice"), ALICE.key, ALICE.key.hex(), "alice", 3],
    ids=["an error", "bytes", "hex", "a name", "a number"],
)
def test_where_the_tenant_cannot_be_told_nothing_is_reused_or_stored(
    desk: Desk, answer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    desk.ask(ALICE)
    desk.ask(None)
    before = desk.blocks()
    for _ in range(2):
        assert desk.ask(answer) == len(PROMPT), "neither from the context nor from the store"
        assert desk.blocks() == before
        assert desk.chat.cache.report.reused_tokens == 0
    warnings = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "cannot tell the tenant of a request" in warnings[0].getMessage()
    assert_not_in(ALICE.key, [caplog.text])
    with pytest.raises(UsageError, match="cannot be told"):
        desk.chat.cache.save()
    assert PROMPT not in desk.chat.cache
    # Paired: it is told again, and what was stored before is there.
    assert desk.ask(ALICE) == len(PROMPT) - filled(len(PROMPT))


def test_the_key_is_in_no_log_of_a_server_of_many(
    desk: Desk, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.DEBUG)
    desk.ask(ALICE)

    def fails(*_: object, **__: object) -> None:
        raise StoreError("the disk went away")

    monkeypatch.setattr(Session, "resume", fails)
    desk.ask(BOB)
    desk.ask(ALICE)
    assert "the disk went away" in caplog.text
    for tenant in (ALICE, BOB):
        assert_not_in(tenant.key, [caplog.text])


@pytest.mark.parametrize("fails", ["resume", "__init__"])
def test_a_look_up_that_fails_leaves_nothing_of_another_tenant_in_the_context(
    desk: Desk, fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what is computed then is not stored under the other one's key, when the disk is back."""
    desk.ask(ALICE)
    before, does, times = desk.stored(ALICE, PROMPT), getattr(Session, fails), [1]

    def failing(*arguments: object, **options: object) -> Any:
        if times:
            times.pop()
            raise StoreError("the disk went away")
        return does(*arguments, **options)

    prompt = [*PROMPT, *ids_of(5, 40)]
    with monkeypatch.context() as patched:
        patched.setattr(Session, fails, failing)
        assert desk.ask(BOB, prompt) == len(prompt)
    assert desk.stored(ALICE, prompt) == before


def test_log_probabilities_of_the_prompt_are_not_read_off_another_tenants_context(
    model: Path, store: kvsnap.Store
) -> None:
    """The library takes its own context where the cache has nothing to say."""
    now: list[kvsnap.Tenant] = [ALICE]
    chat = Chat(model, store, tenant=lambda: now[0], logits_all=True, n_ctx=256)
    prompt = ids_of(1, 60)
    options: dict[str, Any] = {"logprobs": 1, "echo": True}
    text = chat.llm.detokenize(prompt).decode(errors="replace")
    chat.complete(text, 1, **options)
    own = chat.decoded
    chat.decoded, now[0] = 0, BOB
    chat.complete(text, 1, **options)
    assert chat.decoded == own > 1


def test_two_caches_of_two_tenants_on_one_llama_share_no_context(
    model: Path, store: kvsnap.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = Chat(model, store, tenant=ALICE)
    chat.complete(PROMPT, 4)
    end_by_dropped_stream(chat, PROMPT)
    chat.llm.set_cache(kvsnap.LlamaCache(store, chat.llm, tenant=BOB))
    chat.decoded = 0
    chat.complete(PROMPT, 4)
    assert chat.decoded == len(PROMPT) + 3
    session = Session(store, LlamaCpp(chat.llm), tenant=BOB)
    names = chain_names(session.root.key, token_array(PROMPT), BLOCK)
    assert sum(store.blocks.has(name) for name in names) == len(PROMPT) // BLOCK
    assert store.index.query("SELECT COUNT(*) FROM blocks WHERE root = 2")[0][0] == 103 // BLOCK


def test_nobody_goes_on_from_the_context_of_an_unknown_request(desk: Desk) -> None:
    desk.ask(ALICE, ids_of(6, 20))
    desk.ask(RuntimeError())
    for tenant in (ALICE, BOB, None):
        desk.ask(RuntimeError())
        session = Session(desk.store, LlamaCpp(desk.chat.llm), tenant=tenant)
        assert session.resume(PROMPT).reused_tokens == 0


def test_only_the_asking_tenants_prefix_is_in_the_cache(desk: Desk) -> None:
    desk.ask(ALICE)
    for who, found in ((BOB, False), (None, False), (ALICE, True)):
        desk.now = who
        assert (PROMPT in desk.chat.cache) is found
    desk.ask(BOB, ids_of(7, 30))
    desk.now = ALICE
    assert PROMPT in desk.chat.cache  # of the store now


def test_tenants_of_a_callback_need_an_encrypted_store(model: Path, tmp_path: Path) -> None:
    with (
        open_shared(tmp_path / "plain", encrypt=False) as plain,
        pytest.raises(UsageError, match="must be encrypted"),
    ):
        Desk(model, plain)


@pytest.mark.parametrize("wrong", [b"secret key", "0" * 64, 98765])
def test_a_tenant_that_is_none_is_refused_without_showing_it(
    model: Path, store: kvsnap.Store, wrong: Any
) -> None:
    with pytest.raises(UsageError, match=f"not a {type(wrong).__name__}") as refused:
        Chat(model, store, tenant=wrong)
    assert str(wrong) not in refused.value.what + refused.value.hint


def test_models_that_need_states_serve_several_tenants(tmp_path: Path, store: kvsnap.Store) -> None:
    pytest.importorskip("gguf", reason="gguf is not installed")
    from kvsnap.testing.tiny_gguf import VOCABULARY, write_tiny

    model = write_tiny(tmp_path / "tiny.gguf", "jamba", window=0)
    desk = Desk(model, store)
    prompt = [3 + n * 7 % (VOCABULARY - 3) for n in range(70)]
    first = desk.ask(ALICE, prompt)
    assert first >= len(prompt)
    assert desk.ask(BOB, prompt) == first
    assert desk.ask(ALICE, prompt) < first
