"""Requests from web pages and through proxies, to servers with and without API keys."""

import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx
import pytest

from skyrl_tx.server.settings import ApiSettings
from skyrl_tx.store import keys
from tests.support.live_api import Server, live_api

SESSIONS = "/api/v1/sessions?access_scope=accessible"
ME = "/api/v1/auth/apikey/me"


def settings(data_dir: Path, **values: object) -> ApiSettings:
    unlimited = {"failed_key_limit": 0}  # every case sends a wrong key
    return ApiSettings.model_validate({"port": 0, "data_dir": data_dir, "base_model": "fake", **unlimited, **values})


@pytest.fixture(scope="module")
def open_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that requires no key."""
    with live_api(settings(tmp_path_factory.mktemp("data"))) as server:
        yield server


@pytest.fixture(scope="module")
def server_with_key(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with a key, which its client sends."""
    with live_api(settings(tmp_path_factory.mktemp("data"))) as server:
        server.client.headers["x-api-key"] = create_key(server)
        yield server


def create_key(server: Server) -> str:
    key, _ = server.store.write(
        lambda tx: keys.create(tx, owner="ann", scope="admin", name=secrets.token_hex(4), note="", now=1.0)
    )
    return key


def get(server: Server, path: str, headers: Mapping[str, str]) -> httpx.Response:
    """Send a GET request. PORT in a header stands for the server's port."""
    port = str(httpx.URL(server.url).port)
    return server.client.get(path, headers={name: value.replace("PORT", port) for name, value in headers.items()})


STRANGERS = [
    pytest.param({"Host": "evil.example:PORT", "Origin": "http://evil.example:PORT"}, id="rebinding, POST"),
    pytest.param({"Host": "evil.example:PORT"}, id="rebinding, GET"),
    pytest.param({"Host": "localhost.evil.example"}, id="rebinding, similar name"),
    pytest.param({"Host": "gpu01"}, id="name of another machine"),
    pytest.param({"Origin": "http://evil.example"}, id="cross-site"),
    pytest.param({"Origin": "null"}, id="sandboxed page"),
    pytest.param({"Origin": "http://127.0.0.1:1"}, id="page of another local server"),
    pytest.param({"Sec-Fetch-Site": "cross-site"}, id="cross-site fetch"),
    pytest.param({"Sec-Fetch-Site": "same-site"}, id="same-site fetch"),
    pytest.param({"X-Forwarded-For": "203.0.113.7", "Host": "tinker.example.com"}, id="proxy"),
    pytest.param({"Forwarded": "for=203.0.113.7"}, id="proxy, RFC 7239"),
    pytest.param({"X-Real-IP": "203.0.113.7"}, id="proxy, nginx"),
]
CLIENTS = [
    pytest.param({"Host": "localhost:PORT"}, id="localhost"),
    pytest.param({"Host": "LOCALHOST."}, id="localhost, absolute"),
    pytest.param({"Host": "tx.localhost"}, id="below localhost"),
    pytest.param({"Host": "127.0.0.1:PORT"}, id="IPv4"),
    pytest.param({"Host": "[::1]:PORT"}, id="IPv6"),
    pytest.param({"Host": "192.0.2.7:PORT"}, id="address of a network interface"),
    pytest.param({"Host": "127.0.0.1:PORT", "Origin": "http://127.0.0.1:PORT"}, id="page of this server"),
    pytest.param({"Sec-Fetch-Site": "same-origin"}, id="fetch of a page of this server"),
    pytest.param({"Sec-Fetch-Site": "none"}, id="address bar"),
]


@pytest.mark.parametrize("headers", STRANGERS)
def test_strangers_are_refused_while_no_key_is_required(open_server: Server, headers: dict[str, str]) -> None:
    refused = get(open_server, SESSIONS, headers)
    assert refused.status_code == 403 and "skyrl-tx keys create" in refused.json()["detail"]


@pytest.mark.parametrize("headers", CLIENTS)
def test_clients_are_served_while_no_key_is_required(open_server: Server, headers: dict[str, str]) -> None:
    assert get(open_server, SESSIONS, headers).status_code == 200


def test_web_page_cannot_sample_or_poll(open_server: Server) -> None:
    """A browser sends such requests without a preflight request (no-cors)."""
    for endpoint in ("asample", "retrieve_future", "create_session"):
        refused = open_server.client.post(
            f"/api/v1/{endpoint}",
            headers={"Origin": "http://evil.example", "Content-Type": "text/plain"},
            content=b'{"request_id": "req-x"}',
        )
        assert refused.status_code == 403


@pytest.mark.parametrize("headers", [*STRANGERS, *CLIENTS])
def test_a_key_suffices_and_is_required_once_one_exists(server_with_key: Server, headers: dict[str, str]) -> None:
    assert get(server_with_key, SESSIONS, headers).status_code == 200
    assert get(server_with_key, SESSIONS, {**headers, "x-api-key": "tml-wrong"}).status_code == 401


def test_first_key_ends_the_refusals_of_a_running_server(tmp_path: Path) -> None:
    with live_api(settings(tmp_path)) as server:
        named = {"Host": "tinker.example.com", "x-api-key": "tml-local"}
        assert get(server, SESSIONS, named).status_code == 403
        named["x-api-key"] = create_key(server)
        assert get(server, SESSIONS, named).status_code == 200


def test_no_auth_on_all_addresses_checks_the_host(tmp_path: Path) -> None:
    with live_api(settings(tmp_path, host="0.0.0.0", no_auth=True)) as server:
        assert get(server, SESSIONS, {"Host": "evil.example"}).status_code == 403
        assert get(server, SESSIONS, {"Host": "10.0.0.3:PORT"}).status_code == 200


def test_allowed_hosts_are_served_and_others_refused_with_keys_too(tmp_path: Path) -> None:
    with live_api(settings(tmp_path, allowed_hosts=["tinker.example.com"])) as server:
        assert get(server, SESSIONS, {"Host": "Tinker.example.com:PORT"}).status_code == 200
        key = {"x-api-key": create_key(server)}
        assert get(server, SESSIONS, {"Host": "tinker.example.com", **key}).status_code == 200
        refused = get(server, SESSIONS, {"Host": "evil.example", **key})
        assert refused.status_code == 403 and "--allowed-hosts" in refused.json()["detail"]


def test_headers_of_a_trusted_proxy_are_believed(tmp_path: Path) -> None:
    named = {"Host": "tinker.example.com", "X-Forwarded-For": "203.0.113.7", "X-Forwarded-Proto": "https"}
    allowed = {"allowed_hosts": ["tinker.example.com"]}
    with live_api(settings(tmp_path / "a", trusted_proxies=["127.0.0.0/8"], **allowed)) as server:
        assert get(server, SESSIONS, named).status_code == 200
        assert get(server, SESSIONS, {"X-Forwarded-For": "203.0.113.7", "Host": "evil.example"}).status_code == 403
    with live_api(settings(tmp_path / "b", trusted_proxies=["10.0.0.1"], **allowed)) as server:
        refused = get(server, SESSIONS, named)
        assert refused.status_code == 403 and "--trusted-proxies" in refused.json()["detail"]


def test_documentation_loads_nothing_from_other_hosts(open_server: Server) -> None:
    for page in ("/docs", "/redoc"):
        assert "https://" not in open_server.client.get(page).text
    assert open_server.client.get("/openapi.json").json()["info"]["title"] == "skyrl_tx"


def test_proxies_that_are_no_addresses_are_refused_at_start(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'proxy\.lan' is not an IP address or network"):
        settings(tmp_path, trusted_proxies=["proxy.lan"])
