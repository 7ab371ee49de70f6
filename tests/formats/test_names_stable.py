"""The same names in every process, whatever its hash seed, folder or locale (cases A11, A12)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvsnap.formats.identity import Identity, root_of
from kvsnap.formats.names import chain_names, token_array
from kvsnap.formats.tenant import Tenant

TENANT = Tenant(bytes(32))
PROGRAM = """
import sys
from kvsnap.formats.identity import root_of
from kvsnap.formats.names import chain_names, token_array
from kvsnap.formats.tenant import Tenant

for tenant in (None, Tenant(bytes(32))):
    root = root_of(sys.argv[1], tenant)
    print(root.root_id, *(n.hex() for n in chain_names(root.key, token_array(range(40)), 16)))
"""


def printed_names(canonical: str, seed: str | None, cwd: Path, locale: str) -> str:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONHASHSEED"}
    environment |= {"LC_ALL": locale, "LANG": locale, "PYTHONUTF8": "0"}
    if seed is not None:
        environment["PYTHONHASHSEED"] = seed
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, canonical],
        env=environment,
        cwd=cwd,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


@pytest.mark.parametrize(
    ("seed", "locale"), [(None, "C.UTF-8"), ("1", "C"), ("random", "tr_TR.ISO8859-9")]
)
def test_names_do_not_depend_on_the_process(
    identity: Identity, tmp_path: Path, seed: str | None, locale: str
) -> None:
    here = []
    for tenant in (None, TENANT):
        root = root_of(identity, tenant)
        names = chain_names(root.key, token_array(range(40)), 16)
        here.append(" ".join([root.root_id, *(name.hex() for name in names)]))
    assert printed_names(identity.canonical(), seed, tmp_path, locale).splitlines() == here
