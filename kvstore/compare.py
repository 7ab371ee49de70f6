"""The collision check: is a block's own record the one that a prompt asks for?

Files and the tier in memory ask this one function, so that neither believes more than the other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvsnap.formats import names
from kvsnap.formats.block import BlockRecord
from kvsnap.formats.identity import Root

if TYPE_CHECKING:
    from kvsnap.kvstore.wanted import Wanted

COLLISION = "the file holds other token ids: a name collision"
"""The one difference that says nothing against a file: it stands under its rightful name."""


def difference(record: BlockRecord, root: Root, wanted: Wanted) -> str | None:
    """What keeps a block from being used for `wanted`, in one line; None where nothing does.

    The name must follow from all of the record's own ids; `wanted` may ask for their front only.
    """
    own_name = names.block_name(root.key, record.parent, record.token_ids, record.extras)
    if record.name != wanted.name or own_name != wanted.name:
        return "the file is another block's"
    if record.root_id != root.root_id or record.identity != root.identity:
        return "the file belongs to another identity"
    if record.fidelity != root.fidelity:
        return "the file belongs to another identity"
    if record.extras != wanted.extras:
        return "the file is another block's"
    if record.parent != wanted.parent or record.start != wanted.start:
        return "the file belongs to another place in a chain"
    front = record.token_ids[: len(wanted.token_ids)]
    if not np.array_equal(front, wanted.token_ids):
        return COLLISION
    return None
