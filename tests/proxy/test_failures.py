"""Whatever is wrong with the server, its slots or the store: the request is answered as without a proxy,
and one warning says why."""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx2
import pytest

from kvsnap.kvstore.proxy import prompt as prompts
from kvsnap.kvstore.store import Store

pytestmark = pytest.mark.engine

TEXT = "the rain in spain stays mainly in the plain and so on and so on " * 2


def warnings_of(caplog: Any) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def blocks_of(store: Store) -> int:
    return store.index.query("SELECT count(*) FROM blocks")[0][0]


def text_of(answer: Any) -> str:
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


def twice(upstream: Any, proxy: Any, text: str = TEXT) -> Any:
    """The same chat before and after a restart of the server: the second answer's timings."""
    first = proxy.chat(text)
    proxy.settle()
    upstream.restart()
    second = proxy.chat(text)
    proxy.settle()
    assert text_of(first) == text_of(second)
    return second.json()["timings"]


def test_what_is_restored_is_not_computed(
    tiny: Path, start_upstream: Any, start_proxy: Any
) -> None:
    upstream = start_upstream(tiny)
    timings = twice(upstream, start_proxy(upstream))
    assert timings["cache_n"] > timings["prompt_n"]


def test_a_server_that_is_down_is_a_502_and_served_when_it_is_back(
    tiny: Path, start_upstream: Any, start_proxy: Any, caplog: Any
) -> None:
    upstream = start_upstream(tiny)
    upstream.kill()
    proxy = start_proxy(upstream)
    for _ in range(3):
        assert proxy.chat(TEXT).status_code == 502
    assert len(warnings_of(caplog)) == 1
    upstream.start()
    assert twice(upstream, proxy)["cache_n"] > 0


def test_a_server_that_dies_in_the_middle_of_an_answer_cuts_the_answer(
    tiny: Path, start_upstream: Any, start_proxy: Any
) -> None:
    upstream = start_upstream(tiny, "--token-seconds", "0.2")
    proxy = start_proxy(upstream)
    body = {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 50, "stream": True}
    with pytest.raises(httpx2.HTTPError):  # noqa: PT012, SIM117
        with httpx2.stream("POST", proxy.url + "/v1/chat/completions", json=body, timeout=30) as r:
            for _ in r.iter_raw():
                upstream.kill()
    proxy.settle()
    upstream.start()
    assert text_of(proxy.chat(TEXT))


def test_a_restore_that_is_refused_is_computed(
    tiny: Path, start_upstream: Any, start_proxy: Any, caplog: Any
) -> None:
    upstream = start_upstream(tiny, "--refuse-restore")
    assert twice(upstream, start_proxy(upstream))["cache_n"] == 0
    assert len(warnings_of(caplog)) == 1
    assert "Unable to restore slot" in warnings_of(caplog)[0]


def test_where_idle_slots_leave_no_room_for_a_restore_they_are_erased(
    tiny: Path, start_upstream: Any, start_proxy: Any, caplog: Any
) -> None:
    upstream = start_upstream(tiny, "--slots", "3", "--unified", "--ctx", "256")
    proxy = start_proxy(upstream)
    texts = [letter * 90 for letter in "abcd"]
    for text in texts:
        proxy.post("/completion", {"prompt": text, "n_predict": 1})
        proxy.settle()
    for text in texts:
        answer = proxy.post("/completion", {"prompt": text, "n_predict": 1})
        assert answer.json()["timings"]["cache_n"] >= 80
        proxy.settle()
    assert not warnings_of(caplog)


def test_a_server_that_computes_what_was_restored_is_recognised_and_said_once(
    tiny: Path, start_upstream: Any, start_proxy: Any, caplog: Any
) -> None:
    upstream = start_upstream(tiny, "--ignore-restore")
    proxy = start_proxy(upstream)
    for letter in "abcd":
        proxy.chat(letter * 100)
        proxy.settle()
    upstream.restart()
    for letter in "abcd":
        # The words of the template are what the prompts share, and what the slot holds.
        assert proxy.chat(letter * 100).json()["timings"]["cache_n"] < 20
        proxy.settle()
    assert len(warnings_of(caplog)) == 1
    assert "--swa-full" in warnings_of(caplog)[0]
    assert ["id_slot" in fields for fields in upstream.seen()] == [True, True, False, False]


