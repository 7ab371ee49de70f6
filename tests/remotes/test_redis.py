"""Redis against a real server: the contract, its limits, and what it says when it refuses."""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import itertools
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

from kvsnap.formats.errors import (
    Damaged,
    KvsnapError,
    RemoteDenied,
    RemoteDown,
    RemoteError,
    UsageError,
)
from kvsnap.kvstore.remotes import Options, open_remote
from kvsnap.kvstore.remotes.base import Remote
from kvsnap.kvstore.remotes.redis import MAX_OBJECT, Redis
from kvsnap.kvstore.remotes.redis_url import CONNECTIONS
from kvsnap.testing.remote_suite import RemoteSuite
from tests.remotes.redis_server import PASSWORD, RedisServer, redis_server

KEY = "blocks/ab/one.safetensors"
_places = itertools.count()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as running:
        yield running


@pytest.fixture
def own(tmp_path: Path) -> Iterator[RedisServer]:
    """A server that a test may mistreat."""
    with redis_server(tmp_path) as running:
        yield running


@pytest.fixture
def raw(server: RedisServer) -> Iterator[redis.Redis]:
    with redis.Redis(port=server.port, password=PASSWORD) as client:
        yield client


@pytest.fixture
def remote(server: RedisServer, raw: redis.Redis) -> Iterator[Redis]:
    raw.flushall()
    with Redis(server.url("/0/kv"), 20) as opened:
        yield opened


class TestRedis(RemoteSuite):
    secrets = (PASSWORD,)

    @pytest.fixture(autouse=True)
    def place(self, server: RedisServer) -> None:
        self.url = server.url(f"/0/suite:{next(_places)}")

    def make(self) -> Remote:
        return open_remote(self.url, Options(timeout=60, tries=1))


class TestUnixSocketWithTtl(TestRedis):
    @pytest.fixture(autouse=True)
    def place(self, server: RedisServer) -> None:
        path = f"/1/suite/{next(_places)}"
        self.url = f"redis://:{PASSWORD}@{path}?ttl=3600&socket={server.socket}"


def failure(work: Callable[[], object], kind: type[KvsnapError]) -> str:
    """The one line of the error that `work` raises, which no part of must hold a secret."""
    with pytest.raises(kind) as raised:
        work()
    everything = "".join(traceback.format_exception(raised.value)) + repr(raised.value)
    everything += raised.value.hint
    assert PASSWORD not in everything
    assert "\n" not in raised.value.what
    return raised.value.what


def test_objects_are_plain_strings_that_redis_cli_shows(remote, raw):
    remote.put(KEY, b"value")
    assert raw.get(f"kv:{KEY}") == b"value"
    assert raw.zrange("kv::changed", 0, -1) == [KEY.encode()]
    remote.delete(KEY)
    assert raw.keys("*") == []


def test_databases_and_prefixes_are_apart(server, remote):
    remote.put(KEY, b"value")
    for path in ("/1/kv", "/0/k", "/0/kv/more", "/0/kv:more", "/0", ""):
        with Redis(server.url(path), 20) as other:
            assert other.size(KEY) is None
            assert list(other.list("")) == []
    with Redis(server.url("/0/kv"), 20) as same:
        assert same.get(KEY, 10).data == b"value"


def test_glob_characters_of_foreign_keys_match_nothing_of_ours(server, raw, remote):
    remote.put(KEY, b"x")
    for foreign in (
        "kv:UPPER",
        "kv:a b",
        "kv:blocks/../x",
        "kv:/abs",
        "kv:n\0l",
        "kv:" + "k" * 5000,
    ):
        raw.set(foreign, b"x")
    raw.set(b"kv:\xff\xfe", b"x")
    raw.set("kv:a*[b]?", b"x")
    raw.rpush("kv:blocks/list", b"x")
    found = {entry.key: entry.size for entry in remote.list("")}
    assert found.pop(KEY) == 1
    assert not found


