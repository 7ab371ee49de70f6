"""A pickle read as data: values, containers and the names that the caller allows. Nothing is run.

Opcodes are taken apart by the tables of `pickletools`, which execute none of them. What
stands for a class or function is a `Name`; REDUCE asks the caller's table for what a name makes of its
arguments, NEWOBJ gives a `Stub`, and BUILD keeps the state of one. Any name that is not in the table is refused by its
name, and so is any opcode that torch.save (protocols 2 to 5) has no use for.

Bounded: bytes and opcodes, and thereby stack, memo and everything made. Keys are text or numbers, so
nothing deep is hashed. A pickle can put a list into itself: whoever walks through the result must go
down a fixed number of levels.
"""

from __future__ import annotations

import pickletools
import reprlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from io import BytesIO
from typing import Any, NoReturn

from kvsnap.formats.errors import Damaged, Unsupported

MAX_BYTES = 16 * 2**20
MAX_OPS = 1_000_000
"""A cache of 100 layers takes 9,000; a list of 128k token ids as numbers as many more."""

Maker = Callable[..., object]


@dataclass(frozen=True)
class Name:
    """What a pickle calls `module.name`."""

    text: str


@dataclass
class Stub:
    """An object of a class of this name, with what would become its attributes."""

    name: str
    state: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Known:
    """What a pickle may name: functions and what they make of their arguments, classes of which
    a `Stub` is made, and values that only stand for themselves."""

    makers: Mapping[str, Maker]
    classes: Collection[str]
    values: Collection[str]
    persistent: Maker
    """What a persistent id stands for."""


def read_pickle(data: bytes, known: Known) -> object:
    """The object. `Unsupported` for a name or opcode that is not known, `Damaged` for a pickle that
    ends early, has bytes left over, or takes what is not there."""
    if len(data) > MAX_BYTES:
        raise Unsupported(
            f"a pickle of {len(data)} bytes: more than a cache needs",
            "save the cache alone, not beside other things",
        )
    machine = _Machine(known)
    end = 0
    for name, argument, position in _operations(data):
        machine.step(name, argument)
        end = position
    if end + 1 != len(data):
        raise Damaged(f"{len(data) - end - 1} bytes follow the end of the pickle")
    return machine.result()


def _operations(data: bytes) -> Iterator[tuple[str, Any, int]]:
    """As `pickletools.genops`, which takes arguments of any operation apart before anybody can refuse it,
    and warns of some."""
    file = BytesIO(data)
    for count in range(MAX_OPS):
        position = file.tell()
        code = file.read(1).decode("latin-1")
        opcode = _OPCODES.get(code)
        if opcode is None:
            raise Damaged(f"the pickle is no pickle after {count} operations")
        if opcode.name not in _READ:
            raise Unsupported(
                f"the pickle has operation {opcode.name}, which torch.save does not write"
            )
        try:
            if opcode.name == "GLOBAL":  # the table's reader undoes escapes, and Python does not
                argument: Any = f"{_line(file)}.{_line(file)}"
            else:
                argument = opcode.arg.reader(file) if opcode.arg is not None else None
        except ValueError as error:
            raise Damaged(f"the pickle is no pickle after {count} operations") from error
        yield opcode.name, argument, position
        if opcode.name == "STOP":
            return
    raise Unsupported(
        f"a pickle of more than {MAX_OPS} operations",
        "save the cache alone, not beside other things",
    )


def _line(file: BytesIO) -> str:
    line = file.readline()
    if not line.endswith(b"\n"):
        raise ValueError("a line without an end")
    return line[:-1].decode("utf-8")


_MARK = object()
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_LITERALS = {
    "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT",
    "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8",
}  # fmt: skip
_EMPTY: dict[str, Callable[[], object]] = {
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
    "EMPTY_TUPLE": tuple,
    "EMPTY_SET": set,
}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_PUTS = {"BINPUT", "LONG_BINPUT"}
_GETS = {"BINGET", "LONG_BINGET"}
_IGNORED = {"PROTO", "FRAME"}


