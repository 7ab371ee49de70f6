"""The drop-in cache of llama-cpp-python, through the calls that an application makes.

A restart is a new Llama and a new Store on the same folder; one test takes a new process. Reuse is
what the engine did not decode.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import shutil
import subprocess
import sys
import threading
import tracemalloc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest

import kvsnap
from kvsnap.engines import LlamaCpp
from kvsnap.formats.errors import StoreFull, Unsupported, UsageError
from kvsnap.formats.names import chain_names

pytestmark = pytest.mark.engine

BLOCK = 16  # of the store_path fixture
SYSTEM = "You help the customers of a small bicycle rental by the river. Be brief and friendly. "
SAMPLE = Path(__file__).parents[2] / "samples" / "llama_cpp_drop_in.py"


class Chat:
    """A Llama with a LlamaCache, and the number of tokens that it really decoded."""

    def __init__(self, model: Path, store: kvsnap.Store | None, **settings: Any) -> None:
        cached = {key: settings.pop(key) for key in ("tenant", "codec") if key in settings}
        self.llm = make(model, **settings)
        if store is not None:
            self.cache = kvsnap.LlamaCache(store, self.llm, **cached)
            self.llm.set_cache(self.cache)
        self.decoded = 0  # since the adapter was made, which may try one token
        decode = self.llm._ctx.decode

        def counting(batch: Any) -> None:
            decode(batch)
            self.decoded += batch.batch.n_tokens

        self.llm._ctx.decode = counting

    def complete(self, prompt: Any, max_tokens: int = 8, **options: Any) -> str:
        found = self.llm.create_completion(
            prompt, max_tokens=max_tokens, temperature=0.0, **options
        )
        return str(found["choices"][0]["text"])

    def held(self) -> list[int]:
        return [int(n) for n in self.llm.input_ids[: self.llm.n_tokens]]


def make(model: Path, **settings: Any) -> llama_cpp.Llama:
    # One thread: on busy cores the others of a batch wait for each other, in full spin.
    threads = {"n_threads": 1, "n_threads_batch": 1}
    return llama_cpp.Llama(str(model), verbose=False, **{"n_ctx": 512, **threads, **settings})


def ids_of(seed: int, length: int) -> list[int]:
    """Ids of ordinary words; another seed has another first token."""
    return [int(n) for n in np.random.default_rng(seed).integers(1000, 20000, length)]


def filled(tokens: int) -> int:
    return tokens // BLOCK * BLOCK


def uninterrupted(model: Path, first: list[int], reused: int, prompt: list[int]) -> str:
    """What an engine without a cache says that evaluates the same tokens in the same batches."""
    chat = Chat(model, None)
    chat.complete(first)
    LlamaCpp(chat.llm).truncate(reused)
    return chat.complete(prompt)


@pytest.fixture
def restart(model: Path, open_store: Callable[[], kvsnap.Store]) -> Iterator[Callable[..., Chat]]:
    chats: list[Chat] = []

    def start(**settings: Any) -> Chat:
        chats.append(Chat(model, open_store(), **settings))
        return chats[-1]

    yield start
    for chat in chats:
        chat.llm.close()


def test_a_restart_goes_on_from_the_filled_blocks_with_the_same_text(
    model: Path, restart: Callable[..., Chat]
) -> None:
    first = ids_of(1, 100)
    before = restart()
    before.complete(first)
    held = before.held()
    prompt = held + ids_of(2, 10)

    after = restart()
    text = after.complete(prompt)
    reused = filled(len(held))
    assert after.decoded == len(prompt) - reused + 7  # the last new token is never evaluated
    assert text == uninterrupted(model, first, reused, prompt)
    assert after.cache.report.reused_tokens == after.cache.report.from_store == reused


CHILD = """
import json, sys
import llama_cpp, kvsnap
model, store, messages = json.loads(sys.argv[1])
llm = llama_cpp.Llama(model, n_ctx=512, n_threads=1, n_threads_batch=1, verbose=False)
cache = kvsnap.LlamaCache(kvsnap.Store(store), llm)
llm.set_cache(cache)
decoded, decode = [], llm._ctx.decode
llm._ctx.decode = lambda batch: (decoded.append(batch.batch.n_tokens), decode(batch))
chunks = llm.create_chat_completion(messages, max_tokens=8, temperature=0.0, stream=True)
text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
report = cache.report
print(json.dumps([text, sum(decoded), report.prompt_tokens, report.reused_tokens]))
"""


def ask(model: Path, store: Path, messages: list[dict[str, str]]) -> Any:
    command = [sys.executable, "-c", CHILD, json.dumps([str(model), str(store), messages])]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_chat_goes_on_in_a_new_process(model: Path, store_path: Path) -> None:
    messages = [
        {"role": "system", "content": SYSTEM * 4},
        {"role": "user", "content": "Hello! What does a day cost?"},
    ]
    answer, decoded, prompt, reused = ask(model, store_path, messages)
    assert reused == 0
    assert decoded == prompt + 7
    held = decoded
    messages += [
        {"role": "assistant", "content": answer},
        {"role": "user", "content": "And two days?"},
    ]
    _, decoded, prompt, reused = ask(model, store_path, messages)
    assert decoded == prompt - reused + 7
    assert filled(held) - BLOCK <= reused <= held  # the answer may read differently as ids


def test_what_the_context_holds_is_not_read_from_the_store(restart: Callable[..., Chat]) -> None:
    chat = restart()
    prompt = ids_of(1, 100)
    chat.complete(prompt)
    held = chat.held()
    chat.decoded = 0
    chat.complete(prompt)
    assert chat.decoded == 1 + 7  # the last token again, then the answer
    chat.complete(held)  # whole in the context with its logits: sampled at once
    chat.decoded = 0
    LlamaCpp(chat.llm).truncate(0)
    chat.llm.eval(held)
    chat.decoded = 0
    chat.complete(held)
    assert chat.decoded == 7
    assert chat.cache.report.from_store == 0


class Boom(Exception):
    pass


def end_by_length(chat: Chat, prompt: list[int]) -> None:
    chat.complete(prompt, 25)


def end_by_eos(chat: Chat, prompt: list[int]) -> None:
    left = [20]

    def force(ids: Any, logits: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            logits[chat.llm.token_eos()] = 1e9
        return logits

    processors = llama_cpp.LogitsProcessorList([force])
    found = chat.llm.create_completion(
        prompt, max_tokens=30, temperature=0.0, logits_processor=processors
    )
    assert found["choices"][0]["finish_reason"] == "stop"
    assert found["usage"]["completion_tokens"] == 19


def end_by_stop_string(chat: Chat, prompt: list[int]) -> None:
    probe = Chat(Path(chat.llm.model_path), None)
    stop = probe.complete(prompt, 24)[-6:]
    found = chat.llm.create_completion(prompt, max_tokens=40, temperature=0.0, stop=[stop])
    assert found["choices"][0]["finish_reason"] == "stop"


def end_by_dropped_stream(chat: Chat, prompt: list[int]) -> None:
    stream = chat.llm.create_completion(prompt, max_tokens=40, temperature=0.0, stream=True)
    for _ in range(20):
        next(stream)
    stream.close()


def end_by_exception(chat: Chat, prompt: list[int]) -> None:
    left = [20]

    def fail(ids: Any, logits: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            raise Boom
        return logits

    # Inside llama.cpp's sampler an exception is lost; at the stopping criteria it is not.
    criteria = llama_cpp.StoppingCriteriaList([lambda ids, logits: fail(ids, logits) is None])
    with pytest.raises(Boom):
        chat.llm.create_completion(
            prompt, max_tokens=40, temperature=0.0, stopping_criteria=criteria
        )


@pytest.mark.parametrize(
    "end",
    [end_by_length, end_by_eos, end_by_stop_string, end_by_dropped_stream, end_by_exception],
    ids=lambda end: end.__name__,
)
def test_however_a_completion_ends_what_is_stored_is_what_the_engine_held(
    restart: Callable[..., Chat], end: Callable[[Chat, list[int]], None]
) -> None:
    chat, prompt = restart(), ids_of(3, 60)
    end(chat, prompt)
    held = chat.held()
    assert held[:60] == prompt
    assert len(held) > 70
    chat.complete(ids_of(4, 20), 1)  # another conversation takes the context

    after = restart()
    going_on = held + ids_of(5, 5)
    after.complete(going_on, 1)
    assert after.decoded == len(going_on) - filled(len(held))
    session = kvsnap.Session(after.cache.store, LlamaCpp(after.llm))
    names = chain_names(session.root.key, np.array(held, np.uint32), BLOCK)
    assert all(after.cache.store.blocks.has(name) for name in names)
    sequences = [going_on, ids_of(4, 20)]  # and nothing else is stored
    known = [chain_names(session.root.key, np.array(ids, np.uint32), BLOCK) for ids in sequences]
    stored = after.cache.store.index.query("SELECT COUNT(*) FROM blocks")[0][0]
    assert stored == sum(map(len, known))


def test_a_dropped_stream_is_stored_by_save(restart: Callable[..., Chat]) -> None:
    chat = restart()
    end_by_dropped_stream(chat, ids_of(3, 60))
    report = chat.cache.save()
    assert report.blocks_written == len(chat.held()) // BLOCK
    assert chat.held()[:48] in restart().cache


def test_a_completion_is_stored_once(
    restart: Callable[..., Chat], monkeypatch: pytest.MonkeyPatch
) -> None:
    """When it ends; at the next one's beginning only where it did not end, so that nobody waits."""
    puts = []
    put_filled = kvsnap.Session.put_filled
    monkeypatch.setattr(
        kvsnap.Session, "put_filled", lambda self: (puts.append(1), put_filled(self))
    )
    chat = restart()
    for number, seed in enumerate((40, 41, 40), 1):
        chat.complete(ids_of(seed, 40), 2)
        assert len(puts) == number
    end_by_dropped_stream(chat, ids_of(42, 40))
    assert len(puts) == 3
    chat.complete(ids_of(43, 40), 2)
    assert len(puts) == 5


