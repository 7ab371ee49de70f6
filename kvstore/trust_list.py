"""Change whom a store believes, and what follows for what is stored: vouched for, or set aside."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvsnap.formats.errors import Damaged, KvsnapError, NotFound, Sealed, UsageError
from kvsnap.formats.signature import public_key
from kvsnap.kvstore.place import TRUST, change_settings
from kvsnap.kvstore.rebuild import read_ours
from kvsnap.kvstore.retry import try_again
from kvsnap.kvstore.session_file import read_session
from kvsnap.kvstore.signing import sign_blocks, sign_session, unsigned_blocks
from kvsnap.kvstore.store import Store
from kvsnap.kvstore.trust import UNSIGNED, VARIABLE, Trust

MOST_NAME = 200
_AT_ONCE = 100
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class TrustChange:
    """`vouched`: blocks that this machine signed; `set_aside`: blocks that no trusted key signed, now
    in quarantine; `sessions`: session files signed."""

    key: str
    name: str
    vouched: int = 0
    set_aside: int = 0
    sessions: int = 0


def add(
    store: Store,
    key: str,
    name: str = "",
    *,
    vouch: bool = False,
    progress: Progress = lambda done, total: None,
) -> TrustChange:
    """Believe a public key from now on; processes that have the store open go on as before.

    What no trusted key signed is set aside, and computed or fetched again when it is needed. With
    `vouch` it is signed by this machine's key instead: whoever says so knows that all of it was
    computed here. Raises `UsageError` for what is no key.
    """
    key = public_key(key)
    if len(name) > MOST_NAME or not name.isprintable():
        raise UsageError(f"a name has at most {MOST_NAME} letters, all of them printable")
    trust = Trust({**_listed(store), key: name})
    vouched = sessions = 0
    if vouch:
        vouched = sign_blocks(store, unsigned_blocks(store, trust), trust, progress)
        sessions = _sign_sessions(store, trust)
    change_settings(store.place, TRUST, lambda old: {**(old or {}), key: name})
    gone = _set_aside(store, trust, progress)
    return TrustChange(key, name, vouched, gone, sessions)


def remove(
    store: Store, key_or_name: str, progress: Progress = lambda done, total: None
) -> TrustChange:
    """Believe a key no more; what only it signed is set aside. Without any key left, the store asks
    for no signatures again. Raises `NotFound`."""
    listed = _listed(store)
    found = [k for k, name in listed.items() if key_or_name in (name, k)]
    if len(found) != 1:
        what = "several keys are" if found else "no key is"
        raise NotFound(f"{what} listed as {key_or_name!r}", "kvsnap trust ls shows the keys")
    (key,) = found
    left = {k: name for k, name in listed.items() if k != key}

    def without(old: dict[str, str] | None) -> dict[str, str]:
        return {k: name for k, name in (old or {}).items() if k != key}

    change_settings(store.place, TRUST, without)
    gone = _set_aside(store, Trust(left), progress) if left else 0
    return TrustChange(key, listed[key], 0, gone)


def _listed(store: Store) -> dict[str, str]:
    if store.trust is not None and store.trust.outside:
        raise UsageError(
            f"whom to trust is given from outside ({VARIABLE}), in place of the store's own list",
            "unset it to change the list, or change it there",
        )
    return store.trust.listed if store.trust is not None else {}


def _sign_sessions(store: Store, trust: Trust) -> int:
    done = 0
    for path, _, facts in store.listing.refresh():
        if facts.problem:
            continue
        # verify tells of those that cannot be read; a sealed one may be another tenant's
        with contextlib.suppress(Damaged, NotFound, Sealed, OSError):
            done += try_again(functools.partial(_sign_session, store, path, trust))
    return done


def _sign_session(store: Store, path: Path, trust: Trust) -> bool:
    session = read_session(path, store.opener.keys)
    return sign_session(store, session, trust) is not session


def _set_aside(store: Store, trust: Trust, progress: Progress) -> int:
    """The deepest first: what follows a block that goes is marked, and then there is little."""
    names = unsigned_blocks(store, trust)[::-1]
    done = 0
    for first in range(0, len(names), _AT_ONCE):
        with store.index.transaction() as db:
            for name in names[first : first + _AT_ONCE]:
                row = store.index.find(name)
                if row is None or row.lost is not None or trust.lists(row.signer):
                    continue
                found = read_ours(store.place.block(name))
                if found is not None and trust.lists(found.signer):
                    # Whoever signed it died between rename and row; it is read before it is used.
                    store.index.correct(db, name, found.size, found.signer)
                    continue
                store.index.lose(db, name, UNSIGNED)
                with contextlib.suppress(KvsnapError):  # whoever reads it finds the same
                    store.place.set_aside(store.place.block(name), UNSIGNED)
                done += 1
        progress(min(first + _AT_ONCE, len(names)), len(names))
    return done
