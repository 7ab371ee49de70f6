"""The package list is the tree, the layers point one way, and names are imported one way only."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TOOL = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
FOLDERS = {name: ROOT / folder for name, folder in TOOL["package-dir"].items()}
SOURCES = [
    path for top in ("formats", "kvstore", "cli") for path in sorted((ROOT / top).rglob("*.py"))
]


def layer(path: Path) -> str:
    """formats, kvstore, engines, testing or cli."""
    parts = path.relative_to(ROOT).parts
    return parts[1] if parts[0] == "kvstore" and parts[1] in ("engines", "testing") else parts[0]


def imports(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def installed_folder(package: str) -> Path:
    """The folder of an installed package name, by the longest mapped prefix."""
    prefix = max((p for p in FOLDERS if (package + ".").startswith(p + ".")), key=len)
    return FOLDERS[prefix].joinpath(*package[len(prefix) :].strip(".").split("."))


def test_every_package_of_the_tree_is_installed_and_no_other() -> None:
    listed = {installed_folder(package).resolve() for package in TOOL["packages"]}
    tops = (ROOT / "formats", ROOT / "kvstore", ROOT / "cli", ROOT / "samples")
    found = {init.parent.resolve() for top in tops for init in top.rglob("__init__.py")}
    assert found == listed


ALLOWED = {
    "formats": {"formats"},
    "kvstore": {"formats", "kvstore", "engines"},
    "engines": {"formats", "engines", "kvstore"},  # LlamaCache stands in front of both
    "testing": {"formats", "kvstore", "engines", "testing"},
    "cli": {"formats", "kvstore", "engines", "cli", "samples"},
}


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_layers_import_downwards_only(path: Path) -> None:
    if path.parent.name == "_kvsnap":
        return  # the root package exports from all layers, lazily
    used = {name.split(".")[1] for name in imports(path) if name.startswith("kvsnap.")}
    if layer(path) == "kvstore":
        if "remotes" in path.parts:  # a remote knows neither store nor engines
            own = {n for n in imports(path) if n.startswith("kvsnap.kvstore")}
            assert all(n.startswith("kvsnap.kvstore.remotes") for n in own)
            assert used <= {"formats", "kvstore"}
        # The store knows the engines' contract, never an engine.
        concrete = {n for n in imports(path) if n.startswith("kvsnap.engines.llamacpp")}
        # The proxy is a program on top of the store that speaks to one kind of server.
        assert not concrete or "proxy" in path.parts
    assert used <= ALLOWED[layer(path)], f"{layer(path)} imports {used}"


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_modules_are_imported_by_their_installed_names(path: Path) -> None:
    tops = {name.split(".")[0] for name in imports(path)}
    assert not tops & {"formats", "kvstore", "cli"}, "a second copy of the module would load"
    assert not [
        n
        for n in imports(path)
        if n.startswith(("kvsnap.kvstore.engines", "kvsnap.kvstore.testing"))
    ]


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_are_small(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 400
