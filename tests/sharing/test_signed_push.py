"""push --sign and pull with a trust list: what is signed, by whom, what moves, what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from kvsnap.formats.codecs import get_codec
from kvsnap.formats.errors import NotFound, PartlyDone, SessionMoved, Untrusted, Vanished
from kvsnap.formats.manifest import Manifest, parse_manifest
from kvsnap.kvstore.recompress import recompress
from kvsnap.kvstore.remotes.counted import Counted
from kvsnap.kvstore.session import Session
from kvsnap.kvstore.sharing import contents
from kvsnap.kvstore.sharing import push as pushing
from kvsnap.kvstore.sharing.pull import pull
from kvsnap.kvstore.sharing.push import push
from kvsnap.kvstore.sharing.verify_remote import verify_remote
from kvsnap.kvstore.store import Store
from kvsnap.testing.aftermath import assert_clean, assert_saved
from kvsnap.testing.faults import flip
from kvsnap.testing.stamped import StampedEngine
from kvsnap.testing.turns import some_ids, turn
from tests.planting import block_of, chain_files
from tests.sharing.objects import ME, files_of, only
from tests.signers import Signers

Machine = Callable[..., Store]
IDS = some_ids(57)
MORE = np.concatenate([IDS, some_ids(30, 1)])


@pytest.fixture
def keys(tmp_path: Path) -> Signers:
    return Signers(tmp_path / "keys")


def signers(folder: Path) -> list[str]:
    return [block_of(path.read_bytes()).signer for path in chain_files(folder)]


def manifest_in(there: Path) -> Manifest:
    return parse_manifest(memoryview(only(there, "manifests").read_bytes()))


def pushed_signed(store: Store, remote: Counted, keys: Signers, name: str = "a") -> None:
    with keys.machine(name):
        push(store, remote, ME, "chat", sign=True)


def test_what_is_pushed_signed_is_taken_and_computes_nothing(
    machine: Machine, remote: Counted, there: Path, keys: Signers
) -> None:
    a = machine("a")
    turn(a, StampedEngine(), IDS, "chat")
    pushed_signed(a, remote, keys)
    assert signers(there) == signers(a.path) == [keys.public("a")] * 3
    b = keys.trusting(machine, "b", "a")
    assert pull(b, remote, "chat").moved_files == 3
    assert_saved(b, IDS, "chat")
    assert_clean(b)
    assert signers(b.path) == [keys.public("a")] * 3, "the signature came along"
    assert verify_remote(remote, trust=b.trust).bad == []


@pytest.mark.parametrize("kind", [{}, {"window": 20, "recurrent": 24}], ids=["plain", "states"])
@pytest.mark.parametrize("codec", ["zstd", "q8"])
def test_states_and_lossy_blocks_are_signed_too(
    machine: Machine, remote: Counted, there: Path, keys: Signers, kind: dict, codec: str
) -> None:
    a = machine("a")
    turn(a, StampedEngine(**kind), IDS, "chat", codec=codec)
    pushed_signed(a, remote, keys)
    assert set(signers(there)) == {keys.public("a")}
    assert len(signers(there)) == 4 if kind else 3
    b = keys.trusting(machine, "b", "a")
    pull(b, remote, "chat")
    engine = StampedEngine(**kind)
    turn(b, engine, MORE, "chat")
    assert engine.positions == list(range(57, 87))
    assert_clean(b)


def test_unsigned_sessions_and_those_of_others_are_refused_by_name(
    machine: Machine, remote: Counted, keys: Signers
) -> None:
    a = machine("a")
    turn(a, StampedEngine(), IDS, "chat")
    push(a, remote, ME, "chat")
    b = keys.trusting(machine, "b", "c")
    with pytest.raises(Untrusted, match="nobody signed it") as caught:
        pull(b, remote, "chat")
    assert "kvsnap trust add" in caught.value.hint
    pushed_signed(a, remote, keys)
    with pytest.raises(Untrusted, match=f"it is signed by {keys.public('a')}"):
        pull(b, remote, "chat")
    with pytest.raises(Untrusted):
        pull(b, remote, "chat", force=True, new_name="other")
    assert not list(b.listing)
    assert chain_files(b.path) == []


def test_signing_in_a_store_without_a_list_makes_the_sessions_next_revision(
    machine: Machine, remote: Counted, keys: Signers
) -> None:
    a = machine("a")
    turn(a, StampedEngine(), IDS, "chat").session.save({"text": "hello"})
    before = a.sessions.load(ME, "chat")
    pushed_signed(a, remote, keys)
    after = a.sessions.load(ME, "chat")
    assert (before.record.revision, after.record.revision) == (2, 3)
    assert after.record.notes == {"text": "hello"}
    assert (before.signed, after.signed) == (False, True)
    assert after.content != before.content, "the revision is part of it"
    assert_saved(a, IDS, "chat")
    assert_clean(a)


def test_a_live_session_finds_that_it_was_signed_meanwhile(
    machine: Machine, remote: Counted, keys: Signers
) -> None:
    """As after recompressing: another version stands there, and its own is stored beside it."""
    a, engine = machine("a"), StampedEngine()
    live = turn(a, engine, IDS, "chat").session
    pushed_signed(machine("a"), remote, keys)
    engine.evaluate(MORE[57:])
    with pytest.raises(SessionMoved) as moved:
        live.save()
    assert moved.value.stored_as == "chat@2"
    assert_saved(a, IDS, "chat")
    assert_saved(a, MORE, "chat@2")
    engine.check_rows()


def test_the_second_time_only_the_sessions_file_moves(
    machine: Machine, remote: Counted, there: Path, keys: Signers
) -> None:
    a = machine("a")
    turn(a, StampedEngine(), IDS, "chat")
    pushed_signed(a, remote, keys)
    before, put = files_of(there), remote.calls("put")
    revision = a.sessions.load(ME, "chat").record.revision
    with keys.machine("a"):
        report = push(a, remote, ME, "chat", sign=True)
    assert report.moved_files == 1
    assert remote.calls("put") - put == 1
    assert files_of(there) == before
    assert a.sessions.load(ME, "chat").record.revision == revision, "it was signed already"


def test_a_longer_session_moves_only_its_new_blocks(
    machine: Machine, remote: Counted, keys: Signers
) -> None:
    a = machine("a")
    turn(a, StampedEngine(), IDS, "chat")
    pushed_signed(a, remote, keys)
    turn(a, StampedEngine(), MORE, "chat")
    with keys.machine("a"):
        assert push(a, remote, ME, "chat", sign=True).moved_files == 3
    b = keys.trusting(machine, "b", "a")
    pull(b, remote, "chat")
    assert_saved(b, MORE, "chat")


def test_blocks_of_one_and_a_manifest_of_another_who_are_both_trusted(
    machine: Machine, remote: Counted, there: Path, keys: Signers
) -> None:
    """B goes on with A's session, and pushes it; C trusts both of them."""
    a = machine("a")
    turn(a, StampedEngine(), IDS, "chat")
    pushed_signed(a, remote, keys)
    b = keys.trusting(machine, "b", "a")
    pull(b, remote, "chat")
    turn(b, StampedEngine(), MORE, "chat")
    push(b, remote, ME, "chat")
    a_key, b_key = keys.public("a"), keys.public("b")
    assert signers(b.path) == [a_key] * 3 + [b_key] * 2
    manifest = manifest_in(there)
    assert manifest.signature is not None
    assert manifest.signature.signer == b_key
    c = keys.trusting(machine, "c", "a", "b")
    pull(c, remote, "chat")
    assert_saved(c, MORE, "chat")
    assert signers(c.path) == [a_key] * 3 + [b_key] * 2
    d = keys.trusting(machine, "d", "b")
    with pytest.raises(PartlyDone, match="no trusted key signed it"):
        pull(d, remote, "chat")
    engine = StampedEngine()
    turn(d, engine, MORE, "chat")
    assert engine.positions == list(range(87))
    e = keys.trusting(machine, "e", "a")
    with pytest.raises(Untrusted, match=b_key):
        pull(e, remote, "chat")


