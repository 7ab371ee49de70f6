"""vLLM's fs tier: its config and names are read, and hostile ones refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvsnap.formats.errors import Damaged, KvsnapError, Unsupported
from kvsnap.formats.interchange.vllm_fs_tier import (
    MAX_CONFIG,
    TEMPORARY,
    Group,
    block_file,
    is_base,
    parse_config,
    rank_folder,
)
from tests.formats.interchange.served import files_of

FILES = files_of("vllm_fs_tier")
BASE = "llama4L_7e6fc280d529"
CONFIG = bytes(FILES[f"{BASE}/config.json"])
HASH = "3276b9673ce05f1fa537b230755a107bcd26724e3dcee1bd0f09af6cae33485b"


def config(**changed: Any) -> memoryview:
    fields = {**json.loads(CONFIG), **changed}
    return memoryview(json.dumps({k: v for k, v in fields.items() if v is not ...}).encode())


def test_the_sample_s_config_is_read_and_names_its_own_folder() -> None:
    found = parse_config(memoryview(CONFIG))
    assert found.folder == BASE
    assert (found.model, found.dtype, found.ranks, found.blocks_per_file) == (
        "llama4L", "bfloat16", 1, 1,
    )  # fmt: skip
    assert found.groups == (Group(4, 32),)
    assert found.format == ""
    assert 0 < found.least_size(0) <= 65536
    assert found.least_size(1) == 0


def test_a_config_that_was_changed_names_another_folder() -> None:
    for changed in ({"dtype": "float16"}, {"tp_size": 2}, {"more": 1}, {"tokens_per_hash": 16}):
        assert parse_config(config(**changed)).folder != BASE
    assert parse_config(config()).folder == BASE  # white space is none of it
    assert parse_config(config(model_name="org/m")).folder.startswith("org_m_")


def test_the_sample_s_names_are_read() -> None:
    found = []
    for path in FILES:
        folder, _, rest = path.partition("/")
        if rest != "config.json":
            assert rank_folder(folder) == (BASE, 0)
            found.append(block_file(rest))
    assert len(found) == 2
    assert all(one is not None and one.placed and one.group == 0 for one in found)
    assert is_base(BASE)


def test_a_block_in_other_folders_than_its_hash_s_is_told() -> None:
    for path, placed in ((f"327/6b_g0/{HASH}.bin", True), (f"327/6c_g0/{HASH}.bin", False)):
        found = block_file(path)
        assert found is not None
        assert found.placed is placed
    assert block_file(f"327/6b_g12/{HASH}.bin") is not None


@pytest.mark.parametrize(
    "path",
    [
        "",
        f"{HASH}.bin",
        f"32/6b_g0/{HASH}.bin",
        f"327/6b/{HASH}.bin",
        f"327/6b_g/{HASH}.bin",
        f"327/6b_g{'9' * 300}/{HASH}.bin",
        f"327/6b_g-1/{HASH}.bin",
        f"x/327/6b_g0/{HASH}.bin",
        f"327/6b_g0/{HASH}.bin_123.tmp",
        f"327/6b_g0/{HASH}.bin\n",
        "327/6b_g0/../x.bin",
    ],
)
def test_other_paths_are_no_block_s(path: str) -> None:
    assert block_file(path) is None


def test_folders_and_temporary_names_are_told_apart() -> None:
    for name in ("", "m", "m_r0", f"{BASE}_r", f"{BASE}_r-1", f"{BASE}_r{'1' * 99}", BASE):
        assert rank_folder(name) is None
    assert rank_folder(f"a_r1_{BASE}_r12") == (f"a_r1_{BASE}", 12)
    assert TEMPORARY.fullmatch(f"{HASH}.bin_{2**63 - 1}.tmp")
    assert TEMPORARY.fullmatch(".o_direct_probe_5.tmp")
    assert not TEMPORARY.fullmatch(f"{HASH}.bin")


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({"model_name": ...}, Damaged),
        ({"model_name": 5}, Damaged),
        ({"dtype": None}, Damaged),
        ({"tp_size": 0}, Damaged),
        ({"tp_size": True}, Damaged),
        ({"tp_size": 2**40}, Damaged),
        ({"tp_size": 1.0}, Damaged),
        ({"blocks_per_file": ...}, Damaged),
        ({"kv_cache_groups": {}}, Damaged),
        ({"kv_cache_groups": [[]]}, Damaged),
        ({"kv_cache_groups": [{"layer_names": [1], "tokens_per_block": 1}]}, Damaged),
        ({"kv_cache_groups": [{"layer_names": [], "tokens_per_block": -1}]}, Damaged),
        ({"inference_engine": "other"}, Unsupported),
    ],
)
def test_a_config_of_other_fields_is_refused(
    changed: dict[str, Any], error: type[KvsnapError]
) -> None:
    with pytest.raises(error):
        parse_config(config(**changed))


def test_many_ranks_are_counted_without_a_huge_number() -> None:
    many = parse_config(config(tp_size=2**30, pp_size=2**30, pcp_size=2**30))
    assert many.ranks == 2**31 - 1
    assert many.least_size(0) == 0


def test_a_config_that_is_cut_or_hostile_is_refused() -> None:
    for length in range(len(CONFIG.rstrip())):
        with pytest.raises(Damaged):
            parse_config(memoryview(CONFIG[:length]))
    for text in (
        b"[" * 500_000,
        b'{"a":' * 200_000,
        b"\xff\xfe",
        b"5",
        b'{"tp_size":' + b"9" * 9000 + b"}",
        b" " * (MAX_CONFIG + 1),
    ):
        with pytest.raises(Damaged):
            parse_config(memoryview(text))
    surrogate = parse_config(config(model_name="\ud800\x1b"))
    assert surrogate.model == "\ud800\x1b"
