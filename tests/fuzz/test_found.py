"""What fuzzing found, each by its name: small inputs that were read wrongly once."""

from __future__ import annotations

import dataclasses
import json
import os
import tracemalloc
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvsnap.formats.codecs import get_codec
from kvsnap.formats.codecs.calibration import (
    Calibration,
    LayerGroup,
    PlaneCalibration,
    pack_calibration,
    parse_calibration,
)
from kvsnap.formats.container import Container
from kvsnap.formats.errors import Damaged, KvsnapError, Unsupported
from kvsnap.formats.fields import hex_field
from kvsnap.formats.identity import differences
from kvsnap.formats.layout import Group, Layout, Plane
from kvsnap.formats.rowset import decode_rows, encode_rows
from kvsnap.kvstore import rebuild
from kvsnap.testing.untaught import untaught
from tests.fuzz import other_readers, readers, seeds, tables
from tests.fuzz.tables import File


def peak(work: Callable[[], object]) -> int:
    """Bytes of memory that it took at most."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def changed(data: bytes, change: Callable[[File], object]) -> bytes:
    file = tables.take_apart(data)
    change(file)
    return tables.put_together(json_of(file), file.tensors)


def json_of(file: File) -> str:
    return json.dumps(tables.header_of(file), separators=(",", ":"))


def taught(**changes: Callable[[np.ndarray], np.ndarray]) -> bytes:
    """A calibration of the seeds' layout with other numbers in every group."""

    def other(group: LayerGroup) -> LayerGroup:
        arrays = {name: change(getattr(group, name)) for name, change in changes.items()}
        return dataclasses.replace(group, **arrays)

    planes = {
        name: PlaneCalibration(plane.row, tuple(other(group) for group in plane.groups))
        for name, plane in untaught(seeds.LAYOUT, "w").planes.items()
    }
    return seeds.joined(pack_calibration(Calibration("w", 0.001, planes)))


def test_a_long_hexadecimal_field_takes_no_more_than_its_own_length() -> None:
    """The pattern matched pairs of digits, and kept 180 bytes for each pair."""
    container = Container({"extras": "ab" * 500_000}, {})
    assert peak(lambda: hex_field(container, "extras")) < 2_000_000


@pytest.mark.parametrize("text", ["a", "abc", "AB", "a g", "ab\n", "٣٣"])
def test_hexadecimal_fields_are_pairs_of_lower_case_digits(text: str) -> None:
    with pytest.raises(Damaged):
        hex_field(Container({"extras": text}, {}), "extras")


def test_a_codecs_text_of_a_megabyte_is_not_kept() -> None:
    """It reads as a step of 0.2, and was remembered as a known codec."""
    with pytest.raises(Unsupported, match="too long") as caught:
        get_codec("q4@1;step=0.2" + "0" * 1_000_000)
    assert len(caught.value.what) < 200


def test_one_long_name_in_an_identity_is_not_repeated_for_every_field_in_it() -> None:
    """200 kB of identity took a gigabyte to be explained."""
    text = json.dumps({"x" * 20_000: {str(number): 0 for number in range(4_000)}})
    assert peak(lambda: differences(text, "{}")) < 10_000_000


def test_an_identity_that_is_longer_than_any_is_not_taken_apart() -> None:
    """The fields below a nested one were gathered again on every level."""
    text = json.dumps({"x": [{str(number): 0 for number in range(10_000)}]})
    assert len(text) > 2**16
    for pair in ((text, "{}"), ("{}", text)):
        with pytest.raises(Damaged, match="65536"):
            differences(*pair)


@pytest.mark.parametrize("name", ["a\nb", "\ud800", "x" * 65, "\x1b[2J", "", "a.b"])
def test_names_of_groups_and_planes_can_be_shown(name: str) -> None:
    plane = Plane(name="k", kind="rows", dtype="U8", row=(1,))
    for make in (
        lambda: Group(name=name, layers=1, planes=(plane,)),
        lambda: dataclasses.replace(plane, name=name),
    ):
        with pytest.raises(Damaged) as caught:
            make()
        assert caught.value.what.isprintable()


