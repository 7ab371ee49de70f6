"""Genuine signatures where they do not belong: older manifests, other names, other sessions' files."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvsnap.formats.container import parse
from kvsnap.formats.errors import Damaged, Diverged, KvsnapError, PartlyDone, Untrusted
from kvsnap.formats.manifest import BLOCK, Manifest, pack_manifest, parse_manifest
from kvsnap.formats.session import parse_session
from kvsnap.formats.signature import signature_of
from kvsnap.kvstore.remotes.counted import Counted
from kvsnap.kvstore.sharing.pull import pull
from kvsnap.kvstore.sharing.push import push
from kvsnap.kvstore.store import Store
from kvsnap.testing.aftermath import assert_saved
from kvsnap.testing.stamped import StampedEngine
from kvsnap.testing.turns import some_ids, turn
from tests.planting import joined, session_with, session_with_other_tail, with_header
from tests.sharing.objects import ME, ids_there, only
from tests.signers import STRANGER, Signers

Machine = Callable[..., Store]
IDS = some_ids(57)
MORE = np.concatenate([IDS, some_ids(20, 1)])
OTHERS = some_ids(40, 2)


@pytest.fixture
def keys(tmp_path: Path) -> Signers:
    return Signers(tmp_path / "keys")


@pytest.fixture
def a(machine: Machine, remote: Counted, keys: Signers) -> Store:
    store = machine("a")
    turn(store, StampedEngine(), IDS, "chat")
    push_signed(store, remote, keys)
    return store


def push_signed(store: Store, remote: Counted, keys: Signers, name: str = "chat") -> None:
    with keys.machine("a"):
        push(store, remote, ME, name, sign=True)


def manifest_file(there: Path, name: str = "chat") -> Path:
    return there / "manifests" / ME / f"{name}.safetensors"


def manifest_in(path: Path) -> Manifest:
    return parse_manifest(memoryview(path.read_bytes()))


def copy_of(there: Path) -> dict[Path, bytes]:
    """Manifests and sessions as they are now: what somebody can keep, and put back later."""
    folders = (there / "manifests", there / "sessions")
    return {p: p.read_bytes() for folder in folders for p in folder.rglob("*.safetensors")}


def put_back(kept: dict[Path, bytes]) -> None:
    for path, data in kept.items():
        path.write_bytes(data)


def test_an_older_manifest_is_noticed_by_its_revision(
    machine: Machine, remote: Counted, there: Path, keys: Signers, a: Store
) -> None:
    """Signed in order, and of an earlier day: a session goes forward only."""
    kept = copy_of(there)
    turn(a, StampedEngine(), MORE, "chat")
    push_signed(a, remote, keys)
    newer = a.sessions.load(ME, "chat").record.revision
    b = keys.trusting(machine, "b", "a")
    pull(b, remote, "chat")
    put_back(kept)
    with pytest.raises(Diverged, match="it goes on from this one, by 20 tokens"):
        pull(b, remote, "chat")
    assert_saved(b, MORE, "chat")
    pull(b, remote, "chat", force=True)
    assert ids_there(b, "chat") == IDS.tolist()
    assert b.sessions.load(ME, "chat").record.revision < newer


def test_an_older_version_of_the_same_tokens_is_named_by_its_revision(
    machine: Machine, remote: Counted, there: Path, keys: Signers, a: Store
) -> None:
    kept = copy_of(there)
    turn(a, StampedEngine(), IDS, "chat").session.save({"title": "newer"})
    push_signed(a, remote, keys)
    b = keys.trusting(machine, "b", "a")
    pull(b, remote, "chat")
    ours = b.sessions.load(ME, "chat").record
    put_back(kept)
    with pytest.raises(Diverged, match=f"revision {ours.revision}, this is 2"):
        pull(b, remote, "chat")
    assert b.sessions.load(ME, "chat").record.notes == {"title": "newer"}


def test_who_never_had_the_session_cannot_tell(
    machine: Machine, remote: Counted, there: Path, keys: Signers, a: Store
) -> None:
    """What it gets was signed by A, and A has gone on since: old, and never wrong."""
    kept = copy_of(there)
    turn(a, StampedEngine(), MORE, "chat")
    push_signed(a, remote, keys)
    put_back(kept)
    b = keys.trusting(machine, "b", "a")
    pull(b, remote, "chat")
    assert_saved(b, IDS, "chat")
    push_signed(a, remote, keys)
    pull(b, remote, "chat")
    assert_saved(b, MORE, "chat")


def test_replayed_it_is_replaced_by_the_next_push(
    machine: Machine, remote: Counted, there: Path, keys: Signers, a: Store
) -> None:
    kept = copy_of(there)
    turn(a, StampedEngine(), MORE, "chat")
    push_signed(a, remote, keys)
    put_back(kept)
    push_signed(a, remote, keys)
    assert manifest_in(manifest_file(there)).tokens == len(MORE)


def test_a_manifest_under_another_name_is_none_of_that_name(
    machine: Machine, remote: Counted, there: Path, keys: Signers, a: Store
) -> None:
    manifest_file(there, "rules").write_bytes(manifest_file(there).read_bytes())
    b = keys.trusting(machine, "b", "a")
    with pytest.raises(Damaged, match="another session's"):
        pull(b, remote, "rules")


CHANGES: dict[str, Callable[[Manifest], Manifest]] = {
    "name": lambda m: replace(m, name="rules"),
    "revision": lambda m: replace(m, revision=m.revision + 5),
    "tokens": lambda m: replace(m, tokens=m.tokens - 1),
    "creator": lambda m: replace(m, creator="somebody else"),
    "root": lambda m: replace(m, root_id="0" * 64),
    "fewer blocks": lambda m: replace(m, items=m.items[:1] + m.items[2:]),
    "another content": lambda m: replace(
        m,
        items=tuple(
            replace(item, content=b"\7" * 32) if item.kind == BLOCK else item for item in m.items
        ),
    ),
    "another session": lambda m: replace(
        m, items=(*m.items[:-1], replace(m.items[-1], name=b"\7" * 32, file=b"\7" * 32))
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_manifest_that_was_changed_is_not_signed(
    machine: Machine, remote: Counted, there: Path, keys: Signers, a: Store, change: str
) -> None:
    path = manifest_file(there)
    forged = CHANGES[change](manifest_in(path))
    target = manifest_file(there, forged.name)
    target.write_bytes(joined(pack_manifest(forged)))
    b = keys.trusting(machine, "b", "a")
    with pytest.raises(Untrusted, match="its signature is wrong"):
        pull(b, remote, forged.name)
    assert not list(b.listing)
    push_signed(a, remote, keys)
    assert manifest_in(path).signed


def test_a_manifest_without_its_signature_and_one_of_a_stranger(
    machine: Machine, remote: Counted, there: Path, keys: Signers, a: Store
) -> None:
    path = manifest_file(there)
    genuine = manifest_in(path)
    b = keys.trusting(machine, "b", "a")
    for forged, reason in (
        (replace(genuine, signature=None), "nobody signed it"),
        (genuine.sign(STRANGER), f"it is signed by {STRANGER.public}"),
        (replace(genuine, signature=STRANGER.sign(b"x")), "it is signed by"),
        (
            replace(genuine, signature=replace(STRANGER.sign(b"x"), signer=keys.public("a"))),
            "its signature is wrong",
        ),
    ):
        path.write_bytes(joined(pack_manifest(forged)))
        with pytest.raises(Untrusted, match=reason):
            pull(b, remote, "chat")
    push_signed(a, remote, keys)
    pull(b, remote, "chat")
    assert_saved(b, IDS, "chat")


def session_file(there: Path) -> Path:
    return only(there, "sessions")


def name_it(there: Path, data: bytes) -> None:
    """Put another file in the session's place, under the name that the manifest gives."""
    session_file(there).write_bytes(data)


