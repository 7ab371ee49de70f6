"""Two machines go on with one session: what is replaced is always gone on from, unless by force."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kvsnap.formats.errors import Diverged
from kvsnap.formats.names import TokenIds
from kvsnap.kvstore.keyring import Keyring
from kvsnap.kvstore.remotes.counted import Counted
from kvsnap.kvstore.sharing import manifests
from kvsnap.kvstore.sharing.pull import pull
from kvsnap.kvstore.sharing.push import push
from kvsnap.kvstore.store import Store
from kvsnap.testing.aftermath import assert_saved
from kvsnap.testing.stamped import StampedEngine
from kvsnap.testing.turns import some_ids, turn
from tests.sharing.hooked import Hooked
from tests.sharing.objects import ME, ids_there, save_and_push

Machine = Callable[..., Store]
IDS = some_ids(57)
MINE = np.concatenate([IDS, some_ids(20, 1)])
YOURS = np.concatenate([IDS, some_ids(20, 2)])


def ids_in(remote: Counted) -> list[int]:
    """Of the session that the remote shows now."""
    manifest = manifests.require(remote, Keyring(), ME, "chat").manifest
    assert manifest is not None
    return list(manifests.session_of(remote, Keyring(), manifest)[0].record.token_ids.tolist())


@pytest.fixture
def both(machine: Machine, remote: Counted) -> tuple[Store, Store]:
    """Two machines that hold the same session, and so does the remote."""
    a, b = machine("a"), machine("b")
    save_and_push(a, remote, IDS, "chat")
    pull(b, remote, "chat")
    return a, b


def test_what_goes_on_replaces_there_and_here(both: tuple[Store, Store], remote: Counted) -> None:
    a, b = both
    turn(a, StampedEngine(), MINE, "chat")
    push(a, remote, ME, "chat")
    pull(b, remote, "chat")
    assert_saved(b, MINE, "chat")


def test_other_tokens_are_refused_there_and_here(
    both: tuple[Store, Store], remote: Counted
) -> None:
    a, b = both
    turn(a, StampedEngine(), MINE, "chat")
    turn(b, StampedEngine(), YOURS, "chat")
    push(a, remote, ME, "chat")
    with pytest.raises(Diverged, match="other tokens from position 57 on") as caught:
        push(b, remote, ME, "chat")
    assert "--as" in caught.value.hint
    with pytest.raises(Diverged, match="other tokens from position 57 on"):
        pull(b, remote, "chat")
    assert ids_in(remote) == MINE.tolist()
    assert_saved(b, YOURS, "chat")


def test_what_is_older_is_refused_there_and_here(
    both: tuple[Store, Store], remote: Counted
) -> None:
    a, b = both
    turn(a, StampedEngine(), MINE, "chat")
    with pytest.raises(Diverged, match="it goes on from this one") as raised:
        pull(a, remote, "chat")
    assert "push it" in raised.value.hint
    push(a, remote, ME, "chat")
    with pytest.raises(Diverged, match="it goes on from this one") as raised:
        push(b, remote, ME, "chat")
    assert "pull it" in raised.value.hint, "and not --force, which would lose what is there"
    assert ids_in(remote) == MINE.tolist()


def test_the_same_tokens_of_a_lower_revision_are_refused(
    both: tuple[Store, Store], remote: Counted
) -> None:
    a, b = both
    turn(a, StampedEngine(), IDS, "chat").session.save({"title": "newer"})
    with pytest.raises(Diverged, match="revision 3"):
        pull(a, remote, "chat")
    push(a, remote, ME, "chat")
    with pytest.raises(Diverged, match="revision 3"):
        push(b, remote, ME, "chat")


def test_two_saves_of_one_revision_are_two_versions(
    both: tuple[Store, Store], remote: Counted
) -> None:
    """Both went on from the same version; the notes of the first must not vanish."""
    for store, title in zip(both, ("mine", "yours"), strict=True):
        engine = StampedEngine()
        turn(store, engine, IDS, "chat", save=False).session.save({"title": title})
    a, b = both
    push(a, remote, ME, "chat")
    with pytest.raises(Diverged):
        push(b, remote, ME, "chat")
    with pytest.raises(Diverged):
        pull(b, remote, "chat")
    assert b.sessions.load(ME, "chat").record.notes == {"title": "yours"}


def test_force_replaces_there_and_here(both: tuple[Store, Store], remote: Counted) -> None:
    a, b = both
    turn(a, StampedEngine(), MINE, "chat")
    turn(b, StampedEngine(), YOURS, "chat")
    push(a, remote, ME, "chat")
    push(b, remote, ME, "chat", force=True)
    assert ids_in(remote) == YOURS.tolist()
    pull(a, remote, "chat", force=True)
    assert_saved(a, YOURS, "chat")


def test_under_another_name_both_are_kept(both: tuple[Store, Store], remote: Counted) -> None:
    a, b = both
    turn(a, StampedEngine(), MINE, "chat")
    turn(b, StampedEngine(), YOURS, "chat")
    push(a, remote, ME, "chat")
    pull(b, remote, "chat", new_name="theirs")
    assert_saved(b, MINE, "theirs")
    assert_saved(b, YOURS, "chat")


def other_pushes_first(other: Store, remote: Counted) -> Hooked:
    """The remote, to which another machine pushes just before a manifest is replaced."""

    def push_theirs(operation: str, key: str) -> None:
        if operation == "replace":
            push(other, remote, ME, "chat")

    return Hooked(remote, push_theirs)


def test_of_two_who_push_at_once_one_wins_and_the_other_loses_nothing(
    both: tuple[Store, Store], remote: Counted
) -> None:
    a, b = both
    turn(a, StampedEngine(), MINE, "chat")
    turn(b, StampedEngine(), YOURS, "chat")

    with pytest.raises(Diverged, match="meanwhile"):
        push(a, other_pushes_first(b, remote), ME, "chat")
    assert ids_in(remote) == YOURS.tolist()
    assert_saved(a, MINE, "chat")
    with pytest.raises(Diverged, match="other tokens"):
        push(a, remote, ME, "chat")


def test_force_does_not_reach_what_was_pushed_after_it_looked(
    both: tuple[Store, Store], remote: Counted
) -> None:
    a, b = both
    turn(a, StampedEngine(), MINE, "chat")
    turn(b, StampedEngine(), YOURS, "chat")

    with pytest.raises(Diverged, match="meanwhile"):
        push(a, other_pushes_first(b, remote), ME, "chat", force=True)
    assert ids_in(remote) == YOURS.tolist()


def test_a_save_during_a_pull_is_not_lost(both: tuple[Store, Store], remote: Counted) -> None:
    a, b = both
    turn(a, StampedEngine(), MINE, "chat")
    push(a, remote, ME, "chat")

    def save_here(operation: str, key: str) -> None:
        if key.startswith("blocks/") and ids_there(b, "chat") == IDS.tolist():
            turn(b, StampedEngine(), YOURS, "chat")

    with pytest.raises(Diverged, match="saved here meanwhile"):
        pull(b, Hooked(remote, save_here), "chat")
    assert_saved(b, YOURS, "chat")


def test_a_name_pulled_twice_follows_the_remote(both: tuple[Store, Store], remote: Counted) -> None:
    """A pulled copy under another name counts its revisions anew; it still goes on."""
    a, b = both
    pull(b, remote, "chat", new_name="copy")
    turn(a, StampedEngine(), MINE, "chat")
    push(a, remote, ME, "chat")
    pull(b, remote, "chat", new_name="copy")
    assert_saved(b, MINE, "copy")


@pytest.mark.parametrize("cut", [0, 16, 40])
def test_a_session_that_was_cut_back_is_pushed_by_force_only(
    both: tuple[Store, Store], remote: Counted, cut: int
) -> None:
    a, _ = both
    shorter: TokenIds = np.concatenate([IDS[:cut], some_ids(5, 9)])
    turn(a, StampedEngine(), shorter, "chat")
    with pytest.raises(Diverged, match=f"other tokens from position {cut} on"):
        push(a, remote, ME, "chat")
    push(a, remote, ME, "chat", force=True)
    assert ids_in(remote) == shorter.tolist()