def test_a_slot_version_that_is_not_known_ends_in_plain_forwarding(
    tiny: Path, start_upstream: Any, start_proxy: Any, caplog: Any, store: Store
) -> None:
    upstream = start_upstream(tiny, "--slot-version", "5")
    proxy = start_proxy(upstream)
    for _ in range(2):
        text_of(proxy.chat(TEXT))
    assert len(warnings_of(caplog)) == 1
    assert "version 5" in warnings_of(caplog)[0]
    assert all("id_slot" not in fields for fields in upstream.seen())
    assert blocks_of(store) == 0


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("--rope-freq-base", "500000"), "--rope"),
        (("--lora-scale", "0.5"), "LoRA"),
        (("--spoil", "ids"), "by number"),
        (("--spoil", "nan"), "no numbers"),
        (("--api-key", "secret"), "401"),
    ],
)
def test_rows_of_unknown_origin_are_neither_stored_nor_restored(
    tiny: Path,
    start_upstream: Any,
    start_proxy: Any,
    caplog: Any,
    store: Store,
    arguments: tuple[str, str],
    word: str,
) -> None:
    upstream = start_upstream(tiny, *arguments)
    proxy = start_proxy(upstream)
    for _ in range(2):
        text_of(proxy.chat(TEXT)) if "secret" not in arguments else proxy.chat(TEXT)
    assert len(warnings_of(caplog)) == 1
    assert word in warnings_of(caplog)[0]
    assert blocks_of(store) == 0


def test_the_rope_options_of_the_server_given_to_the_proxy_make_it_served(
    tiny: Path, start_upstream: Any, start_proxy: Any
) -> None:
    from kvsnap.engines.llamacpp_load import LoadOptions

    upstream = start_upstream(tiny, "--rope-freq-base", "500000")
    proxy = start_proxy(upstream, load=LoadOptions(rope_freq_base=500000.0))
    assert twice(upstream, proxy)["cache_n"] > 0


def test_a_server_with_an_api_key_is_served_with_the_proxys_own_and_the_clients(
    tiny: Path, start_upstream: Any, start_proxy: Any
) -> None:
    upstream = start_upstream(tiny, "--api-key", "secret")
    proxy = start_proxy(upstream, key="secret")
    right = {"headers": {"authorization": "Bearer secret"}}
    body = {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 4}
    assert proxy.post("/v1/chat/completions", body, **right).status_code == 200
    proxy.settle()
    assert blocks_of(proxy.store) > 0
    for headers in ({}, {"authorization": "Bearer wrong"}):
        answer = proxy.post("/v1/chat/completions", body, headers=headers)
        assert answer.status_code == 401
        assert "x-kvsnap-reused-tokens" not in answer.headers


def test_another_model_behind_the_same_address_finds_nothing_of_the_first(
    tiny: Path, start_upstream: Any, start_proxy: Any, tmp_path: Path
) -> None:
    from kvsnap.testing.tiny_gguf import write_tiny

    other = write_tiny(tmp_path / "other.gguf", "llama", 7, context=1024)
    upstream = start_upstream(tiny)
    proxy = start_proxy(upstream)
    text_of(proxy.chat(TEXT))
    proxy.settle()
    upstream.restart(model=other)
    assert proxy.chat(TEXT).json()["timings"]["cache_n"] == 0
    proxy.settle()
    upstream.restart()
    assert proxy.chat(TEXT).json()["timings"]["cache_n"] > 0


def test_a_restart_that_the_marker_does_not_tell_is_told_by_the_tasks(
    tiny: Path, start_upstream: Any, start_proxy: Any
) -> None:
    upstream = start_upstream(tiny, "--marker", "pinned")
    proxy = start_proxy(upstream)
    for letter in "ab":
        proxy.chat(letter * 100)
        proxy.settle()
    upstream.restart()
    assert proxy.chat("b" * 100).json()["timings"]["cache_n"] > 64
    probes = [one for one in httpx2.get(upstream.url + "/seen").json() if one.get("n_predict") == 0]
    assert len(probes) == 1  # it was looked at anew


def test_a_damaged_block_is_computed_and_the_text_is_right(
    tiny: Path, start_upstream: Any, start_proxy: Any, store: Store, caplog: Any
) -> None:
    upstream = start_upstream(tiny)
    proxy = start_proxy(upstream)
    first = text_of(proxy.chat(TEXT))
    proxy.settle()
    names = store.index.query("SELECT name FROM blocks ORDER BY start")
    path = store.place.block(names[2][0])
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x40
    path.chmod(0o600)
    path.write_bytes(content)
    upstream.restart()
    answer = proxy.chat(TEXT)
    assert text_of(answer) == first
    assert answer.json()["timings"]["cache_n"] <= 2 * store.block_size
    assert any("digest" in line or "damage" in line for line in warnings_of(caplog))