def test_a_block_that_is_here_counts_only_if_a_trusted_key_signed_it(
    machine: Machine, remote: Counted, keys: Signers
) -> None:
    """Else it is fetched again, and replaced."""
    a, plain = machine("a"), machine("b")
    turn(a, StampedEngine(), IDS, "chat")
    pushed_signed(a, remote, keys)
    turn(plain, StampedEngine(), IDS)
    plain.close()
    b = keys.trusting(machine, "b", "a")
    assert pull(b, remote, "chat").moved_files == 3
    assert signers(b.path) == [keys.public("a")] * 3
    c = keys.trusting(machine, "c", "a")
    turn(c, StampedEngine(), IDS)
    assert pull(c, remote, "chat").moved_files == 0, "this machine computed them itself"
    assert signers(c.path) == [keys.public("c")] * 3


def test_a_store_with_a_list_always_signs_what_it_pushes(
    machine: Machine, remote: Counted, there: Path, keys: Signers
) -> None:
    a = keys.trusting(machine, "a", "z")
    turn(a, StampedEngine(), IDS, "chat")
    push(a, remote, ME, "chat")
    assert signers(there) == [keys.public("a")] * 3
    assert manifest_in(there).signed


def test_a_store_with_a_list_refuses_to_push_a_session_that_nobody_signed(
    machine: Machine, remote: Counted, there: Path, keys: Signers
) -> None:
    plain = machine("a")
    turn(plain, StampedEngine(), IDS, "chat")
    plain.close()
    a = keys.trusting(machine, "a", "z")
    for sign in (False, True):
        with pytest.raises(Untrusted, match="session 'chat': no trusted key signed it") as caught:
            push(a, remote, ME, "chat", sign=sign)
        assert "resume and save it here" in caught.value.hint
    assert files_of(there) == {}
    turn(a, StampedEngine(), IDS, "chat")
    push(a, remote, ME, "chat")
    b = keys.trusting(machine, "b", "a")
    pull(b, remote, "chat")
    assert_saved(b, IDS, "chat")


