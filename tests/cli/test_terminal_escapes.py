"""What others wrote does nothing to a terminal: escapes, line ends and marks of direction in names,
metadata, paths and settings are shown as escapes by every command, as text, in errors and as JSON."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("gguf", reason="gguf is not installed")

from kvsnap.formats.archive import END, pack_header, padding
from kvsnap.formats.container import pack, parse
from tests.cli.everything import Everything
from tests.cli.wicked import EVIL, WAY, WAY_ASCII, assert_harmless, make_wicked

pytestmark = pytest.mark.engine

COMMANDS = [
    "ls", "ls {url}", "show a", "show b", "show c", "show {block}", "show --tree", "show a --tree",
    "stats", "stats --prometheus", "verify", "verify a", "verify {url}", "verify a {url}", "doctor",
    "explain a {llama} --check", "explain {llama} --prompt x", "save {llama} --prompt x --session a",
    "resume a {llama} --max-tokens 0 --no-save", "pull a {url} --force", "pull b --as d",
    "pull missing", "push a {url}", "push a --force", "push missing", "import {portable} --as d",
    "import {portable} missing", "export a {out}", "gc", "gc --capacity 1kB", "gc --remote {url} --grace 0",
    "pin a", "pin missing", "unpin a", "rm a", "rm a --remote {url}", "recompress a --codec raw", "trust ls",
]  # fmt: skip


@pytest.fixture(scope="module")
def wicked(tmp_path_factory: pytest.TempPathFactory) -> Everything:
    return make_wicked(tmp_path_factory.mktemp("wicked"))


def rewrite(path: Path, **fields: str) -> None:
    """The same file with other header fields, right by its own digest."""
    found = parse(memoryview(path.read_bytes()))
    packed = pack({**found.metadata, **fields}, list(found.tensors.items()))
    path.write_bytes(b"".join(map(bytes, packed.buffers)))


def rewrite_blocks(on: Everything, **fields: str) -> None:
    """In store and remote; the index is built anew from what they say."""
    for path in on.of("store/blocks/*/*", "remote/blocks/*/*"):
        rewrite(path, **fields)
    for path in on.of("store/index.sqlite3*"):
        path.unlink()


def rewrite_identity(on: Everything, change: Callable[[dict[str, Any]], None]) -> None:
    """Of the sessions of the store."""
    for path in on.of("store/sessions/*/*"):
        identity = json.loads(parse(memoryview(path.read_bytes())).metadata["identity"])
        change(identity)
        rewrite(path, identity=json.dumps(identity))


def set_settings(on: Everything, **fields: object) -> None:
    path = on.store / "kvsnap.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def name_files(on: Everything) -> None:
    """Such names of files, and one that is not UTF-8, wherever somebody may put them."""
    places = [
        "store", "store/blocks", "store/blocks/ab", "store/sessions", "store/sessions/default",
        "store/pins/default", "store/tmp", "store/quarantine", "store/calibrations",
        "remote/manifests/default", "remote/blocks/ab", "remote/sessions/default",
    ]  # fmt: skip
    for place in places:
        folder = on.root / place
        folder.mkdir(parents=True, exist_ok=True)
        for name in (f"way{EVIL}", f"way{EVIL}.safetensors", f"way{EVIL}.reason"):
            (folder / name).write_text(WAY)
        (folder / os.fsdecode(b"way\x9b2J.safetensors")).write_text(WAY)


def change_index(on: Everything) -> None:
    facts = {"name": WAY, "tokens": 3, "blocks": 0, "model": WAY, "kind": WAY, "revision": 1}
    with sqlite3.connect(on.store / "index.sqlite3") as db:
        db.execute("UPDATE sessions SET facts = ?", [json.dumps(facts)])
        db.execute("UPDATE blocks SET lost = ?, reachable = 0", [WAY])
        db.execute("UPDATE roots SET identity = ?", [json.dumps({"architecture": WAY})])
    db.close()


def spoil_archive(on: Everything) -> None:
    key, data = "manifests/default/" + WAY_ASCII, WAY.encode()
    on.of("given/portable.kvsnap")[0].write_bytes(
        pack_header("manifests/default/a.safetensors", len(data))
        + data + bytes(padding(len(data)))
        + pack_header(key, 0) + END
    )  # fmt: skip


WAYS: dict[str, Callable[[Everything], object]] = {
    "as it is": lambda on: None,
    "codec of blocks": lambda on: rewrite_blocks(on, codec=WAY_ASCII),
    "fidelity of blocks": lambda on: rewrite_blocks(on, fidelity=WAY),
    "identity of blocks": lambda on: rewrite_blocks(on, identity=json.dumps({"architecture": WAY})),
    "version of blocks": lambda on: rewrite_blocks(on, kvsnap=WAY),
    "architecture": lambda on: rewrite_identity(on, lambda i: i.update(architecture=WAY)),
    "types": lambda on: rewrite_identity(on, lambda i: i.update(kv_types={WAY: WAY})),
    "no types": lambda on: rewrite_identity(
        on, lambda i: i.update(kv_types=WAY, architecture=[WAY])
    ),
    "fidelity of sessions": lambda on: [
        rewrite(path, fidelity=WAY, codec=WAY_ASCII) for path in on.of("store/sessions/*/*")
    ],
    "manifest": lambda on: [
        rewrite(path, creator=WAY, model=WAY, fidelity=WAY)
        for path in on.of("remote/manifests/*/*.safetensors")
    ],
    "name in a manifest": lambda on: [
        rewrite(path, name=WAY) for path in on.of("remote/manifests/*/*.safetensors")
    ],
    "version of a store": lambda on: set_settings(on, format=WAY),
    "capacity": lambda on: set_settings(on, capacity=WAY),
    "break-even": lambda on: set_settings(on, break_even={WAY: {"model": WAY}, "x": WAY}),
    "trusted": lambda on: set_settings(on, trust={"ab" * 32: WAY}),
    "names of files": name_files,
    "index": change_index,
    "portable file": spoil_archive,
}
"""Where somebody else's words stand → how they get there."""


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("form", ["--verbose", "--json"])
def test_no_command_shows_as_they_are_the_words_in(
    wicked: Everything, tmp_path: Path, way: str, form: str
) -> None:
    said = ""
    for line in COMMANDS:
        if form == "--json" and "--prometheus" in line:
            continue
        # A folder of such a name is part of every path that is shown.
        with wicked.copied(tmp_path / EVIL) as on:
            WAYS[way](on)
            ran = on.run(f"{line} {form}")
        assert_harmless(ran)
        said += ran.out + ran.err
    # No session has such a name: it is refused unshown.
    first = "told" if way in ("as it is", "name in a manifest") else "way"
    assert rf"{first}\x1b[2J" in said or rf"{first}\u001b[2J" in said
