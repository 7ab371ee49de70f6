"""From texts, messages and turns to token ids: stored ids are never tokenized again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from kvsnap.formats.errors import UsageError
from kvsnap.formats.names import TokenIds, token_array
from kvsnap.formats.session import SessionRecord
from kvsnap.kvstore.conversation import (
    Prompt,
    Source,
    answered,
    check_messages,
    new_prompt,
    next_prompt,
    readable,
)


class Toy:
    """A tokenizer that merges "ab" (A62), and a template of brackets that may drop thoughts."""

    def __init__(self, drops_thoughts: bool = False) -> None:
        self.drops_thoughts = drops_thoughts

    def tokenize(self, text: str, *, first: bool, chat: bool = False) -> TokenIds:
        del first, chat
        merged = text.replace("ab", "\x01")
        return token_array([1 if c == "\x01" else ord(c) for c in merged])

    def detokenize(self, token_ids: Sequence[int]) -> bytes:
        return b"".join(b"ab" if t == 1 else chr(t).encode() for t in token_ids)

    def render(self, messages: Sequence[Mapping[str, Any]], *, answer: bool) -> str:
        parts = []
        for number, message in enumerate(messages):
            content = message["content"]
            if self.drops_thoughts and number < len(messages) - 1:
                content = content.rpartition("</think>")[2]
            parts.append(f"[{message['role'][0]}:{content}]")
        return "".join(parts) + ("[a:" if answer else "")

    def generate(self, token_ids: TokenIds, *, temperature: float, seed: int) -> Iterator[int]:
        raise AssertionError("not needed here")


def record(prompt: Prompt) -> SessionRecord:
    return SessionRecord(
        name="s", tenant_id="default", root_id="0" * 64, identity="{}", block_size=64, revision=1,
        token_ids=prompt.token_ids, chain=(bytes(32),) * (len(prompt.token_ids) // 64),
        notes=prompt.notes("toy"),
    )  # fmt: skip


ASK = Source(messages=[{"role": "user", "content": "hi"}])


def talk(engine: Any, *answer_ids: int, ended: bool = True) -> SessionRecord:
    """Saved messages, then an answer."""
    asked = next_prompt(engine, record(new_prompt(engine, ASK, answer=False)), Source())
    return record(answered(asked, engine, answer_ids, ended))


def test_a_saved_chat_is_rendered_without_the_generation_prompt() -> None:
    toy: Any = Toy()
    assert new_prompt(toy, ASK, answer=False).text == "[u:hi]"
    assert (
        next_prompt(toy, record(new_prompt(toy, ASK, answer=False)), Source()).text == "[u:hi][a:"
    )


def test_the_next_turn_is_appended_to_the_stored_ids_which_are_not_tokenized_again() -> None:
    toy: Any = Toy()
    # The model wrote "a", "b" as two tokens; tokenizing its text again would give one.
    stored = talk(toy, ord("a"), ord("b"))
    turn = next_prompt(toy, stored, Source(text="more"))
    assert turn.text == "[u:hi][a:ab][u:more][a:"
    assert turn.token_ids[: len(stored.token_ids)].tolist() == stored.token_ids.tolist()
    assert toy.detokenize(turn.token_ids).decode() == turn.text
    assert not turn.warning
    assert len(turn.token_ids) == len(toy.tokenize(turn.text, first=True)) + 1


def test_a_template_that_rewrites_earlier_turns_is_noticed() -> None:
    toy: Any = Toy(drops_thoughts=True)
    stored = talk(toy, *map(ord, "x</think>yes"))
    turn = next_prompt(toy, stored, Source(text="more"))
    assert turn.warning
    assert turn.text == "[u:hi][a:yes][u:more][a:"
    common = np.flatnonzero(turn.token_ids[:12] != stored.token_ids[:12])[0]
    assert common == len("[u:hi][a:")


def test_an_answer_cut_short_goes_on_where_it_stopped() -> None:
    toy: Any = Toy()
    cut = talk(toy, ord("o"), ended=False)
    more = next_prompt(toy, cut, Source())
    assert more.token_ids.tolist() == cut.token_ids.tolist()
    longer = answered(more, toy, [ord("k")], ended=True)
    assert longer.messages[-1] == {"role": "assistant", "content": "ok"}
    assert longer.text == "[u:hi][a:ok"
    # The answer is over now: going on means a further one.
    assert next_prompt(toy, record(longer), Source()).text == "[u:hi][a:ok][a:"


def test_raw_text_is_appended_as_text_and_ids_as_ids() -> None:
    toy: Any = Toy()
    raw = record(new_prompt(toy, Source(text="xa"), answer=True))
    assert next_prompt(toy, raw, Source(text="b")).token_ids.tolist() == [*map(ord, "xab")]
    assert next_prompt(toy, raw, Source(token_ids=[7])).token_ids.tolist() == [*map(ord, "xa"), 7]
    with pytest.raises(UsageError, match="raw text"):
        next_prompt(toy, raw, ASK)


@pytest.mark.parametrize(
    "value",
    [
        None, 3, "hello", [1], [{}], [{"role": "user"}], [{"content": "x"}], {"messages": 1},
        [{"role": "user", "content": [{"type": "image_url"}]}], [{"role": 1, "content": "x"}],
    ],
)  # fmt: skip
def test_what_is_no_list_of_text_messages_is_a_usage_error(value: Any) -> None:
    with pytest.raises(UsageError) as caught:
        check_messages(value)
    assert caught.value.hint


def test_an_incomplete_last_character_is_left_out_of_the_text() -> None:
    assert readable("né".encode()[:-1]) == "n"
    assert readable(b"a\xffb") == "a�b"
