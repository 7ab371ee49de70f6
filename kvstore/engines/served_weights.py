"""The files of a model or an adapter that a serving engine loads: where they are, and their digest.

A serving engine gives its plugins no live weights: they are in other processes, cut, fused and perhaps
on devices. So the files stand for them, and what the engine makes of them (types, quantization) goes
into the identity beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from blake3 import blake3

from kvsnap.formats.errors import NotFound, Unsupported

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
"""How files end that hold weights. More than the engine loads is a miss at worst."""


def local_folder(name: str, revision: str | None = None, cache: str | None = None) -> Path:
    """A path as it is, or where the files of a model's name are on this machine: nothing is fetched.
    Raises `NotFound` where they are not."""
    path = Path(name).expanduser()
    if path.exists():
        return path
    from huggingface_hub import snapshot_download

    try:
        found = snapshot_download(name, revision=revision, cache_dir=cache, local_files_only=True)
    except (OSError, ValueError) as error:
        raise NotFound(
            f"the files of model {name!r} are not to be found on this machine",
            'say where they are: "model": "/folder" in the extra configuration',
        ) from error
    return Path(found)


def weights_digest(place: Path, file_digest: Callable[[Path], str]) -> str:
    """Of one file its own digest; of a folder `blake3:HEX` over those of all weights in it, whatever
    their names. Raises `NotFound` for what is not there, `Unsupported` for a folder without any."""
    if place.is_file():
        return file_digest(place)
    found = weight_files(place)
    return _joined(file_digest(path) for path in found)


def adapter_digest(place: Path, file_digest: Callable[[Path], str]) -> str:
    """The same of a LoRA adapter's folder; its configuration decides the scale, and counts."""
    files = [*weight_files(place), place / "adapter_config.json"]
    return _joined(file_digest(path) for path in files)


def code_digest(place: Path, file_digest: Callable[[Path], str]) -> str:
    """Of the Python files that came with a model, where the engine runs them."""
    return _joined(file_digest(path) for path in sorted(place.glob("*.py")))


def weight_files(folder: Path) -> list[Path]:
    """Files of weights in a folder, sorted by name."""
    try:
        found = sorted(path for path in folder.iterdir() if path.suffix in WEIGHTS)
    except OSError as error:
        raise NotFound(
            f"cannot read the model's folder {folder}: {error.strerror}", "check the path"
        ) from error
    if not found:
        raise Unsupported(
            f"no weights in {folder}: nothing tells this model from another",
            f"give a folder with files that end in {', '.join(WEIGHTS)}",
        )
    return found


def _joined(digests: Iterable[str]) -> str:
    text = "\n".join(sorted(digests))
    return f"blake3:{blake3(text.encode()).hexdigest()}"
