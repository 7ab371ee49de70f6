"""Sessions of an encrypted store do what they do in a plain one: the same calls on both, and the same
answers, but for the few that token ids in the index would be needed for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvsnap.formats.codecs import get_codec
from kvsnap.formats.container import Packed
from kvsnap.formats.errors import NotFound, StoreFull
from kvsnap.formats.sealed import Clear, parse_sealed, seal
from kvsnap.kvstore.doctor import examine
from kvsnap.kvstore.explain.explain import explain
from kvsnap.kvstore.gc import gc
from kvsnap.kvstore.inspect import describe_block, describe_session
from kvsnap.kvstore.recompress import recompress
from kvsnap.kvstore.session import Session
from kvsnap.kvstore.stats import stats
from kvsnap.kvstore.store import Store
from kvsnap.kvstore.tree import read_tree
from kvsnap.kvstore.verify import verify_store
from kvsnap.testing.faults import flip
from kvsnap.testing.recount import assert_closed, assert_counts
from kvsnap.testing.untaught import untaught
from tests.sealed_places import BLOCK, NAME, WEIGHTS, engine, open_encrypted, save, secret_ids
from tests.tenants import ALICE, BOB

IDS = secret_ids(5 * BLOCK + 9, 1)
FORK = np.concatenate([IDS[: 3 * BLOCK], secret_ids(30, 2)])
PROMPTS = [IDS, IDS[:70], IDS[: 2 * BLOCK], FORK, np.concatenate([IDS, FORK]), secret_ids(40, 3)]
KINDS: dict[str, dict[str, Any]] = {
    "rows": {},
    "window": {"window": 24},
    "recurrent": {"recurrent": 40},
    "both": {"window": 8, "recurrent": 16},
}
Answers = list[Any]


def answers(tmp_path: Path, does: Callable[[Store], Answers]) -> tuple[Answers, Answers]:
    """Of a plain store and of an encrypted one."""
    both = []
    for name, encrypt in (("plain", False), ("sealed", True)):
        with open_encrypted(tmp_path / name, encrypt=encrypt) as store:
            both.append(does(store))
            assert_closed(store)
            assert_counts(store)
            assert verify_store(store, ALICE).bad == []
    return both[0], both[1]


def whole_blocks(report: Any) -> int:
    return report.reused_tokens // BLOCK * BLOCK


def look_up(store: Store, kind: dict[str, Any], **how: Any) -> Answers:
    """How much of each prompt a new engine gets, and its rows."""
    found = list[Any]()
    for prompt in PROMPTS:
        new = engine(**kind)
        report = Session(store, new, tenant=ALICE, **how).resume(prompt)
        lossy = report.fidelity != "exact"
        if not lossy:
            new.check_rows()
        count = report.reused_tokens if kind else whole_blocks(report)
        rows = new.export(0, count) if "recurrent" not in kind and not kind.get("window") else {}
        found.append((count, report.fidelity, {n: a.tobytes() for n, a in rows.items()}))
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("codec", ["raw", "zstd", "q8", "q4", "kvtc"])
def test_the_same_is_restored_to_the_bit(tmp_path: Path, kind: str, codec: str) -> None:
    options = KINDS[kind]

    def does(store: Store) -> Answers:
        store.calibrations.put(untaught(engine(**options).layout, WEIGHTS))
        model = engine(**options)
        session = Session(store, model, NAME, tenant=ALICE, codec=codec)
        for stop in (20, 2 * BLOCK, 70, len(IDS)):
            held = len(model.token_ids())
            model.evaluate(IDS[held:stop])
            session.checkpoint()
        session.save()
        lossy = codec not in ("raw", "zstd")
        found = look_up(store, options, codec=codec if lossy else None)
        own = engine(**options)
        report = Session(store, own, NAME, tenant=ALICE).resume([*IDS, 7])
        found.append((report.reused_tokens, report.fidelity, report.damage))
        return found

    plain, sealed = answers(tmp_path, does)
    assert plain == sealed
    assert plain[-1][0] == len(IDS)
    assert plain[0][0] > 0


def test_of_another_block_the_front_is_not_taken(tmp_path: Path) -> None:
    """What it would need is the ids of blocks in the index. The rows of the session's own tail are."""

    def does(store: Store) -> Answers:
        save(store, IDS, NAME, ALICE)
        found = [Session(store, engine(), tenant=ALICE).resume(IDS[:70]).reused_tokens]
        found.append(Session(store, engine(), NAME, tenant=ALICE).resume(IDS).reused_tokens)
        return found

    plain, sealed = answers(tmp_path, does)
    assert plain == [69, len(IDS) - 1]
    assert sealed == [64, len(IDS) - 1]


