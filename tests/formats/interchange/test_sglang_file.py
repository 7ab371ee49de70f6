"""SGLang's pages: samples of SGLang's read and written, and what their names and sizes contradict refused."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given as example
from hypothesis import settings
from hypothesis import strategies as st

from kvsnap.formats.errors import Damaged, KvsnapError, Unsupported, UsageError
from kvsnap.formats.interchange.foreign import Given
from kvsnap.formats.interchange.sglang_file import SGLANG_FILE, page_keys, page_name
from tests.formats.interchange.served import (
    EXPECTED,
    IDS,
    Counted,
    digest,
    equal,
    files_of,
    given,
    made_rows,
    views,
)

FILES = files_of("sglang_hicache_file")
FIRST, SECOND = (f"{key}_llama4L_0_1.bin" for key in page_keys(np.array(IDS, np.uint32), 32))
LAYOUTS = ("layer_first", "page_first_direct", "page_first", "page_head")


def test_the_sample_is_recognised_and_read_to_the_value() -> None:
    assert SGLANG_FILE.recognise(FILES)
    rows = SGLANG_FILE.read(FILES, given())
    assert (rows.tokens, rows.heads, rows.head_dim, rows.k_type) == (64, 2, 64, "bf16")
    assert rows.order == "halves"
    assert rows.ids_proven
    assert list(rows.token_ids) == IDS[:64]
    assert rows.told["model"] == "llama4L"
    for number, name in enumerate((FIRST, SECOND)):
        expected = EXPECTED["files"][f"sglang_hicache_file/{name}"]
        part = slice(32 * number, 32 * number + 32)
        assert digest(rows, part) == expected["canonical_f32_sha256"]


@pytest.mark.parametrize("layout", [None, "layer_first", "page_first_direct"])
def test_the_sample_is_written_again_to_the_byte(layout: str | None) -> None:
    told = given(page_layout=layout)
    assert SGLANG_FILE.write is not None
    written = SGLANG_FILE.write(SGLANG_FILE.read(FILES, told), told)
    assert written == {name: bytes(content) for name, content in FILES.items()}


def test_a_name_is_the_hash_over_all_tokens_up_to_the_page_s_end() -> None:
    ids = np.arange(10, dtype=np.uint32)
    first = hashlib.sha256(ids[:4].tobytes()).digest()
    second = hashlib.sha256(first + ids[4:8].tobytes()).digest()
    assert page_keys(ids, 4) == [first.hex(), second.hex()]
    assert page_keys(ids[:3], 4) == []


def test_ids_of_another_text_are_refused() -> None:
    for at in (0, 31):
        with pytest.raises(UsageError, match="hash differs"):
            SGLANG_FILE.read(FILES, given(token_ids=[*IDS[:at], 9, *IDS[at + 1 :]]))
    for at in (32, 63):
        with pytest.raises(Damaged, match="page 1 of 2 is missing, tokens 32 to 63"):
            SGLANG_FILE.read(FILES, given(token_ids=[*IDS[:at], 9, *IDS[at + 1 :]]))
    with pytest.raises(UsageError, match="fewer token ids"):
        SGLANG_FILE.read(FILES, given(token_ids=IDS[:31]))
    with pytest.raises(UsageError, match="token ids"):
        SGLANG_FILE.read(FILES, given(token_ids=None))
    with pytest.raises(UsageError, match="hash differs"):  # another page size: other hashes
        SGLANG_FILE.read(FILES, given(block=16))


def test_a_gap_is_refused_and_the_part_before_it_can_be_asked_for() -> None:
    for gone, found in ((FIRST, "page 0 of 2"), (SECOND, "page 1 of 2")):
        some = {name: content for name, content in FILES.items() if name != gone}
        with pytest.raises(Damaged, match=found):
            SGLANG_FILE.read(some, given())
    rows = SGLANG_FILE.read({FIRST: FILES[FIRST]}, given(token_ids=IDS[:40]))
    assert rows.tokens == 32
    assert equal(rows, SGLANG_FILE.read(FILES, given()), 32)


def test_pages_of_other_prompts_are_passed_over() -> None:
    others = {f"{n:064x}_llama4L_0_1.bin": memoryview(b"x") for n in range(9)}
    counted = Counted({f"d/{n}": c for n, c in {**others, **FILES}.items()})
    rows = SGLANG_FILE.read(counted, given())
    assert counted.read == [f"d/{FIRST}", f"d/{SECOND}"]  # no other file is touched
    assert equal(rows, SGLANG_FILE.read(FILES, given()), 64)
    assert rows.told["other pages"] == "9"


@pytest.mark.parametrize("length", [0, 1, 32768, 65535, 65537, 131072])
@pytest.mark.parametrize("name", [FIRST, SECOND])
def test_a_page_of_another_length_is_refused(name: str, length: int) -> None:
    content = (bytes(FILES[name]) * 2)[:length]
    with pytest.raises(Damaged, match=f"{length} bytes"):
        SGLANG_FILE.read({**FILES, name: memoryview(content)}, given())


@pytest.mark.parametrize("name", ["layers", "heads", "head_dim", "dtype", "block"])
def test_what_no_file_says_must_be_given_and_fit(name: str) -> None:
    with pytest.raises(UsageError, match="nothing tells") as caught:
        SGLANG_FILE.read(FILES, given(**{name: None}))
    assert name in caught.value.hint
    wrong: tuple[Any, ...] = (0, -1, 2**31, 2**80, True, "4", 4.0)
    for value in ("q8_0", "fp8", "\x1b[2J") if name == "dtype" else wrong:
        with pytest.raises((UsageError, Unsupported)) as caught:
            SGLANG_FILE.read(FILES, given(**{name: value}))
        assert "\x1b" not in caught.value.what
    if name not in ("dtype", "block"):
        for value in (1, 3, 2**31 - 1):
            with pytest.raises(Damaged, match="bytes"):
                SGLANG_FILE.read(FILES, given(**{name: value}))
    if name == "dtype":
        with pytest.raises(Damaged, match="bytes"):
            SGLANG_FILE.read(FILES, given(dtype="f32"))


def test_an_unknown_layout_is_refused() -> None:
    for layout in ("page_unified", "layer_last", "\x1b"):
        with pytest.raises(Unsupported, match="not known"):
            SGLANG_FILE.read(FILES, given(page_layout=layout))


def test_layouts_are_the_order_of_their_axes() -> None:
    """Element by element, by the table of the module."""
    rows = made_rows(4, "f16", layers=2, heads=3, dim=2)
    facts = {"layers": 2, "heads": 3, "head_dim": 2, "dtype": "f16", "block": 4}
    place = {
        "layer_first": lambda l, t, h, d: ((l * 4 + t) * 3 + h) * 2 + d,
        "page_first_direct": lambda l, t, h, d: ((l * 4 + t) * 3 + h) * 2 + d,
        "page_first": lambda l, t, h, d: ((t * 2 + l) * 3 + h) * 2 + d,
        "page_head": lambda l, t, h, d: ((h * 4 + t) * 2 + l) * 2 + d,
    }
    for layout in LAYOUTS:
        told = Given(**facts, model_name="m", page_layout=layout, token_ids=rows.token_ids)
        assert SGLANG_FILE.write is not None
        ((name, content),) = SGLANG_FILE.write(rows, told).items()
        flat = np.frombuffer(content, "<u2")
        for plane, layers in enumerate((rows.k, rows.v)):
            for l, t, h, d in np.ndindex(2, 4, 3, 2):
                where = plane * 48 + place[layout](l, t, h, d)
                assert flat[where] == layers[l][t, h * 2 + d], layout
        assert equal(SGLANG_FILE.read({name: memoryview(content)}, told), rows, 4)


@pytest.mark.parametrize(
    ("rest", "error"),
    [
        ("_llama4L_0_2.bin", Unsupported),
        ("_llama4L_1_2.bin", Unsupported),
        ("_llama4L_0_1_2_0.bin", Unsupported),
        ("_llama4L_0_1_2_1.bin", Unsupported),
        ("_llama4L_0_1_cp0_2.bin", Unsupported),
        ("_llama4L_0_1_tp4_dcp2_page64.bin", Unsupported),
        ("_llama4L.bin", Unsupported),
        (".mamba_llama4L_0_1.bin", Unsupported),
    ],
)
def test_pages_of_several_ranks_and_unlike_kinds_are_refused(
    rest: str, error: type[KvsnapError]
) -> None:
    more = {f"{name[:64]}{rest}": content for name, content in FILES.items()}
    for files in (more, {**FILES, **more}):
        assert SGLANG_FILE.recognise(files)
        with pytest.raises(error):
            SGLANG_FILE.read(files, given())


def test_of_several_models_the_given_one_is_taken() -> None:
    other = {f"{name[:64]}_org-big_0_1.bin": memoryview(b"") for name in FILES}
    rows = SGLANG_FILE.read({**other, **FILES}, given())
    assert equal(rows, SGLANG_FILE.read(FILES, given()), 64)
    with pytest.raises(Damaged, match="0 bytes"):
        SGLANG_FILE.read({**other, **FILES}, given(model_name="org/big"))
    with pytest.raises(UsageError, match="2 models"):
        SGLANG_FILE.read({**other, **FILES}, given(model_name=None))
    with pytest.raises(UsageError, match="that model"):
        SGLANG_FILE.read(FILES, given(model_name="org/big"))


def test_names_are_taken_apart() -> None:
    key = "ab" * 32
    for rest, model, pool, tp, pp, others in (
        ("_m_0_1", "m", "", (0, 1), None, ""),
        ("_org-m_x_1_7_3_8", "org-m_x_1_7", "", (3, 8), None, ""),
        ("_m_0_4_2_1", "m", "", (0, 4), (1, 2), ""),
        ("_m_2_0", "m", "", None, (0, 2), ""),
        ("_m", "m", "", None, None, ""),
        ("_", "", "", None, None, ""),
        ("_m_0_1_cp1_2", "m", "", (0, 1), None, "_cp1_2"),
        ("_m_0_1_tp2_dcp2_page64", "m", "", (0, 1), None, "_tp2_dcp2_page64"),
        (".mamba_m_x_0_1", "m_x", "mamba", (0, 1), None, ""),
        (".deepseek_v4_c4_indexer_state_m_0_1", "m", "deepseek_v4_c4_indexer_state", (0, 1), None, ""),
    ):  # fmt: skip
        found = page_name(f"{key}{rest}.bin")
        assert found is not None
        assert found.key == key
        assert (found.model, found.pool, found.tp, found.pp, found.others) == (
            model, pool, tp, pp, others,
        )  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".bin",
        f"{'a' * 64}.bin",  # vLLM's fs tier
        f"{'a' * 63}_m_0_1.bin",
        f"{'A' * 64}_m_0_1.bin",
        f"{'a' * 64}_m_0_1.bin.tmp.1.2.abc",
        f"{'a' * 64}_m_0_1.data",
    ],
)
def test_other_names_are_no_page_s(name: str) -> None:
    assert page_name(name) is None
    assert not SGLANG_FILE.recognise({name: memoryview(b"")})


def test_hostile_names_cost_no_time_and_are_refused() -> None:
    key = "a" * 64
    for rest in ("_0" * 20000, "_1_2" * 20000, f"_m_{'9' * 5000}_{'9' * 5000}", "_cp1_" * 9000):
        assert page_name(f"{key}_{rest}.bin") is not None
        with pytest.raises(KvsnapError):
            SGLANG_FILE.read({f"{key}_{rest}.bin": memoryview(b"")}, given(model_name=None))


@settings(max_examples=60, deadline=None)
@example(
    st.sampled_from(["f16", "bf16", "f32"]), st.sampled_from(LAYOUTS),
    st.integers(1, 4), st.integers(1, 3), st.integers(1, 4), st.integers(1, 5), st.integers(0, 9),
)  # fmt: skip
def test_what_is_written_is_read(
    kind: str, layout: str, layers: int, heads: int, dim: int, page: int, more: int
) -> None:
    rows = made_rows(page + more, kind, layers, heads, dim)
    whole = (page + more) // page * page
    told = Given(
        layers=layers, heads=heads, head_dim=dim, dtype=kind, block=page, page_layout=layout,
        model_name="org/m_1", token_ids=rows.token_ids,
    )  # fmt: skip
    assert SGLANG_FILE.write is not None
    written = views(SGLANG_FILE.write(rows, told))
    assert len(written) == whole // page
    assert SGLANG_FILE.recognise(written)
    read = SGLANG_FILE.read(written, told)
    assert read.tokens == whole
    assert equal(read, rows, whole)


def test_without_the_model_s_name_nothing_is_written() -> None:
    rows, write = made_rows(8), SGLANG_FILE.write
    assert write is not None
    for model in (None, "", "a\nb", "\x1b[2J", "x" * 129):
        with pytest.raises(UsageError):
            write(rows, Given(block=4, model_name=model))


def test_other_tools_files_are_not_taken_for_it() -> None:
    for folder in ("vllm_example_connector", "lmcache_fs", "vllm_fs_tier"):
        assert not SGLANG_FILE.recognise(files_of(folder))
    assert not SGLANG_FILE.recognise({})
