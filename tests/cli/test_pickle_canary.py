"""Files that run code when they are loaded carelessly, in place of each file that kvsnap reads, through
every command: nothing runs, the error is one a person can act on, nothing outside is touched (A66)."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from itertools import cycle
from pathlib import Path

import pytest

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("gguf", reason="gguf is not installed")
pytest.importorskip("yaml", reason="PyYAML is not installed")

from kvsnap.cli.commands import trust
from kvsnap.cli.commands.bench import BENCHES
from kvsnap.cli.main import COMMANDS
from kvsnap.formats.archive import END, pack_header, padding
from kvsnap.formats.block import KIND as BLOCK
from kvsnap.formats.block import STATE_KIND as STATE
from kvsnap.kvstore.remotes.archive import Archive
from tests.cli.canary import CARELESS, FORMS, INSIDE, with_inside
from tests.cli.everything import Everything, make_everything
from tests.cli.in_process import Ran

pytestmark = [pytest.mark.engine, pytest.mark.slow]

LINES: dict[str, list[str]] = {
    "bench": [
        "bench crossover {llama} --lengths 64",
    ],
    "calibrate": [],
    "demo": [],
    "doctor": ["doctor"],
    "explain": [
        "explain a {llama} --check",
        "explain r {recurrent}",
        "explain {llama} --prompt-file {prompt} --tenant-key-file {tenant}",
    ],
    "export": ["export a {out}", "export k {out}", "export r {out}"],
    "gc": ["gc", "gc --capacity 20kB", "gc --remote {url} --grace 0"],
    "import": ["import {portable}", "import {portable} a --as b"],
    "keygen": ["keygen {out}"],
    "ls": ["ls", "ls --json", "ls {url}"],
    "pin": ["pin k {block}"],
    "pull": ["pull far", "pull a {url} --force", "pull k --as k2", "pull r --as r2"],
    "push": ["push a --force", "push r", "push k {url} --force"],
    "recompress": ["recompress a --codec q8", "recompress r --codec raw"],
    "resume": [
        "resume a {llama} --max-tokens 2",
        "resume a {llama} --prompt-file {prompt} --max-tokens 1",
        "resume r {recurrent} --max-tokens 1",
        "resume k {llama} --max-tokens 1 --allow-lossy",
        "resume {llama} --token-ids {far} --max-tokens 1 --no-save",
    ],
    "rm": ["rm a k", "rm far --remote {url}"],
    "save": [
        "save {llama} --token-ids {ids} --session a",
        "save {llama} --token-ids {far}",
        "save {llama} --prompt-file {prompt} --session p --pin",
        "save {llama} --messages {chat} --session c --tenant-key-file {tenant}",
        "save {llama} --token-ids {ids} --session k --codec kvtc",
        "save {recurrent} --token-ids {ids}",
        "save {folder} --token-ids {ids}",
    ],
    "show": ["show a", "show k --json", "show {block}", "show --tree", "show a --tree"],
    "simulate": ["simulate --trace {trace}"],
    "stats": ["stats", "stats --prometheus"],
    "trust": ["trust ls", "trust add {key} --vouch", "trust rm friend"],
    "unpin": ["unpin a"],
    "verify": ["verify", "verify a", "verify {url}", "verify far {url}"],
}
"""Command → lines that read something, and exit with 0 where all is well."""

HEAVY = {
    "bench": [
        "bench store --blocks 20",
        "bench codecs {codecs} --codec kvtc --texts {texts} --context 64 --tokens 2",
    ],
    "calibrate": ["calibrate --model {model} --texts {texts} --tokens 1024"],
    "demo": ["demo --model {model} --max-tokens 2"],
}
"""Seconds each: they run on a store and a remote of nothing but such files, and on such a model."""

SERVES = {"proxy"}
"""These end only when they are stopped; what they read of a store they read as `resume` does."""

Attack = Callable[[str, Callable[[Everything], None]], Ran]
Place = Callable[[Everything], list[Path]]
PLACES: dict[str, Place] = {
    "block": lambda e: e.of("store/blocks/*/*", kind=BLOCK),
    "state checkpoint": lambda e: e.of("store/blocks/*/*", kind=STATE),
    "session": lambda e: e.of("store/sessions/*/*"),
    "pin": lambda e: e.of("store/pins/*/*"),
    "calibration": lambda e: e.of("store/calibrations/*"),
    "settings": lambda e: e.of("store/kvsnap.json"),
    "index": lambda e: e.of("store/index.sqlite3"),
    "log of the index": lambda e: [e.store / "index.sqlite3-wal", e.store / "index.sqlite3-shm"],
    "unfinished file": lambda e: e.of("store/tmp/*"),
    "quarantine": lambda e: e.of("store/quarantine/*"),
    "damaged settings": lambda e: e.of("store/kvsnap.json.damaged"),
    "manifest": lambda e: e.of("remote/manifests/*/*.safetensors"),
    "block of a remote": lambda e: e.of("remote/blocks/*/*", kind=BLOCK),
    "state checkpoint of a remote": lambda e: e.of("remote/blocks/*/*", kind=STATE),
    "session of a remote": lambda e: e.of("remote/sessions/*/*"),
    "calibration of a remote": lambda e: e.of("remote/calibrations/*"),
    "portable file": lambda e: e.of("given/portable.kvsnap"),
    "tenant key": lambda e: e.of("given/tenant.key"),
    "signing key": lambda e: e.of("given/signing.pem"),
    "token ids": lambda e: e.of("given/ids.json", "given/far.json"),
    "messages": lambda e: e.of("given/chat.json"),
    "prompt": lambda e: e.of("given/prompt.txt"),
    "trace": lambda e: e.of("given/trace.jsonl"),
    "model": lambda e: e.of("given/*.gguf", "given/hf/model.safetensors"),
    "digests of models": lambda e: [e.memo],
    "configuration of a model": lambda e: e.of("given/hf/*.json"),
}
"""What a file is → where those of that kind stand."""

OURS = {
    *("block", "state checkpoint", "session", "pin", "calibration", "manifest"),
    *(f"{kind} of a remote" for kind in ("block", "state checkpoint", "session", "calibration")),
}
UNSEEN = {
    *("unfinished file", "quarantine", "damaged settings", "log of the index", "digests of models"),
}
"""What is never read, a log that is not the index's own, which SQLite passes over, and digests, which
are computed again."""


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Everything:
    return make_everything(tmp_path_factory.mktemp("everything"))


@pytest.fixture
def canary(tmp_path: Path) -> Path:
    return tmp_path / "canary"


@pytest.fixture
def attack(everything: Everything, tmp_path: Path, canary: Path) -> Attack:
    """Run a line where something was planted; all but what the line says is checked."""

    def run(line: str, plant: Callable[[Everything], None]) -> Ran:
        with everything.copied(tmp_path / "on") as on:
            plant(on)
            before = on.outside()
            ran = on.run(line)
            assert not canary.exists(), line
            assert not ran.complaint(), (line, ran.complaint())
            assert on.outside() == before, line
        return ran

    return run


def write(paths: list[Path], data: bytes | Callable[[bytes], bytes]) -> None:
    """Put bytes, or what is made of those that stand there, in the place of files."""
    for path in paths:
        new = data if isinstance(data, bytes) else data(path.read_bytes())
        path.unlink(missing_ok=True)  # it may be a link to the file of another test
        path.write_bytes(new)


def told(ran: Ran) -> str:
    """What it says, without what differs from run to run."""
    text = re.sub(r"/\S*/(store|remote|given|out)\b", "", f"{ran.code} {ran.out} {ran.err}")
    text = re.sub(r"[0-9.]+ (ms|s|B|kB|MB)\b", "", text)
    return re.sub(r"[0-9a-f]*[0-9][0-9a-f]*", "", text)


def lines_of(table: dict[str, list[str]]) -> list[str]:
    return [line for lines in table.values() for line in lines]


@pytest.fixture(scope="module")
def untouched(everything: Everything, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Line → what it tells where every file is as it should be."""
    base, found = tmp_path_factory.mktemp("untouched"), {}
    for line in lines_of(LINES):
        with everything.copied(base / "on") as on:
            ran = on.run(line)
        assert ran.code == 0, (line, ran.err)
        found[line] = told(ran)
    return found


