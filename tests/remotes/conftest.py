"""Servers that start once a run, and are asked without a detour through a proxy."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.remotes import servers

_OURS = ("AWS_", "GOOGLE_", "AZURE_", "KVSNAP_REMOTE")


@pytest.fixture(autouse=True)
def nobodys_settings(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Neither credentials nor proxies of whoever runs the tests."""
    for name in list(os.environ):
        if name.startswith(_OURS) or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    monkeypatch.setenv("HOME", str(tmp_path_factory.mktemp("home")))


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.S3Server]:
    with servers.seaweed(tmp_path_factory.mktemp("seaweed")) as server:
        yield server


@pytest.fixture(scope="session")
def http_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.HttpServer]:
    with servers.nginx(tmp_path_factory.mktemp("nginx")) as server:
        yield server
