"""Store: the one door to a folder of blocks and sessions."""

from __future__ import annotations

import contextlib
import functools
import os
import sqlite3
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Self

from kvsnap.formats.codecs import compiled
from kvsnap.formats.errors import KvsnapError, NotFound, StoreReadOnly, UsageError, Vanished
from kvsnap.formats.session import SessionFile
from kvsnap.formats.tenant import Tenant, tenant_id
from kvsnap.kvstore import files
from kvsnap.kvstore.blocks import Blocks
from kvsnap.kvstore.break_even import BreakEven
from kvsnap.kvstore.break_even import read as read_break_even
from kvsnap.kvstore.budget import budget, parse_size
from kvsnap.kvstore.calibrations import Calibrations
from kvsnap.kvstore.holds import Holds
from kvsnap.kvstore.index import FAILED, Index
from kvsnap.kvstore.keyring import Keyring
from kvsnap.kvstore.links import refuse_links
from kvsnap.kvstore.locks import Owner
from kvsnap.kvstore.mounts import refuse_network_file_system
from kvsnap.kvstore.opener import Opener
from kvsnap.kvstore.pins import Pins, fill_pins
from kvsnap.kvstore.place import ENCRYPT, Place, change_settings, default_path, read_settings
from kvsnap.kvstore.ram import Ram
from kvsnap.kvstore.rebuild import fill_from_files
from kvsnap.kvstore.session_list import SessionList, fill_sessions
from kvsnap.kvstore.sessions import Sessions
from kvsnap.kvstore.space import Space
from kvsnap.kvstore.tenants_apart import refuse_shared_store
from kvsnap.kvstore.trust import trust_of
from kvsnap.kvstore.unfinished import fill_unfinished
from kvsnap.kvstore.weights import FileDigests

if TYPE_CHECKING:
    from kvsnap.kvstore.remotes.base import Remote
    from kvsnap.kvstore.sharing.behind import Behind
    from kvsnap.kvstore.sharing.through import Through


ENCRYPT_VARIABLE = "KVSNAP_ENCRYPT"


