"""Runs in a process of its own: the real SGLang engine on the CPU, with KVSnapStorage.

    python engine_worker.py JOB.json    prints one JSON object as its last line

A job: folder of the `model`, `engine` (arguments of Engine, over those below), `storage` (extra
configuration, None: no storage), and `steps`, done in order, each a label, what to do, and with what. The
object has what each label gave; of the label "" nothing:
    ["generate", [ids, ...]]    each in turn: output ids and SGLang's own count of cached tokens
    ["generate apart", ids, salt]   kept apart from requests of another salt, by SGLang
    ["flush"]                   forget what is on the device and in host pages
    ["attach", storage], ["detach"]   another storage; whether SGLang took it, and its message
    ["damage", place, byte]     flip a bit of the page with that place in its chain (0 the first)
    ["clear"]                   ask to clear the storage
    ["replace weights", folder] update_weights_from_disk
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

ENGINE: dict[str, Any] = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "disable_cuda_graph": True,
    "disable_overlap_schedule": True,
    "grammar_backend": "none",
    "max_total_tokens": 4096,
    "page_size": 32,
    "enable_hierarchical_cache": True,
    "hicache_ratio": 2,
    "hicache_io_backend": "direct",
    "hicache_mem_layout": "layer_first",
    "hicache_write_policy": "write_through",
    "hicache_storage_prefetch_policy": "wait_complete",
    "log_level": "info",
}
STORAGE: dict[str, Any] = {
    "backend_name": "kvsnap",
    "module_path": "kvsnap.engines.sglang",
    "class_name": "KVSnapStorage",
    "interface_v1": 1,
    "hicache_storage_pass_prefix_keys": True,
    "prefetch_threshold": 32,
}
NEW_TOKENS = 12


def settled(folder: Path | None, seconds: float = 20.0) -> None:
    """Wait until SGLang's backup thread has written what it has: no new block for a second."""
    deadline, before, since = time.monotonic() + seconds, -1, time.monotonic()
    while folder is not None and time.monotonic() < deadline:
        count = sum(1 for _ in folder.glob("blocks/*/*.safetensors"))
        if count != before:
            before, since = count, time.monotonic()
        elif time.monotonic() - since > 1.0:
            return
        time.sleep(0.05)


class Run:
    def __init__(self, job: dict[str, Any]) -> None:
        import sglang

        told = dict(ENGINE, **job.get("engine", {}))
        self.folder: Path | None = None
        if job.get("storage") is not None:
            told["hicache_storage_backend"] = "dynamic"
            told["hicache_storage_backend_extra_config"] = self.extra(job["storage"])
        self.engine = sglang.Engine(model_path=job["model"], **told)

    def extra(self, storage: dict[str, Any]) -> str:
        self.folder = Path(storage["store"]) if "store" in storage else None
        return json.dumps(STORAGE | storage)

    def wait_for(self, work: Any) -> Any:
        return self.engine.loop.run_until_complete(work)

    def generate(self, prompts: list[list[int]]) -> Any:
        results = []
        for ids in prompts:
            began = time.perf_counter()
            asked = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
            out = self.engine.generate(input_ids=ids, sampling_params=asked)
            results.append(
                {
                    "ids": out["output_ids"],
                    "cached": out["meta_info"]["cached_tokens"],
                    "details": out["meta_info"].get("cached_tokens_details") or {},
                    "seconds": time.perf_counter() - began,
                }
            )
            settled(self.folder)
        return results

    def generate_apart(self, ids: list[int], salt: str) -> Any:
        from sglang.srt.managers.io_struct import GenerateReqInput

        asked = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
        request = GenerateReqInput(input_ids=ids, sampling_params=asked, cache_salt=salt)
        answers = self.engine.tokenizer_manager.generate_request(request, None)
        out = self.wait_for(answers.__anext__())
        settled(self.folder)
        told = out["meta_info"]
        return {
            "ids": out["output_ids"],
            "cached": told["cached_tokens"],
            "details": told.get("cached_tokens_details") or {},
        }

    def flush(self) -> Any:
        """SGLang does not while it still writes to its storage."""
        deadline = time.monotonic() + 30
        while not self.engine.flush_cache().success:
            assert time.monotonic() < deadline, "SGLang is never idle"
            time.sleep(0.1)
        return True

    def attach(self, storage: dict[str, Any]) -> Any:
        manager = self.engine.tokenizer_manager
        done = self.wait_for(manager.attach_hicache_storage("dynamic", self.extra(storage)))
        return [done.success, done.message]

    def detach(self) -> Any:
        done = self.wait_for(self.engine.tokenizer_manager.detach_hicache_storage())
        return [done.success, done.message]

    def clear(self) -> Any:
        return self.wait_for(self.engine.tokenizer_manager.clear_hicache_storage()).success

    def replace_weights(self, folder: str) -> Any:
        return self.engine.update_weights_from_disk(folder)[0]

    def damage(self, place: int, byte: int) -> Any:
        from safetensors import safe_open

        assert self.folder is not None
        done = []
        for path in sorted(self.folder.glob("blocks/*/*.safetensors")):
            with safe_open(path, "np") as file:
                if int(file.metadata()["start"]) != 8 * place:
                    continue
            data = bytearray(path.read_bytes())
            data[byte] ^= 4
            path.write_bytes(bytes(data))
            done.append(path.stem)
        return done


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    run = Run(job)
    values = {}
    for label, name, *arguments in job["steps"]:
        values[label] = getattr(run, name.replace(" ", "_"))(*arguments)
    values.pop("", None)
    run.engine.shutdown()
    print("\n" + json.dumps(values), flush=True)


if __name__ == "__main__":
    main()
