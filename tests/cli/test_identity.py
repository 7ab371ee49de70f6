"""What decides KV makes a miss that names the field; what does not is reused whole."""

from __future__ import annotations

import json
import secrets
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.engine

IDS = list(range(3000, 3200))


@pytest.fixture
def ids(tmp_path: Path) -> Path:
    path = tmp_path / "ids.json"
    path.write_text(json.dumps(IDS))
    return path


@pytest.fixture
def saved(kvsnap: Any, model: Path, ids: Path) -> None:
    done = kvsnap("save", "--model", model, "--token-ids", ids, "--session", "s")
    assert done.code == 0, done.err


@pytest.fixture(scope="session")
def other_model(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same GGUF with one byte of its last tensor changed: same name, same metadata."""
    path = tmp_path_factory.mktemp("other") / model.name
    data = bytearray(model.read_bytes())
    data[-1000] ^= 1
    path.write_bytes(data)
    return path


@pytest.mark.usefixtures("saved")
@pytest.mark.parametrize(
    ("flags", "field"),
    [
        (["--rope-freq-base", "50000"], "rope.base"),
        (["--rope-freq-scale", "0.5"], "rope.scale"),
        (["--rope-scaling", "yarn"], "rope.scaling"),
        (["--yarn-orig-ctx", "4096"], "rope.original_context"),
        (["--yarn-attn-factor", "2"], "rope.attention_factor"),
        (["--cache-type-k", "f32"], "kv_types.full.k"),
        (["--flash-attn", "on", "--cache-type-v", "q8_0"], "kv_types.full.v"),
    ],
)
@pytest.mark.parametrize("session", [["s"], []], ids=["session", "prompt alone"])
def test_another_setting_reuses_nothing_and_names_the_field(
    kvsnap: Any, model: Path, ids: Path, flags: list[str], field: str, session: list[str]
) -> None:
    source = [] if session else ["--token-ids", ids]
    done = kvsnap(
        "--json", "resume", *session, "--model", model, *source, *flags,
        "--max-tokens", 1, "--no-save",
    )  # fmt: skip
    assert done.json["reused_tokens"] == 0
    assert done.json["reuse_stopped_by"].startswith(f"identity: {field} ")
    assert field in done.err


@pytest.mark.usefixtures("saved")
def test_another_models_weights_reuse_nothing(kvsnap: Any, other_model: Path, ids: Path) -> None:
    for session, source in ([["s"], []], [[], ["--token-ids", ids]]):
        done = kvsnap(
            "--json", "resume", *session, "--model", other_model, *source,
            "--max-tokens", 1, "--no-save",
        )  # fmt: skip
        assert done.json["reused_tokens"] == 0
        assert done.json["reuse_stopped_by"].startswith("identity: weights ")


@pytest.mark.usefixtures("saved")
def test_another_tenant_finds_nothing_and_is_told_nothing(
    kvsnap: Any, model: Path, ids: Path, tmp_path: Path
) -> None:
    key = tmp_path / "key"
    key.write_text(secrets.token_hex(32))
    probe = ["--json", "resume", "--model", model, "--token-ids", ids, "--max-tokens", 1]
    tenant = ["--tenant-key-file", key]
    first = kvsnap(*probe, "--no-save", *tenant).json
    assert first["reused_tokens"] == 0
    assert first["reuse_stopped_by"] == "nothing stored for this prompt"
    assert kvsnap("resume", "s", "--model", model, *tenant).code == 1
    # Paired: the tenant's own blocks are found by it, and by nobody without the key.
    kvsnap("save", "--model", model, "--token-ids", ids, "--session", "mine", *tenant)
    assert kvsnap(*probe, "--no-save", *tenant).json["reused_tokens"] == len(IDS) // 64 * 64
    assert kvsnap(*probe, "--no-save").json["reused_tokens"] == len(IDS) // 64 * 64
    assert kvsnap("resume", "mine", "--model", model).code == 1
    assert key.read_text() not in "".join(p.read_bytes().hex() for p in tmp_path.rglob("*.saf*"))


@pytest.mark.usefixtures("saved")
@pytest.mark.parametrize(
    "flags", [["--flash-attn", "on"], ["--threads", "1"], ["--ctx", "1024"]], ids=lambda f: f[0]
)
def test_what_does_not_decide_kv_is_reused_whole(
    kvsnap: Any, model: Path, flags: list[str]
) -> None:
    found = kvsnap(
        "--json", "resume", "s", "--model", model, *flags, "--max-tokens", 1, "--no-save"
    ).json
    assert found["reused_tokens"] == len(IDS) - 1


@pytest.mark.usefixtures("saved")
def test_a_renamed_model_file_is_the_same_model(kvsnap: Any, model: Path, tmp_path: Path) -> None:
    renamed = tmp_path / "another name.gguf"
    renamed.symlink_to(model)
    found = kvsnap("--json", "resume", "s", "--model", renamed, "--max-tokens", 1, "--no-save").json
    assert found["reused_tokens"] == len(IDS) - 1
