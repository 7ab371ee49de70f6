"""The transformers adapter on real weights: the bundled GGUF file, and a folder made of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import kvsnap
from kvsnap.engines.llamacpp_load import vocabulary
from kvsnap.engines.transformers import Transformers, load, save
from kvsnap.engines.transformers_load import load_transformers
from kvsnap.formats.errors import EngineError, NotFound, Unsupported
from kvsnap.testing.tiny_llama import CACHE

pytestmark = [pytest.mark.engine, pytest.mark.slow]

SAMPLE = Path(__file__).parents[2] / "samples" / "transformers_resume.py"
TEXT = "The old library by the river opens at nine and closes at five, but on Sundays it rests. "
CHAT = [{"role": "system", "content": TEXT * 4}, {"role": "user", "content": "When do you open?"}]
WORDS = [
    "Hello world",
    "  two spaces",
    "naïve café, Größe",
    "日本語 🚲🙂",
    "<|im_start|>user\nHi<|im_end|>",
]


@pytest.fixture(scope="module")
def engine(model: Path) -> Transformers:
    """float32, as the GGUF file's loader dequantizes it."""
    return load_transformers(model)


@pytest.fixture(scope="module")
def folder(engine: Transformers, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same in a Hugging Face folder, in bfloat16."""
    path = tmp_path_factory.mktemp("smollm2")
    copied = type(engine.model)(engine.model.config)
    copied.load_state_dict(engine.model.state_dict())
    copied.generation_config = engine.model.generation_config
    copied.to(torch.bfloat16).save_pretrained(path)
    engine.tokenizer.save_pretrained(path)
    return path


@pytest.fixture
def store(tmp_path: Path) -> Any:
    with kvsnap.Store(tmp_path / "store") as store:
        yield store


def test_text_and_templates_are_those_of_llama_cpp(engine: Transformers, model: Path) -> None:
    with vocabulary(model) as other:
        for text in [TEXT, *WORDS]:
            ids = engine.tokenize(text, first=False)
            assert ids.tolist() == other.tokenize(text.encode(), False, True), text
    assert engine.render(CHAT, answer=True).endswith("<|im_start|>assistant\n")
    assert not engine.render(CHAT, answer=False).endswith("<|im_start|>assistant\n")


@pytest.mark.parametrize("text", WORDS[:4])
def test_pieces_join_to_the_text(engine: Transformers, text: str) -> None:
    ids = engine.tokenize(text, first=False)
    assert engine.detokenize(ids.tolist()).decode() == text
    assert b"".join(engine.detokenize([int(token)]) for token in ids).decode() == text
    assert engine.detokenize(engine.tokenize(WORDS[4], first=False).tolist()) == b"user\nHi"


def test_generated_text_is_the_same_after_a_resume(
    engine: Transformers, store: kvsnap.Store
) -> None:
    model = engine.model
    prompt = torch.tensor([engine.tokenize(TEXT * 8, first=True).tolist()])
    cache, reused = load(store, model, prompt)
    assert reused == 0
    first = model.generate(prompt, max_new_tokens=12, do_sample=False, **{CACHE: cache})
    save(store, model, cache, first)
    cache, reused = load(store, model, prompt)
    assert reused == min(prompt.shape[1] - 1, (first.shape[1] - 1) // 64 * 64)
    again = model.generate(prompt, max_new_tokens=12, do_sample=False, **{CACHE: cache})
    assert again.tolist() == first.tolist()


def test_lossy_rows_are_close_and_never_pass_for_exact_ones(
    engine: Transformers, store: kvsnap.Store
) -> None:
    ids = engine.tokenize(TEXT * 12, first=True)
    exact = Transformers(engine.model)
    kvsnap.Session(store, exact, "s", codec="q8").resume(ids)
    exact.evaluate(ids)
    kvsnap.Session(store, exact, "s", codec="q8").save()
    assert load(store, engine.model, ids)[1] == 0
    cache, reused = load(store, engine.model, ids, codec="q8")
    assert reused == (len(ids) - 1) // 64 * 64
    for own, lossy in zip(exact.cache.layers, cache.layers, strict=True):
        there = own.keys[:, :, :reused]
        assert 0 < float((lossy.keys - there).norm()) < 0.02 * float(there.norm())
    saved = save(store, engine.model, cache, ids)
    assert (saved.fidelity, saved.blocks_written) == ("q8@1", 0), "the cache's own codec"
    assert load(store, engine.model, ids)[1] == 0


def test_log_probs_are_those_of_the_model(engine: Transformers) -> None:
    own = Transformers(engine.model, batch_size=7)
    ids = engine.tokenize(TEXT, first=True)
    found = own.log_probs(ids)
    with torch.no_grad():
        logits = engine.model(torch.from_numpy(ids.astype(np.int64))[None]).logits[0]
    wanted = torch.log_softmax(logits.float(), -1).numpy()
    assert found.shape == wanted.shape
    np.testing.assert_allclose(found, wanted, atol=2e-3)
    assert (own.evaluated, len(own.token_ids())) == (len(ids), len(ids))


def test_sampling_follows_its_seed(engine: Transformers) -> None:
    ids = engine.tokenize(TEXT, first=True)

    def drawn(seed: int) -> list[int]:
        tokens = Transformers(engine.model).generate(ids, temperature=1.0, seed=seed)
        return [token for _, token in zip(range(8), tokens, strict=False)]

    assert drawn(1) == drawn(1) != drawn(2)


def run(store: Path, *arguments: object) -> Any:
    done = subprocess.run(
        [sys.executable, "-m", "kvsnap", "--store", str(store), *map(str, arguments)],
        check=False,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done


def test_the_command_line_saves_and_resumes_a_folder(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "chat.json").write_text(json.dumps(CHAT))
    model = ["--engine", "transformers", "--model", folder]
    saved = run(
        tmp_path / "s",
        "--json",
        "save",
        *model,
        "--messages",
        tmp_path / "chat.json",
        "--session",
        "a",
    )
    assert saved.returncode == 0, saved.stderr
    tokens = json.loads(saved.stdout)["tokens"]
    asked = ["resume", "a", *model, "--prompt", "And on Sundays?", "--max-tokens", "8"]
    resumed = run(tmp_path / "s", "--json", *asked)
    assert resumed.returncode == 0, resumed.stderr
    told = json.loads(resumed.stdout)
    assert told["reused_tokens"] == tokens
    assert told["reused_tokens"] + told["computed_tokens"] == told["prompt_tokens"]
    assert told["text"]
    again = run(tmp_path / "s", "--json", "resume", "a", *model, "--max-tokens", "4")
    assert json.loads(again.stdout)["computed_tokens"] <= 2


def test_options_of_another_engine_are_refused_by_name(folder: Path, tmp_path: Path) -> None:
    model = ["--engine", "transformers", "--model", folder]
    done = run(tmp_path / "s", "save", *model, "--prompt", "Hi", "--cache-type-k", "q8_0")
    assert done.returncode == 2
    assert "--cache-type-k is an option of llama.cpp, not of transformers" in done.stderr


@pytest.mark.skipif(CACHE != "cache", reason="the sample names the argument as newer releases do")
def test_the_sample_reuses_the_first_runs_work(folder: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "KVSNAP_STORE": str(tmp_path / "store")}
    outputs = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-W", "error", str(SAMPLE), str(folder)],
            check=False,
            capture_output=True,
            text=True,
            timeout=300,
            env=environment,
        )
        assert done.returncode == 0, done.stderr
        outputs.append(done.stdout.splitlines())
    reused = [int(output[0].split()[0]) for output in outputs]
    total = int(outputs[0][0].split()[2])
    assert reused == [0, total - 1]  # the answer filled the prompt's last block
    assert outputs[0][1:-1] == outputs[1][1:-1]
    assert outputs[1][-1].startswith("0 of ")


def test_what_cannot_be_loaded_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"no config\.json"):
        load_transformers(tmp_path)
    with pytest.raises(NotFound, match="no model "):
        load_transformers(tmp_path / "absent")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(EngineError, match="transformers cannot load"):
        load_transformers(tmp_path)


def test_without_a_tokenizer_there_is_no_text(engine: Transformers) -> None:
    with pytest.raises(Unsupported, match="made without a tokenizer"):
        Transformers(engine.model).tokenize("Hi", first=True)
