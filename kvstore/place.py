"""Where a store lives: its folders, its settings file, and where set-aside files go."""

from __future__ import annotations

import contextlib
import json
import os
import re
import reprlib
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvsnap.formats.container import Packed
from kvsnap.formats.errors import Damaged, StoreError, Unsupported
from kvsnap.formats.fields import FORMAT_VERSION
from kvsnap.formats.signature import is_public_key
from kvsnap.kvstore import files
from kvsnap.kvstore.locks import one_at_a_time

SETTINGS = "kvsnap.json"
TRUST, ENCRYPT = "trust", "encrypt"
_KEYS = re.compile(rb"[0-9a-f]{32}")
"""Half of a public key: of the other settings only the records of break-even have the like."""
_BREAK_EVEN = b'"break_even"'
_DAMAGED = "{} is damaged; the defaults are used, also for its capacity"
DEFAULT_BLOCK_SIZE = 64
"""See docs/design/0003-block-size.md for the measurement."""


@dataclass(frozen=True)
class Place:
    """The folders of one store. Nothing is created before something is written."""

    root: Path
    block_size: int = DEFAULT_BLOCK_SIZE
    """What kvsnap.json gets where it has to be written."""

    @property
    def blocks(self) -> Path:
        return self.root / "blocks"

    @property
    def sessions(self) -> Path:
        return self.root / "sessions"

    @property
    def temporary(self) -> Path:
        return self.root / "tmp"

    @property
    def pins(self) -> Path:
        return self.root / "pins"

    @property
    def calibrations(self) -> Path:
        return self.root / "calibrations"

    @property
    def quarantine(self) -> Path:
        return self.root / "quarantine"

    @property
    def index(self) -> Path:
        return self.root / "index.sqlite3"

    @property
    def settings(self) -> Path:
        return self.root / SETTINGS

    @property
    def damaged_settings(self) -> Path:
        """What stood in kvsnap.json before it was written anew."""
        return self.root / f"{SETTINGS}.damaged"

    def block(self, name: bytes) -> Path:
        text = name.hex()
        return self.blocks / text[:2] / f"{text}.safetensors"

    def pin(self, path: Path) -> Path:
        """Where the pin of a session's file stands: under the same name below pins/."""
        return self.pins / path.parent.name / path.name

    def pin_of_block(self, name: bytes) -> Path:
        return self.pins / "blocks" / f"{name.hex()}.safetensors"

    def writable(self) -> bool:
        """Whether files can be made in the store, or the store itself where it does not exist."""
        path = self.root
        while not path.exists() and path != path.parent:
            path = path.parent
        return os.access(path, os.W_OK | os.X_OK)

    def set_aside(self, path: Path, reason: str) -> Path | None:
        """Move a damaged file (or whatever stands in its place) to quarantine, with the reason.

        Returns where it went; None where it was gone already.
        """
        files.make_dir(self.quarantine)
        target = self.quarantine / f"{path.name}.{secrets.token_hex(4)}"
        with files.store_errors(path):
            try:
                path.rename(target)
            except FileNotFoundError:
                return None
            note = self.quarantine / f"{target.name}.reason"
            note.touch(files.FILE_MODE)
            note.write_text(f"{path}\n{reason}\n")
        return target


def default_path() -> Path:
    """KVSNAP_STORE, or the platform's user cache folder."""
    chosen = os.environ.get("KVSNAP_STORE")
    if chosen:
        return Path(chosen).expanduser()
    from platformdirs import user_cache_path

    return user_cache_path("kvsnap", appauthor=False)


@dataclass(frozen=True)
class Settings:
    """kvsnap.json, or what a new store gets; `problem` says why a damaged one was passed over."""

    block_size: int = DEFAULT_BLOCK_SIZE
    created: int = 0
    capacity: str | int | None = None
    min_free: str | int | None = None
    trust: Mapping[str, str] = field(default_factory=dict)
    """Public key → name of whom it is."""
    encrypt: bool = False
    problem: str = ""


