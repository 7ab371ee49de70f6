"""An owner is alive as long as its process is, and not a moment longer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from kvsnap.kvstore.locks import Owner, one_at_a_time

HOLD = """
import sys, time
from pathlib import Path
from kvsnap.kvstore.locks import Owner
owner = Owner(Path(sys.argv[1]))
print(owner.id, flush=True)
time.sleep(60)
"""


def holder(folder: Path) -> tuple[subprocess.Popen, str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def end(process: subprocess.Popen) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def test_a_killed_owner_is_dead_at_once_and_a_stopped_one_is_not(tmp_path: Path) -> None:
    process, owner = holder(tmp_path)
    mine = Owner(tmp_path)
    assert mine.is_alive(owner)
    process.send_signal(signal.SIGSTOP)
    assert mine.is_alive(owner)
    end(process)
    assert not mine.is_alive(owner)


def test_nobody_of_that_name_is_dead(tmp_path: Path) -> None:
    assert not Owner(tmp_path).is_alive("0" * 16)


def test_two_stores_of_one_process_are_two_owners(tmp_path: Path) -> None:
    one, other = Owner(tmp_path), Owner(tmp_path)
    assert one.id != other.id
    assert one.is_alive(other.id)
    gone = other.id
    other.release()
    assert not one.is_alive(gone)
    assert [path.name for path in tmp_path.iterdir()] == [f"{one.id}.owner"]


def test_asking_whether_somebody_lives_does_not_take_their_lock(tmp_path: Path) -> None:
    one, other = Owner(tmp_path), Owner(tmp_path)
    for _ in range(3):
        assert other.is_alive(one.id)


def test_an_owner_whose_file_was_removed_takes_another_name(tmp_path: Path) -> None:
    owner = Owner(tmp_path / "tmp")
    before = owner.id
    (tmp_path / "tmp" / f"{before}.owner").unlink()
    assert not Owner(tmp_path / "tmp").is_alive(before)
    assert owner.id != before
    assert Owner(tmp_path / "tmp").is_alive(owner.id)


def test_the_lock_of_a_parent_ends_with_the_parent_not_with_its_children(tmp_path: Path) -> None:
    read, write = os.pipe()
    parent = os.fork()
    if parent == 0:
        owner = Owner(tmp_path)
        os.write(write, owner.id.encode())
        if os.fork() == 0:
            time.sleep(20)
        os._exit(0)
    os.waitpid(parent, 0)
    name = os.read(read, 64).decode()
    os.close(read)
    os.close(write)
    give_up = time.monotonic() + 10  # the child's child has yet to begin
    while Owner(tmp_path).is_alive(name) and time.monotonic() < give_up:
        time.sleep(0.01)
    assert not Owner(tmp_path).is_alive(name)


def test_a_folder_is_built_by_one_process_at_a_time(tmp_path: Path) -> None:
    read, write = os.pipe()
    with one_at_a_time(tmp_path):
        child = os.fork()
        if child == 0:
            with one_at_a_time(tmp_path):
                os.write(write, b"child")
            os._exit(0)
        time.sleep(0.2)
        os.write(write, b"first")
    os.waitpid(child, 0)
    assert os.read(read, 64) == b"firstchild"
    os.close(read)
    os.close(write)
