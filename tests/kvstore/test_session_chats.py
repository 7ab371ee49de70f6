"""Chats: where messages end, branches and edits between them, and what a broken-off answer leaves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsnap.formats.errors import EngineError, UsageError
from kvsnap.formats.names import common_prefix
from kvsnap.kvstore.answer import Answer, generate, prefill
from kvsnap.kvstore.boundaries import boundaries, ends_of_notes, find_ends
from kvsnap.kvstore.conversation import (
    Message,
    Prompt,
    Source,
    answered,
    branch_prompt,
    edited_prompt,
    new_prompt,
    next_prompt,
    stored_chat,
)
from kvsnap.kvstore.session import Session
from kvsnap.kvstore.store import Store
from kvsnap.testing.stamped_text import END, START, StampedTextEngine, Template, forgetful, plain

Opener = Callable[[], Store]
SYSTEM: list[Message] = [{"role": "system", "content": "you help people with bicycles"}]


def folding(messages: Sequence[Message], answer: bool) -> str:
    """As some templates do: the system prompt is the front of the first user's turn."""
    if messages and messages[0]["role"] == "system":
        if len(messages) == 1:
            return ""
        text = f"{messages[0]['content']}\n\n{messages[1]['content']}"
        messages = [{**messages[1], "content": text}, *messages[2:]]
    return plain(messages, answer)


def answer_to(session: Session, prompt: Prompt) -> Answer:
    """Resume, answer (what the assistant itself said needs none), save; engine and notes agree."""
    engine, result, ids = session.engine, Answer(), prompt.token_ids
    assert isinstance(engine, StampedTextEngine)
    asked = prompt.text.endswith(f"{START}assistant\n")
    leave = 1 if asked else 0
    prefill(session, engine, ids, result, leave=leave)
    if asked:
        for _ in generate(engine, ids, result, max_tokens=64):
            pass
        save_answer(session, prompt, result)
    else:
        session.save(prompt.notes("stamped"))
    return result


def save_answer(session: Session, prompt: Prompt, result: Answer) -> None:
    engine = session.engine
    assert isinstance(engine, StampedTextEngine)
    after = answered(prompt, engine, result.new_ids, result.ended)
    assert engine.token_ids().tolist() == after.token_ids.tolist()
    engine.check_rows()
    session.save(after.notes("stamped"))


def say(session: Session, text: str) -> tuple[Prompt, Answer]:
    engine = session.engine
    assert isinstance(engine, StampedTextEngine)
    if session.stored is None:
        first = Source(messages=[*SYSTEM, {"role": "user", "content": text}])
        prompt = new_prompt(engine, first, answer=True)
    else:
        prompt = next_prompt(engine, session.stored.record, Source(text=text))
    return prompt, answer_to(session, prompt)


def talk(store: Store, *texts: str, name: str = "chat", **options: Any) -> Session:
    session = Session(store, StampedTextEngine(**options), name)
    for text in texts:
        say(session, text)
    return session


def record_of(session: Session) -> Any:
    assert session.stored is not None
    return session.stored.record


@pytest.mark.parametrize("template", [plain, folding])
def test_every_end_is_where_ids_and_text_agree(store: Store, template: Template) -> None:
    session = talk(store, "hello", "and then?", "why", template=template)
    engine, chat = session.engine, stored_chat(record_of(session))
    assert isinstance(engine, StampedTextEngine)
    ends = find_ends(engine, chat)
    assert len(ends) == len(chat.messages) == 7
    assert [number for number, end in enumerate(ends) if end is None] == (
        [] if template is plain else [0]  # such a system prompt ends inside a turn
    )
    for message, end in zip(chat.messages, ends, strict=True):
        if end is not None:
            tokens, characters = end
            text = chat.text[:characters]
            assert engine.spelled(chat.token_ids[:tokens]) == text
            assert text.removesuffix(f"{END}\n").endswith(str(message["content"]))


