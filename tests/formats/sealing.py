"""What the tests of sealed files share: one tenant, one small file, and how a reader opens it."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from kvsnap.formats.container import Packed, Tensor, check_file_digest, parse
from kvsnap.formats.sealed import Clear, parse_sealed, seal
from kvsnap.formats.tenant import Tenant

FOLDER = Path(__file__).parents[1] / "golden" / "v1"
GOLDEN = sorted(
    path.stem for path in FOLDER.glob("*.safetensors") if not path.stem.startswith("sealed")
)
TENANT, STRANGER = Tenant(bytes(range(32))), Tenant(bytes(range(1, 33)))
SALT = bytes(range(100, 132))
NAME, PARENT, OTHER = bytes([1] * 32), bytes([2] * 32), bytes([3] * 32)
CLEAR = Clear("block", TENANT.tenant_id, NAME, PARENT, bytes([4] * 32).hex(), 64, 16)
TEXT = b"what a person asked, and what the model made of it; " * 4


def packed(*parts: bytes) -> Packed:
    return Packed(parts, sum(map(len, parts)), "")


def numbers(*values: int) -> Tensor:
    array = np.array(values, "<u8")
    return Tensor("U64", array.shape, array)


def joined(made: Packed) -> bytes:
    data = b"".join(bytes(part) for part in made.buffers)
    assert len(data) == made.size
    return data


def sealed(text: bytes = TEXT, clear: Clear = CLEAR, salt: bytes | None = SALT) -> bytes:
    return joined(seal(packed(text), clear, TENANT, [("sizes", numbers(5, 6, 7))], salt=salt))


def opened(file: bytes, tenant: Tenant | None = TENANT) -> bytes:
    """As a reader does it: the digest first."""
    check_file_digest(memoryview(file))
    return bytes(parse_sealed(memoryview(file)).open(tenant))


def golden(name: str) -> tuple[bytes, Clear]:
    """A golden file, and what would stand in the clear around it."""
    file = (FOLDER / f"{name}.safetensors").read_bytes()
    container = parse(memoryview(file))
    fields, kind = container.metadata, container.metadata["kind"]
    if kind in ("block", "state"):
        names = (bytes.fromhex(fields[key]) for key in ("name", "parent"))
        count = len(container.tensors["token_ids"].data) // 4
        place = (fields["root_id"], int(fields["start"]), count)
        signer = fields.get("signer", "")
        return file, Clear(kind, TENANT.tenant_id, *names, *place, signer=signer)
    last = bytes(container.tensors["chain"].data[-32:]) if kind == "session" else b""
    return file, Clear(kind, TENANT.tenant_id, root_id=fields.get("root_id", ""), last=last)