def test_a_session_with_other_tail_rows_is_not_the_one_that_is_named(
    machine: Machine, remote: Counted, there: Path, keys: Signers, a: Store
) -> None:
    genuine = session_file(there).read_bytes()
    told = parse(memoryview(genuine)).metadata
    quoting = with_header(
        session_with_other_tail(genuine),
        **{key: told[key] for key in ("content", "talk", "signer", "signature")},
    )
    b = keys.trusting(machine, "b", "a")
    for forged in (
        session_with_other_tail(genuine),
        session_with_other_tail(genuine, STRANGER),
        session_with(genuine, notes={"text": "obey"}),
        quoting,
    ):
        name_it(there, forged)
        with pytest.raises(Damaged, match="not the one that its manifest names"):
            pull(b, remote, "chat")
    assert not list(b.listing)
    push_signed(a, remote, keys)
    pull(b, remote, "chat")
    assert_saved(b, IDS, "chat")


def test_a_signed_manifest_of_a_session_that_nobody_signed_gives_its_blocks_and_no_tail(
    machine: Machine, remote: Counted, there: Path, keys: Signers, a: Store
) -> None:
    """Who signed the manifest vouched for the file; its tail's rows have no signature of their own
    and are computed."""
    path, file = manifest_file(there), session_file(there)
    plain = session_with(file.read_bytes())
    digest = bytes.fromhex(parse_session(memoryview(plain)).file_digest)
    genuine = manifest_in(path)
    item = replace(genuine.session, name=digest, file=digest, size=len(plain))
    changed = replace(genuine, items=(*genuine.items[:-1], item)).sign(keys.key("a"))
    file.with_name(f"{digest.hex()}.safetensors").write_bytes(plain)
    path.write_bytes(joined(pack_manifest(changed)))
    b = keys.trusting(machine, "b", "a")
    pull(b, remote, "chat")
    engine = StampedEngine()
    turn(b, engine, MORE, "chat", save=False)
    engine.check_rows()
    assert engine.positions == list(range(48, 77))


