"""From what a person gives (text, messages, ids, a next turn) to token ids, and to a session's notes.

Stored ids are never tokenized again: what follows the stored text is tokenized and appended. Where
a message was changed, or a chat template rewrites earlier turns (it drops a model's thoughts, say),
the stored text is no prefix of the new one; then ids are kept up to the last message before that.
"""

from __future__ import annotations

import codecs
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvsnap.engines.text import TextEngine
from kvsnap.formats.errors import UsageError
from kvsnap.formats.names import TokenIds, token_array
from kvsnap.formats.session import SessionRecord
from kvsnap.kvstore.boundaries import End, Ends, deepest_end, ends_of_notes, find_ends

Message = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Source:
    """What was given; exactly one field is set, or none to go on with a session."""

    text: str | None = None
    messages: Sequence[Message] | None = None
    token_ids: Sequence[int] | None = None

    @property
    def given(self) -> bool:
        return any(x is not None for x in (self.text, self.messages, self.token_ids))


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """Ids to evaluate, and what a session remembers of them.

    `kind` is "chat" or "raw"; `text` is the text that the ids stand for (chat only); `answering`
    says that the ids end inside an assistant's answer, `open_bytes` that its last character is
    incomplete; `ends` are those of the messages, as far as they are known. `warning` is for the person: something about the conversation was lost.
    """

    token_ids: TokenIds
    kind: str
    messages: tuple[Message, ...] = ()
    text: str = ""
    answering: bool = False
    open_bytes: bytes = b""
    ends: Ends = ()
    warning: str = ""

    def notes(self, model: str) -> dict[str, Any]:
        found: dict[str, Any] = {"kind": self.kind, "model": model}
        if self.kind == "chat":
            found |= {
                "answering": self.answering,
                "ends": [end and list(end) for end in self.ends],
                "messages": list(self.messages),
                "open_bytes": self.open_bytes.hex(),
                "text": self.text,
            }
        return found


def check_messages(value: Any) -> tuple[Message, ...]:
    """OpenAI chat form: a list of {"role", "content"}, or {"messages": that list}."""
    if isinstance(value, dict):
        value = value.get("messages")
    ok = isinstance(value, list) and all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and _is_text(m["role"])
        for m in value
    )
    if not ok:
        raise UsageError(
            "messages must be a JSON list of objects with role and content",
            'for example: [{"role": "user", "content": "Hello"}]',
        )
    for message in value:
        if not isinstance(message.get("content"), str) or not _is_text(message["content"]):
            raise UsageError(
                "only text content can be saved: token ids do not tell images apart",
                'give each message a "content" that is a string of Unicode text',
            )
    return tuple(value)


def new_prompt(engine: TextEngine, source: Source, *, answer: bool) -> Prompt:
    """A prompt from nothing. `answer` adds the generation prompt to messages."""
    if source.messages is not None:
        return _rendered(engine, check_messages(list(source.messages)), answer)
    if source.token_ids is not None:
        return Prompt(token_ids=token_array(source.token_ids), kind="raw")
    text = _checked(source.text or "")
    return Prompt(token_ids=engine.tokenize(text, first=True), kind="raw")


def next_prompt(
    engine: TextEngine, record: SessionRecord, source: Source, *, same_weights: bool = True
) -> Prompt:
    """A stored session and what follows it: `text` is the next user turn of a chat.

    Without the same weights nobody knows whether the tokenizer is the same, and ids of another one
    are other words: a chat is rendered and tokenized anew, raw ids are taken as they are, with a
    warning.
    """
    notes = record.notes
    if not same_weights and source.token_ids is None:
        return _of_another_model(engine, record, source)
    if source.token_ids is not None:
        warning = "the session is no chat any more: what ids say is not known as messages"
        more = token_array(source.token_ids)
        return _joined(record, more, warning if notes.get("kind") == "chat" else "")
    if notes.get("kind") != "chat":
        if source.messages is not None:
            raise UsageError(
                f"session {record.name!r} is raw text, so --messages cannot be appended to it",
                "give --prompt, or start a chat: kvsnap save --messages",
            )
        text = _checked(source.text or "")
        return _joined(record, engine.tokenize(text, first=len(record.token_ids) == 0))
    stored = stored_chat(record)
    if not source.given and notes.get("answering"):
        return dataclasses.replace(stored, answering=True, open_bytes=_open_bytes(notes))
    whole = _continued(engine, stored, (*stored.messages, *_added(source)), answer=True)
    if whole.text.startswith(stored.text):
        return whole
    return dataclasses.replace(
        whole,
        warning="the chat template rewrote earlier turns: reuse ends at the first differing token",
    )


def stored_chat(record: SessionRecord) -> Prompt:
    """A stored chat as it stands, as a prompt. Raises `UsageError` where it is none."""
    messages, text = _chat_notes(record.notes)
    ids = record.token_ids
    ends = ends_of_notes(record.notes, len(messages), len(ids), text)
    return Prompt(token_ids=ids, kind="chat", messages=messages, text=text, ends=ends)


def edited_prompt(engine: TextEngine, record: SessionRecord, index: int, content: str) -> Prompt:
    """A stored chat up to message `index`, which says `content` now; what followed it is dropped.

    The ids before the change are those that are stored, so a resume reuses them. After anything
    but an assistant's message the model is to answer.
    """
    stored = stored_chat(record)
    if not 0 <= index < len(stored.messages):
        raise UsageError(
            f"session {record.name!r} has {len(stored.messages)} messages, and no number {index}",
            "count from 0",
        )
    changed = {**stored.messages[index], "content": _checked(content)}
    answer = changed["role"] != "assistant"
    return _continued(engine, stored, (*stored.messages[:index], changed), answer=answer)


