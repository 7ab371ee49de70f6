"""Block files: one filled block, immutable. See docs/format.md, section "Block file"."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

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
from kvsnap.formats.layout import Layout, Rows
from kvsnap.formats.names import TokenIds
from kvsnap.formats.rowset import (
    content_digest,
    content_of,
    contiguous,
    decode_rows,
    encode_rows,
    rows_of_file,
)

KIND = "block"


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

    def fields(self) -> dict[str, str]:
        """The header fields that decide what an engine receives."""
        return {
            "extras": self.extras.hex(),
            "fidelity": self.fidelity,
            "kind": KIND,
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

    def layout(self) -> Layout:
        return layout_of(self.record.identity)

    def decode_into(self, layout: Layout, out: Mapping[str, np.ndarray]) -> None:
        decode_rows(self.codec, layout, self.tensors, out, self.record.start)

    def check_content(self) -> None:
        """Decode and compare the `content` digest: what verify does, and a read does not."""
        layout = self.layout()
        rows = rows_of_file(layout, len(self.record.token_ids))
        self.decode_into(layout, rows)
        if _content(self.record, self.codec, rows, self.tensors) != self.content:
            raise Damaged("the content digest differs: the rows are not the ones that were named")


def pack_block(record: BlockRecord, codec: Codec, layout: Layout, rows: Rows) -> Packed:
    """The bytes of one block file. Equal record, rows and codec give equal bytes."""
    layout.check(rows, len(record.token_ids))
    whole = contiguous(rows)
    ids = record.token_ids.astype("<u4")
    coded = encode_rows(codec, layout, whole, record.start)
    metadata = {
        **record.fields(),
        "codec": codec.id,
        "content": _content(record, codec, whole, dict(coded)),
        "identity": record.identity,
        "kvsnap": FORMAT_VERSION,
    }
    return pack(metadata, [("token_ids", Tensor("U32", ids.shape, ids)), *coded])


def _content(record: BlockRecord, codec: Codec, rows: Rows, coded: Mapping[str, Tensor]) -> str:
    ids = record.token_ids.astype("<u4").tobytes()
    return content_digest(record.fields(), ids, content_of(codec, rows, coded))


def parse_block(buffer: memoryview) -> BlockFile:
    """Parse a whole block file. The caller checks the `file` digest first."""
    container = parse(buffer)
    tensors = dict(container.tensors)
    record = block_record(container, tensors.pop("token_ids", None))
    return BlockFile(record, codec_field(container), container.field("content"), tensors)


def block_record(container: Container, ids: Tensor | None) -> BlockRecord:
    """The record of a block file from its header and its `token_ids` tensor."""
    check_version(container, KIND)
    return BlockRecord(
        name=digest_field(container, "name"),
        parent=digest_field(container, "parent"),
        root_id=digest_field(container, "root_id").hex(),
        start=number_field(container, "start"),
        token_ids=ids_tensor(ids),
        identity=container.field("identity"),
        extras=hex_field(container, "extras"),
        fidelity=container.field("fidelity"),
    )