@pytest.mark.parametrize("template", [plain, folding, forgetful])
@settings(max_examples=25)
@given(
    texts=st.lists(st.text("abcdef ", max_size=12), min_size=1, max_size=6),
    other=st.text("abcdef ", min_size=1, max_size=12),
)
def test_chats_that_share_messages_share_the_ids_up_to_their_boundary(
    template: Template, texts: list[str], other: str
) -> None:
    engine = StampedTextEngine(template)
    roles = ["system", *["user", "assistant"] * len(texts)]
    messages = [{"role": r, "content": t} for r, t in zip(roles, texts, strict=False)]
    prompt = new_prompt(engine, Source(messages=messages), answer=True)
    found = boundaries(engine, prompt)
    assert found == sorted(set(found))
    assert all(0 < position <= len(prompt.token_ids) for position in found)
    if template is not plain:
        return
    for count in range(1, len(messages)):
        # What another chat has in common with this one reaches at least to the boundary.
        changed = [*messages[:count], {"role": roles[count], "content": other + texts[count]}]
        ids = new_prompt(engine, Source(messages=changed), answer=False).token_ids
        assert common_prefix(ids, prompt.token_ids) >= found[count - 1]


def test_a_system_prompt_that_ends_inside_a_turn_has_its_boundary_before_what_the_user_says(
    store: Store,
) -> None:
    engine = StampedTextEngine(folding)
    messages = [*SYSTEM, {"role": "user", "content": "Hello"}]
    prompt = new_prompt(engine, Source(messages=messages), answer=True)
    first = boundaries(engine, prompt)[0]
    assert engine.spelled(prompt.token_ids[:first]) == (f"{START}user\n{SYSTEM[0]['content']}\n\n")
    assert boundaries(engine, new_prompt(engine, Source(text="raw"), answer=False)) == []


@pytest.mark.parametrize("messages", range(8))
def test_a_chat_branched_after_any_message_goes_on_from_there(
    open_store: Opener, messages: int
) -> None:
    session = talk(open_store(), "hello", "and then?", "why")
    engine, record = session.engine, record_of(session)
    assert isinstance(engine, StampedTextEngine)
    computed = engine.evaluated
    front = branch_prompt(engine, record, messages)
    session.branch("fork", len(front.token_ids), notes=front.notes("stamped"))
    assert engine.evaluated == computed
    assert record.token_ids[: len(front.token_ids)].tolist() == front.token_ids.tolist()

    fresh = StampedTextEngine()
    fork = Session(open_store(), fresh, "fork")
    assert [m["content"] for m in record_of(fork).notes["messages"]] == [
        m["content"] for m in record.notes["messages"][:messages]
    ]
    prompt = next_prompt(fresh, record_of(fork), Source(text="other"))
    assert fresh.spelled(prompt.token_ids) == plain(prompt.messages, True)
    result = answer_to(fork, prompt)
    assert result.report is not None
    assert result.report.reused_tokens == fresh.positions[0] >= len(front.token_ids)
    assert record_of(Session(open_store(), fresh, "chat")).revision == record.revision


@pytest.mark.parametrize("messages", [-1, 4])
def test_a_branch_after_a_message_that_is_not_there_is_refused(store: Store, messages: int) -> None:
    session = talk(store, "hello")
    engine = session.engine
    assert isinstance(engine, StampedTextEngine)
    with pytest.raises(UsageError, match="3 messages"):
        branch_prompt(engine, record_of(session), messages)
    with pytest.raises(UsageError, match="3 messages"):
        edited_prompt(engine, record_of(session), messages, "x")


def test_a_branch_where_the_template_lets_no_message_end_is_refused(store: Store) -> None:
    session = talk(store, "hello", template=folding)
    engine = session.engine
    assert isinstance(engine, StampedTextEngine)
    with pytest.raises(UsageError, match="message 1 no end of its own"):
        branch_prompt(engine, record_of(session), 1)


