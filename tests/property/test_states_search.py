"""The deepest usable checkpoint against a search through all of them, whatever is stored and lost."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from kvsnap.formats.block import STATE
from kvsnap.formats.codecs import get_codec
from kvsnap.formats.identity import Identity, root_of
from kvsnap.formats.layout import Group, Layout, Plane
from kvsnap.formats.names import ZERO_PARENT, block_name, chain_names, token_array
from kvsnap.kvstore.match import chain, deepest_state
from kvsnap.kvstore.store import Store
from kvsnap.kvstore.wanted import Wanted
from kvsnap.testing.recount import assert_counts

SIZE = 4
PAGE = Plane(name="r", kind="pages", dtype="U8", row=(4,), source_type="f32")
LAYOUT = Layout(groups=(Group(name="recurrent", layers=1, span=0, planes=(PAGE,)),))
ROOT = root_of(
    Identity(family="f", weights="w", architecture="a", layout=LAYOUT, rope=None, block_size=SIZE)
)
# Two ids, in runs: prompts share prefixes, branch inside blocks and come back together.
PROMPTS = st.lists(st.tuples(st.integers(0, 1), st.integers(1, 7)), min_size=1, max_size=5).map(
    lambda runs: tuple(token for token, length in runs for _ in range(length))
)
SAVES = st.lists(st.tuples(PROMPTS, st.sets(st.integers(1, 24), max_size=4)), max_size=5)


def put(store: Store, prompt: tuple[int, ...], positions: set[int]) -> dict[tuple[int, ...], bytes]:
    """Store a prompt's blocks and checkpoints; tokens up to there → name of each checkpoint."""
    ids, made = token_array(prompt), {}
    names = chain_names(ROOT.key, ids, SIZE)
    rows = LAYOUT.empty(0)
    rows["recurrent.r"][...] = 1
    codec = get_codec("raw")
    for block in chain(names, ids, SIZE):
        store.blocks.put(ROOT, block, codec, LAYOUT, {})
    for position in sorted(at for at in positions if at <= len(ids)):
        depth = position // SIZE
        parent = names[depth - 1] if depth else ZERO_PARENT
        rest = ids[depth * SIZE : position]
        name = block_name(ROOT.key, parent, rest, STATE)
        store.blocks.put(ROOT, Wanted(name, parent, depth * SIZE, rest, STATE), codec, LAYOUT, rows)
        made[prompt[:position]] = name
    return made


@settings(max_examples=60)
@given(
    saves=SAVES, prompt=PROMPTS, gone=st.sets(st.integers(0, 30), max_size=3), anew=st.booleans()
)
def test_the_deepest_usable_state_is_found(
    saves: list[tuple[tuple[int, ...], set[int]]],
    prompt: tuple[int, ...],
    gone: set[int],
    anew: bool,
) -> None:
    folder = Path(tempfile.mkdtemp(prefix="kvsnap-", dir=os.environ.get("PYTEST_DEBUG_TEMPROOT")))
    try:
        text = json.dumps({"block_size": SIZE, "created": 1, "format": "1"})
        (folder / "kvsnap.json").write_text(text)
        states: dict[tuple[int, ...], bytes] = {}
        with Store(folder) as store:
            for saved, positions in saves:
                states |= put(store, saved, positions)
            files = sorted(store.place.blocks.glob("*/*"))
            lost = {bytes.fromhex(files[n].stem) for n in gone if n < len(files)}
            for name in lost:
                store.place.block(name).unlink()
                if not anew:
                    store.blocks.set_aside(name, "the file is missing")
        if anew:
            (folder / "index.sqlite3").unlink(missing_ok=True)
        with Store(folder) as store:
            ids = token_array(prompt)
            names = chain_names(ROOT.key, ids, SIZE)
            match = deepest_state(store.blocks, ROOT, names, ids, SIZE, len(ids) - 1)
            usable = [0]
            for tokens, name in states.items():
                before = names[: len(tokens) // SIZE]
                if prompt[: len(tokens)] == tokens and not lost & {name, *before}:
                    usable.append(len(tokens))
            assert match.tokens == max(at for at in usable if at < len(prompt))
            assert (match.state is None) == (match.tokens == 0)
            if match.state is not None:
                assert match.state.name == states[prompt[: match.tokens]]
                store.blocks.read_state(ROOT, match.state, LAYOUT)
            assert [block.name for block in match.blocks] == names[: match.tokens // SIZE]
            assert_counts(store)
    finally:
        shutil.rmtree(folder)
