"""This machine's own signing key: a file of the user's, never of a store."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

from kvsnap.formats.errors import KvsnapError, UsageError
from kvsnap.formats.signature import SigningKey, new_signing_key, parse_signing_key
from kvsnap.kvstore import files

VARIABLE = "KVSNAP_SIGNING_KEY_FILE"
_MOST_BYTES = 2**16
"""A key file has 119. What is longer is none, and not read whole."""


def signing_key_path() -> Path:
    """KVSNAP_SIGNING_KEY_FILE, or signing.pem in the user's configuration folder."""
    chosen = os.environ.get(VARIABLE)
    if chosen:
        return Path(chosen).expanduser()
    from platformdirs import user_config_path

    return user_config_path("kvsnap", appauthor=False) / "signing.pem"


def find_signing_key(path: Path | None = None) -> SigningKey | None:
    """The key, None where there is no file. A link is followed, unlike in a store: secrets that are
    mounted into a container are links. Raises `UsageError` for a file that holds none."""
    path = path or signing_key_path()
    try:
        if path.exists() and not path.is_file():
            raise UsageError(f"signing key {path} is no regular file", f"name another: {VARIABLE}")
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise UsageError(
            f"signing key {path} cannot be read: {error.strerror}",
            f"check the path and its mode, or name another: {VARIABLE}",
        ) from error
    try:
        return parse_signing_key(data)
    except UsageError as error:
        raise UsageError(f"{path}: {error.what}", error.hint) from error


def require_signing_key() -> SigningKey:
    """The key, made now where there is none."""
    found = find_signing_key()
    if found is not None:
        return found
    path, key = signing_key_path(), new_signing_key()
    try:
        path.parent.mkdir(mode=files.DIR_MODE, parents=True, exist_ok=True)
        write_key_file(path, key.pem())
    except OSError as error:
        found = find_signing_key() if isinstance(error, FileExistsError) else None
        if found is not None:  # another process was faster
            return found
        raise UsageError(
            f"no signing key can be written to {path}: {error.strerror}",
            f"name a file that can: {VARIABLE}",
        ) from error
    return key


def write_key_file(path: Path, content: bytes) -> None:
    """A new file, whole or not at all, for its owner's eyes from its first moment on. Raises
    FileExistsError: a key that is lost cannot be made again."""
    # No process id in it: threads have the same, and so may processes of two containers.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
    handle = os.open(
        temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, files.FILE_MODE
    )
    try:
        with os.fdopen(handle, "wb") as out:
            out.write(content)
            out.flush()
            os.fsync(out.fileno())
        os.link(temporary, path)  # fails where one is there, unlike a rename
    finally:
        temporary.unlink(missing_ok=True)
    with contextlib.suppress(KvsnapError):
        files.sync_all([path.parent])