def read_settings(place: Place) -> Settings:
    """Refuses a store of another format version. A damaged file is passed over with its problem:
    every block and session carries its own version, so nothing wrong can come of that."""
    text = b""
    with files.store_errors(place.root):  # a path too long, or through a folder that is closed
        if place.root.exists() and not place.root.is_dir():
            raise StoreError(f"{place.root} is not a folder", "point --store at a folder")
    try:
        text = bytes(files.read_whole(place.settings))
        settings = json.loads(text)
        version, block_size = settings["format"], settings["block_size"]
        created = settings.get("created", 0)
    except (FileNotFoundError, NotADirectoryError):
        if files.is_folder(place.root / "manifests"):  # a push would be refused from then on
            raise StoreError(
                f"{place.root} is a remote, no store", "point --store at a folder of its own"
            ) from None
        return Settings()
    except OSError as error:
        raise files.store_error(error, place.settings, "read") from error
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, Damaged):
        return _damaged(place, text)
    if version != FORMAT_VERSION:
        raise Unsupported(
            f"{place.root} is a store of format version {reprlib.repr(version)}, this kvsnap reads"
            f" {FORMAT_VERSION!r}",
            "use the kvsnap that wrote it, or another --store",
        )
    if type(block_size) is not int or not 1 <= block_size <= 2**16 or type(created) is not int:
        return _damaged(place, text)
    if TRUST not in settings and _has_keys(text):
        return _damaged(place, text)  # a bit changed in the very word
    trust = settings.get(TRUST, {})
    names = list(trust.values()) if isinstance(trust, dict) else [None]
    encrypt = settings.get(ENCRYPT, False)
    sound = all(isinstance(name, str) for name in names) and all(map(is_public_key, trust))
    if not sound or type(encrypt) is not bool:
        return _damaged(place, text)
    capacity, min_free = settings.get("capacity"), settings.get("min_free")
    return Settings(block_size, created, capacity, min_free, trust, encrypt)


def _has_keys(text: bytes) -> bool:
    """Whether public keys stand in it. The trust list stands before what has digests of models."""
    return _KEYS.search(text.partition(_BREAK_EVEN)[0]) is not None


def _damaged(place: Place, text: bytes) -> Settings:
    """The defaults; but a store that asks for signatures, or is encrypted, must not become one that
    does not by damage."""
    for key, what in ((TRUST, "holds a trust list"), (ENCRYPT, "says whether it is encrypted")):
        if f'"{key}"'.encode() in text or (key == TRUST and _has_keys(text)):
            raise StoreError(
                f"{place.settings} is damaged, and {what}",
                "mend it by hand: it is a small JSON file",
            )
    return Settings(problem=_DAMAGED.format(place.settings))


def write_settings(place: Place) -> None:
    """Create the store's folders and kvsnap.json where they are missing or damaged."""
    for folder in (place.root, place.blocks, place.sessions, place.temporary):
        files.make_dir(folder)
    settings = read_settings(place)
    if settings.created and not settings.problem:
        return
    # Once in a store's life, and before kvsnap.json says that it is done: a session that was
    # reported saved must not lose the store around it.
    with files.store_errors(place.root):
        files.sync_upwards(place.root)
    with one_at_a_time(place.root):
        settings = read_settings(place)  # by now another process may have, with a trust list in it
        if settings.problem:
            # Not to quarantine, which goes when room is needed: it may be a person's typing error,
            # and hold a capacity that somebody asked for.
            with files.store_errors(place.settings):
                place.settings.rename(place.damaged_settings)
        elif settings.created:
            return
        kept = dict[str, Any]()
        with files.store_errors(place.settings), contextlib.suppress(FileNotFoundError):
            kept = _record(place)  # somebody wrote it by hand
        new = {"block_size": place.block_size, "created": int(time.time())}
        _replace_settings(place, {**kept, **new, "format": FORMAT_VERSION})


def change_settings(place: Place, key: str, change: Callable[[Any], Any]) -> None:
    """Change one field of kvsnap.json, JSON, from what it is now (None: not there), and keep the
    others; the store is made where it is not."""
    write_settings(place)
    with one_at_a_time(place.root), files.store_errors(place.settings):
        record = _record(place)
        _replace_settings(place, {**record, key: change(record.get(key))})


def _record(place: Place) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(bytes(files.read_whole(place.settings)))
    return found


def _replace_settings(place: Place, record: dict[str, Any]) -> None:
    """The trust list stands first: a file that lost its end still shows that there was one."""
    record = json.loads(json.dumps(record, sort_keys=True))
    kept = {key: record[key] for key in sorted(record, key=lambda key: key != TRUST)}
    if not kept.get(TRUST):
        kept.pop(TRUST, None)
    text = (json.dumps(kept, indent=1) + "\n").encode()
    temporary = place.temporary / f"{secrets.token_hex(8)}.{secrets.token_hex(8)}.part"
    files.write_file(temporary, Packed((text,), len(text), ""))
    try:
        files.sync_all([temporary])
        with files.store_errors(place.settings):
            temporary.replace(place.settings)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
    files.sync_all([place.root])
