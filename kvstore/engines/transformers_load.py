"""Load a model for the command line: a Hugging Face folder, or a GGUF file by transformers' loader."""

from __future__ import annotations

import warnings
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

import torch
import transformers

from kvsnap.engines.gguf import check_model
from kvsnap.engines.transformers import Transformers
from kvsnap.formats.errors import EngineError, NotFound, Unsupported


def load_transformers(
    path: Path, *, context: int | None = None, threads: int | None = None
) -> Transformers:
    """The engine with its tokenizer, on the CPU or the first GPU. Nothing is downloaded, and no code of
    the folder is run.

    A folder's weights have the type that its configuration names; a GGUF file's are dequantized to
    float32. Raises `NotFound`, `Unsupported` or `EngineError` with one line.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    place, dtype = _place(path)
    talk: Any = transformers.utils.logging
    talk.set_verbosity_error()
    talk.disable_progress_bar()
    try:
        # Releases rename arguments and warn of it; and there is a bar that no setting turns off.
        with warnings.catch_warnings(), redirect_stderr(StringIO()):
            warnings.simplefilter("ignore")
            tokenizer: Any = transformers.AutoTokenizer.from_pretrained(**place)
            model: Any = transformers.AutoModelForCausalLM.from_pretrained(**place, dtype=dtype)
    except ImportError as error:
        raise Unsupported(
            f"transformers lacks a package: {_line(error)}", "pip install 'kvsnap[hf]'"
        ) from error
    except Exception as error:  # whatever a damaged file makes a parser raise
        raise EngineError(
            f"transformers cannot load {path}: {_line(error)}",
            "the files may be cut, or of an architecture that this transformers does not know",
        ) from error
    if torch.cuda.is_available():
        model.to("cuda")
    return Transformers(model.eval(), tokenizer=tokenizer, context=context)


_WANTED = "give a Hugging Face folder, or a GGUF file, with --model"


def _place(path: Path) -> tuple[dict[str, Any], Any]:
    """What `from_pretrained` is given, and the type of the weights."""
    common = {"local_files_only": True, "trust_remote_code": False}
    if not path.exists():
        raise NotFound(f"no model {path}", _WANTED)
    if not path.is_dir():
        check_model(path)
        place = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
        return {**place, **common}, torch.float32
    if not (path / "config.json").is_file():
        raise NotFound(f"{path} has no config.json", _WANTED)
    return {"pretrained_model_name_or_path": str(path), **common}, "auto"


def _line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__
