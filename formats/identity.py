"""Identity: everything besides token ids that decides KV bytes. Its hash is the root.

The canonical form is JSON: keys sorted, no white space, ASCII escapes, floats as the shortest
decimal that reads back as the same binary64 (always with a point or an exponent), NaN and infinity
refused. Every field has one type, so absent (null), empty ("" or []) and zero differ. A field that
a reader does not know makes a different root, hence a miss: unknown is never a wildcard.

What cannot change KV beyond rounding is not here: threads, batch size, device, flash attention,
transposition of V, engine version, file path, display name.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from blake3 import blake3

from kvsnap.formats.errors import Damaged, UsageError
from kvsnap.formats.layout import Layout, layout_from_json, layout_to_json
from kvsnap.formats.tenant import NO_TENANT_ID, Tenant
from kvsnap.formats.tenant import tenant_id as id_of

IDENTITY_VERSION = 1
EXACT = "exact"
MAX_BLOCK = 2**16
MAX_COMPARED = 2**16
"""Characters of an identity whose fields are told apart; 2,000 are usual. A field's name has those of
all that it stands in, so that longer ones would take memory by the square of their length."""
_CUT = 200
"""Characters of such a name."""


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """A LoRA or control vector: `kind` "lora" or "control", digest of its file, scale."""

    kind: str
    digest: str
    scale: float


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary position embedding as the engine really applies it; None = the model has none."""

    type: str
    base: float
    scale: float
    scaling: str
    original_context: int
    extension_factor: float | None
    attention_factor: float | None
    beta_fast: float | None
    beta_slow: float | None
    long_context: bool | None
    """Whether the context was built longer than the original one, where that picks the factors."""


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Tensor, pipeline and context parallel rank and size: one rank's rows are no other's."""

    tensor_rank: int = 0
    tensor_size: int = 1
    pipeline_rank: int = 0
    pipeline_size: int = 1
    context_rank: int = 0
    context_size: int = 1


@dataclass(frozen=True, kw_only=True)
class Identity:
    """See the module. `weights` and `projector` are digests like `blake3:HEX`."""

    family: str
    """Engine family: two families order the elements of K differently."""
    weights: str
    architecture: str
    layout: Layout
    rope: Rope | None
    block_size: int
    fidelity: str = EXACT
    adapters: tuple[Adapter, ...] = ()
    projector: str | None = None
    rotation_k: int = 0
    """Size of the Hadamard matrix that the engine multiplies K rows with before storing; 0 none."""
    rotation_v: int = 0
    shard: Shard = Shard()
    overrides: tuple[tuple[str, str], ...] = ()
    """Model metadata that the caller overrode at load time, sorted by key."""

    def __post_init__(self) -> None:
        if not 1 <= self.block_size <= MAX_BLOCK:
            raise UsageError(f"a block holds 1 to 65536 tokens, not {self.block_size}")

    def to_json(self) -> dict[str, Any]:
        return {
            "adapters": [vars(adapter) for adapter in self.adapters],
            "architecture": self.architecture,
            "block_size": self.block_size,
            "family": self.family,
            "fidelity": self.fidelity,
            "identity": IDENTITY_VERSION,
            "kv_types": {
                name: plane.source_type for name, (_, plane) in self.layout.planes().items()
            },
            "layout": layout_to_json(self.layout),
            "overrides": [list(pair) for pair in self.overrides],
            "projector": self.projector,
            "rope": vars(self.rope) if self.rope else None,
            "rotation_k": self.rotation_k,
            "rotation_v": self.rotation_v,
            "shard": vars(self.shard),
            "weights": self.weights,
        }

    def canonical(self) -> str:
        """The canonical form that is hashed and that files carry."""
        record = self.to_json()
        _refuse_non_finite(record)
        return _canonical(record)


@dataclass(frozen=True)
class Root:
    """The secret-free handle of one family of chains. `key` is never written or printed."""

    key: bytes
    root_id: str
    identity: str
    """The canonical identity, as files carry it."""
    tenant_id: str = NO_TENANT_ID

    @functools.cached_property
    def fidelity(self) -> str:
        """`exact`, or what a lossy codec says of itself."""
        return str(parse_identity(self.identity).get("fidelity", ""))

    @functools.cached_property
    def block_size(self) -> int:
        """Tokens of its blocks: a serving engine's need not have those of the store."""
        found = parse_identity(self.identity).get("block_size")
        if type(found) is not int or not 1 <= found <= MAX_BLOCK:
            raise Damaged("the identity has an impossible block size")
        return found

    def __repr__(self) -> str:
        return f"Root(root_id={self.root_id[:12]}…)"