def test_thousands_of_planes_are_decoded_in_one_pass() -> None:
    """Each plane looked through all tensors: of 5,000 planes 25 million comparisons."""
    many = 5_000
    plane = Plane(name="k", kind="rows", dtype="U8", row=(1,))
    layout = Layout(
        groups=tuple(Group(name=f"g{n}", layers=1, planes=(plane,)) for n in range(many))
    )
    looked_at = 0

    class Counted(str):
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            nonlocal looked_at
            looked_at += 1
            return super().__eq__(other)

    rows, raw = layout.empty(0), get_codec("raw")
    stored = {Counted(name): tensor for name, tensor in encode_rows(raw, layout, rows, 0)}
    decode_rows(raw, layout, stored, rows, 0)
    assert looked_at < 10 * many


@pytest.mark.parametrize("notes", ['{"a":NaN}', '{"a":[1e999]}', '{"a":-Infinity}'])
def test_notes_that_no_save_writes_are_damaged(notes: str) -> None:
    file = changed(seeds.sessions()[2], lambda file: file.metadata.update(notes=notes))
    with pytest.raises(Damaged, match="JSON"):
        readers.session(file).check_talk()


def test_notes_of_any_depth_are_read_or_damaged() -> None:
    """What the reader of JSON could just take was too deep for its writer: RecursionError."""
    for depth in range(900, 1010):
        text = '{"a":' + "[" * depth + "]" * depth + "}"
        file = changed(
            seeds.sessions()[2], lambda file, text=text: file.metadata.update(notes=text)
        )
        with pytest.raises(Damaged):
            readers.session(file).check_talk()


@pytest.mark.parametrize("below", [0.5, 0.9], ids=["no inverse", "a negative one"])
def test_a_metric_whose_halves_differ_is_damaged(below: float) -> None:
    """Its lower half alone looked positive definite; saving a block then fell with LinAlgError, or took
    a root of a negative number."""

    def lopsided(metric: np.ndarray) -> np.ndarray:
        metric = metric.copy()
        metric[:, 0, 1], metric[:, 1, 0] = 2, below
        return metric

    with pytest.raises(Damaged, match="metric"):
        parse_calibration(memoryview(taught(metric=lopsided)))


@pytest.mark.parametrize(
    "changes",
    [
        {"spread": lambda spread: spread * 0 + np.float32(1e-45)},
        {"spread": lambda spread: spread * 0 + np.float32(3e38)},
        {"weigher": lambda weigher: weigher + np.float32(3e38)},
        {"weigher": lambda weigher: np.resize(np.float32([3e38, -3e38]), weigher.shape)},
        {"mean": lambda mean: mean + np.float32(3e38)},
        {"basis": lambda basis: basis * np.float32(3e38)},
        {"metric": lambda metric: metric * np.float32(3e38)},
    ],
    ids=["small spread", "large spread", "large weigher", "weigher of no sum", "mean", "basis", "metric"],
)  # fmt: skip
def test_a_calibration_of_extremes_loses_nothing_and_warns_of_nothing(changes: dict) -> None:
    """NaN as a token's weight was whatever the processor makes of it, and words went to stderr."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        readers.calibration_used(readers.calibrated(taught(**changes)))


def test_a_calibrations_names_are_shown_as_their_escapes() -> None:
    planes = '{"a\\nb\\ud800":{"layers":[1],"row":[1,1]}}'
    file = changed(seeds.calibrations()[0], lambda file: file.metadata.update(planes=planes))
    with pytest.raises(Damaged) as caught:
        readers.calibrated(file)
    assert caught.value.what.isprintable()


def test_a_version_of_a_store_is_told_in_short() -> None:
    for version in ("x" * 1_000_000, [[[]]] * 1000):
        text = json.dumps({"format": version, "block_size": 16})
        with pytest.raises(Unsupported) as caught:
            other_readers.settings(text.encode())
        assert len(caught.value.what) < 500


@pytest.mark.parametrize("left", [1, 2, 4])
def test_a_block_that_is_cut_while_its_record_is_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: int
) -> None:
    """Its length was looked at, then somebody cut it: numpy raised ValueError, and a rebuild fell."""
    path = tmp_path / "block"
    data = changed(seeds.blocks()[-1], lambda file: file.metadata.update(x="x" * 5000))
    path.write_bytes(data)
    real, end = os.pread, 8 + int.from_bytes(data[:8], "little") + left
    monkeypatch.setattr(
        rebuild.os, "pread", lambda file, count, at: real(file, max(0, min(count, end - at)), at)
    )
    with pytest.raises(KvsnapError):
        rebuild.read_record(path)
