"""kill -9 at every moment of a piece of work at which files change their names, one after the other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

_DRIVER = """
import json, os, shutil, signal, sys
from pathlib import Path

source, folder, top = (Path(word) for word in sys.argv[1:4])
names = {}
exec(sys.argv[4], names)
CHANGES = ("rename", "replace", "unlink")

def act(number, after):
    '''Die before the call with that number, or after it.'''
    count = 0
    def wrap(real):
        def call(*args, **kwargs):
            nonlocal count
            path = os.fsdecode(args[0])
            if not path.startswith(str(source)) or path.endswith(".owner"):
                return real(*args, **kwargs)
            count += 1
            if count == number + 1:
                words = [os.path.relpath(os.fsdecode(word), source) for word in args[:2]]
                print(json.dumps([number, after, real.__name__, *words]), flush=True)
                try:
                    real(*args, **kwargs) if after else None
                finally:
                    os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)
        return call
    for name in CHANGES:
        setattr(os, name, wrap(getattr(os, name)))
    names["work"]()

whole = folder / "before"
shutil.copytree(top, whole, symlinks=True)
number, after = 0, False
while True:
    child = os.fork()
    if child == 0:
        act(number, after)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    if status == 0:
        break
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, status
    shutil.move(top, folder / f"{number}{'a' if after else 'b'}")
    shutil.copytree(whole, top, symlinks=True)
    number, after = (number + 1, False) if after else (number, True)
"""


def killed_everywhere(top: Path, source: Path, code: str) -> list[tuple[list[str], Path]]:
    """Run `work()` of `code` again and again in a process that is killed before its first change below
    `source`, after it, before the second, and so on. `top` is what it works on; what each of them
    left of it is kept: (what it was about to do or had just done, the copy). At the end `top` is as
    one leaves it that was not killed."""
    folder = top.parent / "killed"
    folder.mkdir()
    command = [sys.executable, "-c", _DRIVER, str(source), str(folder), str(top), code]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=300, env=environment
    )
    assert done.returncode == 0, done.stderr
    found = []
    for line in done.stdout.splitlines():
        number, after, *words = json.loads(line)
        found.append(([*words, "after" if after else "before"], folder / f"{number}{'ba'[after]}"))
    return found
