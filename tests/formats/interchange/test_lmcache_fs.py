"""LMCache's chunks: the sample of LMCache's read and written, and what names and sizes contradict refused."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given as example
from hypothesis import settings
from hypothesis import strategies as st

from kvsnap.formats.errors import Damaged, KvsnapError, Unsupported, UsageError
from kvsnap.formats.interchange.foreign import Given
from kvsnap.formats.interchange.lmcache_fs import LMCACHE_FS, chunk_keys, chunk_name
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

FILES = files_of("lmcache_fs")
((NAME, CONTENT),) = FILES.items()
KEY = NAME[:-5].rpartition("@")[2]


def test_the_sample_is_recognised_and_read_to_the_value() -> None:
    assert LMCACHE_FS.recognise(FILES)
    rows = LMCACHE_FS.read(FILES, given())
    assert (rows.tokens, rows.heads, rows.head_dim, rows.k_type) == (64, 2, 64, "bf16")
    assert rows.order == "halves"
    assert rows.ids_proven
    assert list(rows.token_ids) == IDS[:64]
    assert rows.told == {"model": "llama4L", "chunks": "1"}
    assert digest(rows) == EXPECTED["files"][f"lmcache_fs/{NAME}"]["canonical_f32_sha256"]


def test_the_sample_is_written_again_to_the_byte() -> None:
    assert LMCACHE_FS.write is not None
    written = LMCACHE_FS.write(LMCACHE_FS.read(FILES, given()), given())
    assert written == {NAME: bytes(CONTENT)}


def test_it_holds_the_same_rows_as_vllm_s_own_folder_of_the_same_run() -> None:
    from kvsnap.formats.interchange.vllm_example import VLLM_EXAMPLE

    other = VLLM_EXAMPLE.read(files_of("vllm_example_connector"), given())
    assert equal(LMCACHE_FS.read(FILES, given()), other, 64)


def test_a_name_is_the_hash_over_all_tokens_up_to_the_chunk_s_end() -> None:
    ids = np.arange(10, dtype=np.uint32)
    parent = blake3(struct.pack(">qI", 0, 0)).digest()
    first = blake3(parent + struct.pack(">4I", 0, 1, 2, 3)).digest()
    second = blake3(first + struct.pack(">4I", 4, 5, 6, 7)).digest()
    assert chunk_keys(ids, 4) == [first.hex(), second.hex()]
    assert chunk_keys(ids[:3], 4) == []


def test_ids_of_another_text_are_refused() -> None:
    for at in (0, 32, 63):
        with pytest.raises(UsageError, match="hash differs"):
            LMCACHE_FS.read(FILES, given(token_ids=[*IDS[:at], 9, *IDS[at + 1 :]]))
    with pytest.raises(UsageError, match="fewer token ids"):
        LMCACHE_FS.read(FILES, given(token_ids=IDS[:63]))
    with pytest.raises(UsageError, match="token ids"):
        LMCACHE_FS.read(FILES, given(token_ids=None))
    with pytest.raises(UsageError, match="hash differs"):
        LMCACHE_FS.read(FILES, given(chunk=32))


def three_chunks() -> tuple[dict[str, memoryview], Given]:
    rows = made_rows(13, "f16", layers=2, heads=2, dim=4)
    told = Given(
        layers=2, heads=2, head_dim=4, dtype="f16", block=2, chunk=4, model_name="org/m",
        token_ids=rows.token_ids,
    )  # fmt: skip
    assert LMCACHE_FS.write is not None
    files = views(LMCACHE_FS.write(rows, told))
    assert len(files) == 3
    assert equal(LMCACHE_FS.read(files, told), rows, 12)
    return files, told


def test_a_gap_is_refused() -> None:
    files, told = three_chunks()
    for number, gone in enumerate(files):
        some = {name: content for name, content in files.items() if name != gone}
        with pytest.raises(Damaged, match=f"chunk {number} of 3 is missing"):
            LMCACHE_FS.read(some, told)


def test_chunks_of_other_prompts_are_passed_over() -> None:
    files, told = three_chunks()
    other = f"org-SEP-m@0x01000100@0@{'0' * 64}.data"
    counted = Counted({other: memoryview(b""), **files})
    rows = LMCACHE_FS.read(counted, told)
    assert counted.read == list(files)
    assert rows.told["other chunks"] == "1"
    assert equal(rows, LMCACHE_FS.read(files, told), 12)


def test_chunks_that_swapped_their_names_come_back_swapped_as_no_hash_covers_them() -> None:
    """What the importer's comparison with computed rows is for; lengths that differ are seen here."""
    files, told = three_chunks()
    names = list(files)
    swapped = {**files, names[0]: files[names[2]], names[2]: files[names[0]]}
    right, wrong = LMCACHE_FS.read(files, told), LMCACHE_FS.read(swapped, told)
    assert np.array_equal(right.k[0][:4], wrong.k[0][8:])
    assert not equal(right, wrong, 4)
    with pytest.raises(Damaged, match="chunk 1 has"):
        LMCACHE_FS.read({**files, names[1]: files[names[1]][:-1]}, told)


@pytest.mark.parametrize("length", [0, 1, 65536, 131071, 131073, 262144])
def test_a_chunk_of_another_length_is_refused(length: int) -> None:
    content = (bytes(CONTENT) * 2)[:length]
    with pytest.raises(Damaged, match=f"{length} bytes"):
        LMCACHE_FS.read({NAME: memoryview(content)}, given())