def test_a_token_spelled_otherwise_ends_the_reuse(restart: Callable[..., Chat]) -> None:
    """Equal text is not equal KV: the ids decide (the library's own tokens go on where they can)."""
    chat = restart()
    word = chat.llm.tokenize(b" bicycle", add_bos=False)
    letters = [t for c in " bicycle" for t in chat.llm.tokenize(c.encode(), add_bos=False)]
    assert chat.llm.detokenize(word) == chat.llm.detokenize(letters)
    assert word[0] != letters[0]
    start, end = ids_of(6, 40), ids_of(7, 20)
    chat.complete(start + letters + end, 1)
    after = restart()
    after.complete(start + word + end, 1)
    assert after.cache.report.reused_tokens == 40
    assert after.decoded == len(word + end)


def test_chat_completions_streamed_or_not_and_reset(restart: Callable[..., Chat]) -> None:
    messages = [
        {"role": "system", "content": SYSTEM * 3},
        {"role": "user", "content": "What does a day cost?"},
    ]
    chat = restart()
    options = {"max_tokens": 8, "temperature": 0.0}
    whole = chat.llm.create_chat_completion(messages, **options)["choices"][0]["message"]
    chat.llm.reset()
    chat.decoded = 0
    stream = chat.llm.create_chat_completion(messages, stream=True, **options)
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in stream)
    assert text == whole["content"]
    report = chat.cache.report
    assert report.from_store == report.reused_tokens >= report.prompt_tokens - 2 * BLOCK
    assert chat.decoded == report.prompt_tokens - report.reused_tokens + 7


