"""What a serving engine's configuration may say of the store; no engine is needed for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvsnap.engines import served_options
from kvsnap.engines.served_options import ServedOptions
from kvsnap.formats.errors import KvsnapError, UsageError
from kvsnap.kvstore.tenant_key import FILE_VARIABLE, VARIABLE

KEY = "5a" * 32


def test_nothing_said_is_the_users_own_store_and_raw_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVSNAP_STORE", str(tmp_path / "theirs"))
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.delenv(FILE_VARIABLE, raising=False)
    options = ServedOptions.from_mapping({})
    assert options.make_codec().id == "raw"
    assert options.buffer_bytes() == 10**9
    assert options.tenant() is None
    with options.open_store() as store:
        assert store.path == tmp_path / "theirs"
        assert not store.encrypt


def test_what_is_said_reaches_the_store(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text(KEY)
    options = ServedOptions.from_mapping(
        {
            "store": str(tmp_path / "store"),
            "codec": "zstd",
            "capacity": "20MB",
            "min_free": 0 + 1,
            "tenant_key_file": str(key),
            "encrypt": True,
        }
    )
    tenant = options.tenant()
    assert tenant is not None
    assert tenant.key == bytes.fromhex(KEY)
    with options.open_store() as store:
        assert store.path == tmp_path / "store"
        assert store.budget.capacity == 20_000_000
        assert store.budget.min_free == 1
        assert store.encrypt


def test_a_remote_is_connected(tmp_path: Path) -> None:
    there = tmp_path / "there"
    options = ServedOptions.from_mapping(
        {"store": str(tmp_path / "s"), "remote": f"file://{there}", "write_behind": True}
    )
    with options.open_store() as store:
        assert store.through is not None
        assert store.behind is not None


def test_trusted_keys_are_those_of_the_list(tmp_path: Path) -> None:
    key = "ab" * 32
    options = ServedOptions.from_mapping({"store": str(tmp_path / "s"), "trust": [key]})
    assert options.trust == (key,)
    with options.open_store() as store:
        assert store.trust is not None
        assert store.trust.lists(key)


def test_an_unknown_word_is_refused_by_name_and_the_engines_own_pass() -> None:
    with pytest.raises(UsageError, match="'capacty' is not known"):
        ServedOptions.from_mapping({"capacty": "1GB"})
    with pytest.raises(UsageError, match="'backend_name'"):
        ServedOptions.from_mapping({"backend_name": "x"})
    assert ServedOptions.from_mapping({"backend_name": 3}, also=["backend_name"]).store is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("store", 3),
        ("codec", None),
        ("codec", 1),
        ("capacity", 1.5),
        ("capacity", True),
        ("min_free", ["1GB"]),
        ("remote", False),
        ("write_behind", "false"),
        ("write_behind", 1),
        ("encrypt", "yes"),
        ("encrypt", None),
        ("trust", "ab" * 32),
        ("trust", [1]),
        ("model", 1),
        ("block_size", 0),
        ("block_size", True),
        ("block_size", "16"),
        ("write_buffer", 1.0),
    ],
)
def test_a_value_of_another_type_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(UsageError, match=f"option {name} is"):
        ServedOptions.from_mapping({name: value})


def test_a_lossy_codec_is_refused_and_an_unknown_one_named() -> None:
    with pytest.raises(UsageError, match="codec q8 is lossy"):
        ServedOptions.from_mapping({"codec": "q8"})
    with pytest.raises(KvsnapError, match="'zip' is not known"):
        ServedOptions.from_mapping({"codec": "zip"})


def test_write_behind_without_a_remote_makes_no_sense() -> None:
    with pytest.raises(UsageError, match="write_behind needs a remote"):
        ServedOptions.from_mapping({"write_behind": True})


def test_a_size_that_is_none_is_refused_when_the_store_is_opened(tmp_path: Path) -> None:
    options = ServedOptions.from_mapping({"store": str(tmp_path), "capacity": "much"})
    with pytest.raises(UsageError, match="'much' is not a size"):
        options.open_store()


def test_a_key_file_that_is_not_there_is_refused_by_the_options_name(tmp_path: Path) -> None:
    options = ServedOptions.from_mapping({"tenant_key_file": str(tmp_path / "nothing")})
    with pytest.raises(KvsnapError, match="cannot read"):
        options.tenant()
    with pytest.raises(UsageError, match="tenant_key_file takes the name of a file"):
        ServedOptions.from_mapping({"tenant_key_file": KEY}).tenant()


@pytest.mark.parametrize("told", [{"encrypt": True}, {"trust": ["ab" * 32]}])
def test_what_could_not_be_sealed_or_signed_is_refused_before_it_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: dict[str, Any]
) -> None:
    monkeypatch.setattr(served_options, "find_spec", lambda name: None)
    options = ServedOptions.from_mapping({"store": str(tmp_path / "store"), **told})
    with pytest.raises(KvsnapError, match="need the package cryptography"):
        options.open_store()


def test_it_needs_no_engine() -> None:
    import subprocess
    import sys

    script = (
        "import sys, kvsnap.engines.served_options;"
        "bad = {'vllm', 'sglang', 'torch', 'numba', 'llvmlite'} & set(sys.modules); assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
