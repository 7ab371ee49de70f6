"""formats is the lowest layer: bytes in, records out; no store, no engine, no file, no clock."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
MODULES = sorted((REPOSITORY / "formats").rglob("*.py"))
LAYERS_ABOVE = ("kvsnap.kvstore", "kvsnap.cli", "kvsnap.engines", "kvsnap.testing")
INPUT_OUTPUT = {
    "io", "os", "pathlib", "shutil", "tempfile", "mmap", "sqlite3", "socket", "ssl", "urllib",
    "http", "subprocess", "multiprocessing", "asyncio", "time", "datetime", "logging",
    "random", "secrets", "uuid", "click", "rich", "llama_cpp", "transformers", "vllm", "sglang",
}  # fmt: skip
CALLS = {"open", "print", "input"}


def breaches(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            names = ["relative"] if node.level else [f"{module}.{a.name}" for a in node.names]
            names = [name for name in names if name != "io.BytesIO"]  # memory, not a file
        elif isinstance(node, ast.Name) and node.id in CALLS:
            yield node.id
        for name in names:
            above = name.startswith(LAYERS_ABOVE) or name == "kvsnap"
            if above or name == "relative" or name.partition(".")[0] in INPUT_OUTPUT:
                yield name


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(REPOSITORY)))
def test_a_module_of_formats_imports_no_layer_above_and_does_no_io(path: Path) -> None:
    assert list(breaches(path.read_text("utf-8"))) == []


@pytest.mark.parametrize(
    "source",
    [
        "from kvsnap.kvstore import store",
        "import kvsnap.cli.main",
        "from kvsnap import kvstore",
        "import kvsnap",
        "from .. import kvstore",
        "from pathlib import Path",
        "import time",
        "def f():\n    import logging",
        "f = open",
        "import os.path",
        "import io",
        "from io import open",
    ],
)
def test_the_rule_finds_what_it_forbids(source: str) -> None:
    assert list(breaches(source))


def test_the_rule_reads_every_module() -> None:
    names = {str(path.relative_to(REPOSITORY / "formats")) for path in MODULES}
    assert {"block.py", "names.py", "codecs/zstd.py", "interchange/llamacpp.py"} <= names


def test_formats_loads_neither_torch_nor_an_engine_nor_the_store() -> None:
    modules = [
        str(path.relative_to(REPOSITORY).with_suffix("")).replace("/", ".")
        for path in MODULES
        # on_device is what an engine on a GPU asks for; nothing here imports it before it is used.
        if path.name not in ("__init__.py", "on_device.py")
    ]
    program = "import sys\n" + "".join(f"import kvsnap.{name}\n" for name in modules)
    program += "print(*sorted(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    loaded = set(done.stdout.split())
    assert "kvsnap.formats.names" in loaded
    assert not loaded & {"torch", "llama_cpp", "safetensors", "click", "kvsnap.kvstore", "sqlite3"}
