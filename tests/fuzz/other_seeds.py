"""Valid inputs that are no safetensors files: portable files, settings, keys. See `seeds`."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence

from kvsnap.formats.archive import END, pack_header, padding
from kvsnap.formats.fields import FORMAT_VERSION
from kvsnap.formats.manifest import block_key
from tests.fuzz.seeds import blocks, golden, manifests


@functools.cache
def archives() -> list[bytes]:
    """The golden one; short and long names (a prefix, a pax header), empty and larger members."""
    deep = "/".join(["a" * 90] * 3) + "/b"
    members = [
        ("manifests/default/alice%2f1.safetensors", manifests()[1]),
        (block_key(bytes(32)), blocks()[-1]),
        ("sweeping/0123456789abcdef", b""),
        ("sessions/" + "ab" * 32 + "/" + "cd" * 32 + ".safetensors", b"x" * 700),
        (deep, b"y" * 512),
    ]
    found = golden("*.kvsnap")
    for some in (members[:2], members[2:4], members[1:], [(deep, b"")], []):
        body = [
            pack_header(name, len(data)) + data + bytes(padding(len(data))) for name, data in some
        ]
        found.append(b"".join(body) + END)
    return found


@functools.cache
def settings() -> list[bytes]:
    plain = {"block_size": 16, "created": 1_700_000_000, "format": FORMAT_VERSION}
    more = {"capacity": "20GB", "min_free": 1000, "break_even": {"x": [1.5, None]}}
    trust = {"trust": {"ab" * 32: "alice"}}
    return [
        json.dumps(one, indent=1).encode() for one in (plain, plain | more, plain | more | trust)
    ]


def keys() -> Sequence[bytes]:
    text = b"000102030405060708090a0b0c0d0e0f101112131415161718191A1B1C1D1E1F"
    return [text, text + b"\n", b" \t" + text + b"\r\n", bytes(range(32)), b"\n" * 32]