@pytest.mark.parametrize("form", FORMS)
def test_each_form_sings_where_it_is_loaded_carelessly(form: str, canary: Path) -> None:
    CARELESS[form](FORMS[form](canary))
    assert canary.exists()


def test_the_lines_are_of_every_command() -> None:
    """A new command is not done before it stands here."""
    assert LINES.keys() == COMMANDS.keys() - SERVES
    every = lines_of(LINES) + lines_of(HEAVY)
    assert {line.split()[0] for line in every} == COMMANDS.keys() - SERVES
    for group, table in (("bench", BENCHES), ("trust", trust.COMMANDS)):
        assert {line.split()[1] for line in every if line.startswith(f"{group} ")} == table.keys()


@pytest.mark.parametrize("kind", PLACES)
def test_no_command_runs_what_stands_in_the_place_of(
    kind: str, attack: Attack, untouched: dict[str, str], canary: Path
) -> None:
    made: list[bytes | Callable[[bytes], bytes]] = [form(canary) for form in FORMS.values()]
    if kind in OURS:
        made += [lambda old, part=part: with_inside(part, old, canary) for part in INSIDE]
    noticed, turn = 0, cycle(made)
    for line in lines_of(LINES):
        data = next(turn)
        ran = attack(line, lambda on, data=data: write(PLACES[kind](on), data))
        noticed += not line.startswith("bench") and told(ran) != untouched[line]
    if kind not in UNSEEN:
        assert noticed, "no line reads these files"


