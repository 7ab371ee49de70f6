"""Calibration files: what is packed comes back, what is damaged is refused, the digest names it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvsnap.formats.codecs.calibration import (
    FEATURES,
    Calibration,
    LayerGroup,
    PlaneCalibration,
    find,
    pack_calibration,
    parse_calibration,
    register,
)
from kvsnap.formats.container import Packed
from kvsnap.formats.errors import Damaged, Unsupported, UsageError
from kvsnap.formats.layout import PlaneRope
from kvsnap.kvstore.measure.calibrate import Samples, calibrate


def group(layers: int = 2, heads: int = 1, dim: int = 3, kept: int = 4) -> LayerGroup:
    source, width = np.random.default_rng(1), layers * heads * dim
    return LayerGroup(
        layers=layers,
        basis=source.standard_normal((kept, width)).astype(np.float32),
        mean=source.standard_normal(width).astype(np.float32),
        metric=np.tile(np.eye(dim, dtype=np.float32), (layers * heads, 1, 1)),
        spread=np.linspace(3, 1, kept, dtype=np.float32),
        weigher=source.standard_normal(FEATURES).astype(np.float32),
    )


@pytest.fixture
def calibration() -> Calibration:
    planes = {
        "full.k": PlaneCalibration((1, 3), (group(), group(layers=1, kept=3))),
        "full.v": PlaneCalibration((2, 2), (group(layers=3, heads=2, dim=2),)),
    }
    return Calibration("a model", 0.25, planes)


@pytest.fixture
def file(calibration: Calibration, whole: Callable[[Packed], bytes]) -> bytes:
    return whole(pack_calibration(calibration))


def test_a_file_gives_back_what_was_packed(calibration: Calibration, file: bytes) -> None:
    read = parse_calibration(memoryview(file))
    assert (read.model, read.finest) == ("a model", 0.25)
    assert read.digest == pack_calibration(calibration).file_digest
    assert {name: plane.layers for name, plane in read.planes.items()} == {"full.k": 3, "full.v": 3}
    for name, plane in calibration.planes.items():
        assert read.planes[name].row == plane.row
        for one, two in zip(plane.groups, read.planes[name].groups, strict=True):
            for key in ("mean", "metric", "spread", "weigher"):
                assert np.array_equal(getattr(one, key), getattr(two, key))
            assert np.allclose(one.basis, two.basis, atol=np.abs(one.basis).max() * 2.0**-11)


def test_equal_calibrations_are_equal_bytes_and_others_have_another_digest(
    calibration: Calibration, file: bytes, whole: Callable[[Packed], bytes]
) -> None:
    assert whole(pack_calibration(calibration)) == file
    other = replace(calibration, finest=0.5)
    assert pack_calibration(other).file_digest != pack_calibration(calibration).file_digest


def test_a_registered_calibration_is_found_by_its_digest(file: bytes) -> None:
    read = parse_calibration(memoryview(file))
    with pytest.raises(Unsupported, match="is not here"):
        find(read.digest[::-1])
    assert register(read) == read.digest
    assert find(read.digest) is read
    assert register(parse_calibration(memoryview(file))) == read.digest
    assert find(read.digest) is read


def test_without_a_digest_nothing_is_found_or_registered(calibration: Calibration) -> None:
    with pytest.raises(Unsupported, match="no calibration"):
        find("")
    with pytest.raises(ValueError, match="as parsed"):
        register(calibration)


def test_a_flipped_byte_is_damaged(file: bytes) -> None:
    for at in range(0, len(file), 97):
        bent = bytearray(file)
        bent[at] ^= 4
        with pytest.raises((Damaged, Unsupported)):
            parse_calibration(memoryview(bytes(bent)))


def _metadata(key: str, value: str) -> Callable[[dict[str, Any], bytearray], None]:
    def change(header: dict[str, Any], _: bytearray) -> None:
        header["__metadata__"][key] = value

    return change


def _tensor(name: str, value: float, at: int = 0) -> Callable[[dict[str, Any], bytearray], None]:
    def change(header: dict[str, Any], data: bytearray) -> None:
        dtype = "<f2" if header[name]["dtype"] == "F16" else "<f4"
        begin, end = header[name]["data_offsets"]
        array = np.frombuffer(data[begin:end], dtype).copy()
        array[at] = value
        data[begin:end] = array.tobytes()

    return change


def _overflow(header: dict[str, Any], data: bytearray) -> None:
    for name, value in (("full.k.0.basis", 6e4), ("full.k.0.scale", 3e38)):
        _tensor(name, value)(header, data)


def _rename(header: dict[str, Any], _: bytearray) -> None:
    header["full.x.0.mean"] = header.pop("full.k.0.mean")


def _reshape(header: dict[str, Any], _: bytearray) -> None:
    header["full.k.0.basis"]["shape"].reverse()


def _extra(header: dict[str, Any], _: bytearray) -> None:
    header["full.k.2.mean"] = {"data_offsets": [0, 0], "dtype": "F32", "shape": [0]}


PLANES = {"full.k": {"layers": [2, 1], "row": [1, 3]}}


@pytest.mark.parametrize(
    "change",
    [
        _metadata("finest", "0"),
        _metadata("finest", "nan"),
        _metadata("finest", "fine"),
        _metadata("kind", "block"),
        _metadata("planes", "["),
        _metadata("planes", "[]"),
        _metadata("planes", "[" * 9000),
        _metadata("planes", json.dumps(PLANES)),
        _metadata("planes", json.dumps({"full.k": {"layers": [], "row": [1, 3]}})),
        _metadata("planes", json.dumps({"full.k": {"layers": [2, 1], "row": [1, -3]}})),
        _metadata("planes", json.dumps({"full.k": {"layers": [2, True], "row": [1, 3]}})),
        _metadata("planes", json.dumps({"full.k": {"layers": 3, "row": [1, 3]}})),
        _tensor("full.k.0.mean", np.nan),
        _tensor("full.k.0.basis", np.inf),
        _tensor("full.k.0.scale", -np.inf),
        _overflow,
        _tensor("full.k.0.metric", -1.0),
        _tensor("full.k.0.spread", 0.0, at=-1),
        _tensor("full.k.0.spread", 9.0, at=1),
        _rename,
        _reshape,
        _extra,
    ],
)
def test_what_was_signed_but_makes_no_sense_is_damaged(
    file: bytes,
    resign: Callable[..., bytes],
    change: Callable[[dict[str, Any], bytearray], None],
) -> None:
    with pytest.raises(Damaged):
        parse_calibration(memoryview(resign(file, change)))


def test_another_version_is_unsupported(file: bytes, resign: Callable[..., bytes]) -> None:
    with pytest.raises(Unsupported, match="version"):
        parse_calibration(memoryview(resign(file, _metadata("kvsnap", "2"))))


def _samples(tokens: int, layers: int, heads: int, dim: int, rope: PlaneRope | None) -> Samples:
    source = np.random.default_rng(2)
    shape = (tokens, layers, heads, dim)
    values, gradients = source.standard_normal((2, *shape)).astype(np.float16)
    return Samples(values, gradients, np.arange(tokens) % 50, rope)


@pytest.mark.parametrize(
    ("shape", "widest", "groups"),
    [((4, 2, 8), 64, [4]), ((5, 2, 8), 40, [1, 2, 2]), ((3, 1, 7), 1, [1, 1, 1])],
)
def test_layers_are_grouped_up_to_a_width(
    shape: tuple[int, int, int], widest: int, groups: list[int]
) -> None:
    made = calibrate("m", {"a.k": _samples(200, *shape, None)}, widest=widest)
    assert [group.layers for group in made.planes["a.k"].groups] == groups
    assert made.planes["a.k"].row == shape[1:]


def test_encoder_and_basis_are_inverse() -> None:
    made = calibrate("m", {"a.k": _samples(300, 3, 2, 8, None)}, finest=1e-6)
    (group,) = made.planes["a.k"].groups
    assert len(group.basis) == 48
    assert np.allclose(group.encoder @ group.basis, np.eye(48), atol=1e-4)


def test_components_that_the_finest_step_leaves_nothing_of_are_not_kept() -> None:
    samples = _samples(300, 3, 2, 8, None)
    low = samples.values.reshape(300, -1)
    low[:, 5:] = low[:, :5] @ np.random.default_rng(3).standard_normal((5, 43))
    (group,) = calibrate("m", {"a.k": samples}, finest=0.05).planes["a.k"].groups
    assert 5 <= len(group.basis) < 12


def test_the_same_keys_give_one_calibration_in_either_order_of_pairs() -> None:
    halves = PlaneRope(pairing="halves", dims=6, base=100.0)
    first = _samples(300, 2, 2, 8, halves)
    order = [0, 3, 1, 4, 2, 5, 6, 7]
    second = replace(
        first,
        values=first.values[..., order],
        gradients=first.gradients[..., order],
        rope=replace(halves, pairing="interleaved"),
    )
    one, two = (calibrate("m", {"a.k": s}).planes["a.k"].groups[0] for s in (first, second))
    assert np.allclose(one.mean, two.mean, atol=1e-5)
    assert np.allclose(one.metric, two.metric, atol=1e-4)


def test_too_few_tokens_are_refused() -> None:
    with pytest.raises(UsageError, match="too few"):
        calibrate("m", {"a.k": _samples(12, 2, 1, 8, None)})
