"""Where the messages of a chat end: in its token ids, and in the text that these stand for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from kvsnap.engines.text import TextEngine
from kvsnap.formats.errors import UsageError
from kvsnap.formats.names import common_prefix

if TYPE_CHECKING:
    from kvsnap.kvstore.conversation import Prompt

End: TypeAlias = tuple[int, int]
"""(token ids, characters): so many ids stand for so much of the text."""
Ends: TypeAlias = tuple[End | None, ...]
"""One for each message; None where it is not known, or where a template lets a message end nowhere:
it may put two into one turn, or write earlier ones differently."""


def boundaries(engine: TextEngine, prompt: Prompt) -> list[int]:
    """Positions in a chat's ids at which another one that begins with the same messages may go its
    own way: the end of each message, else the last position before the next one's content. In
    order; up to there the ids are those of every such chat. Empty for raw text."""
    if prompt.kind != "chat":
        return []
    ends = find_ends(engine, prompt)
    found = {
        end[0] if end is not None else _parting(engine, prompt, number)
        for number, end in enumerate(ends, 1)
    }
    return sorted(found - {0})


def find_ends(engine: TextEngine, chat: Prompt) -> Ends:
    """The ends of all messages, those that the prompt does not know by rendering what is before."""
    ends = list[End | None]()
    last = (0, 0)
    for number, known in enumerate(chat.ends):
        end = known if known is not None else _find_end(engine, chat, number + 1, last)
        ends.append(end)
        last = end or last
    return tuple(ends)


def ends_of_notes(notes: Mapping[str, Any], messages: int, tokens: int, text: str) -> Ends:
    """What a session's notes say. Its own end is that of the last message; of notes without ends,
    or with such as cannot be true, that is all that is known."""
    last = (tokens, len(text))
    unknown: Ends = (*[None] * (messages - 1), last) if messages else ()
    ends = notes.get("ends")
    if not isinstance(ends, list) or len(ends) != messages:
        return unknown
    before = (0, 0)
    for end in ends:
        if end is None:
            continue
        pair = isinstance(end, list) and [type(n) for n in end] == [int, int]
        if not pair or not all(a <= b <= c for a, b, c in zip(before, end, last, strict=True)):
            return unknown
        before = (end[0], end[1])
    return tuple(end and (end[0], end[1]) for end in ends)


def deepest_end(chat: Prompt, text: str) -> End:
    """How far the ids of a chat can be kept for another text: the last end before they part."""
    whole = (len(chat.token_ids), len(chat.text))
    ends = reversed(((0, 0), *(end for end in chat.ends if end is not None), whole))
    return next(end for end in ends if text.startswith(chat.text[: end[1]]))


def _find_end(engine: TextEngine, chat: Prompt, count: int, last: End) -> End | None:
    """That of the first `count` messages, tokenized from an earlier end on. Where the chat's own
    ids differ (a model need not generate what a tokenizer makes of its text), there is none."""
    text = _render(engine, chat.messages[:count])
    tokens, chars = last
    content = str(chat.messages[count - 1]["content"]).strip()
    if text is None or not chat.text.startswith(text) or content not in text[chars:]:
        return None
    for start, first in ((tokens, chars), (0, 0)):
        ids = engine.tokenize(text[first:], first=first == 0, chat=True)
        if np.array_equal(ids, chat.token_ids[start : start + len(ids)]):
            return start + len(ids), len(text)
    return None


def _parting(engine: TextEngine, chat: Prompt, count: int) -> int:
    """How many ids stay where what follows the first `count` messages is another message."""
    role, content = "user", ""
    if count < len(chat.messages):
        role, content = chat.messages[count]["role"], str(chat.messages[count]["content"])
    elif chat.messages[-1]["role"] == "user":
        role = "assistant"
    other = {"role": role, "content": "1" if content.strip().startswith("0") else "0"}
    text = _render(engine, (*chat.messages[:count], other))
    if text is None:
        return 0
    return common_prefix(engine.tokenize(text, first=True, chat=True), chat.token_ids)


def _render(engine: TextEngine, messages: Sequence[Mapping[str, Any]]) -> str | None:
    """None where the template refuses these: many want users and assistants to take turns."""
    try:
        return engine.render(messages, answer=False)
    except UsageError:
        return None