def test_a_key_that_the_server_names_twice_is_listed_once(remote, monkeypatch):
    """SCAN may, while its table grows or shrinks."""
    keys = [f"blocks/{number}" for number in range(3)]
    for key in keys:
        remote.put(key, b"x")
    raw = [f"kv:{key}".encode() for key in keys]
    answers = iter([(7, raw[:2]), (9, []), (0, raw[1:])])
    monkeypatch.setattr(remote._client, "scan", lambda *args, **options: next(answers))
    assert [entry.key for entry in remote.list("blocks/")] == keys


def test_the_time_of_change_is_the_servers(server, remote, raw, monkeypatch):
    monkeypatch.setattr(time, "time", lambda: 0.0)
    remote.put(KEY, b"x")
    (entry,) = remote.list("blocks/")
    seconds, _ = raw.time()
    assert seconds - 60 < entry.changed < seconds + 60


def test_an_object_whose_time_is_lost_counts_as_just_changed(remote, raw):
    remote.put(KEY, b"x")
    raw.delete("kv::changed")
    (entry,) = remote.list("blocks/")
    seconds, _ = raw.time()
    assert entry.changed > seconds - 60


def test_a_hot_tier_forgets(server, raw):
    raw.flushall()
    with Redis(server.url("/0/hot?ttl=1"), 20) as hot:
        hot.put(KEY, b"x")
        assert 0 < raw.pttl(f"hot:{KEY}") <= 1000
        assert hot.replace("manifests/a", b"x", None)
        assert 0 < raw.pttl("hot:manifests/a") <= 1000
        raw.zadd("hot::changed", {"blocks/of-long-ago": 5.0})
        hot.put("blocks/new", b"x")
        assert b"blocks/of-long-ago" not in raw.zrange("hot::changed", 0, -1)
        while raw.exists(f"hot:{KEY}"):
            time.sleep(0.05)
        assert hot.size(KEY) is None


def test_more_than_the_limit_never_leaves_the_server(remote, raw):
    remote.put(KEY, bytes(10_000_000))
    raw.config_resetstat()
    failure(lambda: remote.get(KEY, 1000), Damaged)
    assert remote.get_start(KEY, 1000) == bytes(1000)
    assert raw.info("stats")["total_net_output_bytes"] < 50_000


def test_what_redis_cannot_hold_is_refused_before_it_is_sent(remote):
    data = memoryview(bytearray(MAX_OBJECT + 1))  # never written to: it takes no memory
    line = failure(lambda: remote.put(KEY, data), RemoteError)
    assert f"Redis holds at most {MAX_OBJECT}" in line
    failure(lambda: remote.replace(KEY, data, None), RemoteError)


def test_a_list_in_an_objects_place_is_damage(remote, raw):
    raw.rpush(f"kv:{KEY}", b"x")
    for work in (
        lambda: remote.get(KEY, 10),
        lambda: remote.get_start(KEY, 1),
        lambda: remote.size(KEY),
        lambda: remote.replace(KEY, b"x", None),
    ):
        assert "is no string in redis://" in failure(work, Damaged)


def test_connections_are_bounded(remote, raw, server):
    held = [remote._client.connection_pool.get_connection() for _ in range(CONNECTIONS)]
    assert len(raw.client_list()) <= CONNECTIONS + 1
    with Redis(server.url("/0/kv"), 0.1) as other:
        for _ in range(CONNECTIONS):
            other._client.connection_pool.get_connection()
        failure(lambda: other.size(KEY), RemoteDown)
    for connection in held:
        remote._client.connection_pool.release(connection)


