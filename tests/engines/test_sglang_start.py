"""What is refused before an SGLang process uses a store. No SGLang is needed: its classes are doctored."""

from __future__ import annotations

import dataclasses
import inspect
import json
import subprocess
import sys
from abc import ABC, abstractmethod
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvsnap.engines import served_replaced, sglang_check, sglang_replaced
from kvsnap.engines.sglang_start import (
    ABSTRACT,
    CONFIG,
    METHODS,
    RELEASES,
    check_arguments,
    check_interface,
    check_other_pools,
    check_pool,
    interface_differences,
    read_options,
)
from kvsnap.formats.errors import Unsupported, UsageError
from tests.engines.sglang_arguments import ARGUMENTS

RELEASE = RELEASES[-1]


def storage(**changed: Any) -> type:
    """A class with the interface that kvsnap knows, or another one."""
    members: dict[str, Any] = {}
    for name, parameters in METHODS.items():
        kinds = [inspect.Parameter(p, inspect.Parameter.POSITIONAL_OR_KEYWORD) for p in parameters]

        def method(self: Any, *args: Any) -> None: ...

        method.__signature__ = inspect.Signature(kinds)  # type: ignore[attr-defined]
        members[name] = abstractmethod(method) if name in ABSTRACT else method
    members |= changed
    return type("HiCacheStorage", (ABC,), {k: v for k, v in members.items() if v is not None})


def config(without: str = "") -> type:
    return dataclasses.make_dataclass("Config", sorted(CONFIG - {without}))


def test_the_interface_that_is_known_passes() -> None:
    assert interface_differences(storage(), config(), RELEASE) == []
    assert interface_differences(storage(), config(), f"{RELEASE}.post1") == []
    check_interface(storage(), config(), RELEASE)


@pytest.mark.parametrize("release", ["0.5.22", "0.6.0", "0.5.230", ""])
def test_another_release_is_refused_by_name(release: str) -> None:
    with pytest.raises(Unsupported, match=f"release is {release or 'unknown'}") as raised:
        check_interface(storage(), config(), release)
    assert RELEASE in raised.value.hint


def test_another_interface_is_refused_by_what_differs() -> None:
    def batch_get_v1(self: Any, keys: Any, host_indices: Any, ranks: Any) -> None: ...

    with pytest.raises(Unsupported, match=r"batch_get_v1 takes \(self, keys, host_indices, ranks"):
        check_interface(storage(batch_get_v1=batch_get_v1), config(), RELEASE)
    with pytest.raises(Unsupported, match="HiCacheStorage has no batch_set_v1"):
        check_interface(storage(batch_set_v1=None), config(), RELEASE)

    @abstractmethod
    def flush(self: Any) -> None: ...

    with pytest.raises(Unsupported, match=r"HiCacheStorage\.flush is abstract"):
        check_interface(storage(flush=flush), config(), RELEASE)
    with pytest.raises(Unsupported, match="HiCacheStorageConfig has no tp_rank"):
        check_interface(storage(), config(without="tp_rank"), RELEASE)


def test_options_are_kvsnaps_own_and_sglangs_pass() -> None:
    told = {"backend_name": "kvsnap", "interface_v1": 1, "prefetch_threshold": 64, "codec": "zstd"}
    assert read_options(told).codec == "zstd"
    with pytest.raises(UsageError, match="'prefetch_treshold' is not known"):
        read_options({"prefetch_treshold": 64})
    with pytest.raises(UsageError, match="'block_size' is not one of SGLang's"):
        read_options({"block_size": 64})


def pool(name: str = "MHATokenToKVPoolHost", **changed: Any) -> Any:
    told = {
        "layout": "layer_first",
        "kv_buffer": object(),
        "device": "cpu",
        "storage_format_tag": None,
        "layer_num": 4,
        "target_layer_num": 4,
        "dcp_size": 1,
    }
    return type(name, (), told | changed)()


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"name": "MambaPoolHost"}, "MambaPoolHost"),
        ({"name": "MHATokenToKVPoolMXFP8Host"}, "MXFP8"),
        ({"name": "MLATokenToKVPoolHost"}, "MLATokenToKVPoolHost"),
        ({"layout": "page_unified"}, "'page_unified'"),
        ({"kv_buffer": None}, "no memory"),
        ({"device": "cuda:0"}, "on cuda:0"),
        ({"storage_format_tag": "mxfp8"}, "'mxfp8'"),
        ({"target_layer_num": 3}, "draft"),
        ({"dcp_size": 2}, "context parallelism"),
    ],
)
def test_pools_that_were_not_tried_are_refused_by_name(changed: dict[str, Any], said: str) -> None:
    check_pool(pool())
    with pytest.raises(Unsupported, match=said):
        check_pool(pool(**changed))


