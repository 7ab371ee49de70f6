"""A conversation over several processes: save, resume, resume again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.engine

SAVE_FIELDS = {
    "session", "model", "tokens", "reused_tokens", "computed_tokens", "blocks", "blocks_written",
    "bytes_written", "bytes_raw", "codec", "fidelity", "seconds",
}  # fmt: skip
RESUME_FIELDS = {
    "session", "model", "prompt_tokens", "reused_tokens", "computed_tokens", "reuse_stopped_by",
    "generated_tokens", "token_ids", "text", "fidelity", "seconds",
}  # fmt: skip


def test_a_conversation_goes_on_turn_by_turn(kvsnap: Any, model: Path, chat: Path) -> None:
    saved = kvsnap("--json", "save", "--model", model, "--messages", chat, "--session", "s").json
    assert saved.keys() == SAVE_FIELDS
    assert saved["reused_tokens"] == 0
    assert saved["computed_tokens"] == saved["tokens"]
    assert saved["blocks_written"] == saved["blocks"] == saved["tokens"] // 64
    tokens = saved["tokens"]
    for turn in ("And on Sundays?", "Thank you. Who wrote Faust?"):
        found = kvsnap(
            "--json", "resume", "s", "--model", model, "--prompt", turn, "--max-tokens", 12
        ).json
        assert found.keys() == RESUME_FIELDS
        # The whole conversation so far is reused; only the new turn is computed.
        assert found["reused_tokens"] == tokens
        assert found["reused_tokens"] + found["computed_tokens"] == found["prompt_tokens"]
        assert found["computed_tokens"] < 40
        assert found["generated_tokens"] == len(found["token_ids"]) > 0
        tokens = found["prompt_tokens"] + found["generated_tokens"]
    shown = kvsnap("--json", "show", "s").json
    assert shown["tokens"] == tokens
    roles = [message["role"] for message in shown["notes"]["messages"]]
    assert roles == ["system", "user", "user", "assistant", "user", "assistant"]


def test_resuming_an_unchanged_session_computes_at_most_one_token(
    kvsnap: Any, model: Path, tmp_path: Path
) -> None:
    (tmp_path / "p.txt").write_text("The library opens at nine and closes at five. " * 10)
    kvsnap("save", "--model", model, "--prompt-file", tmp_path / "p.txt", "--session", "raw")
    for flags in (["--no-save"], [], []):
        found = kvsnap("--json", "resume", "raw", "--model", model, "--max-tokens", 8, *flags).json
        assert found["computed_tokens"] <= 1
        assert found["reuse_stopped_by"].startswith("whole prompt")


def test_a_raw_session_gets_its_prompt_appended_as_text(kvsnap: Any, model: Path) -> None:
    kvsnap("save", "--model", model, "--prompt", "One, two, three,", "--session", "count")
    kvsnap("resume", "count", "--model", model, "--prompt", " four, five,", "--max-tokens", 0)
    appended = kvsnap("--json", "show", "count").json["token_ids"]
    kvsnap("save", "--model", model, "--prompt", "One, two, three, four, five,", "--session", "w")
    assert appended == kvsnap("--json", "show", "w").json["token_ids"]


def test_a_second_save_writes_no_block_and_a_longer_one_only_the_new(
    kvsnap: Any, model: Path, tmp_path: Path
) -> None:
    ids = tmp_path / "ids.json"

    def save(count: int) -> Any:
        ids.write_text(json.dumps(list(range(1000, 1000 + count))))
        return kvsnap("--json", "save", "--model", model, "--token-ids", ids, "--session", "s").json

    assert save(200)["blocks_written"] == 3
    again = save(200)
    assert (again["blocks_written"], again["bytes_written"], again["computed_tokens"]) == (0, 0, 0)
    longer = save(330)
    assert (longer["blocks"], longer["blocks_written"]) == (5, 2)
    assert longer["computed_tokens"] == 130


def test_three_sessions_store_a_shared_system_prompt_once(
    kvsnap: Any, model: Path, tmp_path: Path
) -> None:
    shared = list(range(2000, 2000 + 1024))
    for name, own in (("a", 5), ("b", 6), ("c", 7)):
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps(shared + [own] * 70))
        found = kvsnap(
            "--json", "save", "--model", model, "--token-ids", path, "--session", name
        ).json
        assert found["reused_tokens"] == (0 if name == "a" else 1024)
    stats = kvsnap("--json", "stats").json
    assert stats["blocks"] == 1024 // 64 + 3
    assert stats["bytes_saved_by_sharing"] > 0
    assert kvsnap("--json", "verify").json == {
        "checked": 22,
        "bad": [],
        "unreachable": [],
        "sealed": 0,
    }


def test_a_prompt_without_a_session_saves_blocks_only(
    kvsnap: Any, model: Path, chat: Path, store: Path
) -> None:
    first = kvsnap("--json", "resume", "--model", model, "--messages", chat, "--max-tokens", 4).json
    second = kvsnap(
        "--json", "resume", "--model", model, "--messages", chat, "--max-tokens", 4
    ).json
    assert first["session"] is second["session"] is None
    # Without a session the tail after the last block is nobody's: whole blocks are reused.
    assert second["reused_tokens"] == first["prompt_tokens"] // 64 * 64
    assert second["token_ids"] == first["token_ids"]
    assert not list(store.rglob("sessions/*/*"))


def test_a_session_of_no_tokens_is_saved_and_has_nothing_to_evaluate(
    kvsnap: Any, model: Path, tmp_path: Path
) -> None:
    (tmp_path / "none.json").write_text("[]")
    saved = kvsnap(
        "--json", "save", "--model", model, "--token-ids", tmp_path / "none.json", "--session", "e"
    ).json
    assert (saved["tokens"], saved["blocks"]) == (0, 0)
    resumed = kvsnap("resume", "e", "--model", model)
    assert resumed.code == 2
    assert len(resumed.err.strip().splitlines()) == 2
    assert "nothing to evaluate" in resumed.err
    grown = kvsnap(
        "--json", "resume", "e", "--model", model, "--prompt", "Hello", "--max-tokens", 3
    ).json
    assert grown["reused_tokens"] == 0
