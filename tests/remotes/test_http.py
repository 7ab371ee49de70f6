"""A web server's files: nginx, with a password, with redirects, and over TLS."""

from __future__ import annotations

import datetime
import ipaddress
import itertools
import socket
import ssl
from pathlib import Path

import pytest

from kvsnap.formats.errors import NotFound, RemoteDenied, RemoteError, UsageError
from kvsnap.kvstore.remotes.base import Remote
from kvsnap.kvstore.remotes.http import Http
from kvsnap.testing.remote_suite import RemoteSuite
from tests.remotes.answers import Request, answering, reply
from tests.remotes.servers import HttpServer

_places = itertools.count()


def url_of(server: HttpServer, path: str, password: str) -> str:
    return server.url.replace("://", f"://{server.user}:{password}@") + path


class TestNginx(RemoteSuite):
    @pytest.fixture(autouse=True)
    def place(self, http_server: HttpServer) -> None:
        name = f"suite{next(_places)}"
        self.root = http_server.folder / name
        self.url = url_of(http_server, f"/closed/{name}", http_server.password)
        self.secrets = (http_server.password,)

    def make(self) -> Remote:
        return Http(self.url, timeout=20)

    def seed(self, key: str, data: bytes) -> None:
        path = self.root / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


@pytest.fixture
def served(http_server: HttpServer) -> HttpServer:
    (http_server.folder / "blocks").mkdir(exist_ok=True)
    (http_server.folder / "blocks/x").write_bytes(b"hello")
    return http_server


@pytest.mark.parametrize("user", ["", "reader:canary@", "reader@"])
def test_a_wrong_password_is_denied(served: HttpServer, user: str) -> None:
    remote = Http(served.url.replace("://", f"://{user}") + "/closed", timeout=5)
    for read in (
        remote.size,
        lambda key: remote.get(key, 10),
        lambda key: remote.get_start(key, 1),
    ):
        with pytest.raises(RemoteDenied) as raised:
            read("blocks/x")
        assert "user:password@" in raised.value.hint
        assert "canary" not in f"{raised.value} {remote.url}"


def test_a_password_may_hold_any_character(served: HttpServer) -> None:
    with answering(lambda _, connection: reply(connection, 200)) as server:
        Http(server.url.replace("://", "://us%3Aer:p%40%2Fw%C3%A4@"), timeout=5).size("x")
    (request,) = server.requests
    assert request.headers["authorization"] == "Basic dXM6ZXI6cEAvd8Ok"
    assert "@" not in request.target


@pytest.mark.parametrize("path", ["/moved", "/elsewhere"])
def test_redirects_are_followed(served: HttpServer, path: str) -> None:
    remote = Http(served.url + path, timeout=5)
    assert remote.get("blocks/x", 10).data == b"hello"
    assert remote.get_start("blocks/x", 2) == b"he"
    assert remote.size("blocks/x") == 5
    with pytest.raises(NotFound):
        remote.get("blocks/y", 10)


@pytest.mark.parametrize("path", ["", "/", "/blocks/../", "/a%20b", "/ä"])
def test_a_path_is_where_the_keys_begin(served: HttpServer, path: str) -> None:
    with answering(lambda _, connection: reply(connection, 404)) as server:
        remote = Http(server.url + path, timeout=5)
        assert remote.size("blocks/x") is None
    assert server.requests[0].target in ("/blocks/x", "/a%20b/blocks/x", "/%C3%A4/blocks/x")


@pytest.mark.parametrize(
    "url", ["http://", "http:///path", "https://host/x?canary", "http://h/#canary"]
)
def test_urls_that_name_no_server_or_more(url: str) -> None:
    with pytest.raises(UsageError) as raised:
        Http(url, timeout=5)
    assert "canary" not in f"{raised.value} {raised.value.hint}"


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """A key and a certificate for 127.0.0.1 that nobody has signed."""
    x509 = pytest.importorskip("cryptography.x509")
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "tests")])
    host = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    day = datetime.timedelta(days=1)
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder(name, name, key.public_key(), 1, now - day, now + day)
    signed = builder.add_extension(host, critical=False).sign(key, hashes.SHA256())
    pem = serialization.Encoding.PEM
    secret = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    path = tmp_path / "certificate.pem"
    path.write_bytes(signed.public_bytes(pem) + secret)
    return path


@pytest.fixture
def tls(certificate: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    return context


def test_a_certificate_that_nobody_signed_is_refused(tls: ssl.SSLContext) -> None:
    with answering(lambda _, connection: reply(connection, 200, b"hello"), tls) as server:
        with pytest.raises(RemoteError, match="certificate is not trusted") as raised:
            Http(server.url, timeout=5).get("x", 10)
        assert not server.requests
    assert "SSL_CERT_FILE" in raised.value.hint


def test_an_authority_of_ones_own_is_trusted_and_never_left_for_plain_http(
    tls: ssl.SSLContext, certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    with answering(lambda _, connection: reply(connection, 200, b"hello")) as plain:
        target = f"{plain.url}/x"

        def answer(request: Request, connection: socket.socket) -> None:
            if "/moved/" in request.target:
                reply(connection, 302, Location=target)
            else:
                reply(connection, 200, b"hello")

        with answering(answer, tls) as server:
            assert Http(server.url, timeout=5).get("x", 10).data == b"hello"
            with pytest.raises(RemoteError, match="plain http"):
                Http(f"{server.url}/moved", timeout=5).get("x", 10)
    assert not plain.requests
