"""What a process counts of its resumes, saves, blocks and remotes, and how Prometheus sees it."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest

pytest.importorskip("prometheus_client")
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest

import kvsnap
from kvsnap.formats.errors import NotAllStored, RemoteDown, Unsupported, UsageError
from kvsnap.kvstore import break_even, events
from kvsnap.kvstore.blocks import Blocks
from kvsnap.kvstore.break_even import Record, key_of, this_machine
from kvsnap.kvstore.compare import COLLISION
from kvsnap.kvstore.counting import SECONDS, Counter, Histogram
from kvsnap.kvstore.curve import curve
from kvsnap.kvstore.remotes.counted import Counted
from kvsnap.kvstore.remotes.folder import Folder
from kvsnap.kvstore.remotes.wrapped import Wrapped
from kvsnap.kvstore.session import Session
from kvsnap.kvstore.store import Store
from kvsnap.kvstore.wanted import Miss
from kvsnap.testing.faults import failing, flip
from kvsnap.testing.stamped import StampedEngine
from kvsnap.testing.turns import some_ids, turn
from tests.kvstore.exposed import assert_clean, assert_grown, labels_of, series, types, value

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
IDS = some_ids(57)
Grown = Callable[..., float]


@pytest.fixture
def grown() -> Grown:
    """By how much a series grew since the test began; what tests before counted is still there."""
    first = series(kvsnap.metrics.text())

    def more(name: str, **labels: str) -> float:
        key = (name, frozenset(labels.items()))
        return series(kvsnap.metrics.text())[key] - first.get(key, 0.0)

    return more


def files_of(store: Store) -> list[Path]:
    return sorted(store.place.blocks.rglob("*.safetensors"))


def resumes(grown: Grown) -> dict[tuple[str, str], float]:
    """(result, reason) → how many."""
    every = [
        dict(labels)
        for name, labels in series(kvsnap.metrics.text())
        if name.startswith("kvsnap_resumes")
    ]
    counted = {(l["result"], l["reason"]): grown("kvsnap_resumes_total", **l) for l in every}
    return {key: number for key, number in counted.items() if number}


class _Down(Wrapped):
    def size(self, key: str) -> int | None:
        raise RemoteDown(f"{self.url}: no answer within 5 s", "is the server up?")


def _session_differs(store: Store) -> str:
    turn(store, StampedEngine(), IDS, "s")
    Session(store, StampedEngine(), "s").resume([*IDS[:40], 7, 7, 7])
    return "partial differs"


def _damaged(store: Store) -> str:
    turn(store, StampedEngine(), IDS)
    for path in files_of(store):
        flip(path, -1)
    Session(store, StampedEngine()).resume(IDS)
    return "miss damaged"


def _missing(store: Store) -> str:
    turn(store, StampedEngine(), IDS)
    for path in files_of(store):
        path.unlink()
    Session(store, StampedEngine()).resume(IDS)
    return "miss missing"


def _unreadable(store: Store) -> str:
    turn(store, StampedEngine(), IDS)
    session = Session(store, StampedEngine())
    with failing("open"):
        session.resume(IDS)
    return "miss damaged"


def _other_identity(store: Store) -> str:
    turn(store, StampedEngine(), IDS)
    Session(store, StampedEngine(weights="other")).resume(IDS)
    return "miss other_identity"


def _lossy(store: Store) -> str:
    turn(store, StampedEngine(), IDS, codec="q8")
    Session(store, StampedEngine()).resume(IDS)
    return "miss lossy_refused"


def _not_worth_it(store: Store) -> str:
    turn(store, StampedEngine(), IDS)
    engine = StampedEngine()
    record = Record(
        prefill=curve([(1, 0.001), (64, 0.064)]),
        restore={"disk": curve([(1, 1.0), (64, 1.0)])},
        model="m",
        codec="zstd",
        measured=1,
        machine=this_machine(),
    )
    identity = engine.identity(store.block_size, store.file_digest).canonical()
    break_even.write(store.place, key_of(identity), record)
    with Store(store.path) as knowing:
        Session(knowing, engine).resume(IDS)
    return "miss not_worth_it"


def _no_checkpoint(store: Store) -> str:
    turn(store, StampedEngine(window=20), IDS)
    Session(store, StampedEngine(window=20)).resume(IDS[:50])
    return "miss no_checkpoint"


def _remote_down(store: Store) -> str:
    down = _Down(Folder(store.path.with_name("remote").as_uri(), 5.0))
    with Store(store.path, remote=down) as reading:
        Session(reading, StampedEngine()).resume(IDS)
    return "miss remote"


def _nothing(store: Store) -> str:
    Session(store, StampedEngine()).resume(IDS)
    return "miss not_stored"


def _longer(store: Store) -> str:
    turn(store, StampedEngine(), IDS[:32])
    Session(store, StampedEngine()).resume(IDS)
    return "partial not_stored"


def _whole(store: Store) -> str:
    turn(store, StampedEngine(), IDS, "s")
    Session(store, StampedEngine(), "s").resume(IDS)
    return "hit complete"


@pytest.mark.parametrize(
    "happens",
    [
        _whole, _longer, _nothing, _session_differs, _damaged, _missing, _unreadable,
        _other_identity, _lossy, _not_worth_it, _no_checkpoint, _remote_down,
    ],
    ids=lambda happens: happens.__name__.strip("_"),
)  # fmt: skip
def test_a_resume_counts_with_its_result_and_reason(
    store: Store, grown: Grown, happens: Callable[[Store], str]
) -> None:
    result, reason = happens(store).split()
    saved = ("miss", "not_stored")  # the turn that stored it had resumed first
    counted = resumes(grown)
    assert counted.pop((result, reason)) >= 1
    assert set(counted) <= {saved}


def test_every_reason_has_a_case() -> None:
    source = Path(__file__).read_text(encoding="utf-8")
    cases = set(re.findall(r'return "(?:hit|partial|miss) (\w+)"', source))
    assert cases == {*events.REASONS.values(), "missing"}
    assert events.reason_of("the words of another day") == events.OTHER


def test_tokens_add_up_to_the_prompts(store: Store, grown: Grown) -> None:
    engine = StampedEngine()
    done = turn(store, engine, IDS, "s")
    held = turn(store, engine, [*IDS, 1, 2, 3], "s").resumed
    stored = turn(store, StampedEngine(), IDS, "s", save=False).resumed
    reports = [done.resumed, held, stored]
    sources = {
        s: grown("kvsnap_prompt_tokens_total", source=s) for s in ("engine", "store", "computed")
    }
    assert sources == {"engine": 57, "store": 56, "computed": 57 + 3 + 1}
    assert sum(sources.values()) == sum(report.prompt_tokens for report in reports)
    assert sum(resumes(grown).values()) == 3
    counts = [
        grown("kvsnap_resume_duration_seconds_count", result=r) for r in ("hit", "partial", "miss")
    ]
    assert counts == [1, 1, 1]


def test_bytes_are_those_of_the_files(store: Store, grown: Grown) -> None:
    saved = turn(store, StampedEngine(), IDS).saved
    assert saved is not None
    on_disk = sum(path.stat().st_size for path in files_of(store))
    assert grown("kvsnap_io_bytes_total", direction="store_write") == on_disk
    assert grown("kvsnap_encode_output_bytes_total") == on_disk == saved.bytes_written
    assert grown("kvsnap_encode_input_bytes_total") == saved.bytes_raw
    assert grown("kvsnap_blocks_written_total") == 3
    assert grown("kvsnap_io_bytes_total", direction="store_read") == 0
    turn(store, StampedEngine(), IDS, save=False)
    assert grown("kvsnap_io_bytes_total", direction="store_read") == on_disk
    assert grown("kvsnap_blocks_read_total", tier="disk") == 3
    assert grown("kvsnap_io_bytes_total", direction="store_write") == on_disk


def test_blocks_in_memory_are_read_without_bytes(store_path: Path, grown: Grown) -> None:
    with Store(store_path, ram="1MB") as store:
        turn(store, StampedEngine(), IDS)
        turn(store, StampedEngine(), IDS, save=False)
    assert grown("kvsnap_blocks_read_total", tier="memory") == 3
    assert grown("kvsnap_io_bytes_total", direction="store_read") == 0


@pytest.mark.parametrize(
    ("happens", "reason"),
    [(_damaged, "damaged"), (_missing, "missing"), (_unreadable, "unreadable")],
)
def test_a_block_that_cannot_be_used_counts_with_its_reason(
    store: Store, grown: Grown, happens: Callable[[Store], str], reason: str
) -> None:
    happens(store)
    for kind in ("missing", "damaged", "collision", "unreadable", "unsupported"):
        assert (grown("kvsnap_block_misses_total", reason=kind) > 0) == (kind == reason)


def test_a_block_of_other_tokens_or_another_version_is_no_damage(
    store: Store, grown: Grown
) -> None:
    turn(store, StampedEngine(), IDS)
    for reason in (COLLISION, "format version 9 is not known"):
        error = Miss(b"", reason) if reason == COLLISION else Unsupported(reason)
        with mock.patch.object(Blocks, "_compare", side_effect=error):
            Session(store, StampedEngine()).resume(IDS)
        store.blocks.misses.clear()
    assert grown("kvsnap_block_misses_total", reason="collision") > 0
    assert grown("kvsnap_block_misses_total", reason="unsupported") > 0
    assert grown("kvsnap_block_misses_total", reason="damaged") == 0


def test_a_save_counts_by_what_became_of_it(opened: Callable[..., Store], grown: Grown) -> None:
    store = opened(capacity=3 * 3712 + 6000)
    turn(store, StampedEngine(), some_ids(40, 1), "fits", codec="raw")
    with pytest.raises(NotAllStored):
        turn(store, StampedEngine(), some_ids(160, 2), "too-long", codec="raw")
    session = Session(store, StampedEngine(), "refused")
    session.engine.evaluate(IDS)  # type: ignore[attr-defined]
    with failing("fsync"), pytest.raises(kvsnap.KvsnapError):
        session.save()

    def saves(what: str) -> list[float]:
        name = "kvsnap_save_duration_seconds_count"
        return [grown(name, what=what, result=r) for r in ("done", "partly", "failed", "retried")]

    assert saves("session") == [1, 1, 1, 0]
    with Store(store.path) as roomy:
        session = Session(roomy, StampedEngine(), "blocks")
        session.engine.evaluate(IDS)  # type: ignore[attr-defined]
        session.put_filled()
    assert saves("blocks") == [1, 0, 0, 0]


def test_a_save_in_the_background_counts(store: Store, grown: Grown) -> None:
    with Session(store, StampedEngine(), "s") as session:
        session.engine.evaluate(IDS)  # type: ignore[attr-defined]
        session.save_soon()
    name = "kvsnap_save_duration_seconds_count"
    assert grown(name, what="session", result="done") == 1
    assert grown("kvsnap_blocks_written_total") == 3


def test_evictions_count_what_went(opened: Callable[..., Store], grown: Grown) -> None:
    store = opened(3)
    turn(store, StampedEngine(), some_ids(48, 1), codec="raw")
    turn(store, StampedEngine(), some_ids(32, 2), codec="raw")
    assert grown("kvsnap_evicted_blocks_total") == 2
    assert grown("kvsnap_evicted_bytes_total") == 2 * 3712


def test_operations_on_a_remote_count_by_name(tmp_path: Path, grown: Grown) -> None:
    url = (tmp_path / "remote").as_uri()
    remote = Counted(_Down(Folder(url, 5.0)), events.counts_remote(url))
    key = "blocks/ab/one.safetensors"
    remote.put(key, b"12345")
    assert remote.get(key, 100).data == b"12345"
    with pytest.raises(RemoteDown):
        remote.size(key)
    with pytest.raises(kvsnap.KvsnapError):
        remote.get(key, 2)  # longer than it may be
    with pytest.raises(kvsnap.KvsnapError):
        remote.get("blocks/ab/none.safetensors", 100)
    name = "kvsnap_remote_operation_duration_seconds_count"
    counts = {op: grown(name, scheme="file", operation=op) for op in ("put", "get", "size")}
    assert counts == {"put": 1, "get": 3, "size": 1}
    assert grown("kvsnap_io_bytes_total", direction="remote_read") == 5
    assert grown("kvsnap_io_bytes_total", direction="remote_write") == 5
    every = [
        dict(labels)
        for sample, labels in series(kvsnap.metrics.text())
        if sample == "kvsnap_remote_errors_total"
    ]
    errors = {(e["operation"], e["kind"]): grown("kvsnap_remote_errors_total", **e) for e in every}
    assert {key: number for key, number in errors.items() if number} == {
        ("size", "down"): 1,
        ("get", "damaged"): 1,
    }


def test_the_text_is_clean_and_only_grows(store: Store) -> None:
    before = kvsnap.metrics.text()
    assert_clean(before)
    turn(store, StampedEngine(), IDS, "s")
    turn(store, StampedEngine(), IDS, "s")
    after = kvsnap.metrics.text()
    assert_clean(after)
    assert_grown(before, after)
    with pytest.raises(AssertionError):
        assert_grown(after, before)


def test_an_application_registers_them_once_beside_its_own() -> None:
    registry = CollectorRegistry()
    own = kvsnap.metrics.register(registry)
    exposed = generate_latest(registry).decode()
    assert types(exposed) == types(kvsnap.metrics.text())
    with pytest.raises(UsageError, match="already"):
        kvsnap.metrics.register(registry)
    registry.unregister(own)
    kvsnap.metrics.register(registry)


def test_the_default_registry_takes_them() -> None:
    from prometheus_client import REGISTRY

    own = kvsnap.metrics.register()
    try:
        assert b"kvsnap_resumes_total" in generate_latest(REGISTRY)
    finally:
        REGISTRY.unregister(own)


def test_a_bucket_holds_what_is_as_long_as_its_bound() -> None:
    histogram = Histogram("test_seconds", "Of this test.")
    for seconds in (0.0, SECONDS[0], SECONDS[0] + 1e-9, SECONDS[-1], 1e6):
        histogram.observe(seconds)
    seen = histogram.read()[()]
    assert seen.counts[:2] == (2, 3)
    assert seen.counts[-2:] == (4, 5)
    assert seen.sum == pytest.approx(sum((0.0, SECONDS[0], SECONDS[0], SECONDS[-1], 1e6)))


def test_no_count_is_lost_between_threads() -> None:
    counter, histogram = (
        Counter("test_total", "Of this test.", ("a",)),
        Histogram("t_seconds", "T."),
    )

    def work() -> None:
        for _ in range(5000):
            counter.add(1, "x")
            histogram.observe(0.2)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counter.read() == {("x",): 40000}
    assert histogram.read()[()].counts[-1] == 40000


def test_a_forked_child_counts_from_zero_even_where_the_parent_was_counting() -> None:
    code = (
        "import os\n"
        "from kvsnap.kvstore import counting, events\n"
        "events.block_evicted(5)\n"
        "with counting._lock:\n"
        "    child = os.fork()\n"
        "if not child:\n"
        "    import threading\n"
        "    thread = threading.Thread(target=events.block_evicted, args=(3,))\n"
        "    thread.start()\n"
        "    thread.join(20)\n"
        "    os._exit(events.EVICTED_BYTES.read()[()])\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), events.EVICTED_BYTES.read()[()])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["3", "5"]


def test_nobody_loads_the_package_who_does_not_ask(store_path: Path) -> None:
    code = (
        "import sys, kvsnap\n"
        "from kvsnap.testing.stamped import StampedEngine\n"
        "with kvsnap.Store(sys.argv[1]) as store:\n"
        "    kvsnap.Session(store, StampedEngine()).resume([1, 2, 3])\n"
        "kvsnap.metrics\n"
        "assert 'prometheus_client' not in sys.modules\n"
        "print(kvsnap.metrics.text())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(store_path)], capture_output=True, text=True, check=True
    )
    assert value(done.stdout, "kvsnap_resumes_total", result="miss", reason="not_stored") == 1


def test_without_the_package_the_error_says_what_to_install() -> None:
    code = (
        "import sys\n"
        "sys.modules['prometheus_client'] = None\n"
        "import kvsnap\n"
        "for ask in (kvsnap.metrics.text, kvsnap.metrics.collector, kvsnap.metrics.register):\n"
        "    try: ask()\n"
        "    except kvsnap.KvsnapError as error: print(type(error).__name__, error.hint)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["Unsupported pip install 'kvsnap[remote]'"] * 3


def test_the_page_has_every_metric_with_its_type_and_labels(store: Store) -> None:
    """Of a process and of a store."""
    events.counts_remote("file:///x")(_call())
    turn(store, StampedEngine(), IDS)
    rows = re.findall(
        r"^\| `(kvsnap_\w+)` \| (\w+) \|([^|]*)\|", PAGE.read_text("utf-8"), re.MULTILINE
    )
    written = {name: (kind, set(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows}
    exposed = {}
    for text, own in (
        (kvsnap.metrics.text(), set()),
        (kvsnap.metrics.store_text(store), {"store"}),
    ):
        kinds, labels = types(text), labels_of(text)
        exposed |= {name: (kind, labels.get(name, own) - own) for name, kind in kinds.items()}
    assert written == exposed


def _call() -> events.RemoteCall:
    from kvsnap.kvstore.remotes.counted import Call

    return Call("get", 0.5, 10, 0, "RemoteDown")
