"""Whether restoring is expected to be slower than computing, from what was measured here.

`kvsnap bench crossover` measures; the record stands in kvsnap.json under `break_even`, one for each
model and settings. A person can edit that file, and a folder can be copied to another machine: a
record that makes no sense is passed over with a problem, one of another machine without. Without a
record everything that is stored is restored.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from blake3 import blake3

from kvsnap.formats.errors import Damaged
from kvsnap.formats.identity import root_of
from kvsnap.kvstore import files
from kvsnap.kvstore.curve import Curve, curve_from_json
from kvsnap.kvstore.place import Place, change_settings

KEY = "break_even"
NOT_WORTH = "not worth it"
"""How a reason begins that says so."""
TIERS = ("memory", "disk", "cold")
"""Host memory; files in the system's page cache; files that have to come from the device."""
MARGIN = 2.0
"""Restoring has to take so many times as long as computing before it is skipped. The ratio of the two
came out up to 2.2x apart in two measurements on one machine with other work beside, and a restore
that is not quite as fast still saves the energy of computing."""
MAX_RECORDS = 64
"""The oldest go: kvsnap.json is read whenever a store is opened."""
MAX_NAME = 200


@dataclass(frozen=True, kw_only=True)
class Record:
    """What was measured of one model and settings. Curves are tokens → seconds."""

    prefill: Curve
    restore: Mapping[str, Curve]
    model: str
    """File name; for people."""
    codec: str
    measured: int
    """Seconds since 1970."""
    machine: str

    def computing(self, held: int, reusable: int, prompt_tokens: int) -> float:
        """Seconds to compute positions [held, reusable) of a prompt.

        What each call of the engine costs whatever its length is counted only where a restore
        would spare it: not where a part of the prompt has to be computed anyhow.
        """
        whole = self.prefill.at(reusable) - self.prefill.at(held)
        once = self.prefill.at(0)
        return whole + once if reusable >= prompt_tokens else whole

    def restoring(self, held: int, reusable: int, tier: str) -> float | None:
        """Seconds to restore them; None where the tier was not measured."""
        curve = self.restore.get(tier)
        return None if curve is None else curve.at(reusable - held)


@dataclass(frozen=True)
class Verdict:
    """`reason` is one line, empty where restoring is worth it."""

    worth: bool
    reason: str = ""


@dataclass(frozen=True)
class BreakEven:
    """The records of kvsnap.json that make sense, by `key_of` an identity, and what is wrong with
    the others."""

    records: Mapping[str, Record]
    problems: tuple[str, ...] = ()

    def here(self, key: str) -> Record | None:
        """What was measured on this machine."""
        record = self.records.get(key)
        return record if record is not None and record.machine == this_machine() else None

    def worth(
        self, key: str, held: int, reusable: int, prompt_tokens: int, tier: str = "disk"
    ) -> Verdict:
        """Whether to restore positions [held, reusable) of a prompt, or to compute them."""
        record = self.here(key)
        if record is None or reusable <= held:
            return Verdict(True)
        restoring = record.restoring(held, reusable, tier)
        computing = record.computing(held, reusable, prompt_tokens)
        if restoring is None or restoring <= MARGIN * computing:
            return Verdict(True)
        tokens = reusable - held
        return Verdict(
            False,
            f"{NOT_WORTH}: restoring {tokens} token{'s' * (tokens > 1)} takes about"
            f" {_ms(restoring)}, computing them {_ms(computing)}",
        )


def key_of(identity: str) -> str:
    """What a record stands under: the root id of the identity without a tenant's key.

    How fast a model is has nothing to do with whose prompt it is.
    """
    return root_of(identity).root_id


def this_machine() -> str:
    """Tells machines apart without saying which: a digest of host name, processor and cores."""
    facts = (platform.node(), platform.machine(), os.cpu_count())
    return blake3(repr(facts).encode()).hexdigest(8)


def read(place: Place) -> BreakEven:
    """The records of a store. Never fails: whatever cannot be read is as good as not measured."""
    try:
        settings = json.loads(bytes(files.read_whole(place.settings)))
        found = settings.get(KEY, {}) if isinstance(settings, dict) else {}
    except (OSError, ValueError, RecursionError, Damaged):
        return BreakEven({})  # opening the store says so
    if not isinstance(found, dict):
        return BreakEven({}, (f"{place.settings}: {KEY} is no object; it is passed over",))
    records: dict[str, Record] = {}
    problems: list[str] = []
    for key, value in found.items():
        try:
            records[key] = _parse(value)
        except Damaged as error:
            problems.append(
                f"{place.settings}: {KEY} of {key[:12]!r} is passed over: {error.what};"
                " kvsnap bench crossover measures it anew"
            )
    return BreakEven(records, tuple(problems))


def write(place: Place, key: str, record: Record) -> None:
    """Store one record in place of the one before; records that make no sense are dropped."""
    others = dict(read(place).records)
    others.pop(key, None)
    newest = sorted(others, key=lambda name: others[name].measured, reverse=True)
    kept = {name: others[name] for name in newest[: MAX_RECORDS - 1]}
    kept[key] = record
    records = {name: to_json(value) for name, value in kept.items()}
    change_settings(place, KEY, lambda old: records)


def to_json(record: Record) -> dict[str, Any]:
    """As it stands in kvsnap.json."""
    return {
        **asdict(record),
        "prefill": record.prefill.to_json(),
        "restore": {tier: curve.to_json() for tier, curve in record.restore.items()},
    }


def _parse(value: Any) -> Record:
    if not isinstance(value, dict):
        raise Damaged("it is no object")
    restore = value.get("restore")
    if not isinstance(restore, dict):
        raise Damaged("restore is no object")
    return Record(
        prefill=curve_from_json(value.get("prefill")),
        restore={tier: curve_from_json(restore[tier]) for tier in TIERS if tier in restore},
        model=_text(value, "model"),
        codec=_text(value, "codec"),
        measured=_time(value.get("measured")),
        machine=_text(value, "machine"),
    )


def _text(value: Mapping[str, Any], field: str) -> str:
    text = value.get(field, "")
    if not isinstance(text, str) or len(text) > MAX_NAME:
        raise Damaged(f"{field} is no short text")
    return text


def _time(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= time.time() + 86400 * 366:
        raise Damaged("measured is no time")
    return value


def _ms(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{max(1, round(seconds * 1000))} ms"
