"""What of a remote's manifest follows from the session's own token ids: the rest is not believed.

And how large what comes may be. A hostile remote chooses the layout that its files are read by, so
none of the bounds follows from that alone.
"""

from __future__ import annotations

from kvsnap.formats.block import STATE as STATE_EXTRAS
from kvsnap.formats.container import header_size
from kvsnap.formats.errors import Damaged, Unsupported, UsageError
from kvsnap.formats.identity import Root, root_behind
from kvsnap.formats.layout import Layout
from kvsnap.formats.manifest import BLOCK, CALIBRATION, STATE, Manifest
from kvsnap.formats.names import chain_names
from kvsnap.formats.session import SessionFile
from kvsnap.formats.tenant import NO_TENANT_ID, Tenant
from kvsnap.kvstore.match import chain, state_at
from kvsnap.kvstore.wanted import Wanted

MOST_ROWS = 2**27
"""Bytes of one block's rows, or of a tail's: they are decoded when they come, and zstd shrinks what is
all alike 30,000-fold. A block of 64 tokens of a model of 405B in f32 has 2^26."""
MOST_STATE = 2**30
"""Of a state checkpoint's. Windows of 1,024 tokens over 52 layers of Gemma 3 27B have 436 MB."""
MOST_SEALING = 4096
"""What sealing adds to a file."""
MOST_CALIBRATION = 2**28
MOST_HEADER = 2**18
"""Of manifests, blocks and calibrations from elsewhere: JSON takes up to 25 times its size in memory."""
MOST_SESSION_HEADER = 3 * 2**20
"""Of a session's file, whose notes may hold a long chat: 1.5 million letters, or 200,000 of Chinese."""
MOST_TABLES = 2**16
"""Brackets in a header: 64 bytes or more of memory for each."""


def wanted_files(manifest: Manifest, session: SessionFile, root: Root) -> dict[bytes, Wanted]:
    """What each block and checkpoint must say of itself, from the session's token ids."""
    record, key = session.record, root.key
    names, size = list(record.chain), record.block_size
    found = {block.name: block for block in chain(names, record.token_ids, size)}
    for item in manifest.of_kind(STATE):
        state = state_at(key, names, record.token_ids, item.position, size)
        found[state.name] = state
    return found


def longest_block(wanted: Wanted, layout: Layout) -> int:
    """No block or state checkpoint of such rows is longer: codecs never store more than the rows."""
    tokens = len(wanted.token_ids)
    if wanted.extras == STATE_EXTRAS:
        size = layout.size(layout.ranges_at(wanted.start, wanted.stop))
    else:
        size = layout.in_blocks.size(tokens)
    size += MOST_SEALING
    most = MOST_STATE if wanted.extras == STATE_EXTRAS else MOST_ROWS
    return min(MOST_HEADER + size + 4 * tokens, MOST_HEADER + most)


def check_layout(session: SessionFile, layout: Layout) -> None:
    """Raise `Unsupported` where rows of that layout are larger than any model's."""
    record = session.record
    block = layout.in_blocks.size(record.block_size)
    last = record.tail_start
    state = layout.size(layout.ranges_at(last, last + record.block_size - 1))
    if block > MOST_ROWS or (layout.needs_state and state > MOST_STATE):
        raise Unsupported(
            f"one block of the session has {max(block, state)} bytes of rows",
            "no model's are that large; do not trust this remote",
        )


def check_header(data: memoryview, most: int = MOST_HEADER) -> None:
    """Raise `Damaged` for a header that is longer than it can need to be, before it is parsed."""
    size = header_size(bytes(data[:8]))
    if size > most:
        raise Damaged(f"the header is longer than {most} bytes")
    header = bytes(data[:size])
    if header.count(b"{") + header.count(b"[") > MOST_TABLES:
        raise Damaged(f"the header has more than {MOST_TABLES} tables")


def root_of_session(session: SessionFile, tenant: Tenant | None) -> Root:
    record = session.record
    root = root_behind(record.identity, record.root_id, tenant)
    if root is None:
        raise UsageError(
            f"session {record.name!r} belongs to another tenant key",
            "give the key that it was saved with: --tenant-key-file",
        )
    if (record.tenant_id == NO_TENANT_ID) != (tenant is None):
        raise Damaged("the session's tenant and its root do not go together")
    if root.fidelity != record.fidelity:
        raise Damaged("the session's fidelity is not that of its identity")
    return root


def check_names(manifest: Manifest, session: SessionFile, root: Root) -> None:
    """That every name follows from the session's token ids. Raises `Damaged`."""
    record = session.record
    names = chain_names(root.key, record.token_ids, record.block_size)
    if tuple(names) != record.chain:
        raise Damaged("the chain does not follow from the session's token ids")
    blocks = manifest.of_kind(BLOCK)
    if [item.name for item in blocks] != names[: len(blocks)]:
        raise Damaged("the manifest names blocks that are not the session's")
    for item in manifest.of_kind(STATE):
        if item.position > len(record.token_ids):
            raise Damaged("the manifest names a state checkpoint beyond the session's end")
        at = (record.token_ids, item.position, record.block_size)
        if state_at(root.key, names, *at).name != item.name:
            raise Damaged("the manifest names a state checkpoint that is not the session's")
    for item in manifest.of_kind(CALIBRATION):
        if item.name.hex() not in record.fidelity:
            raise Damaged("the manifest names a calibration that is not the session's")
