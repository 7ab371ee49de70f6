"""A faulty proxy in front of real servers: each fault ends as the right error, in time, with nothing
secret in it, and what failed succeeds once the fault has ended.
"""

from __future__ import annotations

import itertools
import os
import traceback
from collections.abc import Callable, Iterator

import pytest

from kvsnap.formats.errors import (
    Damaged,
    KvsnapError,
    NotFound,
    RemoteDenied,
    RemoteDown,
    RemoteError,
)
from kvsnap.kvstore.remotes import Options, open_remote
from kvsnap.kvstore.remotes.base import Remote
from kvsnap.kvstore.remotes.counted import Counted
from kvsnap.kvstore.remotes.remembers import Remembers
from tests.remotes.failing import Clock
from tests.remotes.proxy import FaultyProxy, faulty_proxy
from tests.remotes.servers import HttpServer, S3Server

KEY = "blocks/ab/one.safetensors"
DATA = os.urandom(100_000)
PATIENT = Options(timeout=60, tries=1)
HASTY = Options(timeout=1, tries=1)
"""For faults that never end on their own: each costs a test this time."""
ENDLESS = ("hang", "trickle", "announces_more", "endless")
_places = itertools.count()


class Setting:
    """An object in a server, and remotes that reach it through the proxy."""

    def __init__(
        self, proxy: FaultyProxy, url: str, secrets: tuple[str, ...], writes: bool
    ) -> None:
        self.proxy, self.url, self.secrets, self.writes = proxy, url, secrets, writes

    def open(self, options: Options) -> Remote:
        return open_remote(self.url, options)

    def fails(self, work: Callable[[], object], *kinds: type[KvsnapError]) -> None:
        """It raises one of these kinds itself, a line that holds no secret."""
        with pytest.raises(KvsnapError) as raised:
            work()
        assert type(raised.value) in kinds, raised.value
        told = "".join(traceback.format_exception(raised.value)) + raised.value.hint
        assert not [secret for secret in self.secrets if secret in told]
        assert raised.value.what.isprintable()
        assert raised.value.hint or isinstance(raised.value, NotFound | Damaged)


@pytest.fixture
def s3(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Setting]:
    with faulty_proxy(s3_server.url) as proxy:
        for name, value in s3_server.environment().items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        url = f"s3://{s3_server.bucket}/faults/{next(_places)}"
        secrets = (s3_server.secret_key, s3_server.access_key)
        with open_remote(url, PATIENT) as remote:
            remote.put(KEY, DATA)
        proxy.forget()
        yield Setting(proxy, url, secrets, True)


@pytest.fixture
def http(http_server: HttpServer) -> Iterator[Setting]:
    name = f"faults{next(_places)}"
    path = http_server.folder / name / KEY
    path.parent.mkdir(parents=True)
    path.write_bytes(DATA)
    login = f"{http_server.user}:{http_server.password}@"
    with faulty_proxy(http_server.url) as proxy:
        url = proxy.url.replace("//", f"//{login}") + f"/closed/{name}"
        yield Setting(proxy, url, (http_server.password,), False)


@pytest.fixture(params=["s3", "http"])
def setting(request: pytest.FixtureRequest) -> Setting:
    return request.getfixturevalue(request.param)


READS: dict[str, tuple[type[KvsnapError], ...]] = {
    "drop": (RemoteDown,),
    "reset_midway": (RemoteDown,),
    "truncate": (RemoteDown, Damaged),
    "hang": (RemoteDown,),
    "trickle": (RemoteDown,),
    "announces_more": (RemoteDown,),
    "endless": (Damaged, RemoteDown, RemoteError),
    "missing": (NotFound,),
    "error": (RemoteDown,),
    "unavailable": (RemoteDown,),
    "denied": (RemoteDenied,),
}


@pytest.mark.parametrize("fault", READS)
def test_a_fault_of_a_read_is_told_and_passes(setting, fault):
    with setting.open(HASTY if fault in ENDLESS else PATIENT) as remote:
        setting.proxy.fault(fault, "GET")
        setting.fails(lambda: remote.get(KEY, 2 * len(DATA)), *READS[fault])
    setting.proxy.heal()
    with setting.open(PATIENT) as remote:
        assert remote.get(KEY, len(DATA)).data == DATA


@pytest.mark.parametrize("fault", ["drop", "hang", "unavailable", "error", "missing", "denied"])
def test_a_fault_of_a_size_is_told_and_passes(setting, fault):
    setting.proxy.fault(fault)
    with setting.open(HASTY if fault == "hang" else PATIENT) as remote:
        if fault == "missing":
            assert remote.size(KEY) is None
        else:
            setting.fails(lambda: remote.size(KEY), *READS[fault])
    setting.proxy.heal()
    with setting.open(PATIENT) as remote:
        assert remote.size(KEY) == len(DATA)


