"""What is counted in this process, and what each event adds to it. docs/metrics.md has them all.

Label values are few and fixed: kinds of reasons, never names, paths or texts of errors.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from itertools import product
from typing import TYPE_CHECKING, ParamSpec, Protocol, TypeVar

from kvsnap.formats.errors import IndexDamaged, PartlyDone, Vanished
from kvsnap.kvstore.counting import Counter, Histogram

if TYPE_CHECKING:
    from kvsnap.formats.layout import Rows
    from kvsnap.kvstore.reports import ResumeReport

_Args = ParamSpec("_Args")
_Done = TypeVar("_Done")

COMPLETE, OTHER = "complete", "other"
REASONS = {
    "whole prompt": COMPLETE,
    "nothing stored": "not_stored",
    "end of stored chain": "not_stored",
    "differing token": "differs",
    "identity: fidelity is": "lossy_refused",
    "identity": "other_identity",
    "not worth it": "not_worth_it",
    "state checkpoint": "no_checkpoint",
    "remote": "remote",
    "damaged": "damaged",
}
"""How `stopped_by` of a report begins (docs/cli.md lists that) → reason. The first that fits."""
MISSING = "the file is missing"
"""How a block's `Miss` says so; in `stopped_by` it comes after the block's name."""
_MISSES = tuple(dict.fromkeys([*REASONS.values(), "missing", OTHER]))[1:]
_RESULTS = ("hit", "partial", "miss")
_BLOCK_MISSES = ("missing", "damaged", "collision", "unreadable", "unsupported")
_SAVED = ("done", "partly", "failed", "retried")
_ERRORS = {
    "RemoteDown": "down",
    "RemoteDenied": "denied",
    "Damaged": "damaged",
    "Unsupported": "unsupported",
}

RESUMES = Counter(
    "kvsnap_resumes_total",
    "Prompts resumed, by how much was reused and why no more.",
    ("result", "reason"),
    [("hit", COMPLETE), *product(_RESULTS[1:], _MISSES)],
)
TOKENS = Counter(
    "kvsnap_prompt_tokens_total",
    "Tokens of these prompts: held by the engine, restored from the store, left to compute.",
    ("source",),
    [("engine",), ("store",), ("computed",)],
)
RESUME_SECONDS = Histogram(
    "kvsnap_resume_duration_seconds",
    "Time from a call of resume until the rows were in the engine.",
    ("result",),
    [(result,) for result in _RESULTS],
)
SAVE_SECONDS = Histogram(
    "kvsnap_save_duration_seconds",
    "Time to store a session, or only the blocks of one.",
    ("what", "result"),
    product(("session", "blocks"), _SAVED),
)
BLOCKS_READ = Counter(
    "kvsnap_blocks_read_total",
    "Stored blocks and state checkpoints that were read and found right.",
    ("tier",),
    [("disk",), ("memory",)],
)
BLOCK_MISSES = Counter(
    "kvsnap_block_misses_total",
    "Blocks and state checkpoints that the index named and that could not be used.",
    ("reason",),
    [(reason,) for reason in _BLOCK_MISSES],
)
BLOCKS_WRITTEN = Counter(
    "kvsnap_blocks_written_total", "Blocks and state checkpoints written to the store."
)
ENCODED_FROM = Counter(
    "kvsnap_encode_input_bytes_total", "Rows that were encoded, as the engine had them."
)
ENCODED_TO = Counter("kvsnap_encode_output_bytes_total", "Files that these rows became.")
IO_BYTES = Counter(
    "kvsnap_io_bytes_total",
    "Bytes of blocks and state checkpoints read from and written to the disk, and of all objects"
    " that came from and went to remotes.",
    ("direction",),
    [("store_read",), ("store_write",), ("remote_read",), ("remote_write",)],
)
EVICTED_BLOCKS = Counter(
    "kvsnap_evicted_blocks_total", "Blocks and state checkpoints deleted to make room."
)
EVICTED_BYTES = Counter("kvsnap_evicted_bytes_total", "Bytes of their files.")
REMOTE_SECONDS = Histogram(
    "kvsnap_remote_operation_duration_seconds",
    "Time of one operation on a remote, its tries included.",
    ("scheme", "operation"),
)
REMOTE_ERRORS = Counter(
    "kvsnap_remote_errors_total",
    "Operations on a remote that failed; that there is no such object is no failure.",
    ("scheme", "operation", "kind"),
)
METRICS: tuple[Counter | Histogram, ...] = (
    RESUMES,
    TOKENS,
    RESUME_SECONDS,
    SAVE_SECONDS,
    BLOCKS_READ,
    BLOCK_MISSES,
    BLOCKS_WRITTEN,
    ENCODED_FROM,
    ENCODED_TO,
    IO_BYTES,
    EVICTED_BLOCKS,
    EVICTED_BYTES,
    REMOTE_SECONDS,
    REMOTE_ERRORS,
)


def reason_of(stopped_by: str) -> str:
    """The kind of reason that a report gives in words."""
    found = (reason for start, reason in REASONS.items() if stopped_by.startswith(start))
    reason = next(found, OTHER)
    if reason == "damaged":
        return "missing" if MISSING in stopped_by else reason
    return reason


def counts_resume(method: Callable[_Args, ResumeReport]) -> Callable[_Args, ResumeReport]:
    """Count and time what returns a report."""

    @functools.wraps(method)
    def counted(*args: _Args.args, **kwargs: _Args.kwargs) -> ResumeReport:
        began = time.perf_counter()
        report = method(*args, **kwargs)
        reason = reason_of(report.stopped_by)
        result = "partial" if report.reused_tokens else "miss"
        result = "hit" if reason == COMPLETE else result
        RESUME_SECONDS.observe(time.perf_counter() - began, result)
        RESUMES.add(1, result, reason)
        TOKENS.add(report.reused_tokens - report.from_store, "engine")
        TOKENS.add(report.from_store, "store")
        TOKENS.add(report.computed_tokens, "computed")
        return report

    return counted


def counts_save(what: str) -> Callable[[Callable[_Args, _Done]], Callable[_Args, _Done]]:
    """Count and time what stores a "session" or "blocks"."""

    def counting(method: Callable[_Args, _Done]) -> Callable[_Args, _Done]:
        @functools.wraps(method)
        def counted(*args: _Args.args, **kwargs: _Args.kwargs) -> _Done:
            began, result = time.perf_counter(), "failed"
            try:
                done = method(*args, **kwargs)
                result = "done"
            except PartlyDone:
                result = "partly"
                raise
            except (IndexDamaged, Vanished):
                result = "retried"
                raise
            finally:
                SAVE_SECONDS.observe(time.perf_counter() - began, what, result)
            return done

        return counted

    return counting


def block_read(file_bytes: int) -> None:
    BLOCKS_READ.add(1, "disk")
    IO_BYTES.add(file_bytes, "store_read")


def block_found_in_memory() -> None:
    BLOCKS_READ.add(1, "memory")


def block_missed(reason: str, against_file: bool) -> None:
    """`reason` as a `Miss` has it; `against_file`: it says something against the block's file."""
    if reason == MISSING:
        kind = "missing"
    elif against_file:
        kind = "damaged"
    elif "collision" in reason:
        kind = "collision"
    else:
        kind = "unreadable" if reason.startswith("cannot be read") else "unsupported"
    BLOCK_MISSES.add(1, kind)