@pytest.mark.parametrize("codec", ["raw", "q8"])
def test_of_a_prompts_own_last_block_it_is(tmp_path: Path, codec: str) -> None:
    """A prompt that ends where a block does, once more: its last token alone is computed."""

    def does(store: Store) -> Answers:
        ids = IDS[: 4 * BLOCK]
        save(store, ids, None, ALICE, codec=codec)
        new = engine()
        report = Session(store, new, tenant=ALICE, codec=codec).resume(ids)
        return [report.reused_tokens, report.fidelity, report.damage]

    plain, sealed = answers(tmp_path, does)
    assert plain == sealed
    assert sealed[0] == 4 * BLOCK - 1


def truncates_and_branches(store: Store) -> Answers:
    session = save(store, IDS, NAME, ALICE)
    branches = [
        session.branch("end"),
        session.branch("tail", 5 * BLOCK + 3),
        session.branch("edge", 2 * BLOCK),
        session.branch("inside", 2 * BLOCK + 5),
    ]
    session.truncate(2 * BLOCK + 5)
    session.save()
    found = list[Any]()
    for name in ("end", "tail", "edge", "inside", NAME):
        new = engine()
        own = Session(store, new, name, tenant=ALICE)
        ids = own.stored_token_ids()
        report = own.resume(ids, leave=0)
        new.check_rows()
        found.append((name, ids.tolist(), report.reused_tokens, own.stored.record.notes))  # type: ignore[union-attr]
    assert [one[2] for one in found[:4]] == [len(b.stored_token_ids()) for b in branches]
    return found


def recompresses(store: Store) -> Answers:
    save(store, IDS, NAME, ALICE, codec="raw")
    found = list[Any]()
    for codec in ("zstd", "raw", "q8"):
        report = recompress(store, NAME, get_codec(codec), ALICE)
        found.append((report.blocks, report.blocks_written, report.codec, report.fidelity))
        again = Session(store, engine(), NAME, tenant=ALICE).resume(IDS)
        found.append((again.reused_tokens, again.fidelity, again.damage))
    with pytest.raises(NotFound):
        recompress(store, "none", get_codec("zstd"), ALICE)
    return found


def pins_and_evicts(store: Store) -> Answers:
    save(store, IDS, NAME, ALICE)
    save(store, FORK, "fork", ALICE)
    store.pins.pin_session(ALICE.tenant_id, NAME)
    found = list[Any]()
    with open_encrypted(store.path, encrypt=store.encrypt, capacity=1) as small:
        small.keys.add(ALICE)
        report = gc(small)
        found.append((report.evicted, report.sessions_cut))
        found.append([whole_blocks(_resumed(small, ids)) for ids in (IDS, FORK)])
        small.pins.unpin_session(ALICE.tenant_id, NAME)
        found.append(gc(small).evicted)
        found.append(whole_blocks(_resumed(small, IDS)))
        with pytest.raises(StoreFull):
            save(small, IDS, NAME, ALICE)
    return found


def saves_soon(store: Store) -> Answers:
    found = list[Any]()
    with Session(store, engine(), NAME, tenant=ALICE) as session:
        for stop in (10, 50, len(IDS)):
            session.resume(IDS[:stop], leave=0)
            session.engine.evaluate(IDS[len(session.engine.token_ids()) : stop])
            session.save_soon({"turn": stop})
            report = session.flush()
            assert report is not None
            found.append((report.blocks_written, report.blocks_stored, report.revision))
    found.append(_resumed(store, IDS, NAME).reused_tokens)
    return found


