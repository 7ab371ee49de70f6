"""The whole story on the bundled model: warmed on one machine, resumed on another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import SYSTEM

pytestmark = [pytest.mark.engine, pytest.mark.slow]

BLOCK = 64


def test_a_prompt_warmed_here_is_resumed_elsewhere_and_only_new_blocks_move(
    kvsnap: Any, model: Path, tmp_path: Path
) -> None:
    folder, there = tmp_path / "remote", tmp_path / "there"
    url = folder.as_uri()
    system = {"role": "system", "content": SYSTEM * 18}
    saved = {}
    for name, question in (("hours", "When do you open?"), ("rules", "May I bring my dog?")):
        chat = tmp_path / f"{name}.json"
        chat.write_text(json.dumps([system, {"role": "user", "content": question}]))
        saved[name] = kvsnap(
            "save", "--model", model, "--messages", chat, "--session", name, "--json"
        ).json
    first = kvsnap("push", "hours", url, "--json").json
    assert first["moved_files"] == saved["hours"]["blocks"] + 1
    shared = kvsnap("show", "rules", "--json").json["blocks"]
    shared = [
        block for block in shared if block in kvsnap("show", "hours", "--json").json["blocks"]
    ]
    assert len(shared) >= 4
    before = _size(folder)
    second = kvsnap("push", "rules", url, "--json").json
    assert second["moved_files"] == saved["rules"]["blocks"] - len(shared) + 1
    manifest = (folder / "manifests/default/rules.safetensors").stat().st_size
    assert _size(folder) - before == second["moved_bytes"] + manifest

    assert kvsnap("pull", "hours", url, "--store", there).code == 0
    pulled = kvsnap("pull", "rules", url, "--store", there, "--json").json
    assert pulled["moved_files"] == saved["rules"]["blocks"] - len(shared)
    for name, tokens in ((name, report["tokens"]) for name, report in saved.items()):
        answers = [
            kvsnap(
                "resume", name, "--model", model, "--prompt", "And why?", "--max-tokens", 8,
                "--no-save", "--json", *where, **remote,
            ).json
            for where, remote in (
                ([], {}),
                (["--store", there], {}),
                (["--store", tmp_path / "third"], {"KVSNAP_REMOTE": url}),  # nothing was pulled
            )
        ]  # fmt: skip
        for answer in answers:
            # All that was stored came back, tail included: no block is computed anew.
            assert answer["reused_tokens"] == tokens
            assert answer["computed_tokens"] == answer["prompt_tokens"] - tokens < BLOCK
        assert answers[0]["token_ids"] == answers[1]["token_ids"] == answers[2]["token_ids"]
        assert len(answers[0]["token_ids"]) > 0


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*.safetensors"))
