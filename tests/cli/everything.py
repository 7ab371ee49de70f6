"""One of every file that kvsnap reads, made by kvsnap's own commands on tiny random models."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import gguf
import pytest

from kvsnap.engines.transformers_load import load_transformers
from kvsnap.formats.codecs import calibration
from kvsnap.formats.container import parse
from kvsnap.formats.signature import new_signing_key
from kvsnap.testing.tiny_gguf import VOCABULARY, write_tiny
from kvsnap.testing.tiny_llama import tiny_llama
from tests.cli.in_process import Ran, run

FRIEND = new_signing_key().public
"""A key of another machine's."""
DEAD = "0123456789abcdef"
"""A writer that is no more."""


@dataclass(frozen=True)
class Everything:
    """A store, a folder remote, and the files that a command line may name, below one folder."""

    root: Path

    @property
    def store(self) -> Path:
        return self.root / "store"

    @property
    def remote(self) -> Path:
        return self.root / "remote"

    @property
    def given(self) -> Path:
        """What a command line names: prompts, keys, models, a portable file."""
        return self.root / "given"

    def words(self) -> dict[str, str]:
        """Placeholder → what stands in its place: of a given file the first letters of its name."""
        names = {
            found[0]: str(path)
            for path in self.given.iterdir()
            if (found := re.match("[a-z]+", path.name)) is not None
        }
        block = min(self.store.glob("blocks/*/*"), default=Path("abcd")).name[:12]
        # With more threads than cores that are free, a tiny model takes a hundred times as long.
        model, one = f"--model {names.get('model')}", "--threads 1"
        return {
            **names,
            "given": str(self.given),
            "out": str(self.root / "out"),
            "url": self.remote.as_uri(),
            "block": block,
            "key": FRIEND,
            "llama": f"{model} {one}",
            "recurrent": f"--model {names.get('recurrent')} {one}",
            "folder": f"--model {names.get('hf')} --engine transformers {one}",
            "codecs": f"{model} --engine llama.cpp",
        }

    def run(self, line: str, **variables: str) -> Ran:
        """One command line, in a folder of its own, with the remote in the environment; nothing of the
        user's, and as in a process that has read no calibration yet."""
        home, here = self.root / "home", self.root / "here"
        with pytest.MonkeyPatch.context() as patch:
            for name in [name for name in os.environ if name.startswith(("KVSNAP_", "XDG_"))]:
                patch.delenv(name)
            patch.setenv("HOME", str(home))
            patch.setenv("XDG_STATE_HOME", str(home / "state"))
            patch.setenv("KVSNAP_STORE", str(self.store))
            patch.setenv("KVSNAP_REMOTE", self.remote.as_uri())
            patch.setenv("KVSNAP_SIGNING_KEY_FILE", str(self.given / "signing.pem"))
            for name, value in variables.items():
                patch.setenv(name, value)
            patch.setattr(calibration, "_REGISTERED", {})
            patch.chdir(here)
            patch.setattr(tempfile, "tempdir", str(here))
            return run(*line.format(**self.words()).split())

    def of(self, *patterns: str, kind: str | None = None) -> list[Path]:
        """The files below the root that a pattern finds, of one kind of ours where it is named."""
        found = [path for pattern in patterns for path in self.root.glob(pattern) if path.is_file()]
        assert found, patterns
        return [path for path in found if kind is None or kind_of(path) == kind]

    @property
    def memo(self) -> Path:
        """Of models' digests, in the user's own folder."""
        return self.root / "home" / "state" / "kvsnap" / "model-digests.json"

    def outside(self) -> dict[str, str]:
        """Path → what stands there, of all that is neither store nor remote nor output."""
        skipped = (self.store, self.remote, self.root / "out", self.memo)
        return {
            str(path.relative_to(self.root)): _digest(path)
            for path in sorted(self.root.rglob("*"))
            if not any(path.is_relative_to(own) for own in skipped)
        }

    @contextlib.contextmanager
    def copied(self, to: Path) -> Iterator[Everything]:
        """The same again, for as long as the block takes. What no command may write to is linked."""
        for name in ("store", "remote"):
            shutil.copytree(self.root / name, to / name)
        for name in ("given", "home", "here"):
            shutil.copytree(self.root / name, to / name, copy_function=os.link)
        try:
            yield Everything(to)
        finally:
            shutil.rmtree(to)


