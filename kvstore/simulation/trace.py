"""Traces: one request a line, as JSON. docs/simulate.md describes the formats.

{"hash_ids": [46, 47, 48], "input_length": 1300}     Mooncake: an id a block
{"token_ids": [1, 504, 2365, 7]}                     plain: a prompt's token ids
[1, 504, 2365, 7]                                    the same
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvsnap.formats.errors import BadTokenIds, NotFound, UsageError
from kvsnap.formats.names import token_array
from kvsnap.kvstore.simulation.request import Chains, Request, Workload, filled

MOONCAKE_BLOCK_SIZE = 512
PLAIN_BLOCK_SIZE = 64
MAX_LINE = 256_000_000
"""Bytes; a file without line ends (a device, a wrong file) must not fill the memory."""
_FORMS = 'a line is {"hash_ids": […]} or {"token_ids": […]}; see kvsnap simulate --help'


def read_trace(path: Path, block_size: int | None = None, requests: int | None = None) -> Workload:
    """The requests of a file, or the first ones. UsageError names the first line that is wrong."""
    reader = _Reader(block_size)
    for number, line in _lines(path):
        if requests is not None and len(reader.requests) == requests:
            break
        try:
            reader.take(line)
        except _Bad as error:
            raise UsageError(f"{path}, line {number}: {error}", error.hint) from error
    if not reader.requests:
        raise UsageError(f"{path} has no requests", _FORMS)
    return reader.chains.workload(path.name, reader.block_size, reader.requests)


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Lines with their numbers; empty ones are passed over."""
    try:
        with path.open("rb") as file:
            number = 0
            while line := file.readline(MAX_LINE):
                number += 1
                if len(line) == MAX_LINE:
                    raise UsageError(f"{path}, line {number}: longer than {MAX_LINE} bytes", _FORMS)
                if line.strip():
                    yield number, line
    except OSError as error:
        raise NotFound(f"cannot read {path}: {error.strerror}", "check the path") from error


class _Bad(Exception):
    """What is wrong with a line, and what to do."""

    def __init__(self, what: str, hint: str = _FORMS) -> None:
        super().__init__(what)
        self.hint = hint


class _Reader:
    """Lines to requests. All lines of a file are of one form."""

    def __init__(self, block_size: int | None) -> None:
        self.chains = Chains()
        self.requests: list[Request] = []
        self.block_size = block_size or 0
        self._form = ""
        self._latest: float | None = None

    def take(self, line: bytes) -> None:
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            raise _Bad(f"not JSON: {error.msg}") from error
        except (ValueError, RecursionError) as error:
            raise _Bad("not JSON") from error
        if isinstance(value, list):
            value = {"token_ids": value}
        if not isinstance(value, dict):
            raise _Bad("neither an object nor a list of token ids")
        self._check_form(value)
        self._check_order(value.get("timestamp"))
        take = self._mooncake if self._form == "hash_ids" else self._plain
        self.requests.append(take(value))

    def _check_form(self, value: dict[str, Any]) -> None:
        forms = [form for form in ("hash_ids", "token_ids") if form in value]
        if len(forms) != 1:
            raise _Bad("both hash_ids and token_ids" if forms else "neither hash_ids nor token_ids")
        self._form = self._form or forms[0]
        if forms[0] != self._form:
            raise _Bad(f"{forms[0]}, but {self._form} before", "make it two files")
        sizes = {"hash_ids": MOONCAKE_BLOCK_SIZE, "token_ids": PLAIN_BLOCK_SIZE}
        self.block_size = self.block_size or sizes[self._form]

    def _check_order(self, timestamp: object) -> None:
        if not isinstance(timestamp, int | float):
            return  # not needed
        if self._latest is not None and timestamp < self._latest:
            raise _Bad(f"timestamp {timestamp} after {self._latest}", "sort the file by timestamp")
        self._latest = timestamp

    def _mooncake(self, value: dict[str, Any]) -> Request:
        ids, size = value["hash_ids"], self.block_size
        if not isinstance(ids, list) or any(type(number) is not int for number in ids):
            raise _Bad("hash_ids is not a list of integers")
        tokens = value.get("input_length", len(ids) * size)
        if type(tokens) is not int or tokens < 0:
            raise _Bad(f"input_length is {tokens!r}", "it is the number of the prompt's tokens")
        if not (len(ids) - 1) * size < tokens < (len(ids) + 1) * size:
            raise _Bad(
                f"{len(ids)} hash_ids of {size} tokens cannot be {tokens} tokens",
                "--block-size N says how many tokens a hash id stands for",
            )
        return Request(self.chains.chain(ids), tokens)

    def _plain(self, value: dict[str, Any]) -> Request:
        ids = value["token_ids"]
        if not isinstance(ids, list):
            raise _Bad("token_ids is not a list")
        try:
            array = token_array(ids).astype("<u4", copy=False)
        except BadTokenIds as error:
            raise _Bad(error.what, error.hint) from error
        return Request(self.chains.chain(filled(array.tobytes(), self.block_size)), len(ids))
