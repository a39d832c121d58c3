"""The server over HTTPS with the real SDK."""

import socket
import ssl
from collections.abc import Iterator

import httpx
import pytest
import tinker

from skyrl_tx.server.settings import ApiSettings
from tests.support.certificates import Certificate, create_certificate
from tests.support.live_api import Server, live_api


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return create_certificate(tmp_path_factory.mktemp("certificate"))


@pytest.fixture(scope="module")
def server(certificate: Certificate, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    settings = ApiSettings(
        port=0,
        data_dir=tmp_path_factory.mktemp("data"),
        base_model="fake",
        ssl_certfile=certificate.certfile,
        ssl_keyfile=certificate.keyfile,
        max_connections_per_address=8,
        header_timeout_s=1.0,
    )
    with live_api(settings) as server, make_client(server, certificate) as server.client:
        yield server


def make_client(server: Server, certificate: Certificate) -> httpx.Client:
    verify = ssl.create_default_context(cafile=certificate.authority)
    return httpx.Client(base_url=server.url, timeout=30, verify=verify)


def test_sdk_connects_and_verifies_the_certificate(
    server: Server, certificate: Certificate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate.authority))
    session_id = server.session()
    assert tinker.RestClient(base_url=server.url, api_key="tml-local").list_sessions().result().sessions == [session_id]


def test_unknown_certificate_is_refused_by_the_client(server: Server) -> None:
    with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
        httpx.get(f"{server.url}/api/v1/healthz")


def test_silent_handshakes_end_and_keep_no_client_out(server: Server, certificate: Certificate) -> None:
    """A connection counts before its TLS handshake, which the HTTP protocol does not see."""
    url = httpx.URL(server.url)
    silent = [socket.create_connection((url.host, url.port), timeout=10) for _ in range(20)]
    try:
        with make_client(server, certificate) as new_client:
            assert new_client.post("/api/v1/create_session", json={"tags": []}).status_code == 200
        for connection in silent:
            assert connection.recv(100) == b""
    finally:
        for connection in silent:
            connection.close()
