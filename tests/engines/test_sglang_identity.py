"""What decides SGLang's pages, read from its arguments and configuration; both are stand-ins here."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvsnap.engines import sglang_files
from kvsnap.engines.sglang_identity import identity_of, page_layout, served_model
from kvsnap.formats.errors import NotFound, Unsupported
from tests.engines.sglang_arguments import ARGUMENTS

transformers = pytest.importorskip("transformers")


def arguments(folder: Path, **changed: Any) -> Any:
    told = {
        "model_path": str(folder),
        "revision": None,
        "download_dir": None,
        "hicache_storage_backend": "dynamic",
        "attention_backend": "flashinfer",
        "deepep_dispatcher_output_dtype": "auto",
        "enable_quant_communications": False,
        "enable_tf32_matmul": None,
        "enable_w4a4_mxfp4_megamoe": False,
        "flashinfer_a2a_dispatch_type": None,
        "flashinfer_mxfp4_moe_precision": "default",
        "fp4_gemm_runner_backend": "auto",
        "fp8_gemm_runner_backend": "auto",
        "kv_cache_dtype": "auto",
        "moe_runner_backend": "auto",
        "prefill_attention_backend": None,
        "prefill_kv_cache_dequant_dtype": "auto",
        "rl_on_policy_target": None,
        "model_impl": "auto",
        "model_loader_extra_config": "{}",
        "modelopt_quant": None,
        "quantization_param_path": None,
        "quantize_and_serve": False,
        "rl_quant_profile": None,
    }
    return SimpleNamespace(**ARGUMENTS | told | changed)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sglang_files, "_loaded", {})
    path = tmp_path / "model"
    path.mkdir()
    (path / "model.safetensors").write_bytes(b"weights")
    return path


class Serve:
    """Lets `served_model` find these arguments and this configuration as SGLang's."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.monkeypatch = folder, monkeypatch

    def __call__(self, given: str | None = None, config: Any = None, **told: Any) -> Any:
        text = config or transformers.LlamaConfig(num_hidden_layers=2)
        found = SimpleNamespace(
            is_multimodal=told.pop("is_multimodal", False),
            hf_text_config=text,
            dtype=told.pop("dtype", "torch.bfloat16"),
            quantization=told.pop("quantization", None),
        )
        served = arguments(self.folder, **told)
        modules = {
            "sglang.srt.configs.model_config": {
                "ModelConfig": SimpleNamespace(from_server_args=lambda args: found)
            },
            "sglang.srt.runtime_context": {"get_server_args": lambda: served},
        }
        for name in ("sglang", "sglang.srt", "sglang.srt.configs"):
            self.monkeypatch.setitem(sys.modules, name, ModuleType(name))
        for name, members in modules.items():
            module = ModuleType(name)
            vars(module).update(members)
            self.monkeypatch.setitem(sys.modules, name, module)
        return served_model(given)


@pytest.fixture
def serve(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Serve:
    return Serve(folder, monkeypatch)


POOL = SimpleNamespace(
    layout="page_first",
    start_layer=0,
    end_layer=2,
    layer_num=2,
    page_size=16,
    size_per_token=512,
    head_num=2,
    head_dim=32,
    v_head_dim=32,
    dtype="torch.bfloat16",
)
CONFIG = SimpleNamespace(tp_rank=1, tp_size=2, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1)


def canonical(model: Any, pool: Any = POOL) -> str:
    return identity_of(pool, CONFIG, model, lambda path: f"blake3:{path.name}").canonical()


def test_the_option_says_where_the_files_are_only_if_sglang_does_not(
    serve: Serve, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "model.safetensors").write_bytes(b"of another model")
    assert serve(given=str(other)).folder == folder
    monkeypatch.setattr(sglang_files, "_loaded", {})
    assert serve(given=str(other), model_path="nobody/no-such-model").folder == other


def test_a_page_is_one_plane_of_bytes() -> None:
    layout = page_layout(POOL)
    assert layout.size(8) == 16 * 512
    assert not layout.can_cut


def test_what_changes_kv_changes_the_identity_and_nothing_else_does(
    serve: Serve, folder: Path
) -> None:
    base = canonical(serve())
    assert base == canonical(serve(given=str(folder))), "the same files"
    assert base == canonical(
        serve(config=transformers.LlamaConfig(num_hidden_layers=2, use_cache=False))
    )
    others = [
        serve(dtype="torch.float16"),
        serve(quantization="fp8"),
        serve(quantization_param_path="/scales.json"),
        serve(modelopt_quant="fp8"),
        serve(model_impl="transformers"),
        serve(kv_cache_dtype="fp8_e4m3"),
        serve(kv_cache_dtype="fp8_e5m2"),
        serve(moe_runner_backend="marlin"),
        serve(flashinfer_mxfp4_moe_precision="bf16"),
        serve(enable_tf32_matmul=True),
        serve(config=transformers.LlamaConfig(num_hidden_layers=2, rms_norm_eps=1e-3)),
        serve(config=transformers.LlamaConfig(num_hidden_layers=2, rope_theta=123.0)),
    ]
    found = [base, *map(canonical, others)]
    found += [
        canonical(serve(), SimpleNamespace(**{**vars(POOL), name: value}))
        for name, value in (
            ("layout", "layer_first"),
            ("page_size", 32),
            ("dtype", "torch.float16"),
            ("head_num", 4),
            ("end_layer", 3),
        )
    ]
    (folder / "hf_quant_config.json").write_text("{}")
    found.append(canonical(serve()))
    assert len(set(found)) == len(found)


def test_files_that_changed_under_a_running_server_are_refused(serve: Serve, folder: Path) -> None:
    serve()
    (folder / "model.safetensors").write_bytes(b"other weights")
    with pytest.raises(Unsupported, match="changed after this process loaded"):
        serve(hicache_storage_backend=None)


def test_images_are_refused(serve: Serve) -> None:
    with pytest.raises(Unsupported, match="images and sounds apart by few bits"):
        serve(is_multimodal=True)


def test_arguments_are_looked_at_first(serve: Serve) -> None:
    with pytest.raises(Unsupported, match="LoRA"):
        serve(enable_lora=True)


def test_a_model_that_is_not_to_be_found_is_refused_with_what_to_say(serve: Serve) -> None:
    with pytest.raises(NotFound, match="'nobody/no-such-model' are not to be found") as raised:
        serve(model_path="nobody/no-such-model")
    assert '"model"' in raised.value.hint
