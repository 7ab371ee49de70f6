"""A server's slot after a request: only the filled blocks that the store lacks are kept of it."""

from __future__ import annotations

from dataclasses import dataclass

from kvsnap.formats.codecs import Codec
from kvsnap.formats.errors import Damaged
from kvsnap.formats.interchange.llama_server_slot import SlotFile
from kvsnap.formats.interchange.llamacpp import StateType
from kvsnap.formats.names import TokenIds, common_prefix
from kvsnap.kvstore.chain_writer import ChainWriter
from kvsnap.kvstore.proxy.identity import Attached
from kvsnap.kvstore.proxy.rows import SlotRows
from kvsnap.kvstore.retry import try_again
from kvsnap.kvstore.store import Store


@dataclass(frozen=True)
class Ended:
    """A request that ended in a slot. `generated` is None where it was cut off: the server did not say."""

    prompt: TokenIds
    generated: int | None


def sure_tokens(ended: Ended, slot: SlotFile) -> int:
    """How many tokens at the front of a slot are sure to have the rows of their positions.

    What was generated is sure only if the slot holds exactly prompt and answer, but for the last
    token, which was sampled and never computed: a context that was shifted holds fewer, and its rows
    are those of other positions.
    """
    common = common_prefix(ended.prompt, slot.token_ids)
    if ended.generated is None or common < len(ended.prompt):
        return common
    whole = len(ended.prompt) + max(ended.generated - 1, 0)
    return whole if len(slot.token_ids) == whole else common


def store_blocks(
    store: Store, attached: Attached, codec: Codec, slot: SlotFile, tokens: int
) -> int:
    """In a thread: store what is new among the first `tokens` tokens; how many blocks were written.
    Raises `KvsnapError`."""
    theirs, ours = slot.kinds, attached.kinds
    if [_same_slots(kind) for kind in theirs] != [_same_slots(kind) for kind in ours]:
        raise Damaged(
            "the server's slot is of another kind than at the start",
            "start the proxy anew: another model was loaded",
        )
    writer = ChainWriter(store, SlotRows(attached.layout, slot, tokens), attached.root, codec)

    def put() -> None:
        wanted = writer.chain()
        with store.holds.lease() as lease:
            writer.put(wanted, lease)
        if store.behind is not None:
            names = [block.name for block in wanted]
            store.behind.send_chain(attached.root.tenant_id, names)

    try_again(put)
    return len(writer.written)


def _same_slots(kind: StateType) -> object:
    """What is equal in all slot files of one server."""
    return kind.layers, kind.rotation_k, kind.rotation_v


def new_blocks(ended: Ended, stored: int, block_size: int) -> bool:
    """Whether a slot holds a filled block beyond the `stored` tokens of its prompt."""
    tokens = len(ended.prompt) + max((ended.generated or 1) - 1, 0)
    return tokens // block_size > stored // block_size
