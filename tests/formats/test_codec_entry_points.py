"""Codecs of other packages: found by name, and a broken one is a reason, never a crash."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvsnap.formats import codecs
from kvsnap.formats.codecs import Codec, Stretch, get_codec, known_codecs
from kvsnap.formats.container import Tensor
from kvsnap.formats.errors import Unsupported
from kvsnap.formats.layout import Array, Group, Layout, Plane
from kvsnap.formats.rowset import check_codec, decode_rows

PLANE = Plane(name="k", kind="elements", dtype="F16", row=(1, 4))
LAYOUT = Layout(groups=(Group(name="all", layers=1, planes=(PLANE,)),))


@dataclass(frozen=True)
class Halved(Codec):
    id = "halved"
    lossy = True
    by: int = 2
    name: str = "x"

    def encode(self, at: Stretch, rows: Array) -> dict[str, Tensor]:
        return {".h": Tensor("U8", (rows.nbytes,), rows.tobytes())}

    def decode(self, at: Stretch, stored: Mapping[str, Tensor], out: Array) -> None:
        raise ValueError("nobody knows")


@dataclass(frozen=True)
class Flag(Halved):
    id = "flag"
    on: bool = True


@dataclass(frozen=True)
class NoDefault(Halved):
    id = "nodefault"
    more: Any = field(kw_only=True)


@dataclass(frozen=True)
class Abstract(Codec):
    id = "abstract"


Install = Callable[..., None]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Make classes findable as another package's entry points would be."""

    def make(**classes: Any) -> None:
        module = ModuleType("somebodys")
        vars(module).update(classes)
        monkeypatch.setitem(sys.modules, "somebodys", module)
        points = [SimpleNamespace(name=name, value=f"somebodys:{name}") for name in classes]
        points.append(SimpleNamespace(name="gone", value="not_installed.at:All"))

        def entry_points(group: str, name: str | None = None) -> list[Any]:
            assert group == "kvsnap.codecs"
            return [point for point in points if name in (None, point.name)]

        monkeypatch.setattr(codecs, "entry_points", entry_points)
        get_codec.cache_clear()

    yield make
    get_codec.cache_clear()


def test_a_codec_of_another_package_is_found_with_its_parameters(install: Install) -> None:
    install(halved=Halved)
    codec = get_codec("halved;by=3")
    assert codec == Halved(by=3)
    assert codec.fidelity == "halved@1;by=3;name=x"
    assert get_codec(codec.fidelity) == codec
    assert {"halved", "raw", "q8"} <= set(known_codecs())
    check_codec(codec, LAYOUT)


@pytest.mark.parametrize("name", ["gone", "missing", "nodefault", "abstract", "wrong"])
def test_a_broken_one_is_a_reason(install: Install, name: str) -> None:
    install(nodefault=NoDefault, abstract=Abstract, wrong=Halved)
    with pytest.raises(Unsupported) as caught:
        get_codec(name)
    assert name in caught.value.what
    assert caught.value.hint


def test_parameters_that_do_not_read_back_are_refused_before_anything_is_written(
    install: Install,
) -> None:
    install(flag=Flag, halved=Halved)
    with pytest.raises(Unsupported, match="cannot be found again"):
        check_codec(Flag(on=False), LAYOUT)
    with pytest.raises(Unsupported):
        check_codec(Halved(name="a;by=9"), LAYOUT)


def test_what_it_raises_while_decoding_is_a_miss_that_names_it(install: Install) -> None:
    install(halved=Halved)
    codec, rows = get_codec("halved"), np.zeros((1, 2, 4), np.uint16)
    stored = {f"all.k{k}": t for k, t in codec.encode(Stretch("all.k", PLANE, 0), rows).items()}
    with pytest.raises(Unsupported, match=r"codec halved failed on plane all\.k: ValueError"):
        decode_rows(codec, LAYOUT, stored, {"all.k": rows}, 0)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("q4;step=0.2;step=0.3", "given twice"),
        ("q4;step=0_2", "is '0_2'"),
        ("q4;step=٠.٢", "step of codec q4 is"),
        ("q4;step=", "step of codec q4 is"),
        ("q4;step", "step of codec q4 is"),
        ("q4;step=nan", "no step of nan"),
        ("q4;width=1", "no parameter 'width'"),
        ("q4;", "no parameter ''"),
        ("@1", "codec ''"),
        ("q8@", "version ''"),
        ("q8@1.0", "version '1.0'"),
    ],
)
def test_odd_spellings_are_refused_with_both_lines(text: str, told: str) -> None:
    with pytest.raises(Unsupported) as caught:
        get_codec(text)
    assert told in caught.value.what
    assert caught.value.hint