def test_pools_beside_that_of_plain_kv_are_refused_by_name() -> None:
    check_other_pools(["kv"])
    check_other_pools([])
    with pytest.raises(Unsupported, match="mamba, swa"):
        check_other_pools(["swa", "kv", "mamba"])


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({"enable_lora": True}, "LoRA"),
        ({"lora_paths": ["a"]}, "LoRA"),
        ({"speculative_algorithm": "EAGLE"}, "speculative decoding"),
        ({"custom_weight_loader": ["a.b"]}, "custom weight loader"),
        ({"dllm_algorithm": "LowConfidence"}, "a diffusion language model"),
        ({"forward_hooks": [{"name": "a"}]}, "hooks in its forward pass"),
        ({"kt_weight_path": "/experts"}, "experts of KTransformers"),
        ({"modelopt_checkpoint_restore_path": "/other"}, "a checkpoint of ModelOpt"),
        ({"weight_cache_mode": "client"}, "weights that another process holds"),
        ({"checkpoint_engine_wait_weights_before_ready": True}, "checkpoint engine"),
        ({"load_format": "dummy"}, "'dummy'"),
        ({"load_format": "remote"}, "'remote'"),
    ],
)
def test_arguments_that_were_not_tried_are_refused_by_name(told: dict[str, Any], said: str) -> None:
    check_arguments(SimpleNamespace(**ARGUMENTS))
    with pytest.raises(Unsupported, match=said):
        check_arguments(SimpleNamespace(**ARGUMENTS | told))


def test_replaced_weights_are_noticed_by_every_way_and_still_replaced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[str] = []
    members: dict[str, Any] = {
        name: lambda self, value, name=name: calls.append(f"{name} {value}")
        for name in sglang_replaced.REPLACING
    }
    updater = type("WeightUpdater", (), members)
    for name in sglang_replaced.REPLACING:
        monkeypatch.setattr(served_replaced, "_replaced_by", [])
        served_replaced.watch(updater, sglang_replaced.REPLACING)
        assert not served_replaced.weights_replaced()
        getattr(updater(), name)(3)
        assert served_replaced.weights_replaced()
        assert f"{name} replaces the weights" in caplog.text
    assert calls == [f"{name} 3" for name in sglang_replaced.REPLACING], "once each"


def test_an_updater_that_cannot_be_watched_is_refused() -> None:
    with pytest.raises(Unsupported, match="no update_weights_from_disk"):
        served_replaced.watch(type("WeightUpdater", (), {}), sglang_replaced.REPLACING)


def test_only_the_storage_itself_imports_sglang_and_nothing_brings_a_compiler() -> None:
    folder = Path(sglang_replaced.__file__).parent
    modules = [f"kvsnap.engines.{path.stem}" for path in sorted(folder.glob("sglang_*.py"))]
    assert "kvsnap.engines.sglang_pages" in modules
    script = (
        f"import sys, {', '.join(modules)};"
        "found = {'sglang', 'numba', 'llvmlite'} & set(sys.modules); assert not found, found"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_doctor_says_where_sglang_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang_check, "installed_release", lambda: "")
    ((level, what, advice),) = sglang_check.findings()
    assert (level, what) == ("note", "engine sglang: it is not installed")
    assert "kvsnap[sglang]" in advice


def test_doctor_says_what_differs_and_how_to_start_it(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("sglang.srt.mem_cache.hicache_storage")
    vars(module).update(HiCacheStorage=storage(), HiCacheStorageConfig=config())
    for name in ("sglang", "sglang.srt", "sglang.srt.mem_cache"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(sglang_check, "installed_release", lambda: RELEASE)
    ((level, what, advice),) = sglang_check.findings()
    assert (level, what) == (
        "ok",
        f"engine sglang: SGLang {RELEASE}: the storage interface is the known one",
    )
    assert read_options(json.loads(advice[advice.index("{") : advice.rindex("}") + 1])) is not None
    monkeypatch.setattr(sglang_check, "installed_release", lambda: "9.9")
    vars(module)["HiCacheStorage"] = storage(clear=None)
    found = sglang_check.findings()
    assert [(level, what.partition(": SGLang 9.9: ")[2]) for level, what, _ in found] == [
        ("problem", "its release is 9.9"),
        ("problem", "HiCacheStorage has no clear"),
    ]
    vars(module).pop("HiCacheStorage")
    ((level, what, _),) = sglang_check.findings()
    assert level == "problem"
    assert "cannot be imported" in what
