"""Names of a vLLM request's blocks: of its tokens, its salt and its media, and of nothing else."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from kvsnap.engines.vllm_chain import Chain, cannot_name
from kvsnap.formats.identity import Root, root_of
from kvsnap.formats.names import ZERO_PARENT, chain_names, token_array
from kvsnap.testing.stamped import StampedEngine

SIZE, RANK = 4, (0, 0)
DIGEST, OTHER = "ab" * 32, "cd" * 32


def root(weights: str = "stamped") -> Root:
    return root_of(StampedEngine(weights=weights).identity(SIZE, lambda path: ""))


def media(identifier: str, offset: int, length: int, mm_hash: str | None = None) -> Any:
    place = SimpleNamespace(offset=offset, length=length)
    return SimpleNamespace(identifier=identifier, mm_hash=mm_hash, mm_position=place)


def request(tokens: list[int], **more: Any) -> Any:
    known = {"cache_salt": None, "mm_features": [], "prompt_embeds": None}
    known |= {"resumable": False, "pooling_params": None}
    return SimpleNamespace(all_token_ids=tokens, **known | more)


def names(blocks: int = 3, **more: Any) -> list[bytes]:
    chain = Chain(request(list(range(100, 120)), **more), {RANK: root()}, SIZE)
    chain.reach(blocks)
    return chain.names[RANK][1:]


def test_without_extras_they_are_the_names_of_the_format() -> None:
    ids = token_array(list(range(100, 120)))
    assert names(5) == chain_names(root().key, ids, SIZE)


def test_they_are_the_same_asked_for_at_once_and_as_the_request_grows() -> None:
    tokens = list(range(100, 105))
    chain = Chain(request(tokens), {RANK: root(), (0, 1): root("other")}, SIZE)
    for count in range(1, 6):
        tokens += range(tokens[-1] + 1, 100 + 4 * count)
        chain.reach(count)
        chain.reach(count - 1)
    assert chain.names[RANK] == [ZERO_PARENT, *names(5)]
    assert not set(chain.names[RANK][1:]) & set(chain.names[(0, 1)])
    assert chain.token_ids(1, 3).tolist() == list(range(104, 112))


def test_a_salt_makes_other_names_all_along() -> None:
    salted = [names(), names(cache_salt="a"), names(cache_salt="b"), names(cache_salt=DIGEST)]
    assert len({name for chain in salted for name in chain}) == 4 * 3
    assert names(cache_salt="") == names()  # as in vLLM's own cache


@pytest.mark.parametrize(
    ("offset", "length", "same"),
    [(0, 1, 0), (4, 1, 1), (3, 1, 0), (7, 9, 1), (11, 1, 2), (12, 4, 3)],
)
def test_media_count_from_the_block_on_in_which_they_begin(
    offset: int, length: int, same: int
) -> None:
    plain, shown = names(), names(mm_features=[media(DIGEST, offset, length)])
    assert [one == other for one, other in zip(plain, shown, strict=True)] == [
        number < same for number in range(3)
    ]


def test_other_media_and_other_places_are_other_names() -> None:
    kinds = [
        [],
        [media(DIGEST, 1, 2)],
        [media(DIGEST, 2, 1)],
        [media(OTHER, 1, 2)],
        [media(DIGEST, 1, 1), media(OTHER, 2, 1)],
        [media(OTHER, 1, 1), media(DIGEST, 2, 1)],
        [media(f"adapter:{DIGEST}", 1, 2, DIGEST)],
    ]
    first = [names(1, mm_features=kind)[0] for kind in kinds]
    first.append(names(1, cache_salt=DIGEST)[0])
    assert len(set(first)) == len(kinds) + 1


def test_they_are_the_same_in_every_process() -> None:
    code = (
        "from tests.vllm.test_chain import names, media, DIGEST\n"
        "found = names(cache_salt='a', mm_features=[media(DIGEST, 2, 3)])\n"
        "print(*[name.hex() for name in found])"
    )
    own = names(cache_salt="a", mm_features=[media(DIGEST, 2, 3)])
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONHASHSEED": "7"},
    )
    assert ran.stdout.split() == [name.hex() for name in own]


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({}, ""),
        ({"mm_features": [media(DIGEST, 0, 1), media(f"lora:{OTHER}", 1, 1, OTHER)]}, ""),
        ({"mm_features": [media("cat.png", 0, 1)]}, "its media were given names of their own"),
        ({"mm_features": [media(DIGEST, 0, 1, "mine")]}, "its media were given names of their own"),
        ({"prompt_embeds": object()}, "prompt embeddings have no token ids"),
        ({"cache_salt": "plain"}, ""),
        ({"cache_salt": "half \ud800"}, "its cache_salt is no text"),
        ({"resumable": True}, "a streaming request's tokens may change"),
        ({"pooling_params": object()}, "pooling requests are not handled"),
    ],
)
def test_what_has_no_sure_name_has_none(more: dict[str, Any], why: str) -> None:
    assert cannot_name(request([1, 2, 3], **more), trust_media_names=True) == why


def test_names_of_media_are_not_believed_unless_that_is_asked_for() -> None:
    shown = request([1, 2, 3], mm_features=[media(DIGEST, 0, 1)])
    assert "a client may choose" in cannot_name(shown)
    assert cannot_name(request([1, 2, 3])) == ""