@pytest.mark.parametrize("index", range(7))
def test_an_edited_message_keeps_the_ids_before_it(open_store: Opener, index: int) -> None:
    session = talk(open_store(), "hello", "and then?", "why")
    record = record_of(session)
    fresh = StampedTextEngine()
    again = Session(open_store(), fresh, "chat")
    prompt = edited_prompt(fresh, record, index, "quite another thing")
    assert [m["content"] for m in prompt.messages] == [
        *(m["content"] for m in record.notes["messages"][:index]),
        "quite another thing",
    ]
    assert fresh.spelled(prompt.token_ids) == plain(prompt.messages, index not in (2, 4, 6))
    before = branch_prompt(fresh, record, index)
    assert prompt.token_ids[: len(before.token_ids)].tolist() == before.token_ids.tolist()
    result = answer_to(again, prompt)
    assert result.report is not None
    assert fresh.positions[0] == result.report.reused_tokens >= len(before.token_ids)
    assert say(again, "and so on")[0].warning == ""


@settings(max_examples=25)
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["say", "edit", "branch"]), st.integers(0, 20)),
        min_size=1,
        max_size=7,
    )
)
def test_whatever_is_said_edited_and_branched_ids_and_text_stay_one(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int]]
) -> None:
    with Store(tmp_path_factory.mktemp("store") / "s") as store:
        session, engine = talk(store, "begin"), StampedTextEngine()
        for number, (step, at) in enumerate(steps):
            record = record_of(session)
            count = len(record.notes["messages"])
            if step == "branch":
                front = branch_prompt(engine, record, at % (count + 1))
                name, tokens = f"fork {number}", len(front.token_ids)
                session = session.branch(name, tokens, notes=front.notes("stamped"))
            elif step == "edit" and count:
                answer_to(session, edited_prompt(engine, record, at % count, f"edit {at}"))
            else:
                _, result = say(session, "abc"[: at % 4])
                assert result.report is not None
                assert result.report.reused_tokens >= len(record.token_ids) - 1
            chat = stored_chat(record_of(session))
            assert engine.spelled(chat.token_ids) == chat.text
            for end in chat.ends:
                assert (
                    end is None or engine.spelled(chat.token_ids[: end[0]]) == (chat.text[: end[1]])
                )


def test_a_template_that_drops_thoughts_reuses_everything_before_the_answer(
    open_store: Opener,
) -> None:
    store = open_store()
    prompt, _ = say(Session(store, StampedTextEngine(forgetful, thinks=True), "chat"), "hello")
    store.close()

    fresh = StampedTextEngine(forgetful, thinks=True)
    again = Session(open_store(), fresh, "chat")
    later, result = say(again, "and then?")
    assert "rewrote earlier turns" in later.warning
    assert "think" not in fresh.spelled(later.token_ids)
    before = len(prompt.token_ids)
    assert result.report is not None
    assert result.report.reused_tokens >= before
    assert min(fresh.positions) == result.report.reused_tokens >= before
    third = next_prompt(fresh, record_of(again), Source(text="go on"))
    assert common_prefix(third.token_ids, later.token_ids) == len(later.token_ids)


