"""The real SGLang, which has its own environment: `make test-sglang` collects these tests, no other run."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SHIMMED = os.environ.get("SGLANG_USE_CPU_ENGINE") == "1"
if importlib.util.find_spec("sglang") is None or not SHIMMED:
    collect_ignore_glob = ["test_*.py"]

Start = Callable[..., Callable[[], "Done"]]
Make = Callable[..., Any]


class Done:
    """What a process of engine_worker.py gave: the values of its labelled steps, and its log."""

    def __init__(self, values: dict[str, Any], log: str) -> None:
        self.values, self.log = values, log

    def __getitem__(self, label: str) -> Any:
        return self.values[label]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes tiny models on demand, each once."""
    made: dict[tuple[str, int], Path] = {}

    def make(kind: str = "llama", seed: int = 0) -> Path:
        if (kind, seed) not in made:
            out = tmp_path_factory.mktemp("models") / f"{kind}-{seed}"
            maker = ROOT / "tests" / "tiny_models.py"
            command = [sys.executable, str(maker), str(out), kind, "--seed", str(seed)]
            subprocess.run(command, check=True, timeout=120, capture_output=True)
            made[kind, seed] = out
        return made[kind, seed]

    return make


@pytest.fixture(scope="session")
def start(tmp_path_factory: pytest.TempPathFactory) -> Start:
    """Starts an engine on a job; the function that it gives waits for the end."""

    def run(job: dict[str, Any], *, fails: bool = False, **environment: str) -> Callable[[], Done]:
        folder = tmp_path_factory.mktemp("job")
        path = folder / "job.json"
        path.write_text(json.dumps(job, default=str))
        with (folder / "out").open("w") as out, (folder / "err").open("w") as err:
            process = subprocess.Popen(
                [sys.executable, str(HERE / "engine_worker.py"), str(path)],
                stdout=out,
                stderr=err,
                env=os.environ | {"HF_HUB_OFFLINE": "1"} | environment,
                start_new_session=True,
            )

        def finish() -> Done:
            code = process.wait(timeout=240)
            text, log = (folder / "out").read_text(), (folder / "err").read_text()
            if fails:
                assert code != 0, text[-2000:]
                return Done({}, text + log)
            assert code == 0, (text + log)[-6000:]
            return Done(json.loads(text.strip().splitlines()[-1]), text + log)

        return finish

    return run


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """A storage on a pool, each time as in a new process; of a model of a few bytes."""
    from kvsnap.engines import served_replaced
    from kvsnap.engines import sglang as engine
    from tests.sglang.pools import make_storage, model_in

    made: list[Any] = []
    monkeypatch.setattr(served_replaced, "_replaced_by", [])

    def run(pool: Any, model: Any = None, store: str = "store", **told: Any) -> Any:
        extra = {key: value for key, value in told.items() if not key.startswith(("tp_", "pp_"))}
        ranks = {key: value for key, value in told.items() if key not in extra}
        served = model or model_in(tmp_path / "model")
        monkeypatch.setattr(engine, "served_model", lambda given: served)
        made.append(make_storage(pool, {"store": str(tmp_path / store), **extra}, **ranks))
        return made[-1]

    yield run
    for storage in made:
        storage.close()