def shows(store: Store) -> Answers:
    save(store, IDS, NAME, ALICE)
    save(store, FORK, "fork", ALICE)
    found = list[Any]()
    for listed in store.listing.of(ALICE.tenant_id):
        facts = dataclasses.replace(listed.facts, sealed=False)
        found.append((facts, listed.stored_blocks, listed.pinned_until))
    found.sort(key=lambda one: str(one[0].name))
    session = describe_session(store, ALICE.tenant_id, NAME)
    for key in ("path", "bytes", "codec"):
        session.pop(key)
    found.append({**session, "blocks": [block["name"] for block in session["blocks"]]})
    name = session["blocks"][2]["name"]
    block = describe_block(store, name[:20], ALICE)
    for key in ("path", "bytes", "hits", "codec"):
        block.pop(key)
    found.append(block)
    counted = stats(store, ALICE)
    found.append((counted.blocks, counted.sessions, counted.models, counted.unreachable))
    tree = read_tree(store, tenant=ALICE)
    found += [(node.start, node.tokens, node.blocks, node.sessions) for node in tree.nodes]
    found.append([finding.level for finding in examine(store.path)])
    return found


def explains(store: Store) -> Answers:
    save(store, IDS, NAME, ALICE)
    session = Session(store, engine(), NAME, tenant=ALICE)
    found = list[Any]()
    for prompt in (IDS, np.concatenate([IDS, FORK]), FORK, secret_ids(40, 3)):
        for check in (False, True):
            told = explain(session, prompt, check=check)
            found.append((told.matched_tokens, told.verdict, told.text, told.tail_tokens))
    other = explain(Session(store, engine(rotation_k=3), NAME, tenant=ALICE), IDS)
    found.append((other.verdict, other.identity))
    return found


def explains_what_is_gone(store: Store) -> Answers:
    save(store, IDS, NAME, ALICE)
    chain = store.sessions.load(ALICE.tenant_id, NAME).record.chain
    flip(store.place.block(chain[2]), -3)
    found = list[Any]()
    with open_encrypted(store.path, encrypt=store.encrypt) as again:
        session = Session(again, engine(), NAME, tenant=ALICE)
        told = explain(session, IDS, check=True)
        found.append((told.matched_tokens, told.verdict, bool(told.damage)))
        session.resume(IDS)
        told = explain(session, IDS)
        found.append((told.matched_tokens, told.verdict, told.block))
        session.engine.evaluate(IDS[len(session.engine.token_ids()) :])
        session.save()
    with open_encrypted(store.path, encrypt=store.encrypt, capacity=1) as small:
        gc(small)
        told = explain(Session(small, engine(), NAME, tenant=ALICE), IDS)
        found.append((told.matched_tokens, told.verdict, told.block, told.text))
    with open_encrypted(store.path, encrypt=store.encrypt) as again:
        save(again, IDS, NAME, ALICE)
    return found


def explains_states(store: Store) -> Answers:
    kind = KINDS["both"]
    model = engine(**kind)
    session = Session(store, model, NAME, tenant=ALICE)
    model.evaluate(IDS)
    session.save()
    state = store.sessions.load(ALICE.tenant_id, NAME).record.state
    prompt = np.concatenate([IDS, FORK])
    found = list[Any]()
    told = explain(Session(store, engine(**kind), tenant=ALICE), prompt, check=True)
    found.append((told.matched_tokens, told.verdict, told.state))
    other = engine(**kind)
    with Session(store, other, "fork", tenant=ALICE) as fork:
        other.evaluate(FORK)
        fork.save()
    lost = store.sessions.load(ALICE.tenant_id, "fork").record.state
    for name in (state, lost):
        store.place.block(name).unlink()
        store.blocks.set_aside(name, "for the test")
    for ids in (prompt, np.concatenate([FORK, IDS])):
        told = explain(Session(store, engine(**kind), tenant=ALICE), ids)
        found.append((told.matched_tokens, told.verdict, told.block))
    assert found[1][2] == state.hex()
    assert found[2][2] == lost.hex()
    for again, ids, name in ((session, IDS, NAME), (fork, FORK, "fork")):
        assert again.engine.token_ids().tolist() == ids.tolist(), name
        store.blocks.misses.clear()
        again.save()
    return found