def test_a_replayed_block_of_another_prompt_is_another_block(
    machine: Machine, remote: Counted, there: Path, keys: Signers, a: Store
) -> None:
    """A genuine, signed file under a name that is not its own."""
    turn(a, StampedEngine(), OTHERS, "other")
    push_signed(a, remote, keys, "other")
    chains = [a.sessions.load(ME, name).record.chain for name in ("chat", "other")]
    files = [there / "blocks" / c[0].hex()[:2] / f"{c[0].hex()}.safetensors" for c in chains]
    files[0].write_bytes(files[1].read_bytes())
    b = keys.trusting(machine, "b", "a")
    with pytest.raises(PartlyDone):
        pull(b, remote, "chat")
    engine = StampedEngine()
    turn(b, engine, MORE, "chat", save=False)
    engine.check_rows()
    assert engine.positions == list(range(77))
    push_signed(a, remote, keys)
    c = keys.trusting(machine, "c", "a")
    pull(c, remote, "chat")
    assert_saved(c, IDS, "chat")


def test_a_session_that_nobody_trusted_pushed_is_replaced_by_force_only(
    machine: Machine, remote: Counted, there: Path, keys: Signers, a: Store
) -> None:
    """It may be a colleague's who does not sign: a session is not lost to one that does."""
    theirs = machine("theirs")
    turn(theirs, StampedEngine(), OTHERS, "chat")
    manifest_file(there).unlink()
    push(theirs, remote, ME, "chat")
    with pytest.raises(Diverged, match="other tokens from position 0 on") as caught:
        push_signed(a, remote, keys)
    assert "--force" in caught.value.hint
    with keys.machine("a"):
        push(a, remote, ME, "chat", sign=True, force=True)
    b = keys.trusting(machine, "b", "a")
    pull(b, remote, "chat")
    assert_saved(b, IDS, "chat")


def test_a_manifest_with_a_file_that_is_none_is_told_and_replaced(
    machine: Machine, remote: Counted, there: Path, keys: Signers, a: Store
) -> None:
    path = manifest_file(there)
    os.truncate(path, 100)
    b = keys.trusting(machine, "b", "a")
    with pytest.raises(KvsnapError, match="damaged"):
        pull(b, remote, "chat")
    push_signed(a, remote, keys)
    pull(b, remote, "chat")
    assert signature_of(parse(memoryview(path.read_bytes())).metadata) is not None
    assert_saved(b, IDS, "chat")
