"""`/metrics` of a live API with a running, stopped or dead engine, and samples of the server's state."""

import time
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest
from fastapi.routing import APIRoute
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text
from sqlmodel import Session

from skyrl_tx.server.monitoring import EngineReading, combine_engines, compute_rates, read_gauges
from skyrl_tx.server.settings import ApiSettings
from skyrl_tx.store import engine_state, keys
from skyrl_tx.store.tables import EngineStateRow, KeyScope
from tests.support.live_api import Server, live_api
from tests.support.polling import until

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


def word(at: float, tokens: int = 0, busy_s: float = 0.0, boot_id: str = "a", **backend: object) -> EngineReading:
    queue = {"waiting": 2, "running": 1, "backlog_bytes": 100, "backlog_limit_bytes": 1000}
    meters: dict[str, Any] = {
        "totals": {"training_tokens": tokens},
        "device_seconds": {"train": busy_s},
        "queues": {"training": queue},
        "places": {"models_resident": 3},
        "backend": backend,
    }
    return EngineReading(boot_id, at, meters)


def test_rates_are_differences_by_time() -> None:
    found = compute_rates(word(100.0, tokens=500, busy_s=10.0), word(110.0, tokens=1500, busy_s=15.0))
    assert found["training_tokens_per_s"] == 100.0
    assert found["sampled_tokens_per_s"] == 0.0
    assert found["train_share"] == 0.5


def test_padding_and_compilation_are_rates_of_the_backend() -> None:
    before = word(0.0, padding_tokens=50, compile_seconds=3.0)
    after = word(10.0, padding_tokens=70, compile_seconds=9.0)
    found = compute_rates(before, after)
    assert (found["padding_tokens_per_s"], found["compile_share"]) == (2.0, 0.6)
    assert "compile_share" not in compute_rates(word(0.0), after), "another backend may not count it"


def test_a_new_engine_has_no_rates_yet() -> None:
    assert compute_rates(word(100.0), word(110.0, boot_id="b")) == {}
    assert compute_rates(None, word(110.0)) == {} and compute_rates(word(100.0), None) == {}
    assert compute_rates(word(100.0), word(100.0)) == {}


def test_gauges_leave_out_what_the_backend_does_not_tell() -> None:
    memory = [{"used_bytes": 5, "limit_bytes": 9}, {"used_bytes": 7, "limit_bytes": 9}]
    found = read_gauges(word(1.0, decode_slots=8, decode_slots_used=2, device_memory=memory))
    assert (found["training_waiting"], found["models_resident"], found["decode_slots_used"]) == (2, 3, 2)
    assert (found["memory_used_bytes"], found["memory_limit_bytes"]) == (7, 9), "of the fullest device"
    assert "kv_cache_tokens" not in found and read_gauges(None) == {}


def test_an_engine_of_another_release_may_publish_fewer_groups() -> None:
    """A KeyError would end the thread, and with it the health of the server."""
    meters: dict[str, Any] = {"backend": {"decode_slots": 8}}
    rows = [
        EngineStateRow(
            number=1, boot_id="a", pid=1, status="ready", capabilities={}, base_models=[], meters=meters, updated_at=at
        )
        for at in (1.0, 2.0)
    ]
    before, after = map(EngineReading.from_row, rows)
    assert read_gauges(after) == {"decode_slots": 8}
    assert set(compute_rates(before, after).values()) <= {0.0}


def test_numbers_of_several_engines_are_those_of_one_server() -> None:
    found = combine_engines([read_gauges(word(1.0, decode_slots=8)), read_gauges(word(1.0, decode_slots=4))])
    assert (found["training_waiting"], found["models_resident"], found["decode_slots"]) == (4, 6, 12)
    ran = [
        compute_rates(word(0.0), word(10.0, tokens=tokens, busy_s=busy_s))
        for tokens, busy_s in ((500, 10.0), (100, 5.0))
    ]
    assert (combine_engines(ran)["training_tokens_per_s"], combine_engines(ran)["train_share"]) == (60.0, 0.75)
    memory = [{"used_bytes": 5, "limit_bytes": 9}], [{"used_bytes": 7, "limit_bytes": 9}]
    assert (
        combine_engines([read_gauges(word(1.0, device_memory=device_memory)) for device_memory in memory])[
            "memory_used_bytes"
        ]
        == 7
    )
    assert combine_engines([]) == {} and combine_engines([{"a": 1.5}]) == {"a": 1.5}


def test_a_row_is_written_each_ten_seconds_with_and_without_an_engine(tmp_path: Path) -> None:
    with live_api(ApiSettings(data_dir=tmp_path, base_model="tiny", port=0)) as server:
        server.model()
        sampler = server.api.monitor
        values = sampler.collect(time.time())
        assert (values["engine_ready"], values["requests_open"], values["sessions_active"]) == (0.0, 1, 1)
        assert values["disk_free_bytes"] > 0 and "training_waiting" not in values

        def ready(tx: Session) -> None:
            row = EngineStateRow(
                boot_id="a", pid=1, status="ready", capabilities={}, base_models=[], updated_at=time.time()
            )
            row.meters = word(0.0).meters
            engine_state.publish(tx, row)

        server.store.write(ready)
        values = sampler.collect(time.time())
        assert (values["engine_ready"], values["training_waiting"]) == (1.0, 2)
        text = server.client.get("/metrics").text
        assert "skyrl_tx_sessions_active 1.0" in text and "skyrl_tx_engine_ready 1.0" in text
        assert 'skyrl_tx_store_bytes{part="db"}' in text

        def find_rows() -> list[tuple[int, Mapping[str, float]]]:
            rows = server.store.read(lambda tx: engine_state.list_gauges(tx, 0))
            assert all(at % 10 == 0 for at, _ in rows)
            return [row for row in rows if row[1]["requests_open"] == 1]  # the first row may be older than the model

        assert until(find_rows, within_s=25)
