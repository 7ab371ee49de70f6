"""Block files on disk: put one, read one with every check, set a damaged one aside.

A hit is believed only after the file's own record equals what was asked for, token id by token id.
Any damage is a miss with a reason: `Miss` is raised here, and nothing above it lets it out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace

from kvsnap.formats.block import BlockFile, BlockRecord, pack_block
from kvsnap.formats.codecs import Codec
from kvsnap.formats.container import MAX_HEADER
from kvsnap.formats.errors import Damaged, KvsnapError, Sealed, StoreError, Unsupported
from kvsnap.formats.identity import Root
from kvsnap.formats.layout import Layout, Ranges, Rows
from kvsnap.formats.rowset import Targets
from kvsnap.formats.sealed import seal
from kvsnap.kvstore import events, files
from kvsnap.kvstore.compare import COLLISION, difference
from kvsnap.kvstore.foreign import Foreign
from kvsnap.kvstore.holds import Lease
from kvsnap.kvstore.index import FAILED, Index, Row
from kvsnap.kvstore.opener import Opener, clear_of_block
from kvsnap.kvstore.place import Place
from kvsnap.kvstore.ram import Ram
from kvsnap.kvstore.space import Space
from kvsnap.kvstore.trust import UNSIGNED
from kvsnap.kvstore.wanted import Miss, Wanted

_SCRATCH = files.Scratch()
_MOST_SEEN = 100_000

Asked = tuple[Root, Wanted]
"""What a file's record is compared with."""


