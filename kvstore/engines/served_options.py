"""What may be said of the store in a serving engine's configuration: the same words for all of them."""

from __future__ import annotations

import dataclasses
import reprlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kvsnap.formats.codecs import Codec, get_codec
from kvsnap.formats.errors import Unsupported, UsageError
from kvsnap.formats.tenant import Tenant
from kvsnap.kvstore.budget import parse_size
from kvsnap.kvstore.store import Store
from kvsnap.kvstore.tenant_key import find_tenant

Size = str | int | None
_WRITE_BUFFER = "1GB"


@dataclass(frozen=True, kw_only=True)
class ServedOptions:
    """As they stand in the engine's own configuration. Raises `UsageError` by name for what makes no
    sense, so that a server refuses to start instead of doing without."""

    store: str | None = None
    """The store's folder; None: KVSNAP_STORE, or the user's cache folder."""
    codec: str = "raw"
    """`raw` or `zstd`. A serving engine's rows are pages, which lossy codecs cannot take."""
    capacity: Size = None
    min_free: Size = None
    remote: str | None = None
    write_behind: bool = False
    tenant_key_file: str | None = None
    encrypt: bool = False
    trust: tuple[str, ...] = ()
    model: str | None = None
    """The model's folder or file, whose weights are digested; None: where the engine says it is."""
    trust_media_names: bool = False
    """That media of equal names are equal, where an engine names them and clients cannot."""
    block_size: int | None = None
    """Tokens of a stored block, where the engine leaves the choice."""
    write_buffer: Size = _WRITE_BUFFER
    """How much that is to be written may wait in memory."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            _check(field.name, getattr(self, field.name))
        if get_codec(self.codec).lossy:
            raise UsageError(
                f"codec {self.codec} is lossy, and an engine's pages are kept exactly",
                "give raw or zstd",
            )
        if self.write_behind and self.remote is None:
            raise UsageError("write_behind needs a remote", 'give its URL: "remote": "s3://…"')

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any], also: Collection[str] = ()) -> ServedOptions:
        """Of an engine's extra configuration. `also`: keys that are the engine's own."""
        names = [field.name for field in dataclasses.fields(cls)]
        for key in mapping:
            if key not in names and key not in also:
                raise UsageError(
                    f"option {reprlib.repr(key)} is not known to kvsnap",
                    f"its options: {', '.join(names)}",
                )
        given = {name: mapping[name] for name in names if name in mapping}
        if isinstance(given.get("trust"), list):
            given["trust"] = tuple(given["trust"])
        return cls(**given)

    def make_codec(self) -> Codec:
        return get_codec(self.codec)

    def buffer_bytes(self) -> int:
        return parse_size(_WRITE_BUFFER if self.write_buffer is None else self.write_buffer)

    def tenant(self) -> Tenant | None:
        """Whose blocks; see `find_tenant` for where the key comes from where no file is given."""
        path = Path(self.tenant_key_file) if self.tenant_key_file is not None else None
        return find_tenant(path, "tenant_key_file")

    def open_store(self) -> Store:
        """What was asked for; the caller closes it. Raises `Unsupported` where it could not be written
        for want of a package: not when the first block comes."""
        store = Store(
            self.store,
            capacity=self.capacity,
            min_free=self.min_free,
            remote=self.remote,
            write_behind=self.write_behind,
            trust=self.trust,
            encrypt=self.encrypt,
        )
        if (store.encrypt or store.trust is not None) and find_spec("cryptography") is None:
            store.close()
            raise Unsupported(
                "sealed and signed files need the package cryptography",
                "pip install 'kvsnap[remote]'",
            )
        return store


_SIZES = ("capacity", "min_free", "write_buffer")
_FLAGS = ("write_behind", "encrypt", "trust_media_names")


def _check(name: str, value: object) -> None:
    """A configuration comes from JSON: every value has one type, and "false" is no flag."""
    if name in _FLAGS:
        fits, word = type(value) is bool, "true or false"
    elif name in _SIZES:
        fits, word = value is None or type(value) in (str, int), 'a size, like "20GB"'
    elif name == "trust":
        fits = isinstance(value, tuple) and all(type(key) is str for key in value)
        word = "a list of public keys"
    elif name == "block_size":
        fits, word = value is None or (type(value) is int and value > 0), "a number of tokens"
    else:
        fits, word = (value is None and name != "codec") or type(value) is str, "a text"
    if not fits:
        raise UsageError(f"option {name} is {reprlib.repr(value)}", f"give {word}")
