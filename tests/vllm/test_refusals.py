"""What the connector refuses when it starts, by name: configurations, options, another interface."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request

from kvsnap.engines.vllm_check import check_config, check_interface, differences
from kvsnap.formats.errors import KvsnapError, Unsupported
from tests.vllm.engines import serve
from tests.vllm.lockstep import Lockstep, make_config

SHAPE: dict[str, Any] = {
    "block_size": 32,
    "num_kv_heads": 1,
    "head_size": 64,
    "dtype": torch.bfloat16,
}
FULL = KVCacheGroupSpec(["a"], FullAttentionSpec(**SHAPE))
WINDOW = KVCacheGroupSpec(["b"], SlidingWindowSpec(**SHAPE, sliding_window=64))


@pytest.fixture(scope="module")
def config(tiny_llama: Path) -> Any:
    return make_config(tiny_llama)


def refused(config: Any, groups: list[KVCacheGroupSpec], error: type[KvsnapError]) -> str:
    with pytest.raises(error) as raised:
        check_config(config, KVCacheConfig(8, [], groups))
    assert raised.value.hint
    return raised.value.what


@pytest.mark.parametrize(
    ("part", "name", "value", "says"),
    [
        ("kv_transfer_config", "kv_load_failure_policy", "fail", "kv_load_failure_policy"),
        ("kv_transfer_config", "kv_role", "kv_producer", "kv_role is 'kv_producer'"),
        ("", "speculative_config", SimpleNamespace(), "speculative decoding"),
        ("parallel_config", "decode_context_parallel_size", 2, "context parallelism"),
        ("parallel_config", "prefill_context_parallel_size", 2, "context parallelism"),
        ("load_config", "load_format", "dummy", "dummy weights"),
        ("load_config", "load_format", "tensorizer", "load_format 'tensorizer'"),
        ("parallel_config", "worker_extension_cls", "rlhf.Extension", "worker_extension_cls"),
    ],
)
def test_a_configuration_that_is_not_handled(
    config: Any, monkeypatch: pytest.MonkeyPatch, part: str, name: str, value: Any, says: str
) -> None:
    check_config(config, KVCacheConfig(8, [], [FULL]))
    changed = SimpleNamespace(**vars(config))
    owner = changed
    if part:
        owner = SimpleNamespace(**vars(getattr(config, part)))
        setattr(changed, part, owner)
    setattr(owner, name, value)
    assert says in refused(changed, [FULL], KvsnapError)


def test_weights_of_which_no_digest_is_taken(config: Any) -> None:
    hf = SimpleNamespace(text_model_id="another/model")
    changed = SimpleNamespace(**vars(config) | {"model_config": SimpleNamespace(hf_config=hf)})
    assert "text_model_id" in refused(changed, [FULL], Unsupported)


def test_more_than_one_group_of_caches(config: Any) -> None:
    what = refused(config, [FULL, WINDOW], Unsupported)
    assert "2 groups of KV caches (FullAttentionSpec, SlidingWindowSpec)" in what


def test_caches_that_forget(config: Any) -> None:
    assert "caches of SlidingWindowSpec" in refused(config, [WINDOW], Unsupported)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"capacitiy": "1GB"}, "'capacitiy' is not known to kvsnap"),
        ({"codec": "nibble"}, "codec 'nibble' is not known"),
        ({"write_behind": True}, "write_behind needs a remote"),
        ({"block_size": 6}, "block_size is 6 tokens, vLLM's blocks have 4"),
        ({"encrypt": "false"}, "option encrypt is 'false'"),
    ],
)
def test_an_option_that_makes_no_sense(
    config: Any, tmp_path: Path, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(KvsnapError, match=says):
        Lockstep(config, tmp_path, options=options)


def test_the_interface_is_the_known_one() -> None:
    assert not list(differences(KVConnectorBase_V1, Request))


def test_doctor_says_that_it_fits(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "kvsnap"]
    command += ["--store", str(tmp_path), "doctor", "--engine", "vllm"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "the connector interface is the known one" in " ".join(ran.stdout.split()), ran.stderr


def test_another_interface_is_named() -> None:
    class Renamed(KVConnectorBase_V1):
        start_load_kv = None  # type: ignore[assignment]

        def request_finished(self, request: Any, block_ids: Any, more: Any) -> Any:
            raise NotImplementedError

    class Older:
        def __init__(self) -> None:
            self.all_token_ids: list[int] = []

    class Without(KVConnectorBase_V1):
        pass

    says = [
        "Renamed.request_finished takes (request, block_ids, more), not (request, block_ids)",
        "Renamed has no start_load_kv",
        "Older has no cache_salt",
    ]
    found = list(differences(Renamed, Older))
    assert all(one in found for one in says)
    with pytest.raises(Unsupported, match=r"vLLM 0\.99 has another connector interface"):
        check_interface("0.99", Renamed, Request)
    check_interface("0.99", Without, Request)


@pytest.mark.engine
@pytest.mark.slow
def test_the_engine_does_not_start(models: dict[str, Path], tmp_path: Path) -> None:
    job = {
        "model": str(models["llama"]),
        "store": str(tmp_path / "store"),
        "may_refuse": True,
        "steps": [],
    }
    fails, unknown = serve(
        tmp_path,
        [
            job | {"connector": {"kv_load_failure_policy": "fail"}},
            job | {"extra": {"capacitiy": "1GB"}},
        ],
    )
    assert 'kv_load_failure_policy is "fail"' in fails.refused
    assert "'capacitiy' is not known to kvsnap" in unknown.refused
    assert not (tmp_path / "store").exists()


def test_the_stores_side_loads_no_engine_and_no_tensors() -> None:
    code = (
        "import sys, kvsnap, kvsnap.kvstore.store, kvsnap.kvstore.page_writer,"
        " kvsnap.formats.extras, kvsnap.engines.served_options\n"
        "print(sorted({'torch', 'vllm', 'transformers', 'numba', 'llvmlite'} & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"