class TestAnAnswerThatIsBrokenOff:
    """What the engine holds decides what is saved, and the next turn goes on from there."""

    def begin(self, store: Store) -> tuple[Session, StampedTextEngine, Prompt, Answer]:
        engine = StampedTextEngine(longest=30)
        session, result = Session(store, engine, "chat"), Answer()
        source = Source(messages=[*SYSTEM, {"role": "user", "content": "hello"}])
        prompt = new_prompt(engine, source, answer=True)
        ids = prompt.token_ids
        prefill(session, engine, ids, result)
        return session, engine, prompt, result

    def goes_on(self, open_store: Opener, tokens: int) -> None:
        fresh = StampedTextEngine()
        again = Session(open_store(), fresh, "chat")
        prompt, result = say(again, "go on")
        assert fresh.spelled(prompt.token_ids) == plain(prompt.messages, True)
        assert result.report is not None
        assert result.report.reused_tokens == tokens == fresh.positions[0]

    @pytest.mark.parametrize("tokens", [1, 2, 7])
    def test_by_who_reads_it(self, open_store: Opener, tokens: int) -> None:
        session, engine, prompt, result = self.begin(open_store())
        for _ in generate(engine, prompt.token_ids, result, max_tokens=64):
            if len(result.new_ids) == tokens:
                break
        save_answer(session, prompt, result)
        assert len(result.new_ids) == tokens
        self.goes_on(open_store, len(prompt.token_ids) + tokens)

    def test_by_an_error_of_who_reads_it(self, open_store: Opener) -> None:
        session, engine, prompt, result = self.begin(open_store())
        answer = generate(engine, prompt.token_ids, result, max_tokens=64)

        def read() -> None:
            for number, _ in enumerate(answer):
                print(1 / (3 - number))

        with pytest.raises(ZeroDivisionError):
            read()
        answer.close()
        save_answer(session, prompt, result)
        self.goes_on(open_store, len(prompt.token_ids) + 4)

    def test_by_an_interruption_of_the_engine(
        self, open_store: Opener, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        session, engine, prompt, result = self.begin(open_store())
        sample = engine.sample

        def interrupted() -> int:
            if len(result.new_ids) == 5:
                monkeypatch.setattr(engine, "sample", sample)
                raise KeyboardInterrupt
            return sample()

        monkeypatch.setattr(engine, "sample", interrupted)
        answer = generate(engine, prompt.token_ids, result, max_tokens=64)
        with pytest.raises(KeyboardInterrupt):
            list(answer)
        save_answer(session, prompt, result)
        self.goes_on(open_store, len(prompt.token_ids) + 5)

    def test_by_a_stop_string_whose_tokens_are_taken_back(self, open_store: Opener) -> None:
        session, engine, prompt, result = self.begin(open_store())
        for _ in generate(engine, prompt.token_ids, result, max_tokens=9):
            pass
        stop = engine.detokenize(result.new_ids[4:6])
        at = engine.detokenize(result.new_ids).find(stop)
        while len(engine.detokenize(result.new_ids)) > at:
            result.new_ids.pop()
        session.truncate(len(prompt.token_ids) + len(result.new_ids))
        result.ended = True
        save_answer(session, prompt, result)
        self.goes_on(open_store, len(prompt.token_ids) + len(result.new_ids))

    def test_by_an_error_of_the_engine(
        self, open_store: Opener, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        session, engine, prompt, result = self.begin(open_store())
        answer = generate(engine, prompt.token_ids, result, max_tokens=64)
        assert [next(answer) for _ in range(3)] == result.new_ids
        with monkeypatch.context() as patch:
            patch.setattr(engine, "evaluate", _broken)
            with pytest.raises(EngineError, match="no more"):
                next(answer)
        held = len(engine.token_ids()) - len(prompt.token_ids)
        assert held == 2
        del result.new_ids[held:]
        save_answer(session, prompt, result)
        self.goes_on(open_store, len(prompt.token_ids) + held)


def _broken(*_: object) -> None:
    raise EngineError("no more")


@pytest.mark.parametrize(
    "ends",
    [
        None,
        "none",
        [[1, 2]],
        [None, [1, 2], [0, 3]],
        [None, [5, 2], [9, 31]],
        [[True, 2], None, None],
        [[1.0, 2], None, None],
        [[-1, 2], None, None],
        [[1, 2, 3], None, None],
    ],
)
def test_notes_that_cannot_be_true_say_nothing(ends: Any) -> None:
    assert ends_of_notes({"ends": ends}, 3, 9, "x" * 30) == (None, None, (9, 30))
    assert ends_of_notes({"ends": [[1, 2], None, [9, 30]]}, 3, 9, "x" * 30) == (
        (1, 2),
        None,
        (9, 30),
    )
    assert ends_of_notes({}, 0, 0, "") == ()