@pytest.mark.parametrize("fault", ["drop", "hang", "unavailable", "error", "missing", "denied"])
@pytest.mark.parametrize("operation", ["put", "replace", "delete", "list"])
def test_a_fault_of_a_write_or_a_listing_is_told_and_passes(s3, fault, operation):
    def work(remote: Remote) -> object:
        if operation == "list":
            return [entry.key for entry in remote.list("")]
        if operation == "replace":
            return remote.replace("manifests/t/new", b"new", None)
        return remote.put("blocks/new", b"new") if operation == "put" else remote.delete(KEY)

    s3.proxy.fault(fault)
    with s3.open(HASTY if fault == "hang" else PATIENT) as remote:
        if (fault, operation) == ("missing", "delete"):
            work(remote)
        else:
            kinds = (RemoteError,) if fault == "missing" else READS[fault]
            s3.fails(lambda: work(remote), *kinds)
    s3.proxy.heal()
    with s3.open(PATIENT) as remote:
        if fault == "hang" and operation == "replace":
            work(remote)  # the one that hung may have arrived all the same
            assert remote.get("manifests/t/new", 3).data == b"new"
            return
        expected = {"list": [KEY], "replace": True, "put": None, "delete": None}[operation]
        assert work(remote) == expected
        assert remote.size(KEY) == (None if operation == "delete" else len(DATA))
        if operation == "put":
            assert remote.get("blocks/new", 3).data == b"new"


@pytest.mark.parametrize("fault", ["drop", "error", "unavailable", "reset_midway"])
def test_a_fault_that_passes_within_the_tries_is_not_noticed(setting, fault):
    setting.proxy.fault(fault, "GET", times=2)
    with setting.open(Options(timeout=60, tries=3)) as remote:
        assert remote.get(KEY, len(DATA)).data == DATA
    assert setting.proxy.count("GET", KEY) == 3


def test_a_slow_answer_within_the_timeout_is_an_answer(setting):
    setting.proxy.fault("delay", seconds=0.3)
    with setting.open(PATIENT) as remote:
        assert remote.size(KEY) == len(DATA)
        assert remote.get(KEY, len(DATA)).data == DATA


def test_a_server_that_announces_less_gives_less(setting):
    """What was announced came, so nothing shows it here: lengths and digests are the caller's."""
    setting.proxy.fault("announces_less", "GET")
    with setting.open(PATIENT) as remote:
        assert remote.get(KEY, len(DATA)).data == DATA[: len(DATA) // 2]
        setting.proxy.heal()
        assert remote.get(KEY, len(DATA)).data == DATA


def test_more_than_the_limit_is_not_taken_in(setting):
    with setting.open(PATIENT) as remote:
        setting.fails(lambda: remote.get(KEY, 1000), Damaged)
    with setting.open(HASTY) as remote:
        setting.proxy.fault("endless", "GET")
        setting.fails(lambda: remote.get(KEY, 1000), Damaged, RemoteDown, RemoteError)
    setting.proxy.heal()


def test_one_hanging_object_costs_many_readers_one_timeout(setting):
    """A53: HEAD says that it is there, and GET hangs."""
    setting.proxy.fault("hang", "GET")
    clock = Clock()
    with setting.open(HASTY) as remote:
        counted = Counted(remote)
        reader = Remembers(counted, 30, clock)

        def resume() -> bytes | None:
            """The object, or None where a reader computes instead."""
            try:
                there = reader.size(KEY) is not None
                return reader.get(KEY, len(DATA)).data if there else None
            except RemoteDown:
                return None

        assert [resume() for _ in range(20)] == [None] * 20
        assert sum(count.errors.get("RemoteDown", 0) for count in counted.counts().values()) == 1
        assert setting.proxy.count("GET", KEY) <= 1
        setting.proxy.heal()
        clock.now += 30
    with setting.open(PATIENT) as patient:
        reader.remote = patient
        assert resume() == DATA


@pytest.mark.parametrize("fault", ["unavailable", "drop"])
def test_an_object_that_was_removed_behind_our_back_stays_absent(s3, fault):
    """A52: a lifecycle rule took one of four."""
    keys = [f"blocks/{number}" for number in range(4)]
    with s3.open(PATIENT) as remote, s3.open(PATIENT) as somebody:
        reader = Remembers(remote, 30, Clock())
        for key in keys:
            reader.put(key, b"x")
        assert [reader.size(key) for key in keys] == [1] * 4
        somebody.delete(keys[2])
        for _ in range(2):
            s3.fails(lambda: reader.get(keys[2], 9), NotFound)
        assert [reader.size(key) for key in keys] == [1, 1, None, 1]
        s3.proxy.fault(fault)
        s3.fails(lambda: reader.get(keys[0], 9), RemoteDown)
        assert reader.size(keys[2]) is None
        s3.fails(lambda: reader.size(keys[1]), RemoteDown)


def test_the_proxy_counts_and_passes_everything_on(s3):
    with s3.open(PATIENT) as remote:
        assert remote.get(KEY, len(DATA)).data == DATA
        remote.put("blocks/more", b"12345")
        assert {entry.key for entry in remote.list("")} == {KEY, "blocks/more"}
    assert (s3.proxy.count("PUT", "blocks/more"), s3.proxy.count("GET", KEY)) == (1, 1)
    assert s3.proxy.sent == 5
    assert s3.proxy.received >= len(DATA)
    s3.proxy.forget()
    assert s3.proxy.count() == 0


def test_the_proxy_changes_bytes_when_it_is_told_to(http):
    http.proxy.fault("other_bytes", "GET")
    with http.open(PATIENT) as remote:
        found = remote.get(KEY, len(DATA)).data
    assert found == bytes(byte ^ 0xFF for byte in DATA)
