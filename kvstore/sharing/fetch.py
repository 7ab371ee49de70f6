"""One file of a remote, checked before anything else happens to it."""

from __future__ import annotations

from kvsnap.formats.codecs.calibration import Calibration, parse_calibration
from kvsnap.formats.errors import Damaged
from kvsnap.formats.identity import Root
from kvsnap.formats.layout import Layout
from kvsnap.formats.manifest import Item, Manifest, block_key
from kvsnap.formats.sealed import is_sealed
from kvsnap.kvstore.foreign import Foreign, check_foreign
from kvsnap.kvstore.opener import Opener
from kvsnap.kvstore.remotes.base import Remote
from kvsnap.kvstore.sharing.checks import MOST_CALIBRATION, check_header, longest_block
from kvsnap.kvstore.wanted import Wanted


def fetch_block(
    remote: Remote,
    opener: Opener,
    root: Root,
    wanted: Wanted,
    layout: Layout,
    content: str | None = None,
    *,
    sealed: bool = False,
) -> Foreign:
    """A block or state checkpoint, down to its rows. `content`: the digest that a manifest gives them; `sealed`: the
    manifest is, and so all blocks that it names.
    `layout` is the root's. Raises `NotFound`, `Damaged`, `Unsupported` or `RemoteError`."""
    found = remote.get(block_key(wanted.name), longest_block(wanted, layout))
    check_header(memoryview(found.data))
    if sealed and not is_sealed(memoryview(found.data)):
        raise Damaged("the file is not sealed, as its manifest is")
    return check_foreign(opener, root, wanted, memoryview(found.data), content)


def fetch_calibration(remote: Remote, manifest: Manifest, item: Item) -> Calibration:
    """One that a manifest names. Raises as `fetch_block`."""
    data = remote.get(manifest.item_key(item), min(item.size, MOST_CALIBRATION)).data
    check_header(memoryview(data))
    calibration = parse_calibration(memoryview(data))
    if calibration.digest != item.name.hex():
        raise Damaged("the file holds another calibration than its name says")
    return calibration
