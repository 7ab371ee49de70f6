"""The tenant's key of a command or server: from a file, or from the environment."""

from __future__ import annotations

import os
import re
from pathlib import Path

from kvsnap.formats.errors import Damaged, NotFound, UsageError
from kvsnap.formats.tenant import Tenant, parse_key
from kvsnap.kvstore import files

OPTION = "--tenant-key-file"
FILE_VARIABLE = "KVSNAP_TENANT_KEY_FILE"
VARIABLE = "KVSNAP_TENANT_KEY"
_MOST = 4096
"""Bytes of a key file: 64 hex characters with white space around them."""
_MAKE_ONE = "kvsnap keygen FILE makes one"
_KEY = re.compile(r"\s*[0-9A-Fa-f]{64}\s*")


def find_tenant(path: Path | None = None, option: str = OPTION) -> Tenant | None:
    """The key in the file that was given as `option`, else in that of KVSNAP_TENANT_KEY_FILE, else
    KVSNAP_TENANT_KEY itself; None where there is none of these.

    Raises `UsageError` for what is no key, and for two variables that may say two things, `NotFound` for
    a file that cannot be read. No error shows a key, or what was taken for one.
    """
    if path is not None:
        return _from_file(path, option)
    given = [name for name in (FILE_VARIABLE, VARIABLE) if name in os.environ]
    if len(given) > 1:
        raise UsageError(f"{FILE_VARIABLE} and {VARIABLE} are both set", "unset one of them")
    for name in given:
        if not os.environ[name].strip():
            # A key that a script failed to fill in: what is stored without one can be tested for.
            raise UsageError(f"{name} is set and empty", "unset it to work without a tenant key")
    if given == [FILE_VARIABLE]:
        return _from_file(Path(os.environ[FILE_VARIABLE]), FILE_VARIABLE)
    return _from_environment() if given else None


def _from_environment() -> Tenant:
    if not _KEY.fullmatch(os.environ[VARIABLE]):
        raise UsageError(f"{VARIABLE} is not 64 hex characters", _MAKE_ONE)
    return parse_key(os.environ[VARIABLE].encode("ascii"))


def _from_file(path: Path, option: str) -> Tenant:
    if _KEY.fullmatch(str(path)):
        del path
        raise UsageError(f"{option} takes the name of a file with the key, not the key", _MAKE_ONE)
    try:
        return parse_key(bytes(files.read_whole(path.expanduser(), limit=_MOST)))
    except OSError as error:
        raise NotFound(f"cannot read {path}: {error.strerror}", "check the path") from error
    except Damaged as error:
        raise UsageError(f"{path} holds no tenant key: {error.what}", _MAKE_ONE) from error
    except UsageError as error:
        raise UsageError(f"{path} holds no tenant key: {error.what}", _MAKE_ONE) from error
