"""The public names: sorted, importable, documented."""

from __future__ import annotations

import inspect

import kvsnap


def test_all_is_sorted_and_importable() -> None:
    assert sorted(kvsnap.__all__, key=str.swapcase) == kvsnap.__all__ or (
        sorted(kvsnap.__all__) == kvsnap.__all__
    )
    for name in kvsnap.__all__:
        assert getattr(kvsnap, name) is not None
    assert set(kvsnap.__all__) <= set(dir(kvsnap))


def test_public_names_are_documented() -> None:
    for name in kvsnap.__all__:
        assert inspect.getdoc(getattr(kvsnap, name)), name


def test_unknown_names_are_attribute_errors() -> None:
    assert not hasattr(kvsnap, "no_such_name")