def branch_prompt(engine: TextEngine, record: SessionRecord, messages: int) -> Prompt:
    """The first `messages` messages of a stored chat as a prompt whose ids are the front of its
    ids: what `Session.branch` is to be given, as tokens and notes.

    Raises `UsageError` where those messages do not end at a token of their own.
    """
    stored = stored_chat(record)
    if messages == len(stored.messages):
        answering = bool(record.notes.get("answering"))
        left = _open_bytes(record.notes)
        return dataclasses.replace(stored, answering=answering, open_bytes=left)
    if not 0 <= messages < len(stored.messages):
        raise UsageError(
            f"session {record.name!r} has {len(stored.messages)} messages, not {messages}",
            "branch after one of them",
        )
    known = stored.ends[messages - 1] if messages else (0, 0)
    end = known or find_ends(engine, stored)[messages - 1]
    if end is None:
        raise UsageError(
            f"the chat template gives message {messages} no end of its own",
            "start a new session from its messages: what they share with this one is reused",
        )
    return dataclasses.replace(
        stored,
        token_ids=stored.token_ids[: end[0]],
        messages=stored.messages[:messages],
        text=stored.text[: end[1]],
        ends=(*stored.ends[: messages - 1], end) if messages else (),
    )


def _of_another_model(engine: TextEngine, record: SessionRecord, source: Source) -> Prompt:
    notes = record.notes
    if notes.get("kind") != "chat":
        more = engine.tokenize(_checked(source.text or ""), first=len(record.token_ids) == 0)
        warning = "the session's token ids are another model's: its words may be others"
        return _joined(record, more, warning if len(record.token_ids) else "")
    messages, _ = _chat_notes(notes)
    whole = _rendered(engine, (*messages, *_added(source)), answer=True)
    warning = "the session is another model's: its messages are tokenized anew"
    return dataclasses.replace(whole, warning=warning)


def _added(source: Source) -> Sequence[Message]:
    if source.text is not None:
        return [{"role": "user", "content": _checked(source.text)}]
    return check_messages(list(source.messages)) if source.messages is not None else ()


def answered(prompt: Prompt, engine: TextEngine, new_ids: Sequence[int], ended: bool) -> Prompt:
    """The prompt with an answer appended; `ended`: the model ended it by itself."""
    ids = np.concatenate([prompt.token_ids, token_array(new_ids)])
    if prompt.kind != "chat":
        return Prompt(token_ids=ids, kind=prompt.kind)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text = decoder.decode(prompt.open_bytes + engine.detokenize(new_ids))
    messages, ends = prompt.messages, prompt.ends
    if prompt.answering and messages and messages[-1]["role"] == "assistant":
        last = {**messages[-1], "content": messages[-1]["content"] + text}
        messages, ends = (*messages[:-1], last), ends[:-1]
    else:
        messages = (*messages, {"role": "assistant", "content": text})
    return Prompt(
        token_ids=ids,
        kind="chat",
        messages=messages,
        text=prompt.text + text,
        answering=not ended,
        open_bytes=b"" if ended else decoder.getstate()[0],
        ends=(*ends, (len(ids), len(prompt.text + text))),
    )


def readable(data: bytes) -> str:
    """Text of generated bytes: a last, incomplete character is left out, other bad bytes shown."""
    return codecs.getincrementaldecoder("utf-8")("replace").decode(data)


def _rendered(engine: TextEngine, messages: tuple[Message, ...], answer: bool) -> Prompt:
    nothing = Prompt(token_ids=token_array([]), kind="chat")
    return _continued(engine, nothing, messages, answer=answer)


def _continued(
    engine: TextEngine, stored: Prompt, messages: tuple[Message, ...], *, answer: bool
) -> Prompt:
    """A prompt of `messages`, with the ids of `stored` as far as the texts are the same."""
    text = engine.render(messages, answer=answer) if messages or answer else ""
    tokens, chars = deepest_end(stored, text)
    rest = engine.tokenize(text[chars:], first=tokens == 0, chat=True)
    ids = np.concatenate([stored.token_ids[:tokens], rest])
    before = zip(stored.messages, messages, stored.ends, strict=False)
    kept = [end if old == new and end and end[0] <= tokens else None for old, new, end in before]
    ends: list[End | None] = [*kept, *[None] * (len(messages) - len(kept))]
    if ends and not answer:
        ends[-1] = (len(ids), len(text))
    return Prompt(token_ids=ids, kind="chat", messages=messages, text=text, ends=tuple(ends))


def _joined(record: SessionRecord, more: TokenIds, warning: str = "") -> Prompt:
    ids = np.concatenate([record.token_ids, more])
    return Prompt(token_ids=ids, kind="raw", warning=warning)


def _checked(text: str) -> str:
    """Text that a tokenizer can take: lone surrogates come of bytes that were no UTF-8."""
    if not _is_text(text):
        raise UsageError("the prompt is not valid Unicode text", "give it as UTF-8")
    return text


def _open_bytes(notes: Mapping[str, Any]) -> bytes:
    try:
        return bytes.fromhex(str(notes.get("open_bytes", "")))
    except ValueError:
        return b""  # notes of a program of somebody's own; at most one character is lost


def _is_text(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _chat_notes(notes: Mapping[str, Any]) -> tuple[tuple[Message, ...], str]:
    text = notes.get("text")
    messages = notes.get("messages")
    if not isinstance(text, str) or not isinstance(messages, list):
        raise UsageError(
            "this session's notes do not say how its chat was rendered",
            "it was saved by a program of its own: go on with --token-ids",
        )
    return check_messages(messages), text
