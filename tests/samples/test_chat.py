"""samples/chat.py as a person uses it: killed in the middle, it goes on as if nothing had been."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvsnap.formats.session import SessionRecord
from kvsnap.kvstore.store import Store

pytestmark = [pytest.mark.engine, pytest.mark.slow]

CHAT = Path(__file__).parents[2] / "samples" / "chat.py"
TURN = re.compile(
    r"\[(\d+) of (\d+) tokens reused, (\d+) of them from the store: ([\d.]+) s saved,"
)


class Terminal:
    """A running chat, line by line."""

    def __init__(self, model: Path, store: Path, *options: str) -> None:
        self.store = store
        self.process = subprocess.Popen(
            [sys.executable, "-u", str(CHAT), str(model), "--ctx", "1024", *options],
            env={"KVSNAP_STORE": str(store), "PATH": ""},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def type(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def read_until(self, pattern: re.Pattern[str]) -> re.Match[str]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if found := pattern.search(line):
                return found
        raise AssertionError(f"the chat ended without {pattern.pattern}")

    def say(self, line: str) -> tuple[int, int, int]:
        """Tokens reused, of the prompt, and from the store."""
        self.type(line)
        reused, tokens, from_store, _ = self.read_until(TURN).groups()
        return int(reused), int(tokens), int(from_store)

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate()

    def quit(self) -> str:
        output, _ = self.process.communicate("/quit\n", timeout=300)
        assert self.process.returncode == 0
        return output


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    return tmp_path / "store"


def saved(path: Path, revision: int = 0, name: str = "chat") -> SessionRecord:
    """A session's file, once it has that revision: saves are in the background."""
    give_up = time.monotonic() + 300
    while True:
        with Store(path) as store:
            if store.sessions.version("default", name)[0] >= revision:
                return store.sessions.load("default", name).record
        assert time.monotonic() < give_up
        time.sleep(0.05)


def test_a_killed_chat_goes_on_at_once_and_computes_nothing_again(model: Path, path: Path) -> None:
    chat = Terminal(model, path, "--max-tokens", "8")
    reused, tokens, from_store = chat.say("Where can I leave my bicycle?")
    assert (reused, from_store) == (0, 0)
    again, more, from_store = chat.say("And on Sundays?")
    assert (again, from_store) == (tokens + 8, 0)  # the engine held them
    before = saved(path, revision=4)  # twice a turn: the question, and with its answer
    chat.kill()
    assert len(before.token_ids) == more + 8

    chat = Terminal(model, path, "--max-tokens", "8")
    reused, tokens, from_store = chat.say("Thank you.")
    assert reused == from_store == len(before.token_ids)
    assert 0 < tokens - reused < 40
    record = saved(path, revision=6)
    roles = [message["role"] for message in record.notes["messages"]]
    assert roles == ["user", "assistant"] * 3

    # A branch after the first answer, and another question there.
    first = record.notes["ends"][1][0]
    chat.type("/branch other 2")
    chat.read_until(re.compile(rf"^.*\[other: 2 messages, {first} tokens\]"))
    reused, tokens, _ = chat.say("What does it cost?")
    assert reused >= first

    # The last question is asked in another way: only that is computed.
    reused, edited, _ = chat.say("/edit What does a bicycle cost?")
    assert first <= reused < edited < tokens + 10
    output = chat.quit()
    with Store(path) as store:
        assert {item.facts.name for item in store.listing} == {"chat", "other"}
    assert "[" not in output  # nothing went wrong
    other = saved(path, name="other")
    assert [message["content"] for message in other.notes["messages"]][2] == (
        "What does a bicycle cost?"
    )
    assert saved(path).revision == 6


def test_a_chat_that_is_killed_while_it_answers_answers_again(model: Path, path: Path) -> None:
    chat = Terminal(model, path, "--max-tokens", "300")
    chat.type("Tell me a long story about a bicycle.")
    question = saved(path, revision=1)
    chat.kill()
    assert [message["role"] for message in question.notes["messages"]] == ["user"]

    chat = Terminal(model, path, "--max-tokens", "4")
    chat.read_until(re.compile(r"^\[chat: 1 messages"))
    reused, tokens, from_store = map(int, chat.read_until(TURN).groups()[:3])
    assert tokens == len(question.token_ids)
    assert reused == from_store == tokens - 1  # one is computed, to sample from
    chat.quit()
    assert len(saved(path).notes["messages"]) == 2
