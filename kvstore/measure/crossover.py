"""From which length on restoring is cheaper than computing, measured on this machine.

The whole way is measured that a resume goes, names to loaded rows, on whatever engine there is. The
blocks lie in a store of their own, on the disk of the user's (so that the device is the same) and
gone afterwards: the user's keeps neither blocks nor recency of a prompt that nobody asked.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvsnap.engines.base import Engine
from kvsnap.formats.codecs import DEFAULT_CODEC
from kvsnap.formats.errors import DoesNotFit, KvsnapError, UsageError
from kvsnap.formats.names import TokenIds, chain_names
from kvsnap.kvstore import break_even, files
from kvsnap.kvstore.break_even import TIERS, Record
from kvsnap.kvstore.curve import Curve, curve
from kvsnap.kvstore.measure import page_cache
from kvsnap.kvstore.measure.live import require_cut
from kvsnap.kvstore.place import Place, write_settings
from kvsnap.kvstore.ram import Ram
from kvsnap.kvstore.session import Session
from kvsnap.kvstore.store import Store

ROUNDS = 3
RESTORES = 3
"""Of each tier a round: a restore takes a hundredth of what computing takes."""
DEFAULT_LENGTHS = (64, 256, 1024, 4096)
_LEFT_BEHIND = "kvsnap-bench-"
_A_DAY = 86400
Step = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True)
class Crossover:
    """What was measured: the least of a few rounds, in seconds. Neighbours on the machine only ever
    add: of the medians of two runs one was four times the other, here, with another job beside."""

    key: str
    """Under which the record is stored; see `break_even.key_of`."""
    record: Record
    block_size: int
    rounds: int
    notes: tuple[str, ...]
    """One line for each tier or length that could not be measured, and why."""

    @property
    def tokens(self) -> tuple[int, ...]:
        """The lengths, ascending; the single token at the front of the curve is none."""
        return tuple(tokens for tokens, _ in self.record.prefill.points if tokens > 1)

    def cheaper_from(self, tier: str) -> int | None:
        """Restoring is cheaper from so many tokens on; None: at no length that was measured.

        Of a prompt that goes on: the call that computes the rest is paid either way. The shortest
        length that was measured is the least that is answered.
        """
        shortest, longest = self.tokens[0], self.tokens[-1]
        for tokens in range(longest, shortest - 1, -1):
            restoring = self.record.restoring(0, tokens, tier)
            if restoring is None or restoring > self.record.computing(0, tokens, tokens + 1):
                return tokens + 1 if tokens < longest else None
        return shortest


def measure(
    store: Store,
    engine: Engine,
    token_ids: TokenIds,
    lengths: Sequence[int],
    *,
    model: str = "",
    codec: str = DEFAULT_CODEC,
    rounds: int = ROUNDS,
    within: float | None = None,
    step: Step = lambda done, total: None,
) -> Crossover:
    """Compute and restore the front of `token_ids` at several lengths, rounded up to blocks.

    `within`: seconds; lengths that would take longer altogether are left out, the shortest never.
    `step(done, total)` is called in tokens, between batches. The engine is empty afterwards.
    """
    require_cut(engine)
    size = store.block_size
    asked = sorted({-(-length // size) * size for length in lengths})
    if not asked or asked[0] < 1:
        raise UsageError("there is no length to measure", "give some, e.g. 64,256,1024")
    most = min(len(token_ids), engine.capacity)
    if asked[-1] > most:
        raise DoesNotFit(
            f"{asked[-1]} tokens do not fit: there are {most}",
            "measure shorter lengths, or make the context larger (--ctx)",
        )
    with _own_store(store) as own:
        run = _Run(own, engine, token_ids, codec, rounds, step)
        try:
            run.compute_first(asked, within)
            for number in range(rounds):
                run.round(compute=number > 0)
        finally:
            engine.truncate(0)
        restore = {tier: run.curve(tier) for tier in TIERS if run.seconds.get(tier)}
        record = Record(
            prefill=run.curve("prefill"),
            restore=restore,
            model=model[: break_even.MAX_NAME],
            codec=codec,
            measured=int(time.time()),
            machine=break_even.this_machine(),
        )
        key = break_even.key_of(run.session.root.identity)
    return Crossover(key=key, record=record, block_size=size, rounds=rounds, notes=tuple(run.notes))


class _Run:
    """The rounds: everything alternates, so that a slow moment of the machine meets all of it."""

    def __init__(
        self,
        store: Store,
        engine: Engine,
        token_ids: TokenIds,
        codec: str,
        rounds: int,
        step: Step,
    ) -> None:
        self.store, self.engine, self.ids, self.rounds = store, engine, token_ids, rounds
        self.session = Session(store, engine, codec=codec)
        self.step = step
        self.notes: list[str] = []
        self.lengths: list[int] = []
        self.seconds: dict[str, dict[int, list[float]]] = {tier: {} for tier in TIERS}
        self.seconds["prefill"] = {}
        self._computed = self._total = 0

    def compute_first(self, lengths: Sequence[int], within: float | None) -> None:
        """The first round of computing, which says what may follow; then the blocks are stored."""
        self._total = self.rounds * (1 + sum(lengths))
        self._compute(1, note=False)  # the first call of an engine sets it up
        self._compute(1)
        for number, tokens in enumerate(lengths):
            if number and within is not None:
                known = self.curve("prefill")
                altogether = sum(map(known.at, [*self.lengths, tokens])) * self.rounds
                if altogether > within:
                    left = ", ".join(map(str, lengths[number:]))
                    self.notes.append(
                        f"left out: {left} tokens; with {tokens} it would take about"
                        f" {altogether:.0f} s altogether"
                    )
                    break
            self._compute(tokens)
            self.lengths.append(tokens)
            self._total = self.rounds * (1 + sum(lengths[: number + 1]))
        self.session.resume(self.ids[: self.lengths[-1]], leave=0)  # the engine has it: no work
        self.session.save()
        longest = self.lengths[-1]
        room = longest * (self.session.layout.token_bytes() + 4)
        self.ram = Ram(2 * room)  # page-locked memory takes up to twice the bytes
        self._restore("memory", longest, note=False)

    def round(self, *, compute: bool) -> None:
        for tokens in [1, *self.lengths] if compute else []:
            self._compute(tokens)
        for tokens in self.lengths:
            for _ in range(RESTORES):
                for tier in [tier for tier in TIERS if tier in self.seconds]:
                    self._restore(tier, tokens)

    def curve(self, what: str) -> Curve:
        taken = self.seconds[what]
        return curve((tokens, min(seconds)) for tokens, seconds in taken.items())

    def _compute(self, tokens: int, *, note: bool = True) -> None:
        self.engine.truncate(0)
        started = time.perf_counter()
        self.engine.evaluate(self.ids[:tokens], self._count)
        if note:
            self._note("prefill", tokens, time.perf_counter() - started)

    def _restore(self, tier: str, tokens: int, *, note: bool = True) -> None:
        self.engine.truncate(0)
        blocks = self.store.blocks
        blocks.ram = self.ram if tier == "memory" else None
        names = chain_names(self.session.root.key, self.ids[:tokens], self.store.block_size)
        if tier == "cold":
            problem = page_cache.drop(self.store.place.block(name) for name in names)
            if problem:
                self._give_up(tier, problem)
                return
        hits = self.ram.hits
        started = time.perf_counter()
        report = self.session.resume(self.ids[:tokens], leave=0)
        seconds = time.perf_counter() - started
        if report.reused_tokens != tokens:
            raise KvsnapError(
                f"only {report.reused_tokens} of {tokens} tokens came back: {report.stopped_by}",
                "kvsnap doctor looks for what is wrong with the disk",
            )
        if tier == "memory" and note and self.ram.hits - hits != len(names):
            self._give_up(tier, "the blocks did not come from it")
        elif note:
            self._note(tier, tokens, seconds)

    def _note(self, what: str, tokens: int, seconds: float) -> None:
        # A clock may stand still for as long as a stamped engine takes.
        self.seconds[what].setdefault(tokens, []).append(max(seconds, 1e-9))

    def _give_up(self, tier: str, why: str) -> None:
        self.seconds.pop(tier, None)
        self.notes.append(f"{tier} is not measured: {why}")

    def _count(self, tokens: int) -> None:
        self._computed += tokens
        self.step(min(self._computed, self._total), self._total)


@contextlib.contextmanager
def _own_store(store: Store) -> Iterator[Store]:
    """A store beside the user's: in its tmp/ where there is one, else where it would be made."""
    places = (store.place.temporary, *store.place.root.parents)
    parent = next(path for path in places if path.is_dir())
    _remove_left_behind(parent)
    with files.store_errors(parent / "x"):
        folder = tempfile.TemporaryDirectory(prefix=_LEFT_BEHIND, dir=parent)
    with folder as name:
        write_settings(Place(Path(name), store.block_size))
        with Store(name) as own:
            own.file_digest = store.file_digest  # a model's file is not hashed anew
            yield own


def _remove_left_behind(parent: Path) -> None:
    """Of a measurement that was killed. None takes a day."""
    for path in parent.glob(f"{_LEFT_BEHIND}*"):
        with contextlib.suppress(OSError):
            if time.time() - path.lstat().st_mtime > _A_DAY and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
