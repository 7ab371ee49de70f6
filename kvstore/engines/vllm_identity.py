"""What decides the rows of a model that vLLM serves: its files, its configuration, each rank's caches."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvsnap.engines.served_weights import adapter_digest, code_digest, weights_digest
from kvsnap.engines.transformers_config import rope, settings
from kvsnap.engines.vllm_check import pages_of
from kvsnap.engines.vllm_plan import Facts, Family, Rank
from kvsnap.formats.errors import NotFound, Unsupported
from kvsnap.formats.identity import Adapter, Identity, Rope

FAMILY = "vllm"


class Identities:
    """The identities of one engine's blocks, without and with adapters."""

    def __init__(
        self,
        config: Any,
        facts: Mapping[Rank, Facts],
        block_size: int,
        file_digest: Callable[[Path], str],
        version: str,
        model: str | None = None,
    ) -> None:
        """`config`: the VllmConfig; `version`: of vLLM. `model`: where its weights are, if not where
        vLLM says. Raises as `weights_digest` does."""
        self.config, self.facts, self.block_size = config, facts, block_size
        self.file_digest, self.version = file_digest, version
        place = Path(model) if model is not None else _folder(config)
        self.weights = weights_digest(place, file_digest)
        remote_code = config.model_config.trust_remote_code and place.is_dir()
        self.code = code_digest(place, file_digest) if remote_code else None
        self._adapters: dict[tuple[str, str], str] = {}
        self._known: dict[tuple[Adapter, ...], Family] = {}

    def plain(self) -> Family:
        return self._family(())

    def with_lora(self, lora: Any) -> Family:
        """`lora`: the LoRARequest. Raises `Unsupported` where its files are not what they were when it
        was asked for first: which of the two vLLM has in memory nobody can tell."""
        digest = adapter_digest(_lora_folder(lora), self.file_digest)
        key = (lora.lora_name, lora.lora_path)
        if self._adapters.setdefault(key, digest) != digest:
            raise Unsupported(
                f"the files of adapter {lora.lora_name!r} changed while it was in use",
                "give the new ones another name",
            )
        return self._family((Adapter(kind="lora", digest=digest, scale=1.0),))

    def _family(self, adapters: tuple[Adapter, ...]) -> Family:
        if adapters not in self._known:
            self._known[adapters] = self._make(adapters)
        return self._known[adapters]

    def _make(self, adapters: tuple[Adapter, ...]) -> Family:
        model = self.config.model_config
        hf = model.hf_config.get_text_config()
        told = _engine_settings(self.config)
        told |= {"code": self.code, "pages": pages_of(self.version)}
        own = *settings(hf), *((f"vllm.{name}", json.dumps(value)) for name, value in told.items())
        identities = {
            rank: Identity(
                family=FAMILY,
                weights=self.weights,
                architecture=str(hf.model_type),
                layout=facts.layout,
                rope=_rope(hf, model.max_model_len),
                block_size=self.block_size,
                adapters=adapters,
                shard=facts.shard,
                overrides=tuple(sorted((*own, *facts.overrides))),
            )
            for rank, facts in self.facts.items()
        }
        return {rank: identity.canonical() for rank, identity in identities.items()}


def _engine_settings(config: Any) -> dict[str, Any]:
    """What the engine makes of weights and rows, beyond what the caches themselves tell."""
    told: dict[str, Any] = {}
    model = config.model_config
    told["dtype"] = str(model.dtype).removeprefix("torch.")
    told["quantization"] = model.quantization
    told["cache_dtype"] = str(config.cache_config.cache_dtype)
    if model.is_multimodal_model:  # how media become rows
        told["media"] = settings(model.hf_config)
    return told


def _rope(hf: Any, context: int) -> Rope | None:
    """vLLM picks LongRoPE's factors by the context that it was started with."""
    found = rope(hf)
    if found is None or found.scaling != "longrope":
        return found
    return dataclasses.replace(found, long_context=context > found.original_context)


def _folder(config: Any) -> Path:
    model = config.model_config
    return local_folder(model.model, model.revision, config.load_config.download_dir)


def _lora_folder(lora: Any) -> Path:
    return local_folder(lora.lora_path, None, None)


def local_folder(name: str, revision: str | None, cache: str | None) -> Path:
    """A path as it is, or where the files of a model's name are on this machine: nothing is fetched."""
    if Path(name).expanduser().exists():
        return Path(name).expanduser()
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(name, revision=revision, cache_dir=cache, local_files_only=True)
        )
    except (OSError, ValueError) as error:
        raise NotFound(
            f"the files of model {name!r} are not on this machine: nothing tells its weights",
            'say where they are: "model": "/path" in kv_connector_extra_config',
        ) from error