@pytest.mark.parametrize("form", FORMS)
def test_no_command_runs_what_stands_in_all_places_of_store_and_remote(
    form: str, everything: Everything, attack: Attack, canary: Path
) -> None:
    data = FORMS[form](canary)
    ours = {everything.store, everything.remote}
    places = [place for place in PLACES.values() if ours & set(place(everything)[0].parents)]

    def plant(on: Everything) -> None:
        for paths in [place(on) for place in places]:
            write(paths, data)

    for line in lines_of(LINES) + (lines_of(HEAVY) if form == "pickle" else []):
        attack(line, plant)


@pytest.mark.parametrize("line", [line for line in lines_of(HEAVY) if "bench store" not in line])
def test_no_heavy_command_runs_what_stands_in_a_models_place(
    line: str, attack: Attack, canary: Path
) -> None:
    for form in FORMS.values():
        ran = attack(line, lambda on, form=form: write(PLACES["model"](on), form(canary)))
        assert ran.code == 1


def test_no_heavy_command_runs_what_stands_in_a_texts_place(attack: Attack, canary: Path) -> None:
    data = b"".join(form(canary) for form in FORMS.values())
    line = "bench codecs {codecs} --codec q8 --texts {texts} --context 64 --tokens 2"
    assert attack(line, lambda on: write(on.of("given/texts/*"), data)).code == 0


@pytest.mark.parametrize("form", FORMS)
def test_weights_in_pytorchs_own_form_run_nothing(form: str, attack: Attack, canary: Path) -> None:
    def plant(on: Everything) -> None:
        (on.given / "hf" / "model.safetensors").unlink()
        (on.given / "hf" / "pytorch_model.bin").write_bytes(FORMS[form](canary))

    assert attack("save {folder} --token-ids {ids}", plant).code == 1


def test_code_that_a_models_folder_brings_along_is_not_run(attack: Attack, canary: Path) -> None:
    def plant(on: Everything) -> None:
        path = on.given / "hf" / "config.json"
        settings = json.loads(path.read_text())
        names = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
        settings |= {"model_type": "own", "architectures": ["Model"], "auto_map": names}
        write([path], json.dumps(settings).encode())
        (on.given / "hf" / "own.py").write_text(f"open({str(canary)!r}, 'w')\n")

    assert attack("save {folder} --token-ids {ids}", plant).code == 1


@pytest.mark.parametrize("line", ["demo --model {model}", "bench store --blocks 20"])
def test_code_in_the_folder_where_a_command_is_run_is_not_run(
    line: str, attack: Attack, canary: Path
) -> None:
    """They run kvsnap in processes of their own; `python -m` would look for modules there first."""

    def plant(on: Everything) -> None:
        for name in ("json", "click", "numpy"):
            (on.root / "here" / f"{name}.py").write_text(f"open({str(canary)!r}, 'w')\n")
        write(PLACES["model"](on), b"")  # the demo ends with the first of its processes

    attack(line, plant)


@pytest.mark.parametrize("folder", ["manifests", "sessions", "blocks"])
@pytest.mark.parametrize("form", FORMS)
def test_files_inside_a_portable_file_run_nothing(
    form: str, folder: str, attack: Attack, canary: Path
) -> None:
    planted = FORMS[form](canary)

    def plant(on: Everything) -> None:
        path, parts = on.given / "portable.kvsnap", list[bytes]()
        with Archive.open(path) as archive:
            for entry in archive.list(""):
                ours = entry.key.startswith(folder)
                data = planted if ours else bytes(archive.get(entry.key, entry.size).data)
                parts += [pack_header(entry.key, len(data)), data, bytes(padding(len(data)))]
        write([path], b"".join(parts) + END)
        shutil.rmtree(on.store)

    ran = attack("import {portable} a --as b", plant)
    assert ran.code == (3 if folder == "blocks" else 1)
