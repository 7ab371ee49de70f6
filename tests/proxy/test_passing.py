"""What passes through the proxy is what the server said; what it adds stands in headers."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import re
from pathlib import Path
from typing import Any

import httpx2
import pytest

from kvsnap.kvstore.place import Place, write_settings
from kvsnap.kvstore.store import Store
from tests.proxy.conftest import BLOCK

openai = pytest.importorskip("openai")
pytestmark = pytest.mark.engine

LONG = "one two three four five six seven eight nine ten " * 3
BODY = {"messages": [{"role": "user", "content": LONG}], "max_tokens": 6}


def without_times(body: bytes) -> bytes:
    """A response's bytes up to its timings, which no two runs share; nor do they share what they
    found in a slot."""
    return re.sub(rb'"cached_tokens":\d+', b"", body.split(b'"timings"')[0])


def test_a_stream_is_passed_on_byte_by_byte(
    tiny: Path, start_upstream: Any, start_proxy: Any
) -> None:
    upstream = start_upstream(tiny)
    proxy = start_proxy(upstream)
    for path, body in (
        ("/v1/chat/completions", BODY),
        ("/completion", {"prompt": LONG, "n_predict": 6}),
        ("/v1/completions", {"prompt": [5, 6, "and so on"], "max_tokens": 6}),
    ):
        for stream in (True, False):
            own = {**body, "stream": stream}
            there = httpx2.post(upstream.url + path, json=own, timeout=60)
            here = proxy.post(path, own)
            assert without_times(here.content) == without_times(there.content)
            assert here.content.count(b"\n") == there.content.count(b"\n")
            ours = {key for key in here.headers if key.startswith("x-kvsnap-")}
            assert ours == {
                "x-kvsnap-reused-tokens",
                "x-kvsnap-seconds-saved",
                "x-kvsnap-slot",
            }
            assert set(here.headers) - ours == set(there.headers)
            proxy.settle()


def test_other_routes_are_passed_on_as_they_come(
    tiny: Path, start_upstream: Any, start_proxy: Any
) -> None:
    upstream = start_upstream(tiny)
    proxy = start_proxy(upstream)
    for method, target, body in (
        ("GET", "/v1/models?a=1&b=%20x", b""),
        ("POST", "/v1/embeddings", b"\x00\xff not json"),
        ("POST", "/infill", b'{"input_prefix": "a"}'),
        ("DELETE", "/v1/stream?conv=x%2Fy", b""),
        ("PUT", "/deep/er/path", b"x" * 300_000),
    ):
        headers = {"x-mine": "1", "connection": "x-secret", "x-secret": "2"}
        here = httpx2.request(method, proxy.url + target, content=body, headers=headers, timeout=60)
        there = httpx2.request(method, upstream.url + target, content=body, headers={"x-mine": "1"})
        assert here.json() == there.json()
        assert here.headers["x-upstream"] == "yes"
    for route in ("/health", "/props", "/slots", "/lora-adapters"):
        assert proxy_get(proxy, route) == httpx2.get(upstream.url + route).json()


def proxy_get(proxy: Any, route: str) -> Any:
    return httpx2.get(proxy.url + route).json()


def test_errors_of_the_server_are_its_own(
    tiny: Path, start_upstream: Any, start_proxy: Any
) -> None:
    upstream = start_upstream(tiny)
    proxy = start_proxy(upstream)
    for body in ({"message": []}, {"messages": [{"role": "user", "content": "x" * 3000}]}):
        here = proxy.post("/v1/chat/completions", body)
        there = httpx2.post(upstream.url + "/v1/chat/completions", json=body, timeout=60)
        assert (here.status_code, here.content) == (there.status_code, there.content)


def test_tools_and_template_arguments_are_part_of_the_prompt(
    tiny: Path, start_upstream: Any, start_proxy: Any
) -> None:
    upstream = start_upstream(tiny)
    proxy = start_proxy(upstream)
    client = openai.OpenAI(base_url=proxy.url + "/v1", api_key="none", max_retries=0)
    tool = {"type": "function", "function": {"name": "look", "parameters": {}}}
    for more in ({"tools": [tool]}, {"extra_body": {"chat_template_kwargs": {"a": 1}}}):
        answers = []
        for _ in range(2):
            answers.append(
                client.chat.completions.create(
                    model="m", messages=BODY["messages"], max_tokens=4, **more
                )
            )
            proxy.settle()
        assert answers[1].timings["cache_n"] == answers[0].usage.prompt_tokens - 1
        assert answers[0].choices[0].message.content == answers[1].choices[0].message.content
    assert upstream.seen()[0]["tools"] == [tool]


@pytest.mark.parametrize("arguments", [(), ("--clear-idle",)])
def test_two_clients_go_on_from_their_own_text_at_once(
    tiny: Path, start_upstream: Any, start_proxy: Any, arguments: tuple[str, ...]
) -> None:
    """A server that clears idle slots may clear one between the end of its request and the saving of
    it: what is lost so is computed again, and no more can be said."""
    upstream = start_upstream(tiny, "--slots", "2", *arguments)
    proxy = start_proxy(upstream)

    def talk(name: str) -> list[tuple[int, int]]:
        client = openai.OpenAI(base_url=proxy.url + "/v1", api_key="none", max_retries=0)
        messages = [{"role": "user", "content": f"{name} speaks, and says a few words more. " * 3}]
        found = []
        for turn in range(4):
            stream = turn % 2 == 0
            answer = client.chat.completions.create(
                model="m", messages=messages, max_tokens=5, stream=stream
            )
            if stream:
                events = list(answer)
                text = "".join(e.choices[0].delta.content or "" for e in events)
                timings = events[-1].timings
            else:
                text, timings = answer.choices[0].message.content, answer.timings
            found.append((timings["cache_n"], timings["prompt_n"]))
            messages += [
                {"role": "assistant", "content": text},
                {"role": "user", "content": f"{turn}?"},
            ]
        return found

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        told = list(pool.map(talk, ["ann", "bob"]))
    proxy.settle()
    for turns in told:
        assert turns[0][1] > 4 * BLOCK
        # What it said itself, its tokens of one character, and the words around it.
        if not arguments:
            assert all(prompt_n <= 6 * BLOCK for _, prompt_n in turns[1:])
            assert all(cache_n >= 9 * BLOCK for cache_n, _ in turns[1:])
    assert sum(cache_n for turns in told for cache_n, _ in turns) > 0
    assert not any(slot["is_processing"] for slot in upstream.slots())


def test_several_proxies_and_servers_share_one_store(
    tiny: Path, start_upstream: Any, start_proxy: Any, tmp_path: Path
) -> None:
    first, second = start_upstream(tiny), start_upstream(tiny, folder=tmp_path)
    one, other = start_proxy(first), start_proxy(second, folder=tmp_path)
    text = one.post("/v1/chat/completions", BODY).json()
    one.settle()
    again = other.post("/v1/chat/completions", BODY).json()
    assert again["timings"]["cache_n"] >= again["usage"]["prompt_tokens"] - BLOCK
    assert again["choices"] == text["choices"]
    other.settle()


def test_what_the_library_saved_serves_the_proxy_and_the_other_way_round(
    tiny: Path, start_upstream: Any, start_proxy: Any, store: Store
) -> None:
    import llama_cpp

    from kvsnap.engines.llamacpp import LlamaCpp
    from kvsnap.formats.names import token_array
    from kvsnap.kvstore.session import Session

    upstream = start_upstream(tiny)
    proxy = start_proxy(upstream)
    ids = [1, *(3 + (n * n) % 100 for n in range(99))]
    others = [1, *(3 + (n * 7) % 100 for n in range(99))]
    llm = llama_cpp.Llama(str(tiny), n_ctx=512, verbose=False)
    engine = LlamaCpp(llm)
    session = Session(store, engine)
    engine.evaluate(token_array(ids))
    session.put_filled()
    answer = proxy.post("/completion", {"prompt": ids, "n_predict": 1})
    assert answer.json()["timings"]["cache_n"] == 100 // BLOCK * BLOCK
    proxy.post("/completion", {"prompt": others, "n_predict": 1})
    proxy.settle()
    assert session.resume(others).reused_tokens == 100 // BLOCK * BLOCK
    session.close()
    llm.close()


def test_another_machine_goes_on_through_the_remote(
    tiny: Path, start_upstream: Any, start_proxy: Any, tmp_path: Path
) -> None:
    remote = (tmp_path / "remote").as_uri()
    for number in range(2):
        path = tmp_path / f"machine{number}"
        write_settings(Place(path, BLOCK))
        with Store(path, min_free=0, remote=remote, write_behind=True) as own:
            upstream = start_upstream(tiny)
            proxy = start_proxy(upstream, store=own)
            answer = proxy.post("/v1/chat/completions", BODY).json()
            proxy.settle()
            proxy.close()
            assert (answer["timings"]["cache_n"] > 0) == bool(number)


def test_in_an_encrypted_store_blocks_are_sealed_and_only_their_tenant_reuses_them(
    tiny: Path, start_upstream: Any, start_proxy: Any, tmp_path: Path
) -> None:
    pytest.importorskip("cryptography")
    from kvsnap.formats.tenant import Tenant

    one, other = Tenant(b"1" * 32), Tenant(b"2" * 32)
    cached = []
    for tenant in (one, other, one):
        with Store(tmp_path / "sealed", min_free=0, encrypt=True) as own:
            upstream = start_upstream(tiny)
            proxy = start_proxy(upstream, store=own, tenant=tenant)
            cached.append(proxy.post("/v1/chat/completions", BODY).json()["timings"]["cache_n"])
            proxy.settle()
            proxy.close()
    assert [count > 0 for count in cached] == [False, False, True]


def test_a_quantized_cache_is_restored_as_it_is(
    tiny: Path, start_upstream: Any, start_proxy: Any
) -> None:
    upstream = start_upstream(tiny, "--cache-type", "f32")
    proxy = start_proxy(upstream)
    first = proxy.post("/v1/chat/completions", BODY).json()
    proxy.settle()
    upstream.restart()
    again = proxy.post("/v1/chat/completions", BODY).json()
    assert again["timings"]["cache_n"] > 0
    assert again["choices"] == first["choices"]


def test_cells_that_are_not_in_order_give_the_same_blocks(
    tiny: Path, start_upstream: Any, start_proxy: Any, tmp_path: Path
) -> None:
    contents = []
    for number, arguments in enumerate(((), ("--reversed-cells",))):
        path = tmp_path / f"store{number}"
        write_settings(Place(path, BLOCK))
        with Store(path, min_free=0) as own:
            upstream = start_upstream(tiny, *arguments)
            proxy = start_proxy(upstream, store=own)
            assert proxy.post("/v1/chat/completions", BODY).headers["x-kvsnap-slot"] == "0"
            proxy.settle()
            proxy.close()
            names = [name for (name,) in own.index.query("SELECT name FROM blocks ORDER BY start")]
            contents.append([(name, own.place.block(name).read_bytes()) for name in names])
    assert len(contents[0]) > 5
    assert contents[0] == contents[1]


def test_a_proxy_that_is_asked_before_the_server_is_there_says_so(tmp_path: Path) -> None:
    from kvsnap.formats.errors import NotFound, UsageError
    from kvsnap.kvstore.proxy.app import ProxyOptions, create_app

    options = ProxyOptions(upstream="http://127.0.0.1:1", slot_dir=tmp_path / "absent")
    with Store(tmp_path / "store") as own:
        with pytest.raises(NotFound):
            create_app(own, options)
        right = dataclasses.replace(options, slot_dir=tmp_path)
        for wrong in ({"upstream": "127.0.0.1:8080"}, {"codec": "q8"}):
            with pytest.raises(UsageError):
                create_app(own, dataclasses.replace(right, **wrong))
