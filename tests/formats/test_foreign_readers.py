"""Any safetensors reader opens our files: the `safetensors` library and torch do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import load as load_numpy
from safetensors.torch import load_file

from kvsnap.formats.session import SessionRecord

Bytes = Callable[..., bytes]
Rows = Callable[..., dict[str, np.ndarray]]


@pytest.fixture
def block_path(tmp_path: Path, block_bytes: Bytes) -> Path:
    path = tmp_path / "block.safetensors"
    path.write_bytes(block_bytes("raw"))
    return path


def test_torch_sees_the_rows_in_the_engines_own_types(block_path: Path, random_rows: Rows) -> None:
    tensors, rows = load_file(block_path), random_rows()
    assert set(tensors) == {"token_ids", "full.k", "full.v", "quantized.k"}
    assert tensors["token_ids"].tolist() == [5, 6, 7, 2**32 - 1]
    k, v, packed = (tensors[name] for name in ("full.k", "full.v", "quantized.k"))
    assert (k.dtype, v.dtype, packed.dtype) == (torch.float16, torch.bfloat16, torch.uint8)
    assert (k.shape, v.shape, packed.shape) == ((2, 4, 2, 4), (2, 4, 2, 2), (1, 4, 18))
    # Bits, not values: NaN is among them.
    assert np.array_equal(k.view(torch.uint16).numpy(), rows["full.k"].reshape(2, 4, 2, 4))
    assert np.array_equal(v.view(torch.uint16).numpy(), rows["full.v"].reshape(2, 4, 2, 2))
    assert np.array_equal(packed.numpy(), rows["quantized.k"])


def test_torch_sees_the_values_that_were_stored(
    tmp_path: Path, block_bytes: Bytes, random_rows: Rows
) -> None:
    value = np.array([1.0, -2.5, 65504.0, 0.0] * 4, np.float16)
    rows = random_rows()
    rows["full.k"][0, 1] = value[:8].view(np.uint16)
    rows["full.v"][1, 3] = np.array([0x3F80, 0xC000, 0x0000, 0x4048], np.uint16)
    path = tmp_path / "block.safetensors"
    path.write_bytes(block_bytes("raw", rows))
    tensors = load_file(path)
    assert tensors["full.k"][0, 1].flatten().tolist() == [1.0, -2.5, 65504.0, 0.0] * 2
    assert tensors["full.v"][1, 3].flatten().tolist() == [1.0, -2.0, 0.0, 3.125]


def test_the_librarys_metadata_is_ours(block_path: Path) -> None:
    with safe_open(block_path, "np") as file:
        metadata = file.metadata()
    assert metadata["kvsnap"] == "1"
    assert metadata["kind"] == "block"
    assert metadata["codec"] == "raw"
    assert len(metadata["file"]) == len(metadata["content"]) == len(metadata["name"]) == 64


def test_a_zstd_file_opens_too_and_its_token_ids_read(block_bytes: Bytes) -> None:
    tensors = load_numpy(block_bytes("zstd"))
    assert tensors["token_ids"].tolist() == [5, 6, 7, 2**32 - 1]
    assert {name for name in tensors if name.startswith("full.k")} == {"full.k.b0", "full.k.b1"}


@pytest.mark.parametrize("tokens", [0, 3, 8, 10])
def test_a_session_file_opens(
    session_bytes: Bytes, session_record: Callable[..., SessionRecord], tokens: int
) -> None:
    record = session_record(tokens)
    with_tail = {"full.k.b0"} if tokens % 4 else set()
    tensors = load_numpy(session_bytes(record, "zstd"))
    assert tensors["token_ids"].tolist() == list(range(100, 100 + tokens))
    assert tensors["chain"].shape == (tokens // 4, 32)
    assert tensors["chain"].tobytes() == b"".join(record.chain)
    assert with_tail <= set(tensors)
    assert len(tensors) == (7 if tokens % 4 else 2)