def _resumed(store: Store, ids: np.ndarray, name: str | None = None) -> Any:
    new = engine()
    report = Session(store, new, name, tenant=ALICE).resume(ids)
    new.check_rows()
    return report


SCENARIOS: dict[str, Callable[[Store], Answers]] = {
    does.__name__: does
    for does in (
        truncates_and_branches,
        recompresses,
        pins_and_evicts,
        saves_soon,
        shows,
        explains,
        explains_what_is_gone,
        explains_states,
    )
}


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_it_answers_as_a_plain_store(tmp_path: Path, scenario: str) -> None:
    plain, sealed = answers(tmp_path, SCENARIOS[scenario])
    assert plain == sealed
    assert plain


def test_the_tier_in_memory_has_opened_blocks(tmp_path: Path) -> None:
    with open_encrypted(tmp_path / "s") as store:
        save(store, IDS, NAME, ALICE)
    with open_encrypted(tmp_path / "s", ram="10MB") as store:
        assert whole_blocks(_resumed(store, IDS)) == 5 * BLOCK
        for file in store.path.glob("blocks/*/*"):
            file.unlink()
        assert whole_blocks(_resumed(store, IDS)) == 5 * BLOCK
        report = Session(store, engine(), tenant=BOB).resume(IDS)
        assert report.reused_tokens == 0, "they are still this tenant's"


def test_sessions_are_listed_as_far_as_the_key_goes(tmp_path: Path) -> None:
    with open_encrypted(tmp_path / "s") as store:
        save(store, IDS, NAME, ALICE)
        save(store, IDS, NAME, BOB)
        store.pins.pin_session(BOB.tenant_id, NAME)
    for keys, named in (((), 0), ((ALICE,), 1), ((ALICE, BOB), 2)):
        with open_encrypted(tmp_path / "s") as store:
            for tenant in keys:
                store.keys.add(tenant)
            listed = list(store.listing)
            assert len(listed) == 2
            assert [one.facts.name for one in listed if one.facts.name] == [NAME] * named
            assert all(one.facts.sealed and not one.facts.problem for one in listed)
            assert {one.facts.tokens for one in listed if not one.facts.name} <= {0}
            assert all(one.facts.last for one in listed)
            assert sum(one.pinned_until is not None for one in listed) == 1
            assert [one.stored_blocks for one in listed if one.facts.name] == [5] * named


def test_no_two_files_have_one_salt(tmp_path: Path) -> None:
    packed = Packed((b"what was asked",), 14, "")
    clear, salts, parts = Clear("session", ALICE.tenant_id), set[bytes](), set[bytes]()
    for _ in range(10_000):
        made = b"".join(bytes(part) for part in seal(packed, clear, ALICE).buffers)
        salts.add(made[made.index(b'"salt":"') + 8 :][:64])
        parts.add(bytes(parse_sealed(memoryview(made))._sealed))
    assert len(salts) == len(parts) == 10_000
    assert all(len(bytes.fromhex(salt.decode())) == 32 for salt in salts)


def test_a_block_that_is_sealed_again_is_another_file(tmp_path: Path) -> None:
    seen = dict[str, set[bytes]]()
    with open_encrypted(tmp_path / "s") as store:
        save(store, IDS, NAME, ALICE)
        for _ in range(3):
            recompress(store, NAME, get_codec("raw"), ALICE)
            for file in store.path.glob("blocks/*/*"):
                sealed = parse_sealed(memoryview(file.read_bytes()))
                seen.setdefault(file.name, set()).add(bytes(sealed._sealed)[:64])
        assert _resumed(store, IDS, NAME).reused_tokens == len(IDS) - 1
    assert [len(one) for one in seen.values()] == [3] * 5
    assert len(set.union(*seen.values())) == 15