class _Machine:
    def __init__(self, known: Known) -> None:
        self.known = known
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def result(self) -> object:
        if len(self.stack) != 1 or self.stack[0] is _MARK:
            raise Damaged(f"the pickle leaves {len(self.stack)} objects where it should leave one")
        return self.stack[0]

    def step(self, name: str, argument: Any) -> None:
        if name in _LITERALS:
            self.stack.append(argument)
        elif name in _CONSTANTS:
            self.stack.append(_CONSTANTS[name])
        elif name in _EMPTY:
            self.stack.append(_EMPTY[name]())
        elif name in _PUTS:
            self.memo[argument] = self._top()
        elif name in _GETS:
            if argument not in self.memo:
                raise Damaged(f"the pickle asks for object {argument} before there is one")
            self.stack.append(self.memo[argument])
        elif name in _TUPLES:
            items = [self._pop() for _ in range(_TUPLES[name])]
            self.stack.append(tuple(reversed(items)))
        elif name not in _IGNORED:
            _HANDLERS[name](self, argument)

    def mark(self, _: Any) -> None:
        self.stack.append(_MARK)

    def memoize(self, _: Any) -> None:
        self.memo[len(self.memo)] = self._top()

    def tuple(self, _: Any) -> None:
        self.stack.append(tuple(self._since_mark()))

    def append(self, _: Any) -> None:
        item = self._pop()
        self._container(list).append(item)

    def appends(self, _: Any) -> None:
        items = self._since_mark()
        self._container(list).extend(items)

    def set_item(self, _: Any) -> None:
        value, key = self._pop(), self._pop()
        self._set(key, value)

    def set_items(self, _: Any) -> None:
        items = self._since_mark()
        if len(items) % 2:
            raise Damaged("the pickle has a key without a value")
        for key, value in zip(items[::2], items[1::2], strict=True):
            self._set(key, value)

    def add_items(self, _: Any) -> None:
        items = self._since_mark()
        self._container(set).update(map(_key, items))

    def name(self, argument: Any) -> None:
        self.stack.append(self._allowed(argument))

    def name_of_stack(self, _: Any) -> None:
        name, module = self._pop(), self._pop()
        if not isinstance(name, str) or not isinstance(module, str):
            raise Damaged("the pickle names something by what is no text")
        self.stack.append(self._allowed(f"{module}.{name}"))

    def reduce(self, _: Any) -> None:
        arguments, maker = self._pop(), self._pop()
        made = self.known.makers.get(maker.text) if isinstance(maker, Name) else None
        if made is None or not isinstance(arguments, tuple):
            raise Damaged(f"the pickle calls {_brief(maker)}, which is no function")
        try:
            self.stack.append(made(*arguments))
        except TypeError as error:
            raise Damaged(f"the pickle calls {_brief(maker)} with other arguments") from error

    def new(self, _: Any) -> None:
        arguments, kind = self._pop(), self._pop()
        if not isinstance(kind, Name) or kind.text not in self.known.classes or arguments != ():
            raise Damaged(f"the pickle makes an object of {_brief(kind)}, which is no class")
        self.stack.append(Stub(kind.text))

    def build(self, _: Any) -> None:
        state, target = self._pop(), self._top()
        if not isinstance(target, Stub) or not isinstance(state, dict):
            raise Damaged(f"the pickle gives attributes to {_brief(target)}")
        target.state.update(state)

    def persistent(self, _: Any) -> None:
        self.stack.append(self.known.persistent(self._pop()))

    def stop(self, _: Any) -> None:
        """The result is what is left."""

    def _allowed(self, text: str) -> Name:
        known = self.known
        if text not in known.makers and text not in known.classes and text not in known.values:
            _refuse(text)
        return Name(text)

    def _top(self) -> Any:
        if not self.stack or self.stack[-1] is _MARK:
            raise Damaged("the pickle takes an object where there is none")
        return self.stack[-1]

    def _pop(self) -> Any:
        self._top()
        return self.stack.pop()

    def _since_mark(self) -> list[Any]:
        for at in range(len(self.stack) - 1, -1, -1):
            if self.stack[at] is _MARK:
                items = self.stack[at + 1 :]
                del self.stack[at:]
                return items
        raise Damaged("the pickle ends a list that it did not begin")

    def _container(self, kind: type) -> Any:
        if type(self._top()) is not kind:
            raise Damaged(
                f"the pickle puts items into {_brief(self._top())}, which is no {kind.__name__}"
            )
        return self._top()

    def _set(self, key: Any, value: Any) -> None:
        self._container(dict)[_key(key)] = value


_HANDLERS: dict[str, Callable[[_Machine, Any], None]] = {
    "MARK": _Machine.mark,
    "MEMOIZE": _Machine.memoize,
    "TUPLE": _Machine.tuple,
    "APPEND": _Machine.append,
    "APPENDS": _Machine.appends,
    "SETITEM": _Machine.set_item,
    "SETITEMS": _Machine.set_items,
    "ADDITEMS": _Machine.add_items,
    "GLOBAL": _Machine.name,
    "STACK_GLOBAL": _Machine.name_of_stack,
    "REDUCE": _Machine.reduce,
    "NEWOBJ": _Machine.new,
    "BUILD": _Machine.build,
    "BINPERSID": _Machine.persistent,
    "STOP": _Machine.stop,
}
_READ = {
    *_LITERALS, *_CONSTANTS, *_EMPTY, *_TUPLES, *_PUTS, *_GETS, *_IGNORED, *_HANDLERS,
}  # fmt: skip
_OPCODES = {opcode.code: opcode for opcode in pickletools.opcodes}
_NAMES = reprlib.Repr()
_NAMES.maxstring = 100  # a name of 30 characters says nothing of what is refused


def _key(value: Any) -> str | int:
    if not isinstance(value, str | int):
        raise Unsupported(f"the pickle has {_brief(value)} as a key")
    return value


def _refuse(text: str) -> NoReturn:
    raise Unsupported(
        f"the pickle names {_NAMES.repr(text)}, and kvsnap reads caches only",
        "save tuples of tensors: torch.save(tuple((l.keys, l.values) for l in cache.layers), FILE)",
    )


def _brief(value: object) -> str:
    return value.text if isinstance(value, Name) else f"a {type(value).__name__}"
