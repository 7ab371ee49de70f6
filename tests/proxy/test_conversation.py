"""A conversation goes on from the store whatever happens to the server between its turns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvsnap.formats.names import common_prefix, token_array
from tests.proxy.conftest import BLOCK

openai = pytest.importorskip("openai")

SYSTEM = "You are a helpful assistant who answers in few words."


@pytest.mark.engine
def test_a_server_that_is_killed_between_turns_computes_one_block_and_the_new_text_at_most(
    model: Path, start_upstream: Any, start_proxy: Any, tmp_path: Path
) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    upstream = start_upstream(model, "--keep", str(kept), "--prompt-seconds", "0")
    proxy = start_proxy(upstream)
    client = openai.OpenAI(base_url=proxy.url + "/v1", api_key="none", max_retries=0)
    messages = [{"role": "system", "content": SYSTEM}]
    before = token_array([])
    for turn in range(6):
        messages.append({"role": "user", "content": f"Name the number {turn} in one word."})
        body = {"messages": messages}
        prompt = upstream.post("/apply-template", body)["prompt"]
        ids = token_array(upstream.post("/tokenize", {"content": prompt})["tokens"])
        raw = client.chat.completions.with_raw_response.create(
            model="m", messages=messages, max_tokens=5, temperature=0
        )
        answer = raw.parse()
        timings = answer.timings
        new = len(ids) - common_prefix(before, ids)
        assert timings["prompt_n"] <= BLOCK + new
        assert timings["cache_n"] + timings["prompt_n"] == len(ids)
        assert answer.usage.prompt_tokens_details.cached_tokens == timings["cache_n"]
        assert int(raw.headers["x-kvsnap-reused-tokens"]) == timings["cache_n"]
        assert timings["cache_n"] > 0 or turn == 0
        proxy.settle()
        if turn:
            restored = max(kept.iterdir(), key=lambda path: int(path.stem))
            assert _text_without_proxy(upstream, restored, messages) == _text_of(answer)
        messages.append({"role": "assistant", "content": _text_of(answer)})
        before = ids
        upstream.restart()


def _text_of(answer: Any) -> str:
    return str(answer.choices[0].message.content)


def _text_without_proxy(upstream: Any, restored: Path, messages: Any) -> str:
    """What the server says itself with the same rows in its slot."""
    copy = upstream.folder / "again.slot"
    copy.write_bytes(restored.read_bytes())
    upstream.post("/slots/0?action=restore", {"filename": copy.name})
    copy.unlink()
    body = {"messages": messages, "max_tokens": 5, "id_slot": 0}
    return str(upstream.post("/v1/chat/completions", body)["choices"][0]["message"]["content"])
