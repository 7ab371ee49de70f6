"""Blocks that an earlier kvsnap stored with loss decode to the same rows, bit for bit."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest

from kvsnap.formats.block import BlockFile, parse_block
from kvsnap.formats.codecs import get_codec
from kvsnap.formats.codecs.calibration import find, pack_calibration, parse_calibration, register
from kvsnap.formats.container import check_file_digest
from kvsnap.formats.identity import root_of
from kvsnap.formats.names import block_name
from kvsnap.formats.tenant import Tenant

FOLDER = Path(__file__).parents[1] / "golden" / "v1"
TENANT = Tenant(bytes(range(32)))
FILE = {
    "q8": "886dbe6c5bde4d0d59658a2df8a194d2d5f901b73eaefcba8122de27063e2c72",
    "q4": "a57d47d7146bf6b0ddd2a7b06774df4e047a502f79957a8b856515feca22b963",
}
FIDELITY = {"q8": "q8@1", "q4": "q4@1;step=0.2"}
ROWS = {
    "q8": "4d6705716ae71d050b77c3c1acd6b3e911ddc1d8f992d97a949d6b685da5f78e",
    "q4": "c95429658300924086d298b7c66a7cb8c98302f41fc60c66580abffc0e7a656e",
}
CALIBRATION = "f7d96e22c72a09b0713740de5fd85ea14367cbbad2b658a6abbe402ee8b3ec41"
KVTC = "16f52dedbd8f6cd6fe7cbeeac16421554cc09d40247decce6591db84222406c4"
KVTC_V = "5789c98990464230b2de0a656005e93c757ce449e146fb065358509c9758d331"
codecs = pytest.mark.parametrize("codec", FILE)


def block(codec: str) -> BlockFile:
    buffer = memoryview((FOLDER / f"block-{codec}.safetensors").read_bytes())
    assert check_file_digest(buffer) == FILE[codec]
    return parse_block(buffer)


def rows(codec: str) -> dict[str, np.ndarray]:
    found = block(codec)
    made = found.layout().empty(16)
    found.decode_into(found.layout(), made)
    return made


@codecs
def test_the_rows_are_the_recorded_ones(codec: str) -> None:
    made = rows(codec)
    data = b"".join(made[name].tobytes() for name in sorted(made))
    assert hashlib.sha256(data).hexdigest() == ROWS[codec]


@codecs
def test_the_block_says_its_fidelity_and_its_name_follows_from_it(codec: str) -> None:
    found = block(codec)
    assert found.record.fidelity == FIDELITY[codec] == get_codec(codec).fidelity
    assert (found.codec.id, found.codec) == (codec, get_codec(codec))
    found.check_content()
    root = root_of(found.record.identity, TENANT)
    assert (root.fidelity, root.root_id) == (found.record.fidelity, found.record.root_id)
    name = block_name(root.key, found.record.parent, found.record.token_ids)
    assert name == found.record.name


@codecs
def test_sinks_and_what_is_no_number_are_in_the_file_exactly(codec: str) -> None:
    tensors = block(codec).tensors
    assert np.frombuffer(tensors["full.k.kept"].data, "<u4").tolist() == [0, 1, 2, 3, 9]
    assert tensors["full.k.exact"].shape == (2, 5, 2, 8)
    assert rows(codec)["full.k"][1, 9, 5] == 0x7C00
    assert rows(codec)["full.v"][1, 9, 5] == 0x7F80


def test_a_calibrated_block_decodes_with_the_calibration_that_it_names() -> None:
    buffer = memoryview((FOLDER / "calibration.safetensors").read_bytes())
    assert register(parse_calibration(buffer)) == CALIBRATION
    packed = pack_calibration(find(CALIBRATION))
    assert b"".join(bytes(memoryview(part)) for part in packed.buffers) == buffer
    file = memoryview((FOLDER / "block-kvtc.safetensors").read_bytes())
    assert check_file_digest(file) == KVTC
    found = parse_block(file)
    assert found.record.fidelity == f"kvtc@1;calibration={CALIBRATION};step=0.01"
    found.check_content()
    made = found.layout().empty(16)
    found.decode_into(found.layout(), made)
    # Products with ones and zeros are exact; K turns by sines, whose last bit a library may choose.
    assert hashlib.sha256(made["full.v"].tobytes()).hexdigest() == KVTC_V
    assert np.abs(made["full.k"].view("<f2")[:, 4:9].astype(np.float64)).max() < 200