def block_encoded(rows: Rows, file_bytes: int) -> None:
    ENCODED_FROM.add(sum(array.nbytes for array in rows.values()))
    ENCODED_TO.add(file_bytes)


def block_written(file_bytes: int) -> None:
    BLOCKS_WRITTEN.add(1)
    IO_BYTES.add(file_bytes, "store_write")


def block_evicted(file_bytes: int) -> None:
    EVICTED_BLOCKS.add(1)
    EVICTED_BYTES.add(file_bytes)


class RemoteCall(Protocol):
    """What `kvsnap.kvstore.remotes.counted.Call` has; `error` is the class name of one, or empty."""

    operation: str
    seconds: float
    bytes_in: int
    bytes_out: int
    error: str


def counts_remote(url: str) -> Callable[[RemoteCall], None]:
    """What `Counted` around the remote of this URL tells its calls to."""
    scheme = url.partition("://")[0] if "://" in url else OTHER

    def told(call: RemoteCall) -> None:
        REMOTE_SECONDS.observe(call.seconds, scheme, call.operation)
        IO_BYTES.add(call.bytes_in, "remote_read")
        IO_BYTES.add(call.bytes_out, "remote_write")
        if call.error:
            REMOTE_ERRORS.add(1, scheme, call.operation, _ERRORS.get(call.error, OTHER))

    return told
