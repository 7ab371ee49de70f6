"""Real servers on loopback for the tests of remotes: SeaweedFS as an S3 store, nginx as a plain HTTP
server. Each runs in a folder of its own and dies with the test run, also where that is killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

REQUIRED = "KVSNAP_SERVERS"
"""Set to `required` where a missing server is a failure and not a reason to skip."""
GRPC = 10_000
"""SeaweedFS listens on each of its ports plus this, too."""
START = 60.0
"""Seconds that a server may take to come up, beside other work on two cores."""


@dataclass(frozen=True)
class S3Server:
    """`url` is its address; the bucket is there. The keys may do anything."""

    url: str
    bucket: str
    access_key: str
    secret_key: str

    def environment(self) -> dict[str, str]:
        return {
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_ENDPOINT_URL": self.url,
            "AWS_REGION": "us-east-1",
        }


@dataclass(frozen=True)
class HttpServer:
    """Serves the files of `folder` under `url`; `/closed/` wants `user` and `password`."""

    url: str
    folder: Path
    user: str
    password: str


def program(name: str) -> str:
    """The path of a server's program; without it the test is skipped, or fails where servers are
    required."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name, path=_search_path())
    if found is None:
        if os.environ.get(REQUIRED) == "required":
            pytest.fail(f"{REQUIRED}=required, and there is no {name}")
        pytest.skip(f"there is no {name} on this machine")
    return found


def free_ports(count: int) -> list[int]:
    """Ports of loopback that are free, they and those `GRPC` above. All lie below the range that
    outgoing connections take theirs from."""
    found: list[int] = []
    for _ in range(1000):
        port = random.randrange(12_000, 22_000)
        if port not in found and _is_free(port) and _is_free(port + GRPC):
            found.append(port)
        if len(found) == count:
            return found
    raise RuntimeError("no free ports on 127.0.0.1")


@contextlib.contextmanager
def running(command: list[str], log: Path, ready: Callable[[], bool]) -> Iterator[subprocess.Popen]:
    """A server as a child process, from the moment `ready` says that it answers."""
    guard = shutil.which("setpriv")  # a killed test run takes its servers along
    full = [guard, "--pdeathsig", "KILL", "--", *command] if guard else command
    with log.open("wb") as output:
        process = subprocess.Popen(
            full, stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=log.parent
        )
    try:
        end = time.monotonic() + START
        while not ready():
            if process.poll() is not None or time.monotonic() > end:
                said = log.read_text(errors="replace")[-2000:]
                raise RuntimeError(f"{command[0]} did not come up: {said}")
            time.sleep(0.05)
        yield process
    finally:
        process.kill()  # nothing of theirs is kept, and SeaweedFS takes seconds to say goodbye
        process.wait()


@contextlib.contextmanager
def seaweed(folder: Path) -> Iterator[S3Server]:
    """`weed server` with an S3 gateway and one bucket."""
    weed, access, secret = program("weed"), "kvsnaptests", "canary-secret-of-the-tests"
    config, data = folder / "s3.json", folder / "data"
    data.mkdir()
    identity = {
        "name": "tests",
        "credentials": [{"accessKey": access, "secretKey": secret}],
        "actions": ["Admin", "Read", "Write", "List"],
    }
    config.write_text(json.dumps({"identities": [identity]}))
    s3, master, volume, filer = free_ports(4)
    ports = {"s3": s3, "master": master, "volume": volume, "filer": filer}
    command = [weed, "server", f"-dir={data}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-s3"]
    command += [f"-{name}.port={port}" for name, port in ports.items()]
    command += [f"-s3.config={config}", "-volume.max=20", "-master.volumeSizeLimitMB=64"]
    # What else it opens, on fixed ports where two would meet, or sends to its makers.
    command += ["-s3.port.iceberg=0", "-s3.port.lance=0", "-master.telemetry=false"]
    command += [f"-{name}.localSocket={folder / name}.sock" for name in ("filer", "s3")]
    bucket = f"http://127.0.0.1:{filer}/buckets/kvtests/"

    def ready() -> bool:
        """Buckets are folders of the filer; that it made one and S3 answers is all that tells."""
        return _answers(bucket, "POST") and _answers(f"http://127.0.0.1:{s3}/", "GET")

    try:
        with running(command, folder / "log", ready):
            yield S3Server(f"http://127.0.0.1:{s3}", "kvtests", access, secret)
    finally:
        shutil.rmtree(data, ignore_errors=True)  # it may lie in memory
        for name, port in ports.items():
            Path(f"/tmp/seaweedfs-{name}-grpc-{port + GRPC}.sock").unlink(missing_ok=True)


@contextlib.contextmanager
def nginx(folder: Path) -> Iterator[HttpServer]:
    """nginx in the foreground, unprivileged, over `folder`/files."""
    server, (port,) = program("nginx"), free_ports(1)
    user, password = "reader", "canary-password-of-the-tests"
    (folder / "files").mkdir()
    (folder / "users").write_text(f"{user}:{{PLAIN}}{password}\n")
    config = folder / "nginx.conf"
    config.write_text(_NGINX.format(folder=folder, port=port))
    command = [server, "-p", str(folder), "-c", str(config), "-e", str(folder / "error.log")]
    url = f"http://127.0.0.1:{port}"
    with running(command, folder / "log", lambda: _answers(f"{url}/", "GET")):
        yield HttpServer(url, folder / "files", user, password)


_NGINX = """
daemon off;
master_process off;
pid {folder}/pid;
events {{ worker_connections 256; }}
http {{
  access_log off;
  client_body_temp_path {folder}/body;
  proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi;
  scgi_temp_path {folder}/scgi;
  default_type application/octet-stream;
  server {{
    listen 127.0.0.1:{port};
    root {folder}/files;
    location /closed/ {{
      auth_basic "closed";
      auth_basic_user_file {folder}/users;
      alias {folder}/files/;
    }}
    location /moved/ {{ rewrite ^/moved/(.*)$ /$1 redirect; }}
    location /elsewhere/ {{ rewrite ^/elsewhere/(.*)$ http://localhost:{port}/$1 redirect; }}
  }}
}}
"""


def _search_path() -> str:
    """Debian keeps servers where a plain user's PATH does not look."""
    return os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/usr/local/sbin"))


def _is_free(port: int) -> bool:
    with socket.socket() as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _answers(url: str, method: str) -> bool:
    """Whether a server answers with anything but its own failure."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method=method), timeout=2):
            return True
    except urllib.error.HTTPError as error:
        error.close()
        return error.code < 500
    except OSError:
        return False
