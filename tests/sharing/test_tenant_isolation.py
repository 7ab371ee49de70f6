"""Two tenants over one S3 server and one store: tokens that the one stored and pushed are to the other as
if nobody ever had them (case A68). Not an answer, statement, file or request differs between a world in
which somebody else has them and one in which nobody has. In each, whoever stored them finds them, so that
no test passes by finding never.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvsnap.formats.identity import root_of
from kvsnap.formats.names import chain_names
from kvsnap.formats.tenant import Tenant
from kvsnap.kvstore.remotes import open_remote
from kvsnap.kvstore.sharing.pull import pull
from kvsnap.kvstore.sharing.push import push
from kvsnap.testing.stamped import StampedEngine
from kvsnap.testing.turns import some_ids, turn
from tests.remotes.proxy import FaultyProxy, faulty_proxy
from tests.remotes.servers import S3Server, seaweed
from tests.sharing import isolation
from tests.sharing.curious import BLOCK, IDS, Curious
from tests.sharing.isolation import Seen, Watch, parted
from tests.tenants import ALICE, BOB, assert_not_in, written

pytestmark = pytest.mark.slow

OTHERS, OWN = some_ids(len(IDS), 2), some_ids(2 * BLOCK + 3, 3)
HAS: dict[str, Any] = {"the same": IDS, "other tokens": OTHERS, "nothing": None}
PAIRS = {
    "two keys": (ALICE, BOB, True),
    "a key, and none": (ALICE, None, False),
    "none, and a key": (None, BOB, False),
}
"""Whose the tokens are, who asks, and whether all is sealed: two with keys share in no other way."""
_numbers = itertools.count(100)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    isolation.start()
    with seaweed(tmp_path_factory.mktemp("seaweed")) as found:
        yield found


@pytest.fixture
def proxy(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    with faulty_proxy(server.url) as found:
        for name, value in {**server.environment(), "AWS_ENDPOINT_URL": found.url}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("KVSNAP_CREATOR", "somebody")
        yield found


@pytest.fixture(scope="module")
def nobody_has_it() -> dict[str, dict[str, Seen]]:
    """What the asker of a pair meets where nobody else stored anything."""
    return {}


def first_block(tenant: Tenant | None) -> str:
    root = root_of(StampedEngine().identity(BLOCK, str), tenant)
    return chain_names(root.key, IDS, BLOCK)[0].hex()[:16]


def world(
    proxy: FaultyProxy, server: S3Server, folder: Path, pair: str, has: str
) -> tuple[Curious, dict[str, Seen]]:
    """The owner of a store and remote that the other one has a session in, too; and all that this
    one then does and meets there."""
    owner, asker, encrypt = PAIRS[pair]
    name = f"w{next(_numbers)}"
    place, url = folder / name, f"s3://{server.bucket}/{name}"
    place.mkdir()
    people = [Curious(place, url, who, first_block(owner), encrypt) for who in (owner, asker)]
    for person, ids, session in ((people[1], OWN, "own"), (people[0], HAS[has], "chat")):
        if ids is not None:
            with person.open() as store, open_remote(url) as remote:
                turn(store, StampedEngine(), ids, session, tenant=person.tenant)
                push(store, remote, person.own, session)
    watch = Watch(proxy, str(place), f"{server.bucket}/{name}", name)
    seen = {step: watch.step(does) for step, does in people[1].steps().items()}
    for secret in (ALICE.key, BOB.key, BOB.naming_key):
        assert_not_in(secret, watch.unmasked)
        assert_not_in(secret, written(place))
    return people[0], seen


@pytest.mark.parametrize("has", ["the same", "other tokens"])
@pytest.mark.parametrize("pair", PAIRS)
def test_that_somebody_has_it_is_as_if_nobody_had_it(
    proxy: FaultyProxy,
    server: S3Server,
    tmp_path: Path,
    pair: str,
    has: str,
    nobody_has_it: dict[str, dict[str, Seen]],
) -> None:
    if pair not in nobody_has_it:
        nobody_has_it[pair] = world(proxy, server, tmp_path, pair, "nothing")[1]
    owner, seen = world(proxy, server, tmp_path, pair, has)
    assert parted(seen, nobody_has_it[pair]) == ""
    assert_watched_and_hit(seen)
    # And the owner finds what it stored.
    with owner.open() as store:
        found = owner.ask(store, "chat")["resumed"].reused_tokens
    assert found == (len(IDS) - 1 if has == "the same" else 0)
    with owner.open("fifth") as store, open_remote(owner.url) as remote:
        assert pull(store, remote, "chat", tenant=owner.tenant).stored_blocks == 8


def assert_watched_and_hit(seen: dict[str, Seen]) -> None:
    """That steps were recorded at all, and that the asker's own tokens are found once stored."""
    assert not [step for step, one in seen.items() if not one.store and "remote" not in step]
    asked = {step for step, one in seen.items() if one.remote}
    assert {
        "ls remote",
        "exists in remote",
        "pull",
        "read through",
        "write behind",
        "push",
    } <= asked
    assert not {"look up", "explain", "ls", "save"} & asked
    assert seen["look up"].counted["kvsnap_resumes_total miss not_stored"] == 1
    answers = {step: one.answer for step, one in seen.items()}
    assert answers["look up"]["resumed"]["reused_tokens"] == 0
    assert answers["read through"]["resumed"]["reused_tokens"] == 0
    assert answers["exists in remote"] == [None] * 8
    assert answers["pull"][0] == "NotFound"
    assert answers["save"]["saved"]["blocks_written"] == 8
    assert answers["push"]["moved_files"] == 1, "the blocks went behind the first save"
    assert answers["push again"]["moved_files"] == 0
    assert answers["look up again"]["resumed"]["reused_tokens"] == 8 * BLOCK
    assert answers["read through again"]["resumed"]["reused_tokens"] == 8 * BLOCK
    assert answers["pull again"]["stored_blocks"] == 8
