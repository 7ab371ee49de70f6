"""All that a tenant can do in a store and a remote that it shares, to find out what others have there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvsnap.formats.manifest import block_key
from kvsnap.formats.names import chain_names
from kvsnap.formats.tenant import Tenant, tenant_id
from kvsnap.kvstore.explain.explain import explain
from kvsnap.kvstore.inspect import describe_block, describe_session, find_pinnable
from kvsnap.kvstore.remotes import open_remote
from kvsnap.kvstore.remotes.base import Remote
from kvsnap.kvstore.session import Session
from kvsnap.kvstore.sharing import manifests
from kvsnap.kvstore.sharing.pull import pull
from kvsnap.kvstore.sharing.push import push
from kvsnap.kvstore.sharing.verify_remote import verify_remote
from kvsnap.kvstore.stats import stats
from kvsnap.kvstore.store import Store
from kvsnap.kvstore.tree import read_tree
from kvsnap.kvstore.verify import verify_session, verify_store
from kvsnap.testing.stamped import StampedEngine
from kvsnap.testing.turns import some_ids, turn
from tests.tenants import open_shared

BLOCK = 16
IDS = some_ids(8 * BLOCK + 5, 1)
"""What the curious one is curious about; whoever has it calls it "chat"."""
NEEDS_KEY = ("stats", "verify", "show a block", "pin a block", "tree", "verify remote")
"""Who gives no key is taken for whoever runs the store, and shown all of it."""
Steps = dict[str, Callable[[], Any]]


class Curious:
    """One tenant. `folder` has its stores: "shared", and others of its own; every step opens what it
    needs, as a new process would. `prefix` begins the name of a block that is another's."""

    def __init__(
        self, folder: Path, url: str, tenant: Tenant | None, prefix: str, encrypt: bool
    ) -> None:
        self.folder, self.url, self.tenant, self.prefix = folder, url, tenant, prefix
        self.encrypt, self.own = encrypt, tenant_id(tenant)

    def steps(self) -> Steps:
        """In the order of somebody who first looks, and then stores the same."""
        steps = {**self._looks(), **self._looks_at_remote(), **self._stores()}
        with_key = self.tenant is not None
        return {name: does for name, does in steps.items() if with_key or name not in NEEDS_KEY}

    def open(self, name: str = "shared", **options: Any) -> Store:
        store = open_shared(self.folder / name, BLOCK, self.encrypt, **options)
        store.keys.add(self.tenant)
        return store

    def ask(self, store: Store, name: str | None = None, *, save: bool = False) -> Any:
        """The prompt, as an application has it: what it is told, and what it had to compute."""
        engine = StampedEngine()
        done = turn(store, engine, IDS, name, tenant=self.tenant, save=save)
        engine.check_rows()
        return {"resumed": done.resumed, "saved": done.saved, "computed": engine.positions}

    def _looks(self) -> Steps:
        return {
            "look up": self._in_store(self.ask),
            "look up the session": self._in_store(lambda store: self.ask(store, "chat")),
            "explain": self._in_store(
                lambda store: explain(self._session(store, "chat"), IDS, check=True)
            ),
            "ls": self._in_store(
                lambda store: [(e.facts, e.stored_blocks) for e in store.listing.of(self.own)]
            ),
            "stats": self._in_store(lambda store: stats(store, self.tenant)),
            "verify": self._in_store(lambda store: verify_store(store, self.tenant)),
            "verify the session": self._in_store(
                lambda store: verify_session(store, self.own, "chat", self.tenant)
            ),
            "show": self._in_store(lambda store: describe_session(store, self.own, "chat")),
            "show a block": self._in_store(
                lambda store: describe_block(store, self.prefix, self.tenant)
            ),
            "pin a block": self._in_store(
                lambda store: find_pinnable(store, self.tenant, self.prefix)
            ),
            "tree": self._in_store(lambda store: read_tree(store, tenant=self.tenant)),
        }

    def _looks_at_remote(self) -> Steps:
        return {
            "ls remote": self._in_both(
                lambda store, remote: list(manifests.every(remote, store.keys, self.own))
            ),
            "verify remote": self._in_both(
                lambda _, remote: verify_remote(remote, tenant=self.tenant)
            ),
            "exists in remote": self._in_both(self._sizes),
            "pull": self._in_both(
                lambda store, remote: pull(store, remote, "chat", tenant=self.tenant)
            ),
            "read through": self._in_store(self.ask, name="other", remote=self.url),
            "read the session through": self._in_store(
                lambda store: self.ask(store, "chat"), name="other", remote=self.url
            ),
        }

    def _stores(self) -> Steps:
        def behind(store: Store) -> Any:
            done = self.ask(store, save=True)
            store.flush()
            return done

        def pushed(store: Store, remote: Remote) -> Any:
            return push(store, remote, self.own, "chat")

        return {
            "write behind": self._in_store(
                behind, name="other", remote=self.url, write_behind=True
            ),
            "save": self._in_store(lambda store: self.ask(store, "chat", save=True)),
            "push": self._in_both(pushed),
            "push again": self._in_both(pushed),
            "look up again": self._in_store(self.ask),
            "read through again": self._in_store(self.ask, name="third", remote=self.url),
            "pull again": self._in_both(
                lambda store, remote: pull(store, remote, "chat", tenant=self.tenant), name="fourth"
            ),
        }

    def _session(self, store: Store, name: str | None = None) -> Session:
        return Session(store, StampedEngine(), name, tenant=self.tenant)

    def _sizes(self, store: Store, remote: Remote) -> list[int | None]:
        names = chain_names(self._session(store).root.key, IDS, BLOCK)
        return [remote.size(block_key(name)) for name in names]

    def _in_store(self, does: Callable[[Store], Any], **options: Any) -> Callable[[], Any]:
        def opened() -> Any:
            with self.open(**options) as store:
                return does(store)

        return opened

    def _in_both(self, does: Callable[[Store, Remote], Any], **options: Any) -> Callable[[], Any]:
        def opened() -> Any:
            with self.open(**options) as store, open_remote(self.url) as remote:
                return does(store, remote)

        return opened
