"""The digest of a GGUF model's weights, without loading an engine."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from kvsnap.formats.errors import NotFound


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