@pytest.mark.parametrize("name", ["layers", "heads", "head_dim", "dtype", "block", "chunk"])
def test_what_no_file_says_must_be_given_and_fit(name: str) -> None:
    with pytest.raises(UsageError, match="nothing tells") as caught:
        LMCACHE_FS.read(FILES, given(**{name: None}))
    assert name in caught.value.hint
    for value in ("q8_0", "fp8") if name == "dtype" else (0, -1, 2**31, True, "4", 4.0):
        with pytest.raises((UsageError, Unsupported)):
            LMCACHE_FS.read(FILES, given(**{name: value}))
    if name in ("layers", "heads", "head_dim"):
        for value in (1, 3, 2**31 - 1):
            with pytest.raises(Damaged, match="bytes"):
                LMCACHE_FS.read(FILES, given(**{name: value}))
    if name == "block":
        for value in (3, 48, 128):
            with pytest.raises(UsageError, match="whole number of blocks"):
                LMCACHE_FS.read(FILES, given(block=value))


@pytest.mark.parametrize(
    ("name", "error"),
    [
        (f"llama4L@0x02000200@0@{KEY}.data", Unsupported),
        (f"llama4L@0x02010201@0@{KEY}.data", Unsupported),
        (f"llama4L@0x00000000@0@{KEY}.data", Unsupported),
        (f"llama4L@0x01000100@1@{KEY}.data", Unsupported),
        (f"other@0x01000100@0@{KEY}.data", UsageError),
        (f"llama4L@0x01000100@0@{KEY[:62]}.data", UsageError),
    ],
)
def test_chunks_of_several_ranks_and_other_groups_are_refused(
    name: str, error: type[KvsnapError]
) -> None:
    assert LMCACHE_FS.recognise({name: CONTENT})
    with pytest.raises(error):
        LMCACHE_FS.read({name: CONTENT}, given())


def test_of_several_models_the_given_one_is_taken_and_of_salts_none() -> None:
    other = {f"org-SEP-m@0x01000100@0@{KEY}.data": memoryview(b"")}
    rows = LMCACHE_FS.read({**other, **FILES}, given())
    assert equal(rows, LMCACHE_FS.read(FILES, given()), 64)
    with pytest.raises(Damaged, match="0 bytes"):
        LMCACHE_FS.read({**other, **FILES}, given(model_name="org/m"))
    with pytest.raises(UsageError, match="2 models"):
        LMCACHE_FS.read({**other, **FILES}, given(model_name=None))
    salted = {f"llama4L@0x01000100@0@{KEY}@{salt}.data": CONTENT for salt in ("a", "b")}
    with pytest.raises(UsageError, match="2 models or salts"):
        LMCACHE_FS.read(salted, given())


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".data",
        f"m@0x01000100@0@{KEY}.tmp",
        f"m@0x01000100@0@{KEY}",
        f"m@01000100@0@{KEY}.data",
        f"m@0x1000100@0@{KEY}.data",
        f"m@0x01000100@{'f' * 9}@{KEY}.data",
        f"m@0x01000100@@{KEY}.data",
        f"m@0x01000100@0@{KEY[:-1]}.data",
        f"m@0x01000100@0@{'a' * 5000}.data",
        f"m@0x01000100@0@{KEY}@.data",
        f"m@0x01000100@0@{KEY}@a@b.data",
        "@" * 9000 + ".data",
    ],
)
def test_other_names_are_no_chunk_s(name: str) -> None:
    assert chunk_name(name) is None
    assert not LMCACHE_FS.recognise({name: CONTENT})


def test_names_are_taken_apart() -> None:
    found = chunk_name(f"org-SEP-m@0x02010201@a@{KEY}@salt.data")
    assert found is not None
    assert (found.model, found.rank, found.world) == ("org/m", 0x02010201, 2)
    assert (found.group, found.key, found.salt) == (10, KEY, "salt")


@settings(max_examples=60, deadline=None)
@example(
    st.sampled_from(["f16", "bf16", "f32"]),
    st.integers(1, 3), st.integers(1, 3), st.integers(1, 4), st.integers(1, 4), st.integers(1, 3),
    st.integers(0, 9),
)  # fmt: skip
def test_what_is_written_is_read(
    kind: str, layers: int, heads: int, dim: int, block: int, blocks: int, more: int
) -> None:
    chunk = block * blocks
    rows = made_rows(chunk + more, kind, layers, heads, dim)
    whole = (chunk + more) // chunk * chunk
    told = Given(
        layers=layers, heads=heads, head_dim=dim, dtype=kind, block=block, chunk=chunk,
        model_name="org/m_1", token_ids=rows.token_ids,
    )  # fmt: skip
    assert LMCACHE_FS.write is not None
    written = views(LMCACHE_FS.write(rows, told))
    assert len(written) == whole // chunk
    assert LMCACHE_FS.recognise(written)
    read = LMCACHE_FS.read(written, told)
    assert read.tokens == whole
    assert equal(read, rows, whole)


def test_without_a_name_that_fits_nothing_is_written() -> None:
    rows, write = made_rows(8), LMCACHE_FS.write
    assert write is not None
    for model in (None, "", "a@b", "a\nb", "x" * 129):
        with pytest.raises(UsageError):
            write(rows, Given(block=4, chunk=4, model_name=model))
    with pytest.raises(UsageError):
        write(rows, Given(block=4, chunk=6, model_name="m"))
    with pytest.raises(UsageError):
        write(rows, Given(block=4, chunk=16, model_name="m"))


def test_other_tools_files_are_not_taken_for_it() -> None:
    for folder in ("vllm_example_connector", "sglang_hicache_file", "vllm_fs_tier"):
        assert not LMCACHE_FS.recognise(files_of(folder))
    assert not LMCACHE_FS.recognise({})