def test_wrong_passwords_and_users_are_denied(server, raw, monkeypatch):
    for url in (server.url(password="wrong-canary"), f"redis://127.0.0.1:{server.port}/0"):
        with Redis(url, 20) as remote:
            for work in (lambda: remote.get(KEY, 1), lambda: remote.put(KEY, PASSWORD.encode())):
                assert "canary" not in failure(work, RemoteDenied)
    raw.execute_command("ACL", "SETUSER", "reader", "on", f">{PASSWORD}", "~*", "+@read", "+time")
    with Redis(f"redis://reader:{PASSWORD}@127.0.0.1:{server.port}/0", 20) as remote:
        assert "no permissions" in failure(lambda: remote.put(KEY, b"x"), RemoteDenied)


def test_the_password_may_come_from_the_environment(server, monkeypatch):
    monkeypatch.setenv("KVSNAP_REDIS_PASSWORD", PASSWORD)
    with Redis(f"redis://127.0.0.1:{server.port}/0", 20) as remote:
        assert remote.size("none") is None
        assert PASSWORD not in f"{remote!r} {remote.url} {vars(remote)['_place']!r}"


def test_the_url_is_shown_without_its_password(server):
    with Redis(server.url("/3/team?ttl=9"), 20) as remote:
        assert remote.url == f"redis://127.0.0.1:{server.port}/3/team"


@pytest.mark.parametrize(
    "rest",
    ["host:port", "host/x", "host/12345", "host/0/a b", "host/0/a*", "host/0/p?ttl=0",
     "host/0/p?ttl=x", "host/0/p?ttl", "host/0/p?password=" + PASSWORD, "host#" + PASSWORD,
     "[host"],
)  # fmt: skip
def test_a_url_that_makes_no_sense_is_refused_without_repeating_it(rest):
    failure(lambda: Redis(f"redis://me:{PASSWORD}@{rest}", 1), UsageError)


def test_a_server_that_is_gone_or_hangs_is_down_and_comes_back(own):
    remote = Redis(own.url(), 0.3)
    remote.put(KEY, b"x")
    with own.hanging():
        for work in (
            lambda: remote.get(KEY, 9),
            lambda: remote.put(KEY, b"y"),
            lambda: list(remote.list("")),
        ):
            failure(work, RemoteDown)
    with Redis(own.url(), 20) as patient:
        assert patient.get(KEY, 9).data in (b"x", b"y")
    own.process.kill()
    own.process.wait()
    failure(lambda: remote.get(KEY, 9), RemoteDown)
    failure(lambda: Redis(own.url(), 5).size(KEY), RemoteDown)
    remote.close()


def test_a_connection_that_the_server_closed_is_opened_anew(own):
    with open_remote(own.url(), Options(timeout=20)) as remote:
        remote.put(KEY, b"x")
        with redis.Redis(port=own.port, password=PASSWORD) as raw:
            raw.client_kill_filter(_type="normal", skipme=True)
        assert remote.get(KEY, 9).data == b"x"


def test_a_full_server_a_replica_and_one_that_loads_say_so(own):
    with redis.Redis(port=own.port, password=PASSWORD) as raw, Redis(own.url(), 20) as remote:
        raw.config_set("maxmemory", raw.info("memory")["used_memory"])
        for work in (
            lambda: remote.put(KEY, b"canary-content" * 100_000),
            lambda: remote.replace(KEY, b"canary-content" * 100_000, None),
        ):
            line = failure(work, RemoteError)
            assert "maxmemory" in line
            assert "content" not in line
        raw.config_set("maxmemory", 0)
        remote.put(KEY, b"fits again")
        raw.replicaof("127.0.0.1", "1")
        assert "read only replica" in failure(lambda: remote.put(KEY, b"x"), RemoteError)
        raw.config_set("replica-serve-stale-data", "no")
        failure(lambda: remote.get(KEY, 9), RemoteDown)


def test_a_cluster_of_one_node_is_named(tmp_path):
    with redis_server(tmp_path, "--cluster-enabled", "yes") as cluster:
        with redis.Redis(port=cluster.port, password=PASSWORD) as raw:
            raw.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
            while b"cluster_state:ok" not in raw.execute_command("CLUSTER", "INFO"):
                time.sleep(0.05)
        with Redis(cluster.url(""), 20) as remote:
            line = failure(lambda: remote.put(KEY, b"x"), RemoteError)
            assert line.endswith("is a Redis cluster")


