"""Rules that the source keeps, read from it: no built-in hash for names (A12), no pickle (A66)."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
SOURCES = sorted(
    path for top in ("formats", "kvstore", "cli") for path in (REPOSITORY / top).rglob("*.py")
)
CODE_RUNNERS = {
    "pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve",
    "jsonpickle", "yaml", "ruamel", "code", "codeop",
}  # fmt: skip
CALLS = {"hash", "eval", "exec", "compile", "__import__"}
METHODS = {"torch.load", "np.load", "numpy.load", "builtins.hash", "builtins.eval"}


def breaches(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found = {alias.name.partition(".")[0] for alias in node.names} & CODE_RUNNERS
        elif isinstance(node, ast.ImportFrom):
            found = {(node.module or "").partition(".")[0]} & CODE_RUNNERS
            found |= {f"{node.module}.{alias.name}" for alias in node.names} & METHODS
            if node.module == "yaml" and {a.name for a in node.names} <= {"safe_load", "YAMLError"}:
                found = set()
        elif isinstance(node, ast.Name):  # not only calls: map(hash, names) is one too
            found = {node.id} & CALLS
        elif isinstance(node, ast.Attribute):
            found = {ast.unparse(node)} & METHODS
        elif isinstance(node, ast.keyword):
            found = {"allow_pickle"} & {node.arg}
        else:
            continue
        yield from (f"line {getattr(node, 'lineno', '?')}: {name}" for name in sorted(found))


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(REPOSITORY)))
def test_nothing_hashes_by_the_builtin_or_runs_what_it_reads(path: Path) -> None:
    assert list(breaches(path.read_text("utf-8"))) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import os, yaml.loader",
        "from yaml import load",
        "from yaml import safe_load, load",
        "x = hash(name)",
        "x = map(hash, names)",
        "eval(text)",
        "exec(text)",
        "torch.load(path)",
        "from torch import load",
        "def f():\n    import marshal",
        "np.load(path)",
        "reader(path, allow_pickle=True)",
    ],
)
def test_the_rule_finds_what_it_forbids(source: str) -> None:
    assert list(breaches(source))


def test_the_rule_lets_good_code_pass() -> None:
    assert not list(
        breaches("import json\nhasher = blake3(b'')\nhasher.update(x)\ndef load(): ...\n")
    )


def test_the_rule_reads_all_three_layers() -> None:
    assert {path.relative_to(REPOSITORY).parts[0] for path in SOURCES} == {
        "formats", "kvstore", "cli",
    }  # fmt: skip
    assert len(SOURCES) > 20