def kind_of(path: Path) -> str:
    return parse(memoryview(path.read_bytes())).metadata["kind"]


def _digest(path: Path) -> str:
    if path.is_dir():
        return "folder"
    return hashlib.sha256(path.read_bytes()).hexdigest()


def empty(root: Path) -> Everything:
    """Its folders, besides store and remote."""
    made = Everything(root)
    for folder in (made.given, made.memo.parent, root / "here"):
        folder.mkdir(parents=True)
    (root / "here" / "mine.txt").write_text("mine")
    made.memo.write_text("{}")
    return made


def make_everything(root: Path) -> Everything:
    """Sessions "a" (pinned, its last block too), "r" with a state checkpoint and "k" by a calibrated
    codec; in the remote "far" as well, whose blocks are not in the store."""
    made = empty(root)
    _given(made.given)
    for line in _STEPS:
        done = made.run(line)
        assert done.code == 0, (line, done.err)
    last = made.run("show a --json").json["blocks"][-1]["name"]
    assert made.run(f"pin a {last}").code == 0
    shutil.rmtree(root / "out")
    _leftovers(made.store)
    return made


_STEPS = [
    "keygen {given}/signing.pem --signing",
    "trust add {key} --name friend",
    "calibrate --model {model} --texts {texts} --tokens 1024",
    "save {llama} --token-ids {ids} --session a",
    "save {recurrent} --token-ids {ids} --session r",
    "save {llama} --token-ids {ids} --session k --codec kvtc",
    "push a",
    "push r",
    "push k",
    "export a {given}/portable.kvsnap",
    "trust add {key} --name friend --store {out}",
    "save {llama} --token-ids {far} --session far --store {out}",
    "push far --store {out}",
]


class _Chatting(gguf.GGUFWriter):
    """Writes a chat template, too, which the tiny models lack."""

    def write_header_to_file(self, path: Path | None = None) -> None:
        self.add_chat_template(_TEMPLATE)
        super().write_header_to_file(path)


def write_model(path: Path, architecture: str) -> None:
    with patch.object(gguf, "GGUFWriter", _Chatting):
        write_tiny(path, architecture, window=0, layers=2, width=32, feed_forward=32)


_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def _given(folder: Path) -> None:
    write_model(folder / "model.gguf", "llama")
    write_model(folder / "recurrent.gguf", "lfm2")
    load_transformers(folder / "model.gguf").tokenizer.save_pretrained(folder / "hf")
    tiny_llama(vocab_size=VOCABULARY, eos_token_id=2).save_pretrained(folder / "hf")
    for name, seed in (("ids", 1), ("far", 7)):
        ids = [3 + (seed * number * number) % (VOCABULARY - 3) for number in range(1, 81)]
        (folder / f"{name}.json").write_text(json.dumps(ids))
    (folder / "chat.json").write_text(json.dumps([{"role": "user", "content": "When?"}]))
    (folder / "prompt.txt").write_text("Open from nine to five. " * 9)
    (folder / "tenant.key").write_text("ab" * 32)
    (folder / "trace.jsonl").write_text(json.dumps({"token_ids": list(range(200))}) + "\n")
    (folder / "texts").mkdir()
    (folder / "texts" / "one.md").write_text("It opens at nine, and closes at five. " * 200)


def _leftovers(store: Path) -> None:
    """What killed writers and damage leave; old enough to go."""
    for folder in ("tmp", "quarantine"):
        (store / folder).mkdir(exist_ok=True)
    names = (
        f"tmp/{DEAD}.{DEAD}.part",
        f"tmp/{DEAD}.owner",
        f"quarantine/{'ab' * 32}.safetensors.01234567",
        f"quarantine/{'ab' * 32}.safetensors.01234567.reason",
        "kvsnap.json.damaged",
    )
    for name in names:
        (store / name).write_text("blocks/ab\nits bytes changed\n")
        os.utime(store / name, (1e9, 1e9))