def test_a_full_store_is_said_and_answers_come(
    tiny: Path, start_upstream: Any, slot_dir: Path, start_proxy: Any, tmp_path: Path, caplog: Any
) -> None:
    upstream = start_upstream(tiny)
    with Store(tmp_path / "small", capacity=10_000, min_free=0) as small:
        proxy = start_proxy(upstream, store=small)
        for letter in "ab":
            text_of(proxy.chat(letter * 300))
            proxy.settle()
        assert len(warnings_of(caplog)) == 1
        proxy.close()


def test_a_slot_folder_of_another_server_is_said(
    tiny: Path, start_upstream: Any, start_proxy: Any, tmp_path: Path, caplog: Any
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    upstream = start_upstream(tiny, folder=other)
    proxy = start_proxy(upstream)
    text_of(proxy.chat(TEXT))
    assert "--slot-save-path" in warnings_of(caplog)[0]
    assert len(warnings_of(caplog)) == 1


def test_leftovers_of_a_killed_proxy_are_removed_and_those_of_a_live_one_kept(
    slot_dir: Path,
) -> None:
    from kvsnap.kvstore.proxy.slot_files import SlotFiles

    program = (
        "import sys, time; from pathlib import Path\n"
        "from kvsnap.kvstore.proxy.slot_files import SlotFiles\n"
        "files = SlotFiles(Path(sys.argv[1]))\n"
        "with files.name() as name:\n"
        "    (files.folder / name).write_bytes(b'x')\n"
        "    print(name, flush=True); time.sleep(60)\n"
    )
    command = [sys.executable, "-c", program, str(slot_dir)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        name = child.stdout.readline().strip()
        (slot_dir / "mine.slot").write_bytes(b"somebody else's")
        live = SlotFiles(slot_dir)
        was_kept = (slot_dir / name).exists()
        child.kill()
    assert was_kept
    again = SlotFiles(slot_dir)
    assert sorted(path.name for path in slot_dir.iterdir()) == ["mine.slot"]
    for files in (live, again):
        files.close()
    (slot_dir / "mine.slot").unlink()


def test_a_client_that_goes_away_frees_its_slot_and_its_prompt_is_kept(
    tiny: Path, start_upstream: Any, start_proxy: Any
) -> None:
    upstream = start_upstream(tiny, "--token-seconds", "0.1")
    proxy = start_proxy(upstream)
    body = {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 500, "stream": True}
    url = proxy.url + "/v1/chat/completions"
    with httpx2.stream("POST", url, json=body, timeout=60) as answer:
        next(answer.iter_raw())
    begun = time.monotonic()
    proxy.settle()
    assert time.monotonic() - begun < 10
    assert not any(slot["is_processing"] for slot in upstream.slots())
    assert blocks_of(proxy.store) > 0
    upstream.restart()
    assert proxy.chat(TEXT).json()["timings"]["cache_n"] > 0


def test_what_the_proxy_does_not_understand_is_passed_on_as_it_came(
    tiny: Path, start_upstream: Any, start_proxy: Any, store: Store
) -> None:
    upstream = start_upstream(tiny, "--slots", "2")
    proxy = start_proxy(upstream)
    ids = list(range(3, 80))
    for more in (
        {"id_slot": 1},
        {"cache_prompt": False},
        {"n_cache_reuse": 32},
        {"lora": [{"id": 0, "scale": 1.0}]},
        {"n": 2},
    ):
        body = {"prompt": ids, "n_predict": 1, **more}
        answer = proxy.post("/completion", body)
        assert answer.status_code == 200
        assert "x-kvsnap-reused-tokens" not in answer.headers
        assert upstream.seen()[-1] == body
    assert blocks_of(store) == 0


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{",
        b'{"prompt": NaN}',
        b'{"prompt": {}}',
        b'{"prompt": ["a", "b"]}',
        b'{"prompt": [[1], [2]]}',
        b'{"prompt": {"prompt_string": "x", "multimodal_data": ["aa"]}}',
        b'{"prompt": ""}',
        b'{"prompt": 1e999}',
        b"[" * 100_000,
        b'{"prompt": "x", "temperature": Infinity}',
    ],
)
def test_bodies_that_say_something_else_are_left_alone(body: bytes) -> None:
    assert prompts.understood("/completion", body) is None
    assert prompts.understood("/v1/chat/completions", body) is None
    image = b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}'
    assert prompts.understood("/v1/chat/completions", image) is None
