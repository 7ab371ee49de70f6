"""The table of what is fuzzed: everything that parses bytes which somebody else may have written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

from kvsnap.formats.errors import Damaged, KvsnapError, StoreError, Unsupported, UsageError
from tests.fuzz import (
    archives,
    edits,
    engine_states,
    foreign_changes,
    foreign_readers,
    foreign_seeds,
    octets,
    other_readers,
    other_seeds,
    readers,
    seeds,
    states,
    texts,
)

Mutate = Callable[[Random, bytes, Sequence[bytes]], bytes]


@dataclass(frozen=True)
class Target:
    """`parse` takes the bytes, `then` what it returns. Only `refusals` may come out of either. `past`:
    whether an input got past what stops most random changes; at least `share` of the inputs must.
    `factor`: bytes of memory for each byte of input. JSON takes up to 40: `[]` is a list."""

    name: str
    seeds: Callable[[], Sequence[bytes]]
    mutate: Mutate
    past: Callable[[bytes], bool]
    parse: Callable[[bytes], Any]
    then: tuple[Callable[[Any], None], ...] = ()
    refusals: tuple[type[KvsnapError], ...] = (Damaged, Unsupported)
    share: float = 0.6
    factor: int = 40


_DIGEST = (edits.changed, readers.digest_past)
_BLOCK = (readers.block_content, readers.block_cut, readers.named, readers.signed)
_SESSION = (readers.tail, readers.talk, readers.chain, readers.signed, readers.explained)
_SEALED = (readers.opened, readers.named_in_the_clear)

_FOREIGN: dict[str, Mutate] = {
    "llama-server": states.changed,
    "llama.cpp": states.changed,
    "llama.cpp-session": states.changed,
    "mlx-lm": foreign_changes.in_tensors,
    "mlx-lm-0.31": foreign_changes.in_tensors,
    "transformers": foreign_changes.in_zip,
    "safetensors": foreign_changes.in_tensors,
    "vllm-example": foreign_changes.in_folder(foreign_changes.in_tensors),
    "sglang": foreign_changes.in_folder(octets.changed),
    "lmcache": foreign_changes.in_folder(octets.changed),
    "quant.cpp": octets.changed,
}
_NEEDS = (Damaged, Unsupported, UsageError)
"""A file may come to lack what the caller did not give."""

TARGETS = (
    Target("block", seeds.blocks, *_DIGEST, readers.block, _BLOCK),
    Target("block, to torch", seeds.plain_blocks, *_DIGEST, readers.block, (readers.block_on_device,)),
    Target("state checkpoint", seeds.states, *_DIGEST, readers.block, _BLOCK),
    # Notes are read, and copied to be digested.
    Target("session", seeds.sessions, *_DIGEST, readers.session, _SESSION, factor=100),
    Target(
        "manifest", seeds.manifests, *_DIGEST, readers.manifest, (readers.manifest_keys, readers.signed)
    ),
    Target(
        "calibration", seeds.calibrations, *_DIGEST, readers.calibrated, (readers.calibration_used,)
    ),
    Target("pin", seeds.pins, *_DIGEST, readers.pin),
    Target("sealed file", seeds.sealed, *_DIGEST, readers.sealed, _SEALED),
    Target(
        "sealed file, inside", seeds.sealed, edits.changed_inside, readers.digest_past,
        readers.sealed, _SEALED, factor=100,
    ),
    Target("record of a rebuild", seeds.stored, edits.changed, readers.header_past, readers.record),
    Target(
        "size by header", seeds.sessions, edits.changed, readers.header_past, readers.size_described
    ),
    Target(
        "portable file", other_seeds.archives, archives.changed, other_readers.member_past,
        other_readers.archive_bytes,
    ),
    Target(
        "portable file, opened", other_seeds.archives, archives.changed,
        other_readers.member_past, other_readers.archive_file,
    ),
    *(
        Target(
            f"llama.cpp state {version}", partial(engine_states.of_attention, version),
            states.changed, other_readers.magic_past,
            partial(other_readers.attention_state, version), (other_readers.in_order,),
        )
        for version in (3, 4)
    ),
    *(
        Target(
            f"llama.cpp memory, {name}", partial(engine_states.of_several, recurrent),
            states.changed, other_readers.magic_past,
            partial(other_readers.several_states, recurrent), (other_readers.in_order,),
        )
        for name, recurrent in (("sliding window", False), ("hybrid", True))
    ),
    Target(
        "kvsnap.json", other_seeds.settings, texts.changed, other_readers.json_past,
        other_readers.settings, (other_readers.asked_budget,),
        (Unsupported, StoreError, UsageError), share=0.4,
    ),
    Target(
        "tenant key", other_seeds.keys, octets.changed, other_readers.everything_past,
        other_readers.key, refusals=(UsageError,),
    ),
    *(
        Target(
            f"foreign, {name}", partial(foreign_seeds.files, name), mutate,
            partial(foreign_readers.recognised, name), partial(foreign_readers.read, name),
            (foreign_readers.used,), _NEEDS, share=0.5,
        )
        for name, mutate in _FOREIGN.items()
    ),
    Target(
        "foreign, slot", foreign_seeds.slots, states.changed,
        partial(foreign_readers.recognised, "llama-server"), foreign_readers.slot,
        (foreign_readers.slot_rows,), share=0.5,
    ),
    Target(
        "foreign, pickle", foreign_seeds.pickles, foreign_changes.in_pickle,
        other_readers.everything_past, foreign_readers.unpickled,
    ),
    Target(
        "foreign, config of a tier", foreign_seeds.configs, texts.changed, other_readers.json_past,
        foreign_readers.config, (foreign_readers.config_used,), share=0.4,
    ),
    Target(
        "foreign, names", foreign_seeds.names, foreign_changes.in_name,
        other_readers.everything_past, foreign_readers.name,
    ),
)  # fmt: skip
