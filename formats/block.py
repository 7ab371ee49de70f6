"""Block files: one filled block, immutable; and state checkpoints, which are named and stored alike.

A state checkpoint is what an engine needs besides blocks to go on from a position: the rows of the
tokens after the last filled block, and of groups with a span what is there of them. It stands in the
tree as a block does, and nothing stands on it. See docs/format.md, "Block file" and "State checkpoint".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvsnap.formats.codecs import Codec
from kvsnap.formats.container import Container, Packed, Tensor, pack, parse
from kvsnap.formats.errors import Damaged
from kvsnap.formats.fields import (
    FORMAT_VERSION,
    check_version,
    codec_field,
    digest_field,
    hex_field,
    ids_tensor,
    number_field,
)
from kvsnap.formats.identity import EXACT, layout_of
from kvsnap.formats.layout import Layout, Ranges, Rows
from kvsnap.formats.names import TokenIds, extra
from kvsnap.formats.rowset import (
    Targets,
    content_digest,
    content_of,
    contiguous,
    decode_rows,
    encode_rows,
    rows_of_file,
)
from kvsnap.formats.signature import (
    SIGNATURE,
    SIGNER,
    Signature,
    SigningKey,
    block_message,
    signature_of,
)

KIND = "block"
STATE_KIND = "state"
STATE = extra("state", b"")
"""The extras in the name of a state checkpoint: it is no block with the same few tokens."""


@dataclass(frozen=True)
class BlockRecord:
    """What a block file says of itself; compared, token id by token id, before it is used."""

    name: bytes
    parent: bytes
    root_id: str
    start: int
    """Position of the first token in the sequence."""
    token_ids: TokenIds
    identity: str
    extras: bytes = b""
    fidelity: str = EXACT

    @property
    def is_state(self) -> bool:
        return self.extras == STATE

    @property
    def kind(self) -> str:
        return STATE_KIND if self.is_state else KIND

    @property
    def stop(self) -> int:
        """The position after its last token."""
        return self.start + len(self.token_ids)

    def part(self, layout: Layout) -> Layout:
        """The groups of a model that the file holds."""
        return layout if self.is_state else layout.in_blocks

    def ranges(self, layout: Layout) -> Ranges:
        """The positions whose rows it holds of each plane of its part of the layout."""
        if self.is_state:
            return layout.ranges_at(self.start, self.stop)
        return dict.fromkeys(layout.in_blocks.planes(), range(self.start, self.stop))

    def fields(self) -> dict[str, str]:
        """The header fields that decide what an engine receives."""
        return {
            "extras": self.extras.hex(),
            "fidelity": self.fidelity,
            "kind": self.kind,
            "name": self.name.hex(),
            "parent": self.parent.hex(),
            "root_id": self.root_id,
            "start": str(self.start),
        }


@dataclass(frozen=True)
class BlockFile:
    """A parsed block file over the buffer it was parsed from."""

    record: BlockRecord
    codec: Codec
    content: str
    tensors: Mapping[str, Tensor]
    signature: Signature | None = None
    """Of whom it says that they signed it; `signed` tells whether that is so."""
    file_digest: str = ""
    sealed: bool = False
    """Whether it stood in a sealed file, whose digest `file_digest` is then."""

    @property
    def signer(self) -> str:
        return self.signature.signer if self.signature is not None else ""

    @property
    def signed(self) -> bool:
        """Whether the signer signed this name, root and `content`; `check_content` tells whether
        that is the content."""
        message = block_message(self.record.name, self.record.root_id, self.content)
        return self.signature is not None and self.signature.covers(message)

    def layout(self) -> Layout:
        """Of the model, all groups."""
        return layout_of(self.record.identity)

    def decode_into(self, layout: Layout, out: Targets, tokens: slice | None = None) -> None:
        """Fill the targets of the file's part of the model's layout. `tokens`: which of the block's
        tokens they hold; None: all."""
        part, ranges = self.record.part(layout), self.record.ranges(layout)
        decode_rows(self.codec, part, self.tensors, out, ranges, tokens)

    def check_content(self) -> None:
        """Decode and compare the `content` digest: what verify does, and a read does not."""
        layout = self.layout()
        rows = rows_of_file(self.record.part(layout), self.record.ranges(layout))
        self.decode_into(layout, rows)
        if _content(self.record, self.codec, rows, self.tensors) != self.content:
            raise Damaged("the content digest differs: the rows are not the ones that were named")


def pack_block(
    record: BlockRecord,
    codec: Codec,
    layout: Layout,
    rows: Rows,
    key: SigningKey | None = None,
    signature: Signature | None = None,
) -> Packed:
    """The bytes of one block file, signed where there is a key, else with the `signature` that another
    file of it has, if it is of these rows. Equal record, rows, codec and key give
    equal bytes."""
    part, ranges = record.part(layout), record.ranges(layout)
    part.check(rows, ranges)
    whole = contiguous(rows)
    ids = record.token_ids.astype("<u4")
    coded = encode_rows(codec, part, whole, ranges)
    metadata = {
        **record.fields(),
        "codec": codec.id,
        "content": _content(record, codec, whole, dict(coded)),
        "identity": record.identity,
        "kvsnap": FORMAT_VERSION,
    }
    message = block_message(record.name, record.root_id, metadata["content"])
    if key is not None:
        signature = key.sign(message)
    if signature is not None and (key is not None or signature.covers(message)):
        metadata |= signature.fields()
    return pack(metadata, [("token_ids", Tensor("U32", ids.shape, ids)), *coded])


def sign_block(buffer: memoryview, key: SigningKey) -> Packed:
    """The same file with this key's signature in place of another, or of none. The caller has compared
    `content` with the rows: it is what gets signed."""
    container, block = parse(buffer), parse_block(buffer)
    message = block_message(block.record.name, block.record.root_id, block.content)
    dropped = (SIGNER, SIGNATURE, "file")
    kept = {name: text for name, text in container.metadata.items() if name not in dropped}
    return pack(kept | key.sign(message).fields(), list(container.tensors.items()))


def _content(record: BlockRecord, codec: Codec, rows: Rows, coded: Mapping[str, Tensor]) -> str:
    ids = record.token_ids.astype("<u4").tobytes()
    return content_digest(record.fields(), ids, content_of(codec, rows, coded))


def parse_block(buffer: memoryview) -> BlockFile:
    """Parse a whole block file. The caller checks the `file` digest first."""
    container = parse(buffer)
    tensors = dict(container.tensors)
    record = block_record(container, tensors.pop("token_ids", None))
    codec = codec_field(container)
    if record.is_state and codec.lossy:
        raise Damaged(f"a state checkpoint in the lossy codec {codec.id}")
    signature = signature_of(container.metadata)
    content, file = container.field("content"), container.field("file")
    return BlockFile(record, codec, content, tensors, signature, file)


def block_record(container: Container, ids: Tensor | None) -> BlockRecord:
    """The record of a block file from its header and its `token_ids` tensor."""
    state = container.metadata.get("kind") == STATE_KIND
    check_version(container, STATE_KIND if state else KIND)
    record = BlockRecord(
        name=digest_field(container, "name"),
        parent=digest_field(container, "parent"),
        root_id=digest_field(container, "root_id").hex(),
        start=number_field(container, "start"),
        token_ids=ids_tensor(ids),
        identity=container.field("identity"),
        extras=hex_field(container, "extras"),
        fidelity=container.field("fidelity"),
    )
    if record.is_state != state:
        raise Damaged("the file's kind and its extras do not go together")
    return record
