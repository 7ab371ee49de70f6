"""Pin files: a session or a block that a person keeps. See docs/format.md, section "Pin file".

A pin is a file of its own, not a field of the session: it is this store's, it does not travel with
the session, and setting it must not look like a new revision to whoever has the session open.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvsnap.formats.container import Packed, pack, parse
from kvsnap.formats.errors import Damaged
from kvsnap.formats.fields import FORMAT_VERSION, check_version, number_field

KIND = "pin"
SESSION, BLOCK = "session", "block"


@dataclass(frozen=True)
class PinRecord:
    """`name` is that of a session's file without its suffix, or a block's as hex (`tenant_id` is empty
    then). `until` is in unix seconds; 0 is for ever."""

    what: str
    tenant_id: str
    name: str
    until: int = 0


def pack_pin(record: PinRecord) -> Packed:
    """The bytes of a pin file: metadata only."""
    metadata = {
        "kind": KIND,
        "kvsnap": FORMAT_VERSION,
        "name": record.name,
        "tenant_id": record.tenant_id,
        "until": str(record.until),
        "what": record.what,
    }
    return pack(metadata, ())


def parse_pin(buffer: memoryview) -> PinRecord:
    """Parse a pin file. The caller checks the `file` digest first."""
    container = parse(buffer)
    check_version(container, KIND)
    what = container.field("what")
    if what not in (SESSION, BLOCK):
        raise Damaged("the pin is of neither a session nor a block")
    return PinRecord(
        what,
        container.field("tenant_id"),
        container.field("name"),
        number_field(container, "until"),
    )