class Store:
    """Open a store; nothing is created before something is written.

    `path` defaults to KVSNAP_STORE or the platform's user cache folder. Any number of threads and
    processes may use one folder. `capacity` and `min_free` are sizes like "20GB" (see budget.py for
    where else they may come from); `ram` is the size of a tier of decoded blocks in memory, for a
    process that resumes again and again. `remote` (a URL, or one that is open) is asked for what is
    missing here; with `write_behind` what is saved goes there, too, in the background: `flush` and
    `close` wait for that, and raise what went wrong. `trust`: public keys besides those of the
    store's own list; with any, only what they (or this machine) signed is used. `encrypt` makes the
    store an encrypted one, for good: what is written from then on is sealed by its tenant's key. Raises `StoreError` where the folder cannot be one and
    `Unsupported` for another format version.
    """

    def __init__(
        self,
        path: str | Path | None = None,
        *,
        capacity: str | int | None = None,
        min_free: str | int | None = None,
        ram: str | int | None = None,
        remote: str | Remote | None = None,
        write_behind: bool = False,
        trust: Iterable[str] = (),
        encrypt: bool = False,
    ) -> None:
        root = Path(path).expanduser() if path is not None else default_path()
        place = Place(root.absolute())
        settings = read_settings(place)
        refuse_links(place)
        refuse_network_file_system(place.root)
        stored = (settings.capacity, settings.min_free)
        self.budget = budget(place.root, stored, capacity, min_free)
        self.problem = settings.problem
        self.trust = trust_of(settings.trust, trust)
        """Whom the store believes; None where it asks for no signatures."""
        self.keys = Keyring()
        """Tenants' keys, of whoever uses the store through this object."""
        self._apart: set[str] = set()
        """Tenants who do not share this store with another."""
        if os.environ.get("KVSNAP_COMPILED") == "1":
            compiled.allow()
        self.progress: Callable[[int, int], None] = lambda done, total: None
        """Called with (files done, files) while the index is built anew."""
        self.index = Index(place.index, self._fill)
        self.block_size = settings.block_size
        self.place = place
        self.keys.seals = settings.encrypt
        if not settings.created and files.is_folder(place.blocks):
            self.block_size = self._block_size_in_use() or settings.block_size
            encrypt = encrypt or bool(self.index.query("SELECT 1 FROM roots WHERE tenant != ''"))
        self.place = Place(place.root, self.block_size)
        if (encrypt or _encrypt_all()) and not settings.encrypt:
            self._become_encrypted()
        self.owner = Owner(self.place.temporary)
        self.holds = Holds(self.index, self.owner)
        self.space = Space(self.place, self.index, self.holds, self.budget)
        tier = Ram(parse_size(ram)) if ram not in (None, 0) else None
        self.calibrations = Calibrations(self.place, self.index, self.space)
        self.opener = Opener(self.trust, self.calibrations.prepare, self.keys)
        own = (self.place, self.index, self.space)
        self.blocks = Blocks(*own, tier, self.opener)
        self.sessions = Sessions(*own, self.opener)
        self.pins = Pins(self.place, self.index, self.sessions, self.space)
        self.listing = SessionList(self.place, self.index, self.keys)
        self.file_digest = FileDigests()
        self.through: Through | None = None
        """Where what is missing here is looked for."""
        self.behind: Behind | None = None
        """Where what is saved goes."""
        if remote is not None:
            self._connect(remote, write_behind)
        elif write_behind:
            raise UsageError("write_behind needs a remote", "give its URL: remote=...")

    @functools.cached_property
    def break_even(self) -> BreakEven:
        """From which length on restoring pays, as `kvsnap bench crossover` measured it here."""
        return read_break_even(self.place)

    @property
    def path(self) -> Path:
        return self.place.root

    @property
    def encrypt(self) -> bool:
        """Whether what is written is sealed by its tenant's key."""
        return self.keys.seals

    def check_tenant(self, tenant_id: str) -> None:
        """Before anything is computed that is to be stored for a tenant: raises `UsageError` where it
        could not be sealed, or would lie open to other tenants."""
        if not self.keys.seals:  # or another process has made it an encrypted one meanwhile
            self.keys.seals = read_settings(self.place).encrypt
        if self.keys.seals:
            self.keys.require(tenant_id)
        elif tenant_id not in self._apart:
            refuse_shared_store(self.place, self.index, tenant_id, self.keys.get(tenant_id))
            self._apart.add(tenant_id)

    def sync(self, names: Sequence[bytes]) -> None:
        """Bring a chain's files to the device, where they are not there yet, then their folders.

        Files go in parallel; a folder's entry is synced after the files in it. After a failed fsync
        the kernel may drop the pages and let the next one succeed, so blocks that it failed for are
        noted, and written anew by the next save of any process.
        """
        gone = Vanished("a block was removed while its session was saved", "save again")
        due: dict[bytes, int] = {}
        for name in names:
            row = self.index.find(name)
            size, changed = files.size_and_change(self.place.block(name))
            if row is None or not row.reachable or size != row.bytes or row.synced == FAILED:
                raise gone
            if row.synced != changed:
                due[name] = changed
        failed = files.sync(self.place.block(name) for name in due)
        if any(isinstance(error.__cause__, FileNotFoundError) for error in failed.values()):
            raise gone
        if failed:
            self.blocks.doubt([name for name in due if self.place.block(name) in failed])
            raise next(iter(failed.values()))
        if due:
            folders = {self.place.block(name).parent for name in due}
            files.sync_all([*folders, self.place.blocks, self.place.root])
            if not self.index.mark_synced(due):
                raise gone

    def find_session(self, name: str, tenant: Tenant | None) -> SessionFile:
        """A session of this store, or of its remote, from where it is pulled. Raises `NotFound`, or
        `Damaged` with the file left alone."""
        self.keys.add(tenant)
        try:
            return self.sessions.load(tenant_id(tenant), name)
        except NotFound:
            if self.through is None:
                raise
        try:
            self.through.bring_session(name, tenant)
        except KvsnapError:
            with contextlib.suppress(NotFound):  # another process may have brought it meanwhile
                return self.sessions.load(tenant_id(tenant), name)
            raise
        return self.sessions.load(tenant_id(tenant), name)

    def flush(self) -> None:
        """Wait until what was saved is in the remote, where it goes there in the background. Raises
        the first error since the last time; what it was about is pushed again by the next save."""
        if self.behind is not None:
            self.behind.flush()

    def close(self) -> None:
        try:
            if self.behind is not None:
                self.behind.close()
        finally:
            if self.through is not None:
                self.through.close()
            self.index.write_notes()
            self.index.close()
            self.owner.release()

    def _connect(self, remote: str | Remote, write_behind: bool) -> None:
        # Imported here: most stores have no remote, and obstore alone takes 50 ms.
        from kvsnap.kvstore.remotes import open_remote
        from kvsnap.kvstore.sharing.behind import Behind
        from kvsnap.kvstore.sharing.through import OPTIONS, Through

        near = open_remote(remote, OPTIONS) if isinstance(remote, str) else remote
        self.through = Through(self, near)
        if write_behind:
            patient = open_remote(remote) if isinstance(remote, str) else remote
            self.behind = Behind(self, patient)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _block_size_in_use(self) -> int | None:
        """That of the blocks stored last, where kvsnap.json is lost or damaged: with another one
        nothing that is stored would ever be found again."""
        sql = (
            "SELECT b.length FROM blocks b JOIN roots r ON r.id = b.root WHERE b.state = 0"
            ' AND b.lost IS NULL AND r.identity NOT LIKE \'%"family":"vllm"%\''
            ' AND r.identity NOT LIKE \'%"family":"sglang"%\' ORDER BY b.id DESC LIMIT 1'
        )  # those of serving engines have the length that the engine asked for
        for (size,) in self.index.query(sql):
            if type(size) is int and 1 <= size <= 2**16:
                return size
        return None

    def _become_encrypted(self) -> None:
        """For good; also where kvsnap.json is lost, and there are sealed files."""
        self.keys.seals = True
        with contextlib.suppress(StoreReadOnly):  # nothing will be written then
            change_settings(self.place, ENCRYPT, lambda old: True)

    def _fill(self, db: sqlite3.Connection) -> None:
        fill_from_files(self.place, db, self.progress)
        fill_sessions(self.place, db)
        fill_pins(self.place, db)
        fill_unfinished(self.place, db)


def _encrypt_all() -> bool:
    """Whether KVSNAP_ENCRYPT asks for it. Raises `UsageError` for a word that may mean anything: who
    takes it for a yes must not find out by what lies open."""
    value = os.environ.get(ENCRYPT_VARIABLE, "")
    if value not in ("", "0", "1"):
        raise UsageError(f"{ENCRYPT_VARIABLE} is {value!r}", "give 1, or unset it")
    return value == "1"
