"""Words of somebody who means harm to a terminal, and a store and a remote that are full of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvsnap.kvstore.store import Store
from kvsnap.testing.stamped import StampedEngine
from kvsnap.testing.turns import some_ids, turn
from tests.cli.everything import Everything, empty, write_model
from tests.cli.in_process import Ran

EVIL = "\x1b[2J\x07\x7f\x9b31m\u202eexe.\u2066\u200f"
"""Clears a screen, CSI in one byte, a text that runs backwards; no white space: it can stand in a path."""
INJECTED = "INJECTED"


def words(first: str) -> str:
    """With new lines that look like ours, and a clipboard that is written to."""
    more = f"\r\n{INJECTED}\x1b]52;c;YQ==\x07\n{INJECTED}\u2028{INJECTED}\x85{INJECTED}\n"
    return f"{first}{EVIL}{more}"


TOLD = words("told")
"""In what is honestly saved and pushed."""
WAY = words("way")
WAY_ASCII = "way\x1b[2J\x07\x7f"
"""In what is changed afterwards."""

NOTES: dict[str, Any] = {
    "kind": "chat",
    "model": TOLD,
    "text": TOLD,
    "messages": [{"role": TOLD, "content": TOLD}],
    "max_kl": {"held_out_tokens": 9, "limit": 1.0, "floor": 0.1, "codec": TOLD, "excess": 0.2},
}
ODD_NOTES: dict[str, Any] = {
    "kind": ["chat"],
    "model": {"name": 5},
    "text": 7,
    "messages": [5, {"role": ["user"], "content": {"x": None}}],
    "max_kl": {"held_out_tokens": "many"},
}


def make_wicked(root: Path) -> Everything:
    """A chat "a" of a model in a file of such a name, pushed by somebody of such a name; sessions of the
    library, "b" with such words in its notes and "c" with notes that are nothing the command line knows."""
    made = empty(root)
    write_model(made.given / f"model{EVIL}.gguf", "llama")
    chat = [{"role": "user", "content": TOLD + "When do you open? " * 5}]
    (made.given / "chat.json").write_text(json.dumps(chat))
    assert made.run("save {llama} --messages {chat} --session a").code == 0
    with Store(made.store) as store:
        for name, seed, notes in (("b", 1, NOTES), ("c", 2, ODD_NOTES)):
            turn(store, StampedEngine(), some_ids(70, seed), name).session.save(notes)
    for name in "abc":
        assert made.run(f"push {name}", KVSNAP_CREATOR=TOLD).code == 0
    assert made.run("export a {given}/portable.kvsnap").code == 0
    return made


def assert_harmless(ran: Ran) -> None:
    for line in (ran.out + ran.err).split("\n"):
        assert line.isprintable(), (ran.arguments, line)
        assert not line.lstrip().startswith(INJECTED), (ran.arguments, line)
    assert not ran.complaint(), (ran.arguments, ran.complaint())
    if "--json" in ran.arguments and ran.out:
        ran.json  # noqa: B018 - it is JSON
