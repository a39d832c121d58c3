"""`/metrics` of a live API: content, limits and access, with a running, stopped or dead engine."""

import time
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path

import pytest
from fastapi.routing import APIRoute
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from skyrl_tx.server.settings import ApiSettings
from skyrl_tx.store import keys
from skyrl_tx.store.tables import KeyScope
from tests.support.live_api import Server, live_api

ALLOWED_LABELS = {
    *("group", "code", "kind", "outcome", "queue", "reason", "part", "pass", "what", "cached", "work", "device", "le"),
    *("version", "owner"),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with live_api(ApiSettings(data_dir=tmp_path_factory.mktemp("data"), base_model="tiny", port=0)) as server:
        yield server


def samples(text: str) -> dict[str, float]:
    """Return the value of each series: its name with its labels."""
    return {
        f"{sample.name}{''.join(f'{{{key}={value}}}' for key, value in sorted(sample.labels.items()))}": sample.value
        for family in parse_text(text)
        for sample in family.samples
    }


def test_requests_are_counted_by_group_and_status(server: Server) -> None:
    before = samples(server.client.get("/metrics").text)
    for _ in range(3):
        server.post("create_session", tags=[], sdk_version="0.38.0")
    server.post("asample", prompt=1)
    server.client.get("/api/v1/of_next_year")
    server.client.get("/nowhere/" + "x" * 100)
    after = samples(server.client.get("/metrics").text)

    def grown(name: str) -> float:
        return after.get(name, 0.0) - before.get(name, 0.0)

    assert grown("skyrl_tx_http_requests_total{code=200}{group=session}") == 3
    assert grown("skyrl_tx_http_requests_total{code=400}{group=sample}") == 1
    assert grown("skyrl_tx_http_requests_total{code=404}{group=manage}") == 1
    assert grown("skyrl_tx_http_requests_total{code=404}{group=other}") == 1
    assert grown("skyrl_tx_http_requests_total{code=200}{group=metrics}") == 1
    assert grown("skyrl_tx_http_request_duration_seconds_count{group=session}") == 3
    assert grown("skyrl_tx_store_write_seconds_count") >= 3
    assert "nowhere" not in server.client.get("/metrics").text


def test_the_number_of_series_is_bounded_and_no_label_names_a_user(server: Server) -> None:
    """The series are counted after calls to every route, with right and wrong methods."""
    for path in server.api.app.openapi()["paths"]:
        for method in ("GET", "POST"):
            filled = path.replace("{", "x-").replace("}", "")
            if "retrieve_future" not in path:
                server.client.request(
                    method, filled, json={"session_id": "secret-session"} if method == "POST" else None
                )

    text = server.client.get("/metrics").text
    found = samples(text)
    assert len(found) < 600, "half of the bound for both processes"
    assert "secret-session" not in text and "x-run_id" not in text
    assert {
        label for family in parse_text(text) for sample in family.samples for label in sample.labels
    } <= ALLOWED_LABELS
    assert all(
        isinstance(route, APIRoute) or "metrics" not in getattr(route, "path", "") for route in server.api.app.routes
    )


def test_openmetrics_is_written_when_it_is_accepted(server: Server) -> None:
    answer = server.client.get("/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"})
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    assert answer.text.endswith("# EOF\n") and answer.text.count("# EOF") == 1
    assert {"skyrl_tx_http_requests", "skyrl_tx_build"} <= {family.name for family in parse_openmetrics(answer.text)}


def test_without_an_engine_the_page_says_so(server: Server) -> None:
    started = time.monotonic()
    found = samples(server.client.get("/metrics").text)
    assert found["skyrl_tx_engine_up"] == 0 and time.monotonic() - started < 1


@pytest.mark.parametrize("scope", ["admin", "user", "sample", "read", "metrics"])
def test_keys_of_two_scopes_may_read(tmp_path: Path, scope: KeyScope) -> None:
    with live_api(ApiSettings(data_dir=tmp_path, base_model="tiny", port=0)) as server:
        key, _ = server.store.write(lambda tx: keys.create(tx, owner="a", scope=scope, name="n", note="", now=1.0))
        expected = HTTPStatus.OK if scope in ("admin", "metrics") else HTTPStatus.FORBIDDEN
        assert server.client.get("/metrics", headers={"X-API-Key": key}).status_code == expected
        assert server.client.get("/metrics", headers={"Authorization": f"Bearer {key}"}).status_code == expected
        assert server.client.get("/metrics", headers={"X-API-Key": "tml-wrong"}).status_code == 401
        found = samples(server.client.get("/metrics").text)
        assert found["skyrl_tx_auth_failures_total{reason=wrong_key}"] == 1
        assert found["skyrl_tx_auth_failures_total{reason=scope}"] == (0 if expected is HTTPStatus.OK else 2)


def test_with_keys_only_direct_callers_of_this_machine_need_none(tmp_path: Path) -> None:
    """Clients behind a proxy and web pages of other sites need a key."""
    settings = ApiSettings(data_dir=tmp_path, base_model="tiny", port=0, trusted_proxies=["127.0.0.2"])
    with live_api(settings) as server:
        server.store.write(lambda tx: keys.create(tx, owner="a", scope="user", name="n", note="", now=1.0))
        get = server.client.get
        assert get("/metrics").status_code == 200
        assert get("/metrics", headers={"X-Forwarded-For": "10.0.0.1"}).status_code == 401
        assert get("/metrics", headers={"Host": "evil.example"}).status_code == 401
        assert get("/metrics", headers={"Origin": "https://evil.example"}).status_code == 401
        assert get("/metrics", headers={"Sec-Fetch-Site": "cross-site"}).status_code == 401


def test_without_keys_web_pages_are_refused(server: Server) -> None:
    assert server.client.get("/metrics", headers={"Origin": "https://evil.example"}).status_code == 403


def test_open_metrics_need_no_key_from_anywhere(tmp_path: Path) -> None:
    settings = ApiSettings(data_dir=tmp_path, base_model="tiny", port=0, metrics_open=True)
    with live_api(settings) as server:
        server.store.write(lambda tx: keys.create(tx, owner="a", scope="user", name="n", note="", now=1.0))
        assert server.client.get("/metrics", headers={"X-Forwarded-For": "10.0.0.1"}).status_code == 200