class Blocks:
    """Put and read block files of one store. Safe for threads and processes."""

    def __init__(
        self,
        place: Place,
        index: Index,
        space: Space,
        ram: Ram | None = None,
        opener: Opener | None = None,
    ) -> None:
        self.place, self.index, self.space, self.ram = place, index, space, ram
        self.opener = opener or Opener()
        self.trust = self.opener.trust
        self.misses: dict[bytes, str] = {}
        """Verdicts of this process: a block that failed once is not looked for again until it is
        stored again. Without it a read-only store would offer the same damaged block for ever."""
        self._seen: dict[bytes, int] = {}
        """Blocks that this process wrote, or read whole and right; when the file last changed then."""
        self._doubtful: set[bytes] = set()
        self._read_again: set[bytes] = set()

    def offers(self, name: bytes) -> bool:
        """Whether a block can be read, as far as index, memory and verdicts tell. True for all
        blocks before one that it is true for, and so good for galloping."""
        if self.ram is not None and name in self.ram:
            return True
        return self.index.is_reachable(name)

    def has(self, name: bytes) -> bool:
        """Row and file of the recorded size: what a save may leave out."""
        row = self.index.find(name)
        if row is None or row.lost is not None or not row.reachable or name in self.misses:
            return False
        if row.synced == FAILED or name in self._doubtful:
            return False
        if self.trust is not None and not self.trust.lists(row.signer):
            self.set_aside(name, UNSIGNED)
            return False
        if self.opener.keys.seals and not row.sealed:
            return False  # it is written once more, sealed
        size, changed = files.size_and_change(self.place.block(name))
        if size == row.bytes:
            return self._believed(row, changed)
        self.set_aside(name, "the file is missing" if size is None else "the file's length changed")
        return False

    def _believed(self, row: Row, changed: int) -> bool:
        """An unsynced file of an earlier process may have its length and not its content, after a
        power cut; before it counts as saved it is read. One of this process, or a synced one, not.
        """
        if changed in (row.synced, self._seen.get(row.name)):
            return True
        try:
            found = self._intact(row.name, None)
        except Sealed:
            return False  # nobody here can tell
        if found is not None and len(found[0]) == row.bytes:
            self._see(row.name, changed)
            return True
        self.set_aside(row.name, "the content is not what was written")
        return False

    def _see(self, name: bytes, changed: int) -> None:
        if len(self._seen) >= _MOST_SEEN:
            self._seen.clear()  # they are read once more, if they are not synced by then
        self._seen[name] = changed

    def put(
        self,
        root: Root,
        wanted: Wanted,
        codec: Codec,
        layout: Layout,
        rows: Rows,
        lease: Lease | None = None,
        *,
        anew: bool = False,
    ) -> int:
        """Store one block or state checkpoint whose parent is stored; returns bytes written, 0 where it was there.

        `anew` writes it in any case, over the file that is there: by another lossless codec.

        `rows` are copied before this returns. The file is not synced: a save does that. The lease
        moves on to the block, so that nobody evicts it while the next one is written.
        """
        if not anew and self.has(wanted.name):
            return 0
        key = self.trust.key if self.trust is not None else None
        before = self._intact(wanted.name, (root, wanted)) if anew and key is None else None
        kept = before[1].signature if before is not None and before[1].signed else None
        packed = pack_block(wanted.record(root), codec, layout, rows, key, kept)
        events.block_encoded(rows, packed.size)
        signer = key.public if key is not None else kept.signer if kept is not None else ""
        file = self._sealed(root, wanted, Foreign(codec, packed, signer))
        return self._publish(root, wanted, file, lease, anew=anew)

    def _sealed(self, root: Root, wanted: Wanted, file: Foreign) -> Foreign:
        """As this store keeps it. Raises `UsageError` where it is to be sealed and there is no key."""
        if not self.opener.keys.seals or file.sealed:
            return file
        record, tenant = wanted.record(root), self.opener.keys.require(root.tenant_id)
        packed = seal(file.packed, clear_of_block(record, root.tenant_id, file.signer), tenant)
        return replace(file, packed=packed, sealed=True)

    def adopt(
        self, root: Root, wanted: Wanted, foreign: Foreign, lease: Lease | None = None
    ) -> int:
        """Store a file that came from elsewhere, its bytes as they are (in an encrypted store sealed);
        returns bytes written. Its parent is stored."""
        if self.has(wanted.name):
            return 0
        return self._publish(root, wanted, self._sealed(root, wanted, foreign), lease)

    def _publish(
        self,
        root: Root,
        wanted: Wanted,
        file: Foreign,
        lease: Lease | None,
        *,
        anew: bool = False,
    ) -> int:
        path, packed = self.place.block(wanted.name), file.packed
        with self.space.write(packed, wanted.name) as room:
            files.make_dir(path.parent)
            if files.file_size(path) is not None:
                # What stands there may be synced and part of a session that was reported saved.
                files.sync_all([room.path])
            with self.index.transaction() as db:
                there = not anew and self._already_there(root, wanted)
                if not there:
                    self.index.insert(db, file.entry(root, wanted))
                if lease is not None:
                    lease.move(db, wanted.name, deeper=True)
                if not there:
                    if files.is_folder(path):
                        self.place.set_aside(path, "a folder stood in the file's place")
                    room.publish(db, path)
                    events.block_written(packed.size)
        self.misses.pop(wanted.name, None)
        self._doubtful.discard(wanted.name)
        if not there:
            self._see(wanted.name, files.size_and_change(path)[1])
        return 0 if there else packed.size

    def read_into(
        self,
        root: Root,
        wanted: Wanted,
        layout: Layout,
        out: Targets,
        tokens: slice,
    ) -> None:
        """Decode rows [tokens) of one block into `out`, after every check. Raises `Miss`.

        `layout` is that of blocks, without the groups that have a span. `wanted.token_ids` may be
        fewer than the block's for a sibling that shares only its front; the file must then begin
        with them and its name must follow from all its ids.
        """
        if self.ram is not None and self.ram.read_into(root, wanted, layout, out, tokens):
            events.block_found_in_memory()
            return
        block = self._load(root, wanted, layout, root.block_size)
        try:
            block.decode_into(layout, out, tokens)
        except Unsupported as error:  # says nothing against the file
            raise self._missed(root, wanted, error.what, aside=False) from error
        except Damaged as error:
            raise self._missed(root, wanted, error.what, aside=True, decode=True) from error

    def read_state(self, root: Root, wanted: Wanted, layout: Layout) -> Rows:
        """The rows of a state checkpoint, of all groups of the model's layout. Raises `Miss`."""
        record = wanted.record(root)
        state = self._load(root, wanted, layout, record.ranges(layout))
        try:
            rows = layout.empty(record.ranges(layout))
            state.decode_into(layout, rows)
        except Unsupported as error:
            raise self._missed(root, wanted, error.what, aside=False) from error
        except Damaged as error:
            raise self._missed(root, wanted, error.what, aside=True, decode=True) from error
        return rows

    def set_aside(
        self, name: bytes, reason: str, asked: Asked | None = None, *, decode: bool = False
    ) -> bool:
        """Quarantine a block's file and mark what follows it unreachable, in one transaction.

        The file is looked at again inside: another process may have stored the block anew; True
        where it has. In a store that cannot be written only this process remembers the verdict.
        """
        self.misses[name] = reason
        self._seen.pop(name, None)
        path = self.place.block(name)
        try:
            with self.index.transaction() as db:
                row = self.index.find(name)
                found = self._intact(name, asked, decode=decode) if row is not None else None
                if found is not None:
                    self.index.correct(db, name, len(found[0]), found[1].signer)
                    return True
                if row is not None:
                    self.index.lose(db, name, reason)
                self.place.set_aside(path, reason)
        except (StoreError, Sealed):
            pass  # remembered above; the caller's read goes on without the block
        return False

    def doubt(self, names: Sequence[bytes]) -> None:
        """Blocks that could not be brought to the device: good to read, but not to rely on."""
        self._doubtful.update(names)
        for name in names:
            self._seen.pop(name, None)
        with contextlib.suppress(StoreError):  # this process remembers; others may have to find out
            self.index.mark_failed(names)

    def _load(self, root: Root, wanted: Wanted, layout: Layout, tokens: int | Ranges) -> BlockFile:
        """The block over this thread's scratch buffer: decode it before the next one is read."""
        path = self.place.block(wanted.name)
        changed = files.size_and_change(path)[1]
        try:
            buffer = files.read_whole(path, _SCRATCH, _largest(root, layout, tokens))
            block = self.opener.block(buffer, root.tenant_id)
            self._compare(block.record, root, wanted)
            self._see(wanted.name, changed)
            events.block_read(len(buffer))
        except Miss as miss:
            raise self._missed(root, wanted, miss.reason, aside=False) from None
        except FileNotFoundError as error:
            raise self._missed(root, wanted, "the file is missing", aside=True) from error
        except OSError as error:  # a permission or a device error says nothing about the bytes
            reason = f"cannot be read: {error.strerror}"
            raise self._missed(root, wanted, reason, aside=False) from error
        except Unsupported as error:
            raise self._missed(root, wanted, error.what, aside=False) from error
        except KvsnapError as error:
            raise self._missed(root, wanted, error.what, aside=True) from error
        return block

    def _already_there(self, root: Root, wanted: Wanted) -> bool:
        """Whether another process stored the block meanwhile, or a verdict of ours was rash."""
        row, path = self.index.find(wanted.name), self.place.block(wanted.name)
        if row is None or not row.reachable or row.synced == FAILED:
            return False
        size, changed = files.size_and_change(path)
        if size != row.bytes or wanted.name in self._doubtful:
            return False
        if self.trust is not None and not self.trust.lists(row.signer):
            return False
        if self.opener.keys.seals and not row.sealed:
            return False
        known = changed in (row.synced, self._seen.get(wanted.name))
        if known and wanted.name not in self.misses:
            return True
        found = self._intact(wanted.name, (root, wanted), decode=True)
        return found is not None and len(found[0]) == row.bytes

    def _intact(
        self, name: bytes, asked: Asked | None, *, decode: bool = False
    ) -> tuple[memoryview, BlockFile] | None:
        """A file that is intact, believed and, as far as can be told, the block of this name. Raises
        `Sealed` where it may be, and the key is not at hand."""
        try:
            buffer = files.read_whole(self.place.block(name))
            block = self.opener.block(buffer, asked[0].tenant_id if asked is not None else None)
            if decode:
                block.check_content()
            if asked is not None:
                self._compare(block.record, *asked)
        except Sealed:
            raise
        except (OSError, KvsnapError, Miss):
            return None
        return (buffer, block) if block.record.name == name else None

    @staticmethod
    def _compare(record: BlockRecord, root: Root, wanted: Wanted) -> None:
        """The collision check. `Damaged`: no file of this name may say that; `Miss`: it may."""
        found = difference(record, root, wanted)
        if found == COLLISION:
            raise Miss(wanted.name, found)
        if found is not None:
            raise Damaged(found)

    def _missed(
        self, root: Root, wanted: Wanted, reason: str, *, aside: bool, decode: bool = False
    ) -> Miss:
        """`decode`: it was the rows that could not be decoded, which no digest tells."""
        events.block_missed(reason, against_file=aside)
        intact = aside and self.set_aside(wanted.name, reason, (root, wanted), decode=decode)
        self.misses[wanted.name] = reason
        if intact and wanted.name not in self._read_again:
            # Evicted and stored again while it was read. Once: a disk that reads now right, now
            # wrong, must not keep the caller looking for ever.
            self._read_again.add(wanted.name)
            self.misses.pop(wanted.name, None)
        with contextlib.suppress(StoreError):
            if self.index.find(wanted.name) is None:
                # Evicted between look-up and read. Nothing offers it any more, and whoever stores
                # it again must not be passed over.
                self.misses.pop(wanted.name, None)
        return Miss(wanted.name, reason)


def _largest(root: Root, layout: Layout, tokens: int | Ranges) -> int:
    """No file of such rows is longer: codecs never store more than the rows."""
    return 2 * MAX_HEADER + layout.size(tokens) + 4 * root.block_size
