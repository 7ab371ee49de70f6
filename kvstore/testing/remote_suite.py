"""The contract of remotes/base.py as tests. The test file of a kind of remote subclasses it:

    class TestMyRemote(RemoteSuite):
        @pytest.fixture(autouse=True)
        def place(self, tmp_path: Path) -> None:
            self.path = tmp_path        # where nothing is stored yet

        def make(self) -> Remote:
            return MyRemote(f"my://{self.path}", timeout=20)

`make` opens the same place each time that a test calls it. A kind that is only read gives `seed`, too.
What a server's faults must come to is not here, as it needs a server that has them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest

from kvsnap.formats.errors import Damaged, NotFound, Unsupported
from kvsnap.kvstore.remotes.base import MAX_KEY, Remote

KEY = "blocks/ab/abcd.safetensors"
KEYS = (
    "a",
    KEY,
    "manifests/team-1/chat%2fone~2.safetensors",
    "a.b/c_d/e-f/g..h/i",
    "/".join(("k" * 102,) * 5)[:MAX_KEY],
)
NO_KEYS = (
    "", "/", "a/", "/a", "a//b", "..", "../a", "a/../b", "a/./b", "a/..", "A", "a b", "a\0b", "a\nb",
    "a\\b", "ä", "a?b", "a#b", "a:b", "a/b/c/d/e/f", "k" * 5000,
)  # fmt: skip
WRITERS = 8
PAGE = 1100
"""More objects than the thousand that object stores list at a time."""
BIG = 10_000_001


class RemoteSuite:
    """Subclass it and give `make`; and `seed` for a remote that is only read."""

    secrets: tuple[str, ...] = ()
    """What `make` was given and nobody may read: passwords, keys."""
    races = 5
    """Rounds in which writers compete: fewer for a server that lets each wait for seconds."""

    def make(self) -> Remote:
        raise NotImplementedError("give the suite a remote: def make(self) -> Remote")

    def seed(self, key: str, data: bytes) -> None:
        """Store an object by other means, where the remote itself cannot."""
        with self.make() as remote:
            remote.put(key, data)

    @pytest.fixture
    def remote(self) -> Iterator[Remote]:
        with self.make() as remote:
            yield remote

    @pytest.fixture
    def writable(self, remote: Remote) -> Remote:
        if not remote.abilities.write:
            pytest.skip("this kind is only read")
        return remote

    @pytest.fixture
    def listed(self, remote: Remote) -> Remote:
        if not remote.abilities.list:
            pytest.skip("this kind does not list")
        return remote

    @pytest.mark.parametrize("size", [0, 1, 4096, BIG])
    def test_an_object_comes_back_byte_for_byte(self, remote: Remote, size: int) -> None:
        data = _bytes(size)
        self.seed(KEY, data)
        assert remote.get(KEY, size).data == data
        assert type(remote.get(KEY, size).data) is bytes
        assert remote.size(KEY) == size

    @pytest.mark.parametrize("key", KEYS, ids=range(len(KEYS)))
    def test_every_key_names_its_own_object(self, remote: Remote, key: str) -> None:
        self.seed(key, key.encode())
        self.seed("other", b"other")
        assert remote.get(key, 1000).data == key.encode()
        assert remote.size(key) == len(key)
        if remote.abilities.list:
            assert {entry.key for entry in remote.list("")} == {key, "other"}

    def test_an_absent_object_is_a_verdict(self, remote: Remote) -> None:
        self.seed("blocks/ab/other", b"x")
        for key in (KEY, "blocks/ab/othe", "blocks/ab/other2", "blocks/cd/x", "nothing"):
            with pytest.raises(NotFound, match=key):
                remote.get(key, 100)
            with pytest.raises(NotFound):
                remote.get_start(key, 10)
            assert remote.size(key) is None

    def test_a_folder_of_objects_is_no_object(self, listed: Remote) -> None:
        """Web servers, which do not list, answer for folders as they like."""
        self.seed(KEY, b"x")
        for key in ("blocks", "blocks/ab"):
            assert listed.size(key) is None
            with pytest.raises((NotFound, Damaged)):
                listed.get(key, 100)

    def test_the_start_of_an_object(self, remote: Remote) -> None:
        data = _bytes(3000)
        self.seed(KEY, data)
        self.seed("empty", b"")
        for count in (0, 1, 8, 2999, 3000, 3001, 10**6):
            assert remote.get_start(KEY, count) == data[:count]
            assert remote.get_start("empty", count) == b""

    @pytest.mark.parametrize("size", [1, 4096, BIG])
    def test_no_more_than_the_limit_is_taken(self, remote: Remote, size: int) -> None:
        self.seed(KEY, _bytes(size))
        for limit in (0, size - 1):
            with pytest.raises(Damaged, match=KEY):
                remote.get(KEY, limit)
        assert len(remote.get(KEY, size).data) == size

    def test_what_is_no_key_is_refused_unasked(self, remote: Remote) -> None:
        for key in NO_KEYS:
            for ask in (remote.size, lambda k: remote.get(k, 10), lambda k: remote.get_start(k, 1)):
                with pytest.raises(Damaged):
                    ask(key)
            if remote.abilities.write:
                for change in (
                    remote.delete,
                    lambda k: remote.put(k, b"x"),
                    lambda k: remote.replace(k, b"x", None),
                ):
                    with pytest.raises(Damaged):
                        change(key)
        if remote.abilities.list:
            assert list(remote.list("")) == []
            for prefix in ("blocks", "/", "../", "a//", "A/"):
                with pytest.raises(Damaged):
                    list(remote.list(prefix))

    def test_what_a_kind_lacks_is_unsupported(self, remote: Remote) -> None:
        self.seed(KEY, b"x")
        if not remote.abilities.write:
            for change in (
                lambda: remote.put(KEY, b"y"),
                lambda: remote.replace(KEY, b"y", None),
                lambda: remote.delete(KEY),
            ):
                with pytest.raises(Unsupported) as raised:
                    change()
                assert raised.value.hint
        if not remote.abilities.list:
            with pytest.raises(Unsupported) as raised:
                list(remote.list(""))
            assert raised.value.hint
        assert remote.get(KEY, 10).data == b"x"

    def test_versions_tell_objects_apart(self, remote: Remote) -> None:
        self.seed(KEY, b"first")
        first = remote.get(KEY, 10).version
        assert remote.get(KEY, 10).version == first
        self.seed(KEY, b"other")
        assert remote.get(KEY, 10).version != first

    def test_put_replaces_the_whole_object(self, writable: Remote) -> None:
        for data in (_bytes(5000), b"short", b"", _bytes(6000)):
            writable.put(KEY, data)
            assert writable.get(KEY, 10**4).data == data
            assert writable.size(KEY) == len(data)

    def test_any_buffer_can_be_put(self, writable: Remote) -> None:
        numbers = np.arange(1000, dtype=np.uint16)
        for data in (
            bytearray(b"abc"),
            memoryview(b"xabcx")[1:4],
            numbers.data,
            numbers[10:20].data,
        ):
            writable.put(KEY, data)
            assert writable.get(KEY, 10**4).data == bytes(data)

    def test_a_buffer_is_the_callers_again_after_the_put(self, writable: Remote) -> None:
        data = bytearray(_bytes(100_000))
        wanted = bytes(data)
        writable.put(KEY, data)
        data[:] = bytes(len(data))
        data.clear()  # fails while anybody holds a view
        assert writable.get(KEY, 10**6).data == wanted

    def test_delete_removes_and_may_be_repeated(self, writable: Remote) -> None:
        writable.put(KEY, b"x")
        writable.put("blocks/ab/other", b"y")
        for _ in range(2):
            writable.delete(KEY)
            assert writable.size(KEY) is None
            with pytest.raises(NotFound):
                writable.get(KEY, 10)
        writable.delete("nothing/here")
        assert writable.get("blocks/ab/other", 10).data == b"y"

    def test_what_one_remote_stored_another_reads(self, writable: Remote) -> None:
        with self.make() as other:
            other.put(KEY, b"x")
        with self.make() as third:
            assert third.get(KEY, 10).data == b"x"
        assert writable.get(KEY, 10).data == b"x", "closing one remote must leave others open"

    def test_a_listing_has_what_stands_below_a_folder(self, listed: Remote) -> None:
        sizes = {"a": 1, "b/a": 2, "b/c/a": 3, "b/c/d/e/f": 0, "bc/a": 5, "b.c/a": 6}
        for key, size in sizes.items():
            self.seed(key, _bytes(size))
        for prefix in ("", "b/", "b/c/", "b/c/d/", "b/c/d/e/", "bc/", "a/", "none/", "b/none/"):
            found = {entry.key: entry.size for entry in listed.list(prefix)}
            assert found == {key: size for key, size in sizes.items() if key.startswith(prefix)}

    def test_a_listing_tells_when_objects_changed(self, listed: Remote) -> None:
        self.seed(KEY, b"x")
        (entry,) = listed.list("")
        assert abs(entry.changed - time.time()) < 24 * 3600

    def test_a_listing_may_be_left_and_begun_again(self, listed: Remote) -> None:
        for number in range(5):
            self.seed(f"blocks/{number}", b"x")
        assert next(iter(listed.list(""))).size == 1
        assert len(list(listed.list(""))) == 5

    def test_a_long_listing_is_whole(self, writable: Remote, listed: Remote) -> None:
        keys = {f"blocks/{number % 7:02x}/{number}" for number in range(PAGE)}
        _together([partial(writable.put, key, b"x") for key in keys])
        found = [entry.key for entry in listed.list("blocks/")]
        assert len(found) == len(keys)
        assert set(found) == keys

    def test_a_reader_sees_all_of_one_object(self, writable: Remote) -> None:
        """While it is overwritten, by threads that use the same remote."""
        states = [bytes([letter]) * (300_000 + letter) for letter in b"ab"]
        writable.put(KEY, states[0])
        done = threading.Event()

        def write() -> None:
            for number in range(20):
                writable.put(KEY, states[number % 2])
            done.set()

        def read() -> None:
            while not done.is_set():
                assert writable.get(KEY, 10**6).data in states
                assert writable.size(KEY) in [len(state) for state in states]

        _together([write, read, read])

    def test_many_threads_store_at_once(self, writable: Remote) -> None:
        objects = {f"blocks/{number:02x}/{number}": _bytes(number * 999) for number in range(40)}

        def move(key: str) -> None:
            writable.put(key, objects[key])
            assert writable.get(key, 10**6).data == objects[key]

        _together([partial(move, key) for key in objects])
        assert {key: writable.get(key, 10**6).data for key in objects} == objects

    def test_replace_stores_only_over_the_version_it_names(self, writable: Remote) -> None:
        assert writable.replace(KEY, b"first", None)
        assert not writable.replace(KEY, b"again", None)
        assert writable.get(KEY, 10).data == b"first"
        first = writable.get(KEY, 10).version
        assert writable.replace(KEY, b"second", first)
        assert not writable.replace(KEY, b"third", first)
        assert writable.get(KEY, 10).data == b"second"
        second = writable.get(KEY, 10).version
        writable.delete(KEY)
        assert not writable.replace(KEY, b"fourth", second)
        assert writable.size(KEY) is None
        assert writable.replace(KEY, b"", None)
        assert writable.replace(KEY, memoryview(b"fifth"), writable.get(KEY, 10).version)
        assert writable.get(KEY, 10).data == b"fifth"

    @pytest.mark.parametrize("present", [False, True])
    def test_of_many_who_replace_at_once_one_does(self, writable: Remote, present: bool) -> None:
        if not writable.abilities.replace_if:
            pytest.skip("this kind does not compare and write in one step")
        for turn in range(self.races):
            key, version = f"manifests/{turn}", None
            if present:
                writable.put(key, b"before")
                version = writable.get(key, 10).version
            won = _race(writable, key, version)
            assert len(won) == 1
            assert writable.get(key, 100).data == won[0]

    def test_no_secret_can_be_read_off_a_remote(self, remote: Remote) -> None:
        with pytest.raises(NotFound) as raised:
            remote.get(KEY, 10)
        shown = (
            f"{remote.url} {remote!r} {raised.value} {raised.value.hint} {raised.value.__context__}"
        )
        assert remote.url
        for secret in self.secrets:
            assert secret not in shown


def _race(remote: Remote, key: str, version: str | None) -> list[bytes]:
    """What those stored who won, of several that replace one object at once."""
    start, won = threading.Barrier(WRITERS), list[bytes]()

    def run(mine: bytes) -> None:
        start.wait(30)
        if remote.replace(key, mine, version):
            won.append(mine)

    _together([partial(run, b"writer %d" % number) for number in range(WRITERS)])
    return won


def _bytes(size: int) -> bytes:
    return np.random.default_rng(size).bytes(size)


def _together(jobs: Sequence[Callable[[], object]]) -> None:
    """Run jobs in threads, and raise what one of them raised."""
    with ThreadPoolExecutor(WRITERS) as pool:
        for future in [pool.submit(job) for job in jobs]:
            future.result()
