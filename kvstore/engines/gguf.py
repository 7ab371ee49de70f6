"""What is asked of a GGUF file before an engine loads it: is it one, and which weights are these."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from kvsnap.formats.errors import NotFound, Unsupported, UsageError


def check_model(path: Path) -> None:
    """Raise before llama.cpp is asked: it would print pages, and abort on some files."""
    if not path.exists():
        raise NotFound(f"no model file {path}", "give the path of a GGUF file with --model")
    if not path.is_file():
        raise UsageError(f"{path} is not a file", "give the path of a GGUF file with --model")
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise NotFound(f"cannot read {path}: {error.strerror}", "check its mode") from error
    if magic != b"GGUF":
        raise Unsupported(
            f"{path} is not a GGUF file (it starts with {magic!r})",
            "llama.cpp reads GGUF files; convert the model, or name another file",
        )


def model_shards(path: Path) -> list[Path]:
    """All files of a split GGUF (`…-00001-of-00003.gguf`), or the one file."""
    found = re.fullmatch(r"(.*-)\d{5}(-of-)(\d{5})(\.gguf)", path.name)
    if not found:
        return [path]
    stem, of, count, suffix = found.groups()
    return [path.with_name(f"{stem}{n:05d}{of}{count}{suffix}") for n in range(1, int(count) + 1)]


def weights_digest(path: Path, file_digest: Callable[[Path], str]) -> str:
    """That of the file; of a split model those of all files in order, joined by `+`."""
    shards = model_shards(path)
    for shard in shards:
        if not shard.is_file():
            raise NotFound(f"the model file {shard} is gone", "put it back, or name another model")
    digests = [file_digest(shard) for shard in shards]
    return digests[0] if len(digests) == 1 else "+".join(digests)
