"""The error tree: what the module's picture says is what the classes are."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest

from kvsnap.formats import errors
from kvsnap.formats.errors import KvsnapError

CLASSES = {
    name: found
    for name, found in inspect.getmembers(errors, inspect.isclass)
    if issubclass(found, KvsnapError)
}


def drawn_tree() -> dict[str, str | None]:
    """Class → parent, from the lines of the docstring: four columns a level."""
    parents: dict[str, str | None] = {}
    path: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        drawing = line[: len(line) - len(line.lstrip("│├└─ "))]
        name = line[len(drawing) :].split(" ")[0]
        if name in CLASSES:
            depth = len(drawing) // 4
            path[depth:] = [name]
            parents[name] = path[depth - 1] if depth else None
    return parents


def test_the_picture_shows_every_class_under_its_parent() -> None:
    parents = {name: found.__bases__[0].__name__ for name, found in CLASSES.items()}
    assert drawn_tree() == parents | {"KvsnapError": None}


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_the_exit_code_is_2_for_usage_3_for_partly_done_and_1_for_the_rest(name: str) -> None:
    chain = {base.__name__ for base in CLASSES[name].__mro__}
    expected = 2 if "UsageError" in chain else 3 if "PartlyDone" in chain else 1
    assert CLASSES[name].exit_code == expected


def test_an_error_carries_what_went_wrong_and_what_to_do() -> None:
    error = errors.Damaged("it broke", "mend it")
    assert (str(error), error.what, error.hint) == ("it broke", "it broke", "mend it")
    assert errors.Damaged("it broke").hint == ""
    stored = SimpleNamespace(record=SimpleNamespace(name="a@2"))
    moved = errors.SessionMoved(stored, "a moved", "look at a@2")  # type: ignore[arg-type]
    assert (moved.stored_as, moved.what, moved.hint) == ("a@2", "a moved", "look at a@2")