@pytest.mark.parametrize(
    ("said", "kind", "told"),
    [
        ("MOVED 3999 10.0.0.1:6379", RemoteError, "is a Redis cluster"),
        ("CLUSTERDOWN The cluster is down", RemoteDown, "The cluster is down"),
        ("LOADING Redis is loading the dataset in memory", RemoteDown, "loading"),
        ("MASTERDOWN Link with MASTER is down", RemoteDown, "MASTER is down"),
        ("BUSY Redis is busy running a script", RemoteDown, "busy"),
        ("MISCONF Redis is configured to save RDB snapshots", RemoteError, "MISCONF"),
        ("NOAUTH Authentication required.", RemoteDenied, "Authentication required"),
        ("WRONGPASS invalid username-password pair", RemoteDenied, "invalid"),
        ("NOPERM this user has no permissions", RemoteDenied, "no permissions"),
        ("OOM command not allowed", RemoteError, "command not allowed"),
        ("READONLY You can't write", RemoteError, "can't write"),
        (f"ERR unknown command, with args beginning with: '{PASSWORD}'", RemoteError, "unknown"),
        ("ERR unknown command 'X', with args beginning with: 'private'", RemoteError, "unknown"),
        (f"ERR {PASSWORD} is wrong", RemoteError, "… is wrong"),
        ("ERR max number of clients reached", RemoteDown, "max number of clients"),
        ("ERR " + "long " * 1000, RemoteError, "long long"),
    ],
)
def test_what_a_server_says_becomes_one_line_of_the_right_kind(said, kind, told):
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=_say, args=(listening, f"-{said}\r\n".encode()))
        thread.start()
        place = f"127.0.0.1:{listening.getsockname()[1]}/0"
        with Redis(f"redis://{place}", 20) as remote:
            object.__setattr__(remote._place, "password", PASSWORD)  # known, and not sent
            with pytest.raises(RemoteError) as raised:
                remote.get(KEY, 9)
            assert type(raised.value) is kind
            assert told in failure(lambda: remote.get(KEY, 9), kind)
            assert len(raised.value.what) < 300
            assert "private" not in raised.value.what
        listening.shutdown(socket.SHUT_RDWR)
        thread.join()


def _say(listening: socket.socket, line: bytes) -> None:
    """Answer each command with one line, until nobody can connect any more."""
    with contextlib.suppress(OSError):
        while True:
            connection, _ = listening.accept()
            with connection, contextlib.suppress(OSError):
                while commands := connection.recv(1 << 16).count(b"*"):
                    connection.sendall(line * commands)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A self-signed certificate for 127.0.0.1, with its key."""
    pytest.importorskip("cryptography", reason="cryptography is not installed")
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "test")])
    now = datetime.datetime.now(datetime.UTC)
    names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(names, critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    folder = tmp_path_factory.mktemp("certificate")
    (folder / "cert.pem").write_bytes(made.public_bytes(serialization.Encoding.PEM))
    plain = serialization.NoEncryption()
    pem = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    (folder / "key.pem").write_bytes(key.private_bytes(*pem, plain))
    return folder


def test_tls_checks_the_certificate(certificate, tmp_path, monkeypatch):
    with redis_server(tmp_path, tls=certificate) as server:
        url = f"rediss://:{PASSWORD}@127.0.0.1:{server.tls_port}/0"
        with Redis(url, 20) as remote:
            assert "certificate" in failure(lambda: remote.size(KEY), RemoteError).lower()
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate / "cert.pem"))
        with Redis(url, 20) as remote:
            remote.put(KEY, b"x")
            assert remote.get(KEY, 9).data == b"x"
