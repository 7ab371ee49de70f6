"""Two stores in two processes and one S3 server, with the bytes counted on the way to it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvsnap.testing.turns import some_ids
from tests.remotes.proxy import FaultyProxy, faulty_proxy
from tests.remotes.servers import S3Server, seaweed

pytestmark = pytest.mark.slow

BLOCK = 64
CHILD = """
import json, sys
import numpy as np
from kvsnap import Session, Store
from kvsnap.kvstore.remotes import open_remote
from kvsnap.kvstore.sharing.pull import pull
from kvsnap.kvstore.sharing.push import push
from kvsnap.testing.stamped import StampedEngine

does, path, url, name, ids = json.loads(sys.argv[1])
ids = np.array(ids, np.uint32)
told = {}
with Store(path) as store, open_remote(url) as remote:
    if does == "pull":
        told["pulled"] = pull(store, remote, name).moved_bytes
    engine = StampedEngine()
    session = Session(store, engine, name)
    told["reused"] = session.resume(ids).reused_tokens
    engine.evaluate(ids[told["reused"]:])
    engine.check_rows()
    told["evaluated"] = engine.evaluated
    if does == "push":
        session.save()
    if does != "pull":
        report = push(store, remote, "default", name)
        told["pushed"], told["files"] = report.moved_bytes, report.moved_files
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with seaweed(tmp_path_factory.mktemp("seaweed")) as found:
        yield found


@pytest.fixture
def proxy(server: S3Server) -> Iterator[FaultyProxy]:
    with faulty_proxy(server.url) as found:
        yield found


def run(server: S3Server, proxy: FaultyProxy, *job: object) -> Any:
    """A machine of its own: what it says."""
    environment = {**server.environment(), "AWS_ENDPOINT_URL": proxy.url, "PATH": ""}
    done = subprocess.run(
        [sys.executable, "-c", CHILD, json.dumps(job)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def sent(proxy: FaultyProxy) -> int:
    """Bytes of bodies that went to the server since the last look, those of manifests aside."""
    found = sum(r.sent for r in proxy.requests if r.method == "PUT" and "/manifests/" not in r.path)
    proxy.forget()
    return found


def test_saved_and_pushed_on_one_machine_it_is_pulled_and_resumed_on_another(
    server: S3Server, proxy: FaultyProxy, tmp_path: Path
) -> None:
    url, a, b = f"s3://{server.bucket}/story", str(tmp_path / "a"), str(tmp_path / "b")
    system, first, second = some_ids(10 * BLOCK, 1), some_ids(140, 2), some_ids(150, 3)
    one, two = (np.concatenate([system, more]).tolist() for more in (first, second))

    told = run(server, proxy, "push", a, url, "one", one)
    assert told["files"] == len(one) // BLOCK + 1
    assert sent(proxy) == told["pushed"]

    told = run(server, proxy, "push", a, url, "two", two)
    own = len(two) // BLOCK - len(system) // BLOCK
    assert told["files"] == own + 1, "what the two share is there"
    assert sent(proxy) == told["pushed"]

    told = run(server, proxy, "again", a, url, "two", two)
    assert told["pushed"] == sent(proxy) == 0

    for name, ids in (("one", one), ("two", two)):
        told = run(server, proxy, "pull", b, url, name, ids)
        assert told["reused"] == len(ids) - 1
        assert told["evaluated"] == 1, "the last token has to be computed, and no block"
    assert sent(proxy) == 0


@pytest.mark.parametrize(
    "fault",
    ["drop", "truncate", "missing", "error", "unavailable", "hang", "trickle", "reset_midway"],
)
def test_whatever_the_server_does_no_wrong_row_is_used_and_success_follows(
    server: S3Server,
    proxy: FaultyProxy,
    tmp_path: Path,
    fault: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A fault on every object of blocks, during a pull and during a resume that reads through."""
    from kvsnap.formats.errors import KvsnapError
    from kvsnap.kvstore.remotes import Options, open_remote
    from kvsnap.kvstore.sharing.pull import pull
    from kvsnap.kvstore.sharing.push import push
    from kvsnap.kvstore.store import Store
    from kvsnap.testing.stamped import StampedEngine
    from kvsnap.testing.turns import turn

    for name, value in {**server.environment(), "AWS_ENDPOINT_URL": proxy.url}.items():
        monkeypatch.setenv(name, value)
    url, ids = f"s3://{server.bucket}/{fault}", some_ids(5 * BLOCK + 7, 4)
    hasty = Options(timeout=1.5, tries=1)
    with Store(tmp_path / "a") as a, open_remote(url) as remote:
        turn(a, StampedEngine(), ids, "chat")
        push(a, remote, "default", "chat")
    proxy.fault(fault, "GET", "/blocks/", first=3)
    with Store(tmp_path / "b") as b, open_remote(url, hasty) as remote:
        with pytest.raises(KvsnapError) as raised:  # partly done, or the remote is down
            pull(b, remote, "chat")
        assert raised.value.what.isprintable()
        assert raised.value.hint
        engine = StampedEngine()
        found = turn(b, engine, ids, save=False)
        assert engine.evaluated == len(ids) - found.resumed.reused_tokens
        engine.check_rows()
    with Store(tmp_path / "c", remote=open_remote(url, hasty)) as c:
        engine = StampedEngine()
        found = turn(c, engine, ids, save=False)
        engine.check_rows()
        assert found.resumed.damage
    proxy.heal()
    with Store(tmp_path / "b") as b, open_remote(url) as remote:
        assert pull(b, remote, "chat").stored_blocks == 5
        engine = StampedEngine()
        turn(b, engine, ids, "chat", save=False)
        engine.check_rows()
        assert engine.evaluated == 1
