"""Session files: a named conversation. Token ids, chain, tail rows, notes and a revision.

The tail are the tokens after the last filled block; their rows live here only. A session file is
replaced as a whole; `revision` counts the saves. See docs/format.md, section "Session file".
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from blake3 import blake3

from kvsnap.formats.codecs import Codec
from kvsnap.formats.container import Packed, Tensor, pack, parse
from kvsnap.formats.errors import Damaged, UsageError
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
from kvsnap.formats.rowset import content_digest, contiguous, decode_rows, encode_rows, rows_of_file
from kvsnap.formats.signature import Signature, SigningKey, session_message, signature_of

KIND = "session"


@dataclass(frozen=True, kw_only=True)
class SessionRecord:
    """What a session file says. `chain` are the names of the filled blocks, in order."""

    name: str
    tenant_id: str
    root_id: str
    identity: str
    fidelity: str = EXACT
    """Of the chain's blocks. The tail's rows are always stored without loss."""
    block_size: int
    revision: int
    token_ids: TokenIds
    chain: tuple[bytes, ...]
    state: bytes = b""
    """Name of the state checkpoint at the end, where the model needs one; it has the tail's rows."""
    notes: Mapping[str, Any] = field(default_factory=dict)
    """Free for the caller, JSON: the CLI keeps the chat's messages and the text here."""

    def __post_init__(self) -> None:
        if len(self.state) not in (0, 32):
            raise Damaged("the name of the session's state checkpoint is none")
        if len(self.chain) != len(self.token_ids) // self.block_size:
            raise Damaged(f"{len(self.chain)} blocks for {len(self.token_ids)} token ids")

    @property
    def path(self) -> tuple[bytes, ...]:
        """What it stands on in the tree of stored files: its chain, and the state at its end."""
        return (*self.chain, self.state) if self.state else self.chain

    @property
    def tail_start(self) -> int:
        return len(self.chain) * self.block_size

    @property
    def tail_tokens(self) -> int:
        return len(self.token_ids) - self.tail_start

    def fields(self) -> dict[str, str]:
        """The header fields that decide what an engine receives, or who may have it."""
        return {
            "block_size": str(self.block_size),
            "fidelity": self.fidelity,
            "kind": KIND,
            "name": self.name,
            "revision": str(self.revision),
            "root_id": self.root_id,
            "state": self.state.hex(),
            "tenant_id": self.tenant_id,
        }


@dataclass(frozen=True)
class SessionFile:
    """A parsed session file over the buffer it was parsed from."""

    record: SessionRecord
    codec: Codec
    content: str
    talk: str
    file_digest: str
    tensors: Mapping[str, Tensor]
    signature: Signature | None = None
    """Of whom it says that they signed it; `signed` tells whether that is so."""
    sealed: bool = False
    """Whether it stood in a sealed file; `file_digest` is that of the file inside."""

    @property
    def signed(self) -> bool:
        """Whether the signer signed these digests; `tail_rows` and `check_talk` compare them with what
        is there."""
        message = session_message(self.content, self.talk)
        return self.signature is not None and self.signature.covers(message)

    def tail_rows(self) -> dict[str, np.ndarray]:
        """Decode the tail and check the `content` digest; raises `Damaged`."""
        rows: dict[str, np.ndarray] = {}
        if self.record.tail_tokens and not self.record.state:
            layout = layout_of(self.record.identity)
            rows = rows_of_file(layout, self.record.tail_tokens)
            decode_rows(self.codec, layout, self.tensors, rows, self.record.tail_start)
        elif self.tensors:
            raise Damaged(f"tensors without a tail: {reprlib.repr(sorted(self.tensors))}")
        if content_digest(self.record.fields(), _ids(self.record), rows) != self.content:
            raise Damaged("the content digest differs: the rows are not the ones that were saved")
        return rows

    def check_talk(self) -> None:
        """Check the `talk` digest, over all but the tail's rows.

        It lets a conversation go on whose tail rows alone are damaged; they are computed again.
        """
        try:
            talk = _talk_digest(self.record)
        except UsageError as error:  # notes that no save wrote: NaN, or too deep
            raise Damaged(error.what) from error
        if talk != self.talk:
            raise Damaged("the session's token ids or notes changed after they were written")