def test_the_store_is_shared_by_llamas_in_threads(
    model: Path, open_store: Callable[[], kvsnap.Store]
) -> None:
    store = open_store()
    shared, texts = ids_of(8, 64), dict[int, list[str]]()

    def run(seed: int) -> None:
        chat = Chat(model, store)
        prompts = [shared + ids_of(seed * 10 + turn, 20) for turn in range(4)]
        texts[seed] = [chat.complete(prompt, 4) for prompt in prompts]

    threads = [threading.Thread(target=run, args=(seed,)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [len(found) for found in texts.values()] == [4, 4]
    chat = Chat(model, open_store())
    for seed in (1, 2):
        chat.llm.reset()
        chat.complete([*shared, *ids_of(seed * 10, 20)], 1)
        assert chat.cache.report.from_store >= 80


@pytest.mark.parametrize("what", ["weights", "type of K", "rope", "tenant"])
def test_another_model_setting_or_tenant_finds_nothing(
    what: str, model: Path, tmp_path: Path, restart: Callable[..., Chat], store: kvsnap.Store
) -> None:
    prompt = ids_of(9, 70)
    restart().complete(prompt, 1)
    settings: dict[str, Any] = {}
    if what == "weights":
        other = tmp_path / "other.gguf"
        shutil.copy(model, other)
        with other.open("r+b") as file:
            file.seek(-100_000, os.SEEK_END)
            byte = file.read(1)
            file.seek(-100_000, os.SEEK_END)
            file.write(bytes([byte[0] ^ 1]))
        model = other
    elif what == "type of K":
        settings = {"type_k": llama_cpp.GGML_TYPE_Q8_0}
    elif what == "rope":
        settings = {"rope_freq_base": 12345.0}
    else:
        settings = {"tenant": kvsnap.Tenant(bytes(32))}
    chat = Chat(model, store, **settings)
    chat.complete(prompt, 1)
    assert chat.decoded == len(prompt)
    assert chat.cache.report.reused_tokens == 0
    own = Chat(model, store, **settings)
    own.complete(prompt, 1)
    assert own.decoded == len(prompt) - filled(len(prompt))


def test_a_lossy_codec_serves_caches_of_that_codec_only(restart: Callable[..., Chat]) -> None:
    prompt = ids_of(10, 70)
    restart(codec="q8").complete(prompt, 1)
    exact = restart()
    exact.complete(prompt, 1)
    assert exact.decoded == 70
    again = restart(codec="q8")
    again.complete(prompt, 1)
    assert again.decoded == 70 - 64


def test_without_its_llama_there_is_no_cache(store: kvsnap.Store) -> None:
    with pytest.raises(UsageError, match="needs its Llama"):
        kvsnap.LlamaCache(store, None)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        kvsnap.LlamaCache(store)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("architecture", "window"), [("llama", 0), ("gemma3", 32), ("mamba", 0), ("jamba", 0)]
)
def test_models_that_cannot_be_cut_go_on_from_where_messages_end(
    architecture: str, window: int, tmp_path: Path, restart: Callable[..., Chat], store: Any
) -> None:
    """They go on from state checkpoints: where a turn ends, and where the first message ends."""
    pytest.importorskip("gguf", reason="gguf is not installed")
    from kvsnap.testing.tiny_gguf import VOCABULARY, write_tiny

    model = write_tiny(tmp_path / "tiny.gguf", architecture, window=window)
    end = 2  # the tiny models' token that ends a message

    def message(seed: int, length: int) -> list[int]:
        ids = np.random.default_rng(seed).integers(3, VOCABULARY, length - 1)
        return [*ids.tolist(), end]

    def start() -> Chat:
        return Chat(model, store, swa_full=False, n_threads_batch=1)

    rules = message(1, 48)
    first = start()
    first.complete(rules + message(2, 20) + [7, 8, 9], 20)
    held = first.held()

    other = start()
    other.complete(rules + message(3, 30) + [7, 8, 9], 1)
    assert other.decoded == len(other.held()) - len(rules)

    again = start()
    again.complete([*held, end, *message(4, 20), 7, 8, 9], 1)
    reused = filled(len(held)) if architecture == "llama" else len(held)
    assert again.decoded == len(again.held()) - reused


def test_what_the_adapter_refuses_is_refused(model: Path, store: kvsnap.Store) -> None:
    llm = make(model, embedding=True)
    with pytest.raises(Unsupported, match="embedding"):
        kvsnap.LlamaCache(store, llm)
    assert "save_state" not in vars(llm)


def test_a_cache_set_on_another_llama_says_so(model: Path, restart: Callable[..., Chat]) -> None:
    chat = restart()
    other = make(model)
    other.set_cache(chat.cache)
    with pytest.raises(UsageError, match="is not what the Llama of this LlamaCache") as raised:
        other.create_completion(ids_of(11, 40), max_tokens=1)
    assert "for each Llama" in raised.value.hint
    assert not chat.cache.store.path.joinpath("blocks").exists()


def failing(error: Exception) -> Callable[..., Any]:
    def fail(*args: Any, **options: Any) -> Any:
        raise error

    return fail


@pytest.mark.parametrize(
    "error",
    [StoreFull("no space left", "make room"), OSError(28, "No space left"), RuntimeError("a bug")],
    ids=lambda error: type(error).__name__,
)
def test_an_error_while_saving_is_logged_once_and_the_completion_is_whole(
    model: Path,
    restart: Callable[..., Chat],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
) -> None:
    uncached, chat = Chat(model, None), restart()
    with monkeypatch.context() as broken:
        broken.setattr(type(chat.cache.store.blocks), "put", failing(error))
        for seed in (12, 13):
            assert chat.complete(ids_of(seed, 40)) == uncached.complete(ids_of(seed, 40))
    (record,) = caplog.records
    assert record.message.startswith("kvsnap: cannot store a completion: ")
    assert (record.exc_info is None) == isinstance(error, StoreFull)

    chat.complete(ids_of(14, 40))  # works again, and so the next failure is news
    monkeypatch.setattr(type(chat.cache.store.blocks), "put", failing(error))
    chat.complete(ids_of(15, 40))
    assert len(caplog.records) == 2


def test_an_error_while_looking_up_is_a_miss(
    restart: Callable[..., Chat],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    text = restart().complete(ids_of(16, 40))
    chat = restart()
    monkeypatch.setattr(kvsnap.Session, "resume", failing(OSError(5, "Input/output error")))
    assert chat.complete(ids_of(16, 40)) == text
    assert chat.decoded == 40 + 7
    assert "cannot look up a prompt" in caplog.text


def test_a_damaged_block_is_computed_and_named(
    restart: Callable[..., Chat], store_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prompt = ids_of(17, 40)
    restart().complete(prompt)
    for path in (store_path / "blocks").rglob("*.safetensors"):
        data = bytearray(path.read_bytes())
        data[-5] ^= 1
        path.write_bytes(data)
    chat = restart()
    chat.complete(prompt, 1)
    assert chat.decoded == 40
    assert "computed instead of reused" in caplog.text
    again = restart()
    again.complete(prompt, 1)
    assert again.decoded == 40 - 32


def test_a_store_that_is_removed_meanwhile_is_made_anew(
    restart: Callable[..., Chat], store_path: Path
) -> None:
    chat = restart()
    chat.complete(ids_of(18, 40))
    shutil.rmtree(store_path)
    chat.llm.reset()
    chat.complete(ids_of(18, 40), 1)
    chat.complete(ids_of(19, 70), 1)
    store = kvsnap.Store(store_path)
    again = Chat(Path(chat.llm.model_path), store)
    again.complete(ids_of(19, 70), 1)
    assert again.decoded < 70
    store.close()


def test_files_of_others_in_the_store_are_passed_over(
    restart: Callable[..., Chat], store_path: Path
) -> None:
    prompt = ids_of(20, 40)
    restart().complete(prompt, 1)
    canary = store_path / "canary"
    pickle = b"cposix\nsystem\n(S'touch " + os.fsencode(canary) + b"'\ntR."
    folder = next((store_path / "blocks").iterdir())
    for path in (store_path / "cache.db", store_path / "1.val", folder / "x.pkl", folder / "ab"):
        path.write_bytes(pickle)
    (store_path / "index.sqlite3").unlink()
    chat = restart()
    chat.complete(prompt, 1)
    assert chat.decoded == 40 - 32
    assert not canary.exists()
    assert (store_path / "cache.db").exists()


def test_logits_are_not_copied_and_files_hold_little_more_than_the_rows(
    model: Path, open_store: Callable[[], kvsnap.Store]
) -> None:
    """The library's own caches copy 300 rows of 49152 logits: 59 MB, and 1.5 GB elsewhere."""

    def peak(cache: Any) -> int:
        llm.set_cache(cache)
        llm.reset()
        llm.create_completion(prompt, max_tokens=1)  # so that nothing is new but the state
        tracemalloc.start()
        llm.create_completion(prompt, max_tokens=2)
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return found

    prompt = ids_of(21, 300)
    llm = make(model, n_ctx=1024, logits_all=True)
    store = open_store()
    cache = kvsnap.LlamaCache(store, llm)
    logits = 300 * 49152 * 4
    assert peak(cache) < 3_000_000
    assert peak(llama_cpp.LlamaRAMCache()) > logits
    rows = 300 * sum(plane.nbytes for plane in LlamaCpp(llm).export(0, 1).values())
    assert store.index.query("SELECT SUM(bytes) FROM blocks")[0][0] < 1.1 * rows
    assert cache.cache_size < 1.1 * rows


MATRIX = """
import json, sys
import llama_cpp, kvsnap
model, path = sys.argv[1:]
def run(store, prompt, **settings):
    settings = {"n_ctx": 512, "n_batch": 512, **settings}
    llm = llama_cpp.Llama(model, n_threads=1, n_threads_batch=1, verbose=False, **settings)
    cache = kvsnap.LlamaCache(store, llm)
    llm.set_cache(cache)
    text = llm.create_completion(prompt, max_tokens=4, temperature=0.0)["choices"][0]["text"]
    llm.close()
    return text, cache.report.reused_tokens
tokenizer = llama_cpp.Llama(model, vocab_only=True, verbose=False)
prompt = tokenizer.tokenize(b"The river was high in spring, so the bridge was closed. " * 30)[:300]
found = []
for number, saver in enumerate([{}, {"logits_all": True}, {"n_batch": 64}, {"n_ctx": 1024}]):
    with kvsnap.Store(f"{path}-{number}", capacity="1GB") as store:
        cold, _ = run(store, prompt, **saver)
        for loader in [{}, {"logits_all": True}, {"n_batch": 64}, {"n_ctx": 384}, {"n_ctx": 2048}]:
            found.append([saver, loader, cold, *run(store, prompt, **loader)])
        try:
            run(store, prompt, n_ctx=256)
        except ValueError as error:
            found.append(str(error))
print(json.dumps(found))
"""


@pytest.mark.slow
def test_contexts_of_other_sizes_and_settings_load_what_was_stored(
    model: Path, tmp_path: Path
) -> None:
    """In a process of its own, because the library's states abort on some of these."""
    command = [sys.executable, "-c", MATRIX, str(model), str(tmp_path / "store")]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found) == 4 * 6
    for case in found:
        if isinstance(case, str):
            assert "exceed context window of 256" in case
            continue
        _, _, cold, text, reused = case
        assert reused == 256, case
        assert text == cold, case


def test_a_callers_own_save_state_and_load_state_are_the_librarys(
    restart: Callable[..., Chat], caplog: pytest.LogCaptureFixture
) -> None:
    chat = restart()
    chat.complete(ids_of(23, 40))
    held = chat.held()
    state = chat.llm.save_state()
    assert type(state) is llama_cpp.LlamaState
    chat.complete(ids_of(24, 40))
    chat.llm.load_state(state)
    assert chat.held() == held
    chat.decoded = 0
    chat.complete(held + ids_of(25, 10), 1)
    assert chat.decoded == 10
    assert "foreign" not in caplog.text
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


def test_rows_of_an_unknown_state_are_not_stored(
    model: Path, restart: Callable[..., Chat], caplog: pytest.LogCaptureFixture
) -> None:
    """A state holds rows and no word of what computed them: here another RoPE, unseen."""
    other = make(model, rope_freq_base=12345.0)
    prompt = ids_of(26, 40)
    other.eval(prompt)
    chat = restart()
    chat.llm.load_state(other.save_state())
    chat.complete(prompt + ids_of(27, 10))
    assert "it did not save itself" in caplog.text
    assert prompt not in restart().cache
    chat.complete(ids_of(28, 40), 1)
    assert ids_of(28, 40) in restart().cache
    chat.complete(prompt, 1)
    after = restart()
    after.complete(prompt, 1)
    assert after.decoded == 40 - 32


def test_a_state_of_the_cache_can_be_loaded(restart: Callable[..., Chat]) -> None:
    prompt = ids_of(29, 40)
    restart().complete(prompt, 1)
    chat = restart()
    state = chat.cache[prompt]
    assert chat.held() == prompt[:32] == state.input_ids.tolist()
    chat.llm.reset()
    chat.llm.load_state(state)
    assert chat.held() == prompt[:32]
    assert prompt in chat.cache
    assert ids_of(30, 40) not in restart().cache
    with pytest.raises(KeyError):
        chat.cache[ids_of(30, 40)]
    with pytest.raises(UsageError, match="is not what the Llama"):
        chat.cache[prompt] = state
    chat.llm.set_cache(None)
    with pytest.raises(UsageError, match="not set any more"):
        chat.llm.load_state(state)


def test_log_probabilities_of_the_prompt_are_right_after_a_restore(
    model: Path, restart: Callable[..., Chat]
) -> None:
    """`echo` tells those of each token of the prompt, and restored rows have no logits."""

    def echoed(chat: Chat) -> list[float]:
        found = chat.llm.create_completion(
            SYSTEM, max_tokens=1, temperature=0.0, echo=True, logprobs=1
        )
        return found["choices"][0]["logprobs"]["token_logprobs"][1:]

    cold = Chat(model, None, logits_all=True)
    expected = echoed(cold)
    restart(logits_all=True).complete(SYSTEM, 1)
    chat = restart(logits_all=True)
    chat.complete(SYSTEM, 1)
    assert chat.decoded < cold.decoded
    chat.decoded = 0
    assert echoed(chat) == expected
    assert chat.decoded == cold.decoded
    assert echoed(restart(logits_all=True)) == expected


def test_log_probabilities_of_the_answer_go_with_a_restore(restart: Callable[..., Chat]) -> None:
    prompt = ids_of(32, 40)

    def answered(chat: Chat) -> Any:
        found = chat.llm.create_completion(prompt, max_tokens=3, temperature=0.0, logprobs=1)
        return found["choices"][0]["logprobs"]["token_logprobs"]

    first = answered(restart(logits_all=True))
    chat = restart(logits_all=True)
    assert answered(chat) == pytest.approx(first, abs=1e-3)
    assert chat.decoded == 40 - 32 + 2


def test_the_llama_goes_when_its_last_name_goes(
    model: Path, store: kvsnap.Store, tmp_path: Path
) -> None:
    """In a cycle a model's memory would stay until the collector comes by."""
    llm = make(model, logits_all=True)
    llm.set_cache(kvsnap.LlamaCache(store, llm))
    llm.create_completion(ids_of(33, 40), max_tokens=1)
    gone = weakref.ref(llm)
    gc.disable()
    try:
        del llm
        assert gone() is None
    finally:
        gc.enable()


def test_the_quick_start_runs_and_the_second_run_reuses(model: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "KVSNAP_STORE": str(tmp_path / "store")}
    outputs = []
    for _ in range(2):
        command = [sys.executable, "-W", "error", str(SAMPLE), str(model)]
        done = subprocess.run(
            command, check=False, capture_output=True, text=True, timeout=300, env=environment
        )
        assert done.returncode == 0, done.stderr
        outputs.append(done.stdout.splitlines())
    reused = [int(output[-1].split()[0]) for output in outputs]
    total = int(outputs[0][-1].split()[2])
    assert reused[0] == 0
    assert total // 64 * 64 <= reused[1] < total  # the answer may have filled the last block
    assert outputs[0][:-1] == outputs[1][:-1]
