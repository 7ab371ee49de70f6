"""The digest of the files that a serving engine loads."""

from __future__ import annotations

from pathlib import Path

import pytest
from blake3 import blake3

from kvsnap.engines.served_weights import (
    WEIGHTS,
    adapter_digest,
    local_folder,
    weights_digest,
)
from kvsnap.formats.errors import NotFound, Unsupported


def digest(path: Path) -> str:
    return f"blake3:{blake3(path.read_bytes()).hexdigest()}"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model-1.safetensors").write_bytes(b"one")
    (folder / "model-2.safetensors").write_bytes(b"two")
    (folder / "config.json").write_text("{}")
    return folder


def test_a_path_is_where_the_files_are(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(model.parent))
    assert local_folder(str(model)) == model
    assert local_folder("~/model") == model


@pytest.mark.parametrize("name", ["nobody/no-such-model", "/no/such/folder"])
def test_a_name_whose_files_are_not_here_is_refused(name: str, tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub")
    with pytest.raises(NotFound, match="are not to be found on this machine") as raised:
        local_folder(name, cache=str(tmp_path))
    assert '"model"' in raised.value.hint


def test_a_file_has_its_own_digest(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"weights")
    assert weights_digest(path, digest) == digest(path)


def test_a_folder_has_a_digest_that_never_changes(model: Path) -> None:
    both = "\n".join(
        sorted([digest(model / "model-1.safetensors"), digest(model / "model-2.safetensors")])
    )
    assert weights_digest(model, digest) == f"blake3:{blake3(both.encode()).hexdigest()}"


def test_a_copy_elsewhere_under_other_names_is_the_same(model: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / "a.safetensors").write_bytes(b"two")
    (copy / "b.safetensors").write_bytes(b"one")
    assert weights_digest(copy, digest) == weights_digest(model, digest)


@pytest.mark.parametrize("kind", WEIGHTS)
def test_every_kind_of_weights_counts(model: Path, kind: str) -> None:
    before = weights_digest(model, digest)
    (model / f"more{kind}").write_bytes(b"more")
    assert weights_digest(model, digest) != before


def test_one_changed_byte_is_another_digest(model: Path) -> None:
    before = weights_digest(model, digest)
    (model / "model-2.safetensors").write_bytes(b"twO")
    assert weights_digest(model, digest) != before


def test_what_holds_no_weights_does_not_count(model: Path) -> None:
    before = weights_digest(model, digest)
    (model / "README.md").write_text("another one")
    (model / "config.json").write_text('{"changed": 1}')
    assert weights_digest(model, digest) == before


def test_a_folder_without_weights_tells_nothing(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="no weights in"):
        weights_digest(tmp_path, digest)


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="cannot read the model's folder"):
        weights_digest(tmp_path / "none", digest)


def test_an_adapters_scale_counts(tmp_path: Path) -> None:
    (tmp_path / "adapter_model.safetensors").write_bytes(b"low rank")
    configuration = tmp_path / "adapter_config.json"
    configuration.write_text('{"lora_alpha": 16}')
    before = adapter_digest(tmp_path, digest)
    configuration.write_text('{"lora_alpha": 32}')
    assert adapter_digest(tmp_path, digest) != before
    assert weights_digest(tmp_path, digest) not in (before, adapter_digest(tmp_path, digest))
