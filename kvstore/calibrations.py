"""Calibrations on disk: what a calibrated codec was taught of a model, named by its digest.

A block of such a codec can be decoded only with the very calibration that its fidelity names. The
files are few, one a model and teaching; they count in the budget and are never evicted.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from kvsnap.formats.codecs import Codec
from kvsnap.formats.codecs.base import CalibratedCodec
from kvsnap.formats.codecs.calibration import (
    Calibration,
    find,
    pack_calibration,
    parse_calibration,
    register,
)
from kvsnap.formats.container import check_file_digest
from kvsnap.formats.errors import KvsnapError, NotFound, Unsupported
from kvsnap.formats.session_name import SUFFIX
from kvsnap.kvstore import files
from kvsnap.kvstore.index import Index
from kvsnap.kvstore.place import Place
from kvsnap.kvstore.space import Space


class Calibrations:
    """The calibrations of one store."""

    def __init__(self, place: Place, index: Index, space: Space) -> None:
        self.place, self.index, self.space = place, index, space

    def path(self, digest: str) -> Path:
        return self.place.calibrations / f"{digest}{SUFFIX}"

    def put(self, calibration: Calibration) -> str:
        """Store a calibration, durably, over a damaged file of its name; returns the digest that
        names it from now on."""
        packed = pack_calibration(calibration)
        path = self.path(packed.file_digest)
        if _digest(path) != packed.file_digest:
            with self.space.write(packed) as room:
                files.make_dir(path.parent)
                files.sync_all([room.path])
                with self.index.transaction() as db:
                    room.publish(db, path)
            files.sync_all([path.parent, self.place.root])
        return packed.file_digest

    def require(self, codec: Codec) -> None:
        """Before blocks are written: raises `Unsupported` unless the file without which nobody could
        read them is in this store. That this process has read it says nothing."""
        if isinstance(codec, CalibratedCodec) and not files.stands(self.path(codec.calibration)):
            raise self._gone(codec.calibration)

    def check(self) -> list[tuple[Path, str]]:
        """Files that are not what their name says, with the reason."""
        found = []
        for path, _, _ in files.sizes(self.place.calibrations):
            try:
                if _read(path).digest != path.name.removesuffix(SUFFIX):
                    found.append((path, "the file holds another calibration than its name says"))
            except KvsnapError as error:
                found.append((path, error.what))
            except OSError as error:
                found.append((path, f"cannot be read: {error.strerror}"))
        return found

    def prepare(self, codec: Codec) -> None:
        """Make a calibrated codec able to work in this process. Raises `Unsupported` where its
        calibration is not in the store, or damaged; other codecs need nothing."""
        if not isinstance(codec, CalibratedCodec):
            return
        try:
            find(codec.calibration)
        except Unsupported:
            self._load(codec.calibration)

    def complete(self, codec: Codec, weights: str) -> Codec:
        """The codec, ready to be used for a model; a calibrated one that names no calibration with
        the newest of this model. Raises `NotFound` where the store has none, `Unsupported` where the
        one named is not here or another model's."""
        if not isinstance(codec, CalibratedCodec):
            return codec
        if codec.calibration:
            self.prepare(codec)
            if find(codec.calibration).model != weights:
                raise Unsupported(
                    f"calibration {codec.calibration[:12]} is another model's",
                    "make one of this model: kvsnap calibrate --model M",
                )
            return codec
        digest = self.newest(weights)
        if digest is None:
            raise NotFound(
                f"codec {codec.id} needs a calibration of this model, and the store has none",
                "make one: kvsnap calibrate --model M",
            )
        return dataclasses.replace(codec, calibration=digest)

    def newest(self, weights: str) -> str | None:
        """The digest of the calibration of a model that was made last; it is ready to be used."""
        found = files.sizes(self.place.calibrations)
        for path, _, _ in sorted(found, key=lambda item: -item[2]):
            try:
                calibration = _read(path)
            except (KvsnapError, OSError):
                continue
            named = path.name == f"{calibration.digest}{SUFFIX}"  # else nobody would find it again
            if named and calibration.model == weights:
                return register(calibration)
        return None

    def _load(self, digest: str) -> None:
        path = self.path(digest)
        if len(digest) != 64 or not all(c in "0123456789abcdef" for c in digest):
            raise Unsupported(
                f"{digest[:80]!r} is not the digest of a calibration", "64 hex digits"
            )
        try:
            calibration = _read(path)
        except OSError as error:
            raise self._gone(digest) from error
        except KvsnapError as error:
            raise Unsupported(
                f"calibration {digest[:12]} cannot be used: {error.what}",
                f"bring a good copy of its file to {path.parent}",
            ) from error
        if calibration.digest != digest:
            raise Unsupported(
                f"calibration {digest[:12]} cannot be used: its file holds another",
                f"bring a good copy of its file to {path.parent}",
            )
        register(calibration)

    def _gone(self, digest: str) -> Unsupported:
        return Unsupported(
            f"calibration {digest[:12]} is not in the store",
            f"bring its file to {self.place.calibrations}, from where it was made",
        )


def _read(path: Path) -> Calibration:
    return parse_calibration(files.read_whole(path))


def _digest(path: Path) -> str:
    """Of an intact file; empty for any other, or none."""
    try:
        return check_file_digest(files.read_whole(path))
    except (KvsnapError, OSError):
        return ""