def test_a_dry_run_signs_nothing(
    machine: Machine, remote: Counted, there: Path, keys: Signers
) -> None:
    a = machine("a")
    turn(a, StampedEngine(), IDS, "chat")
    before = {path: path.read_bytes() for path in a.path.rglob("*.safetensors")}
    with keys.machine("new"):
        report = push(a, remote, ME, "chat", sign=True, dry_run=True)
    assert report.moved_files == 4
    assert {path: path.read_bytes() for path in a.path.rglob("*.safetensors")} == before
    assert files_of(there) == {}
    assert not (keys.folder / "new.pem").exists(), "no key is made where nothing is written"


def test_signing_sets_damaged_blocks_aside_and_pushes_the_rest(
    machine: Machine, remote: Counted, there: Path, keys: Signers
) -> None:
    a = machine("a")
    turn(a, StampedEngine(), IDS, "chat")
    flip(chain_files(a.path)[2], -1)
    with keys.machine("a"), pytest.raises(PartlyDone, match="1 of 3 blocks"):
        push(a, remote, ME, "chat", sign=True)
    assert signers(there) == [keys.public("a")] * 2
    b = keys.trusting(machine, "b", "a")
    with pytest.raises(PartlyDone):
        pull(b, remote, "chat")
    engine = StampedEngine()
    turn(b, engine, IDS, "chat")
    assert engine.positions == list(range(32, 57))


def test_a_branch_and_a_pull_under_another_name_are_this_machines(
    machine: Machine, remote: Counted, keys: Signers
) -> None:
    """Its signature covered the name; who believed it signs for the new one."""
    a = machine("a")
    turn(a, StampedEngine(), IDS, "chat")
    pushed_signed(a, remote, keys)
    b = keys.trusting(machine, "b", "a")
    with keys.machine("b"):
        pull(b, remote, "chat", new_name="mine")
        Session(b, StampedEngine(), "mine").branch("branch", 40)
    for name, ids in (("mine", IDS), ("branch", IDS[:40])):
        found = b.sessions.load(ME, name)
        assert found.signature is not None
        assert found.signature.signer == keys.public("b")
        assert found.signed
        assert_saved(b, ids, name)