def root_of(identity: Identity | str, tenant: Tenant | None = None) -> Root:
    """The root of an identity (or of its canonical form read from a file) under a tenant's key."""
    canonical = identity if isinstance(identity, str) else identity.canonical()
    try:
        data = canonical.encode("ascii")
    except UnicodeEncodeError as error:
        raise Damaged("the identity is not in its canonical form") from error
    key = blake3(data, key=tenant.naming_key).digest() if tenant else blake3(data).digest()
    root_id = blake3(key, derive_key_context="kvsnap root id").hexdigest()
    return Root(key, root_id, canonical, id_of(tenant))


def root_behind(identity: str, root_id: str, tenant: Tenant | None) -> Root | None:
    """The root of a file's identity, where the keys at hand give its root id; else it stays unknown."""
    for candidate in (None, tenant) if tenant else (None,):
        root = root_of(identity, candidate)
        if root.root_id == root_id:
            return root
    return None


def with_fidelity(canonical: str, fidelity: str) -> str:
    """A canonical identity from a file, of another fidelity, in the same canonical form."""
    record = parse_identity(canonical) | {"fidelity": fidelity}
    return _canonical(record)


def parse_identity(canonical: str) -> dict[str, Any]:
    """The fields of a canonical identity from a file; `Damaged` if it is not one."""
    try:
        record = json.loads(canonical)
    except (ValueError, RecursionError) as error:
        raise Damaged("the identity is not JSON") from error
    if not isinstance(record, dict):
        raise Damaged("the identity is not a record")
    return record


def layout_of(canonical: str) -> Layout:
    """The layout inside a canonical identity; `Damaged` if there is none."""
    return layout_from_json(parse_identity(canonical).get("layout"))


_TELLING_FIRST = (
    "weights",
    "adapters",
    "overrides",
    "rope",
    "kv_types",
    "rotation",
    "block_size",
    "fidelity",
)


def differences(stored: str, here: str) -> list[tuple[str, str, str]]:
    """(field, stored, here) of two canonical identities, the most telling first; nested: dotted."""
    if len(stored) > MAX_COMPARED or len(here) > MAX_COMPARED:
        raise Damaged(f"the identity has more than {MAX_COMPARED} characters")
    try:
        before, after = _flatten(parse_identity(stored)), _flatten(parse_identity(here))
    except RecursionError as error:
        raise Damaged("the identity is nested too deeply") from error
    changed = [
        field
        for field in sorted(before.keys() | after.keys())
        if before.get(field, "absent") != after.get(field, "absent")
    ]
    changed.sort(key=_rank)
    return [(name, before.get(name, "absent"), after.get(name, "absent")) for name in changed]


def _rank(field: str) -> int:
    ranks = (n for n, start in enumerate(_TELLING_FIRST) if field.startswith(start))
    return next(ranks, len(_TELLING_FIRST))


def _flatten(value: Any, prefix: str = "") -> dict[str, str]:
    prefix = prefix[:_CUT]
    if isinstance(value, Mapping) and value:
        parts = [(f"{prefix}.{key}" if prefix else str(key), item) for key, item in value.items()]
    elif isinstance(value, list) and value and isinstance(value[0], Mapping):
        parts = [(f"{prefix}[{number}]", item) for number, item in enumerate(value)]
    elif prefix == "overrides" and _are_pairs(value):
        parts = [(f"{prefix}.{key}", item) for key, item in value]
    else:
        return {prefix: json.dumps(value)}
    return {name: text for key, item in parts for name, text in _flatten(item, key).items()}


def _are_pairs(value: Any) -> bool:
    if not isinstance(value, list):
        return False
    return all(isinstance(p, list) and [type(part) for part in p] == [str, str] for p in value)


def _canonical(record: Mapping[str, Any]) -> str:
    return json.dumps(record, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _refuse_non_finite(value: Any) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise UsageError("an identity cannot hold NaN or infinity")
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            _refuse_non_finite(item)