def pack_session(
    record: SessionRecord, codec: Codec, layout: Layout, tail: Rows, key: SigningKey | None = None
) -> Packed:
    """The bytes of a session file, signed where there is a key; `tail` is empty where no token follows the last block, and where
    a state checkpoint has its rows."""
    rows: dict[str, np.ndarray] = {}
    if record.tail_tokens and not record.state:
        layout.check(tail, record.tail_tokens)
        rows = contiguous(tail)
    chain = np.frombuffer(b"".join(record.chain), np.uint8).reshape(-1, 32)
    metadata = {
        **record.fields(),
        "codec": codec.id,
        "content": content_digest(record.fields(), _ids(record), rows),
        "identity": record.identity,
        "kvsnap": FORMAT_VERSION,
        "notes": _notes(record),
        "talk": _talk_digest(record),
    }
    if key is not None:
        metadata |= key.sign(session_message(metadata["content"], metadata["talk"])).fields()
    tensors = [
        ("token_ids", Tensor("U32", record.token_ids.shape, record.token_ids.astype("<u4"))),
        ("chain", Tensor("U8", chain.shape, chain)),
        *(encode_rows(codec, layout, rows, record.tail_start) if rows else ()),
    ]
    return pack(metadata, tensors)


def parse_session(buffer: memoryview) -> SessionFile:
    """Parse a whole session file. The caller checks the `file` digest first."""
    container = parse(buffer)
    check_version(container, KIND)
    tensors = dict(container.tensors)
    ids, chain = ids_tensor(tensors.pop("token_ids", None)), tensors.pop("chain", None)
    if chain is None or chain.dtype != "U8" or chain.shape[1:] != (32,):
        raise Damaged("the file has no chain of block names")
    names = bytes(chain.data)
    try:
        notes = json.loads(container.field("notes"))
    except (ValueError, RecursionError) as error:
        raise Damaged("the notes are not JSON") from error
    if not isinstance(notes, dict):
        raise Damaged("the notes are not a table")
    block_size = number_field(container, "block_size")
    if not 1 <= block_size <= 2**16:
        raise Damaged(f"impossible block size {block_size}")
    record = SessionRecord(
        name=container.field("name"),
        tenant_id=container.field("tenant_id"),
        root_id=digest_field(container, "root_id").hex(),
        identity=container.field("identity"),
        fidelity=container.field("fidelity"),
        block_size=block_size,
        revision=number_field(container, "revision"),
        token_ids=ids,
        chain=tuple(names[at : at + 32] for at in range(0, len(names), 32)),
        state=hex_field(container, "state"),
        notes=notes,
    )
    codec = codec_field(container)
    if codec.lossy:
        raise Damaged(f"a session's tail in the lossy codec {codec.id}")
    content, talk = container.field("content"), container.field("talk")
    return SessionFile(
        record,
        codec,
        content,
        talk,
        container.field("file"),
        tensors,
        signature_of(container.metadata),
    )


def plain_notes(notes: Mapping[str, Any]) -> dict[str, Any]:
    """A copy as they read back: a number that is a key is text there. Raises `UsageError` where they
    are not JSON."""
    try:
        found: dict[str, Any] = json.loads(json.dumps(dict(notes), allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"a session's notes must be JSON: {error}") from error
    return found


def _notes(record: SessionRecord) -> str:
    return json.dumps(plain_notes(record.notes), sort_keys=True, separators=(",", ":"))


def _talk_digest(record: SessionRecord) -> str:
    """BLAKE3 over u32 length, JSON of fields, identity and notes, then chain and ids."""
    parts = [record.fields(), record.identity, _notes(record)]
    text = json.dumps(parts, sort_keys=True, separators=(",", ":")).encode()
    hasher = blake3(len(text).to_bytes(4, "little") + text)
    hasher.update(b"".join(record.chain))
    hasher.update(_ids(record))
    return hasher.hexdigest()


def _ids(record: SessionRecord) -> bytes:
    return record.token_ids.astype("<u4").tobytes()
