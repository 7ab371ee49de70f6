"""The real engine in processes of its own: one stores, another restores what SGLang itself counts.

Kernels and device copies are replaced, see shim/sitecustomize.py. Greedy tokens of a restored prompt are
compared with those of the run that computed it, which evaluated the same pages.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from tests.sglang.conftest import Done, Start
from tests.sglang.engine_worker import NEW_TOKENS

pytestmark = [pytest.mark.engine, pytest.mark.slow]

PAGE = 32
SYSTEM = [(7 * n) % 1900 + 5 for n in range(6 * PAGE + 8)]
CHAT = [*SYSTEM, *((11 * n) % 1900 + 5 for n in range(5 * PAGE + 20))]
CHAT_TOKENS = len(CHAT) // PAGE * PAGE
STORED = (len(CHAT) + NEW_TOKENS - 1) // PAGE
"""Pages of a chat and its answer, of whose last token nobody computed KV."""
assert STORED * PAGE > CHAT_TOKENS, "the last page ends among generated tokens"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stores")


FLUSH = ["", "flush"]
DETACH = [["", "detach"], FLUSH]
ATTACHED = [True, "Attached HiCache storage backend successfully."]


@pytest.fixture(scope="module")
def first(place: Path, models: Callable[..., Path], start: Start) -> Done:
    """The run that stores, of pages in the order `layer_first`."""
    steps = [["asked", "generate", [SYSTEM, CHAT]]]
    return start({"model": models(), "storage": {"store": str(place / "shared")}, "steps": steps})()


@pytest.fixture(scope="module")
def answers(first: Done) -> list[list[int]]:
    """To SYSTEM and CHAT, of the run that computed all of them."""
    return [result["ids"] for result in first["asked"]]


def cached(result: dict[str, Any], where: str = "storage") -> int:
    return int(result["details"].get(where, 0))


def blocks(folder: Path) -> list[Path]:
    return sorted(folder.glob("blocks/*/*.safetensors"))


def test_the_first_run_stores_every_whole_page_once_also_of_generated_tokens(
    first: Done, place: Path
) -> None:
    assert [cached(result) for result in first["asked"]] == [0, 0]
    stored = blocks(place / "shared")
    assert len(stored) == STORED
    starts = []
    for path in stored:
        with safe_open(path, "np") as file:
            starts.append(int(file.metadata()["start"]))
            assert file.get_tensor("page.kv").shape == (1, 2 * 4 * PAGE * 2 * 64 * 2)
    assert sorted(starts) == [8 * n for n in range(len(stored))], "one chain"


@pytest.fixture(scope="module")
def second(
    first: Done, answers: list[Any], place: Path, models: Callable[..., Path], start: Start
) -> Done:
    """A new process on that store, which then meets other stores, without a restart."""
    key = place / "tenant.key"
    key.write_text("7c" * 32)
    shared = {"store": str(place / "shared")}
    tenant = {**shared, "tenant_key_file": str(key)}
    sealed = {"store": str(place / "sealed"), "tenant_key_file": str(key), "encrypt": True}
    generic = {"store": str(place / "generic"), "interface_v1": 0}
    tiny = {"store": str(place / "tiny"), "capacity": "150kB"}
    next_turn = [*CHAT, *answers[1], *SYSTEM[:PAGE]]
    steps = [
        ["restored", "generate", [SYSTEM, CHAT, next_turn]],
        FLUSH,
        ["damaged", "damage", 3, -100],
        ["after damage", "generate", [CHAT]],
        FLUSH,
        ["stored again", "generate", [next_turn]],
        *DETACH,
        ["tenant attached", "attach", tenant],
        ["tenant", "generate", [SYSTEM]],
        *DETACH,
        ["sealed attached", "attach", sealed],
        ["sealed", "generate", [CHAT]],
        FLUSH,
        ["sealed again", "generate", [CHAT]],
        *DETACH,
        ["generic attached", "attach", generic],
        ["generic", "generate", [CHAT]],
        FLUSH,
        ["generic again", "generate", [CHAT]],
        ["", "clear"],
        FLUSH,
        ["cleared", "generate", [CHAT]],
        *DETACH,
        ["tiny attached", "attach", tiny],
        ["tiny", "generate", [CHAT, SYSTEM]],
        FLUSH,
        ["tiny again", "generate", [CHAT]],
        *DETACH,
        ["misspelt", "attach", {"store": str(place / "misspelt"), "capactiy": "1GB"}],
        ["without", "generate", [CHAT]],
        ["shared attached", "attach", shared],
        FLUSH,
        ["replaced", "replace weights", str(models(seed=1))],
        ["after replacing", "generate", [CHAT]],
    ]
    return start({"model": models(), "storage": shared, "steps": steps})()


def test_a_new_process_restores_whole_pages_and_gives_equal_tokens(
    answers: list[Any], second: Done
) -> None:
    system, chat, _ = second["restored"]
    assert cached(system) == len(SYSTEM) // PAGE * PAGE
    assert system["details"]["storage_backend"] == "KVSnapStorage"
    assert [system["ids"], chat["ids"]] == answers


def test_pages_behind_those_that_are_on_the_device_are_restored_too(second: Done) -> None:
    chat = second["restored"][1]
    assert cached(chat, "device") == len(SYSTEM) // PAGE * PAGE
    assert cached(chat) == CHAT_TOKENS - len(SYSTEM) // PAGE * PAGE


def test_a_flipped_bit_ends_the_hit_and_the_tokens_are_equal(
    answers: list[Any], second: Done, place: Path
) -> None:
    (name,), (asked,) = second["damaged"], second["after damage"]
    assert cached(asked) == 3 * PAGE
    assert asked["ids"] == answers[1]
    assert [path for path in (place / "shared" / "quarantine").iterdir() if name in path.name]


def test_what_was_computed_instead_is_stored_again_and_so_is_the_answer(second: Done) -> None:
    (asked,) = second["stored again"]
    assert cached(asked) == (len(CHAT) + NEW_TOKENS + PAGE) // PAGE * PAGE > STORED * PAGE
    assert asked["ids"] == second["restored"][2]["ids"]


def test_another_tenant_finds_nothing(answers: list[Any], second: Done) -> None:
    assert second["tenant attached"] == ATTACHED
    (asked,) = second["tenant"]
    assert cached(asked) == 0
    assert asked["ids"] == answers[0]


def test_a_tenant_with_a_sealed_store_finds_its_own(
    answers: list[Any], second: Done, place: Path
) -> None:
    assert second["sealed attached"] == ATTACHED
    (before,), (after,) = second["sealed"], second["sealed again"]
    assert [cached(before), cached(after)] == [0, CHAT_TOKENS]
    assert after["ids"] == answers[1]
    with safe_open(blocks(place / "sealed")[0], "np") as file:
        assert list(file.keys()) == ["sealed"]


def test_generic_calls_store_pages_alone_and_find_them(
    answers: list[Any], second: Done, place: Path
) -> None:
    (before,), (after,) = second["generic"], second["generic again"]
    assert [cached(before), cached(after)] == [0, CHAT_TOKENS]
    assert after["ids"] == answers[1]
    starts = set()
    for path in blocks(place / "generic"):
        with safe_open(path, "np") as file:
            starts.add(file.metadata()["start"])
    assert starts == {"0"}


def test_clearing_deletes_nobodys_blocks(second: Done) -> None:
    assert cached(second["cleared"][0]) == CHAT_TOKENS
    assert "the store is left as it is" in second.log


def test_a_full_store_never_breaks_generation(
    answers: list[Any], second: Done, place: Path
) -> None:
    assert second["tiny attached"] == ATTACHED
    asked = [*second["tiny"], *second["tiny again"]]
    assert [result["ids"] for result in asked] == [answers[1], answers[0], answers[1]]
    assert 0 < len(blocks(place / "tiny")) <= 2


def test_an_unknown_option_is_refused_by_name_and_the_engine_goes_on(
    answers: list[Any], second: Done, place: Path
) -> None:
    taken, message = second["misspelt"]
    assert not taken
    assert "'capactiy' is not known" in message
    assert second["without"][0]["ids"] == answers[1]
    assert not (place / "misspelt").exists()


def test_weights_that_are_replaced_while_it_runs_find_nothing(
    answers: list[Any], second: Done
) -> None:
    assert second["shared attached"] == ATTACHED
    assert second["replaced"] is True
    (asked,) = second["after replacing"]
    assert cached(asked) == 0
    assert asked["ids"] != answers[1], "they are other weights"
    assert "replaces the weights of this process" in second.log


@pytest.fixture(scope="module")
def others(second: Done, place: Path, models: Callable[..., Path], start: Start) -> dict[str, Done]:
    """Engines of another layout, type and weights on the shared store. Each pair runs at once, so these
    are also two engines on one store."""
    pages = {"hicache_mem_layout": "page_first_direct"}
    ask, again = ["before", "generate", [CHAT]], ["after", "generate", [CHAT]]
    apart = [
        ask,
        ["salt one", "generate apart", CHAT, "one"],
        FLUSH,
        ["salt two", "generate apart", CHAT, "two"],
        ["salt one again", "generate apart", CHAT, "one"],
    ]
    job = {"model": models(), "storage": {"store": str(place / "shared")}, "steps": [ask]}
    gemma = {"store": str(place / "gemma"), "codec": "zstd"}
    twice = {**job, "engine": pages, "steps": [ask, FLUSH, again]}
    pairs = [
        {"layout": twice, "layout beside": twice},
        {
            "layout again": {**job, "engine": pages, "steps": apart},
            "dtype": {**job, "engine": {"dtype": "float32"}},
        },
        {
            "weights": {**job, "model": models(seed=1)},
            "gemma": {"model": models("gemma3"), "storage": gemma, "steps": [ask, FLUSH, again]},
        },
    ]
    done: dict[str, Done] = {}
    for pair in pairs:
        finish = {name: start(told) for name, told in pair.items()}
        done |= {name: wait() for name, wait in finish.items()}
    return done


def test_another_host_layout_finds_nothing_and_then_its_own(
    answers: list[Any], others: dict[str, Done]
) -> None:
    pair = [others[name] for name in ("layout", "layout beside")]
    before = [cached(done["before"][0]) for done in pair]
    assert 0 in before, "the later one may find what the other has stored by then"
    assert all(count % PAGE == 0 for count in before)
    assert [cached(done["after"][0]) for done in pair] == [CHAT_TOKENS, CHAT_TOKENS]
    assert cached(others["layout again"]["before"][0]) == CHAT_TOKENS
    asked = [done[when][0] for done in pair for when in ("before", "after")]
    asked += others["layout again"]["before"]
    assert [result["ids"] for result in asked] == 5 * [answers[1]]


def test_requests_of_another_salt_find_nothing(answers: list[Any], others: dict[str, Done]) -> None:
    done = others["layout again"]
    assert [done["salt one"]["cached"], done["salt two"]["cached"]] == [0, 0]
    assert cached(done["salt one again"]) == CHAT_TOKENS
    assert done["salt one again"]["ids"] == done["salt one"]["ids"] == answers[1]


def test_another_type_and_other_weights_find_nothing(others: dict[str, Done]) -> None:
    assert cached(others["dtype"]["before"][0]) == 0
    assert cached(others["weights"]["before"][0]) == 0


def test_nothing_of_all_this_damaged_the_store(others: dict[str, Done], place: Path) -> None:
    from kvsnap.kvstore.store import Store
    from kvsnap.kvstore.verify import verify_store

    with Store(place / "shared") as store:
        report = verify_store(store)
    assert report.checked >= 4 * CHAT_TOKENS // PAGE
    assert not report.bad


def test_a_model_whose_windows_sglang_keeps_in_full_is_served(others: dict[str, Done]) -> None:
    """Of Gemma 3 this release keeps every token's rows in every layer, in the one pool."""
    (before,), (after,) = others["gemma"]["before"], others["gemma"]["after"]
    assert [cached(before), cached(after)] == [0, CHAT_TOKENS]
    assert before["ids"] == after["ids"]


def test_weights_of_which_nothing_tells_are_refused_at_start_by_name(
    place: Path, models: Callable[..., Path], start: Start
) -> None:
    told = {"engine": {"load_format": "dummy"}, "storage": {"store": str(place / "dummy")}}
    done = start({"model": models(), "steps": [], **told}, fails=True)()
    assert "weights are loaded as 'dummy'" in done.log
    assert not (place / "dummy").exists()