@pytest.mark.parametrize("codec", ["raw", "q8"])
def test_recompressing_keeps_everything_signed(
    machine: Machine, remote: Counted, keys: Signers, codec: str
) -> None:
    a = machine("a")
    turn(a, StampedEngine(), IDS, "chat")
    pushed_signed(a, remote, keys)
    b = keys.trusting(machine, "b", "a")
    pull(b, remote, "chat")
    recompress(b, "chat", get_codec(codec))
    assert_clean(b)
    assert set(signers(b.path)) <= {keys.public("a"), keys.public("b")}
    engine = StampedEngine()
    turn(b, engine, MORE, "chat", save=False)
    assert engine.positions == list(range(57, 87))
    push(b, remote, ME, "chat", force=codec != "raw")
    c = keys.trusting(machine, "c", "a", "b")
    pull(c, remote, "chat")
    assert_clean(c)


def test_recompressing_without_a_key_keeps_signatures_of_the_same_rows(
    machine: Machine, remote: Counted, keys: Signers
) -> None:
    a = machine("a")
    turn(a, StampedEngine(), IDS, "chat")
    pushed_signed(a, remote, keys)
    b = machine("b")
    pull(b, remote, "chat")
    before = signers(b.path)
    recompress(b, "chat", get_codec("raw"))
    assert signers(b.path) == before
    assert set(before) == {keys.public("a")}
    c = keys.trusting(machine, "c", "a")
    pull(c, remote, "chat")
    assert_saved(c, IDS, "chat")


def test_what_was_recompressed_without_a_list_is_signed_by_the_next_push(
    machine: Machine, remote: Counted, keys: Signers
) -> None:
    a = machine("a")
    turn(a, StampedEngine(), IDS, "chat")
    pushed_signed(a, remote, keys)
    b = machine("b")
    pull(b, remote, "chat")
    recompress(b, "chat", get_codec("raw"))
    pushed_signed(b, remote, keys, "b")
    c = keys.trusting(machine, "c", "a", "b")
    pull(c, remote, "chat")
    assert_saved(c, IDS, "chat")
    assert set(signers(c.path)) <= {keys.public("a"), keys.public("b")}


def test_evicted_blocks_are_named_again_only_as_far_as_they_are_believed(
    machine: Machine, remote: Counted, there: Path, keys: Signers
) -> None:
    """What went here and is still there stays in the manifest."""
    a = machine("a")
    turn(a, StampedEngine(), IDS, "chat")
    pushed_signed(a, remote, keys)
    for path in chain_files(a.path)[1:]:
        path.unlink()
    for index in a.path.glob("index.sqlite3*"):
        index.unlink()
    with keys.machine("a"):
        assert push(machine("a"), remote, ME, "chat", sign=True).evicted_blocks == 0
    b = keys.trusting(machine, "b", "a")
    pull(b, remote, "chat")
    assert_saved(b, IDS, "chat")


def test_a_block_that_goes_while_its_chain_is_sent_is_told_as_such(
    machine: Machine, remote: Counted, keys: Signers
) -> None:
    a = keys.trusting(machine, "a", "z")
    turn(a, StampedEngine(), IDS)
    names = [block_of(path.read_bytes()).record.name for path in chain_files(a.path)]
    items = contents.items_of_chain

    def and_gone(*words: object) -> object:
        found = items(*words)  # type: ignore[arg-type]
        for path in chain_files(a.path):
            path.unlink()
        return found

    with mock.patch.object(pushing, "items_of_chain", and_gone), pytest.raises(Vanished):
        pushing.push_chain(a, remote, names)


def test_a_removed_session_is_not_there(machine: Machine, remote: Counted, keys: Signers) -> None:
    with pytest.raises(NotFound):
        pull(keys.trusting(machine, "b", "a"), remote, "chat")
