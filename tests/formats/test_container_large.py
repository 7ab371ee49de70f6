"""Files beyond 2 and 4 GiB: sizes stay exact, and parsing one reads its header only (case A58)."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest

from kvsnap.formats.container import parse
from kvsnap.formats.errors import Damaged


@pytest.mark.parametrize("size", [2**31 - 1, 2**31 + 5, 2**32 - 1, 2**32 + 5])
def test_a_tensor_of_gibibytes_has_its_exact_size(tmp_path: Path, size: int) -> None:
    header = {
        "__metadata__": {},
        "big": {"data_offsets": [0, size], "dtype": "U8", "shape": [size]},
        "last": {"data_offsets": [size, size + 4], "dtype": "U32", "shape": [1]},
    }
    text = json.dumps(header).encode()
    path = tmp_path / "sparse.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + size)  # a hole: it takes no disk
        file.seek(0, 2)
        file.write(b"last")
    whole = np.memmap(path, mode="r").data
    tensors = parse(whole).tensors
    assert tensors["big"].data.nbytes == size
    assert bytes(tensors["last"].data) == b"last"
    with pytest.raises(Damaged, match=f"says {len(whole)}"):
        parse(whole[:-1])
