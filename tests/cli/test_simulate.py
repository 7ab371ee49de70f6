"""`kvsnap simulate`: the contract of its JSON, its tables, and what bad input gives."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvsnap.cli.commands.simulate import command
from kvsnap.kvstore.simulation.policies import POLICIES
from kvsnap.kvstore.simulation.routing import ROUTINGS

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "cli.md").read_text(encoding="utf-8")
SHOWN = re.findall(
    r"```console\n\$ kvsnap (simulate.*)\n((?:.*\n)+?)```",
    (DOCS / "simulate.md").read_text(encoding="utf-8"),
)
FEW = ("--requests", 60)


def test_json_is_a_list_of_rows_with_the_fields_of_the_page(kvsnap: Any) -> None:
    rows = kvsnap("simulate", *FEW, "--capacity", "unlimited,9,50", "--policy", "lru,opt", "--json")
    found = [(row["capacity_blocks"], row["policy"]) for row in rows.json]
    assert found == [(c, p) for c in (9, 50, None) for p in ("lru", "opt")]
    section = PAGE.partition("\n### simulate\n")[2].partition("\n### ")[0]
    table = "\n".join(line.split("|")[1] for line in section.splitlines() if line.startswith("| `"))
    for row in rows.json:
        assert row.keys() == set(re.findall(r"`(\w+)`", table))
        assert row["requests"] == 60
        assert 0 <= row["token_reuse"] <= 1
        assert (row["replicas"], row["routing"]) == (1, None)


def test_without_options_a_capacity_sweep_of_chats_is_printed(kvsnap: Any) -> None:
    done = kvsnap("simulate", *FEW)
    assert done.code == 0
    assert done.out.startswith("chat: 60 requests, ")
    head, *rows = done.out.splitlines()[2:]
    assert [*re.split(r"  +", head.strip())] == [
        "capacity", "policy", "blocks hit", "tokens reused", "evictions", "stranded",
        "shared prefix hit",
    ]  # fmt: skip
    assert len(rows) == 7
    assert rows[-1].split()[0] == "unlimited"


def test_replicas_show_the_routings_side_by_side(kvsnap: Any) -> None:
    done = kvsnap("simulate", *FEW, "--replicas", 2, "--capacity", "50")
    head, row = done.out.splitlines()[2:4]
    assert [*re.split(r"  +", head.strip())] == [
        "capacity", "policy", *ROUTINGS, *(f"load {name}" for name in ROUTINGS),
    ]  # fmt: skip
    assert len(re.findall(r"\d%", row)) == len(ROUTINGS)
    named = kvsnap(
        "simulate", *FEW, "--replicas", 2, "--capacity", "50", "--routing", "prefix", "--json"
    )
    assert [row["routing"] for row in named.json] == ["prefix"]


def test_a_trace_is_replayed_instead(kvsnap: Any, tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text("[1, 2, 3, 4]\n" * 3)
    (row,) = kvsnap(
        "simulate", "--trace", path, "--block-size", 2, "--capacity", "8", "--json"
    ).json
    assert (row["workload"], row["requests"], row["blocks_asked"]) == ("mine.jsonl", 3, 6)
    assert (row["block_hit_rate"], row["token_reuse"]) == (4 / 6, 6 / 12)
    assert row["shared_hit_rate"] is None
    assert "shared" not in kvsnap("simulate", "--trace", path).out


@pytest.mark.parametrize(("arguments", "output"), SHOWN, ids=[a for a, _ in SHOWN])
def test_the_output_that_the_page_shows_is_real(kvsnap: Any, arguments: str, output: str) -> None:
    assert kvsnap(*arguments.split()).out == output


def test_the_page_shows_output() -> None:
    assert len(SHOWN) == 3


def test_a_picture_is_drawn_where_asked_for(kvsnap: Any, tmp_path: Path) -> None:
    done = kvsnap("simulate", *FEW, "--plot", "rates.svg")
    assert done.code == 0
    assert "drawn: rates.svg" in done.err
    assert (tmp_path / "rates.svg").read_bytes().startswith(b"<?xml")


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["--policy", "mru"], "policy 'mru' is not known"),
        (["--policy", ","], "--policy is empty"),
        (["--routing", "prefix"], "one replica leaves nothing to route"),
        (["--routing", "x", "--replicas", "2"], "routing 'x' is not known"),
        (["--policy", "opt", "--replicas", "2"], "policy 'opt' must know"),
        (["--capacity", "0"], "--capacity: '0' is not a number of blocks"),
        (["--capacity", "5,-1"], "--capacity: '-1' is not a number of blocks"),
        (["--capacity", "1e3"], "--capacity: '1e3' is not a number of blocks"),
        (["--capacity", ""], "--capacity is empty"),
        (["--capacity", "9" * 99], "is not a number of blocks"),
        (["--plot", "rates.pdf"], "rates.pdf is neither .png nor .svg"),
        (["--workload", "mail"], "'mail'"),
        (["--requests", "0"], "--requests"),
        (["--trace", "x", "--workload", "chat"], "both --workload and --trace"),
        (["--trace", "x", "--seed", "1"], "--seed is for synthetic chats"),
    ],
)
def test_what_makes_no_sense_gives_one_line_what_and_one_what_to_do(
    kvsnap: Any, arguments: list[str], what: str
) -> None:
    done = kvsnap("simulate", *arguments)
    assert (done.code, done.out) == (2, "")
    error, hint = done.err.splitlines()
    assert error.startswith("error: ")
    assert what in error
    assert hint.strip()


def test_the_capacity_of_the_store_is_not_taken_for_one_in_blocks(kvsnap: Any) -> None:
    done = kvsnap("--capacity", "20GB", "simulate")
    assert done.code == 2
    assert "--capacity before the command is the store's" in done.err


def test_a_broken_trace_is_named_with_its_line(kvsnap: Any, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"hash_ids": [1]}\n{"hash_ids": [1.5]}\n')
    done = kvsnap("simulate", "--trace", path)
    assert done.code == 2
    assert done.err.splitlines()[0].endswith(
        "bad.jsonl, line 2: hash_ids is not a list of integers"
    )
    assert kvsnap("simulate", "--trace", "none.jsonl").code == 1


def test_help_names_every_policy_and_routing() -> None:
    texts = {option.name: getattr(option, "help", "") or "" for option in command.params}
    assert all(name in texts["policy"] for name in POLICIES)
    assert all(name in texts["routing"] for name in ROUTINGS)


def test_a_simulation_loads_neither_torch_nor_an_engine_nor_matplotlib() -> None:
    code = (
        "import sys\n"
        "from kvsnap.cli.main import main\n"
        "try: main(['simulate', '--requests', '5', '--replicas', '2'])\n"
        "except SystemExit as done: assert not done.code\n"
        "heavy = ('torch', 'llama_cpp', 'transformers', 'matplotlib', 'sqlite3')\n"
        "print('HEAVY', [m for m in heavy if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "HEAVY []"
