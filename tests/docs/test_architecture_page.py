"""docs/architecture.md: the files and functions that it names are there, and none is missing."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
STEPS = re.findall(r"`([\w.]+)` \(([\w/]+\.py)\)", PAGE)


def _tree() -> list[str]:
    """Paths of the tree block: two spaces a level, folders end in a slash."""
    found = re.search(r"<!-- tree -->\n```text\n(.*?)```", PAGE, re.DOTALL)
    assert found
    paths: list[str] = []
    folders: list[str] = []
    for line in found[1].splitlines():
        name = line.split()[0]
        depth = (len(line) - len(line.lstrip())) // 2
        folders = folders[:depth]
        paths.append("".join(folders) + name)
        if name.endswith("/"):
            folders.append(name)
    return paths


@pytest.mark.parametrize("path", _tree())
def test_a_path_of_the_tree_exists(path):
    assert (ROOT / path).is_dir() if path.endswith("/") else (ROOT / path).is_file()


@pytest.mark.parametrize("folder", ["formats", "kvstore", "cli", "samples"])
def test_every_module_stands_in_the_tree(folder):
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / folder).rglob("*.py")}
    assert sorted(modules - set(_tree())) == []


@pytest.mark.parametrize(("name", "path"), STEPS)
def test_a_function_that_a_step_names_exists(name, path):
    body = ast.parse((ROOT / path).read_text(encoding="utf-8")).body
    for part in name.split("."):
        named = [
            n
            for n in body
            if isinstance(n, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            if n.name == part
        ]
        assert named, f"{path} has no {name}"
        body = named[0].body


def test_every_step_names_a_function():
    numbered = re.findall(r"^\d+\. .*$", PAGE, re.MULTILINE)
    assert len(numbered) == 58
    assert all(re.match(r"\d+\. `[\w.]+` \([\w/]+\.py\)", line) for line in numbered)
