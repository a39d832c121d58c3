"""Sessions, flags, long polls, health and errors."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from skyrl_tx.contract import codec, results
from skyrl_tx.contract.errors import ErrorCategory
from skyrl_tx.contract.ids import RequestId
from skyrl_tx.process import signals
from skyrl_tx.server import engine_status
from skyrl_tx.server.engine_status import EngineHealth, EngineReport
from skyrl_tx.server.identity import authentication
from skyrl_tx.server.settings import ApiSettings
from skyrl_tx.store import StoreError, engine_state, futures
from skyrl_tx.store.database import Store
from skyrl_tx.store.tables import EngineStateRow, EngineStatus
from tests.support.live_api import Server, live_api


@pytest.fixture(autouse=True)
def _no_health_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable the cache of the health report, so that probes see what a test has just published."""
    monkeypatch.setattr(engine_status, "_HEALTH_MAX_AGE_S", 0.0)


def test_client_flags_are_valid_for_every_release(server: Server) -> None:
    flags = server.post("client/config", sdk_version="0.38.0").json()
    assert flags["parallel_fwdbwd_chunks"] and flags["create_model_via_load_weights"]
    assert flags["pjwt_auth_enabled"]
    assert server.post("client/config").status_code == 200
    assert server.post("client/dynamic_config", sdk_version="0.38.0").json()["sample_cancel_enabled"] is True


@pytest.mark.parametrize(("python", "uses_pyqwest"), [("3.11.7", False), ("3.12.1", True), ("3.1", True), (None, True)])
def test_clients_on_old_python_use_httpx(server: Server, python: str | None, uses_pyqwest: bool) -> None:
    """Clients on Python before 3.12 could wait forever at the end of `with ServiceClient`; see the route."""
    headers = {} if python is None else {"X-Stainless-Runtime-Version": python}
    flags = server.client.post("/api/v1/client/config", json={"sdk_version": "0.38.0"}, headers=headers).json()
    assert flags["use_pyqwest_transport"] is uses_pyqwest


def test_the_connection_of_client_flags_ends(server: Server) -> None:
    """The SDK leaves this connection to the garbage collector, which could close another connection; see the route."""
    answers = [server.post("client/config"), server.post("client/dynamic_config")]
    assert [answer.headers.get("connection") for answer in answers] == ["close", None]


def test_session_is_open_until_finished(server: Server) -> None:
    session_id = server.session()
    assert server.post("session_heartbeat", session_id=session_id).json() == {"type": "session_heartbeat"}
    for reason in ("success", "errored"):
        finish = server.post(f"sessions/{session_id}/finish", reason={"type": reason}, detail=None)
        assert finish.status_code == 200
    gone = server.post("session_heartbeat", session_id=session_id)
    assert gone.status_code == 410 and "(success)" in gone.json()["detail"]
    late = server.post("create_model", session_id=session_id, model_seq_id=0, base_model="x")
    assert late.status_code == 400 and "has finished" in late.json()["detail"]


def test_metadata_values_other_than_text_become_json(server: Server) -> None:
    """The metadata of sessions is converted like the metadata of runs."""
    sent = {"a": "b", "step": 3, "flags": {"on": True, "of": [None]}}
    session_id = server.post("create_session", tags=[], user_metadata=sent).json()["session_id"]
    shown = server.client.get(f"/api/v1/sessions/{session_id}").json()["user_metadata"]
    assert shown == {"a": "b", "step": "3", "flags": '{"on":true,"of":[null]}'}


def test_telemetry_of_any_shape_is_accepted(server: Server) -> None:
    assert server.post("telemetry", events=[{"a": 1}], session_id="sessionless-x").json() == {"status": "accepted"}


def test_health_names_the_failed_component(server: Server) -> None:
    answer = server.client.get("/api/v1/healthz")
    assert answer.status_code == 503 and "engine" in answer.json()["detail"]


def test_poll_without_an_engine_reports_the_reason(server: Server) -> None:
    answer = server.post("create_model", session_id=server.session(), model_seq_id=0, base_model="x")
    request_id = answer.json()["request_id"]
    started = time.monotonic()
    held = server.post("retrieve_future", request_id=request_id, allow_metadata_only=True)
    assert held.status_code == 408 and time.monotonic() - started >= 0.75 * server.settings.retrieve_hold_s
    assert held.json() == {
        "type": "try_again",
        "request_id": request_id,
        "queue_state": "paused_capacity",
        "queue_state_reason": "the engine has not started yet",
    }


def test_poll_survives_a_database_failure(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(authentication, "_CACHE_S", 60.0)  # only the poll reads the database
    request_id = server.post("create_model", session_id=server.session(), model_seq_id=0, base_model="x").json()
    started = time.monotonic()
    with monkeypatch.context() as patch:

        def fail(_: object) -> None:
            raise StoreError("database x: it failed")

        patch.setattr(server.store, "read", fail)
        poll = server.post("retrieve_future", request_id=request_id["request_id"])
    assert poll.status_code == 408 and poll.json()["type"] == "try_again"
    assert "the database is not available" in poll.json()["queue_state_reason"]
    assert time.monotonic() - started > 0.9, "the SDK polls again at once, so the server has to wait"


@pytest.fixture
def patient(settings: ApiSettings, tmp_path: Path) -> Iterator[Server]:
    """A server that holds polls far longer than a notification takes."""
    with live_api(settings.model_copy(update={"data_dir": tmp_path, "retrieve_hold_s": 30.0})) as server:
        yield server


def test_one_commit_wakes_all_polls(patient: Server) -> None:
    model_id = patient.model()
    num_waiting = 40
    steps = [patient.post("optim_step", model_id=model_id, adam_params={}) for _ in range(num_waiting)]
    ids = [RequestId(step.json()["request_id"]) for step in steps]
    done = codec.encode(results.OptimStepOutput(metrics={}))
    peer = Store.open(patient.settings.data_dir, role="engine")

    try:
        with ThreadPoolExecutor(num_waiting) as pool, httpx.Client(base_url=patient.url) as client:
            polls = [
                pool.submit(client.post, "/api/v1/retrieve_future", json={"request_id": request_id})
                for request_id in ids
            ]
            time.sleep(0.1)

            peer.write(
                lambda tx: [
                    futures.complete(tx, request_id, done, failed=False, effect_order=None, now=time.time())
                    for request_id in ids
                ]
            )
            finished = time.monotonic()
            answers = [poll.result() for poll in polls]

        assert time.monotonic() - finished < 15.0, "the polls are notified, they do not time out"
        assert all(answer.json() == {"type": "optim_step", "metrics": {}} for answer in answers)
        again = patient.post("retrieve_future", request_id=ids[0])
        assert again.json() == answers[0].json(), "a lost response is sent again"
    finally:
        peer.close()


def test_failed_request_returns_200(server: Server) -> None:
    step = server.post("optim_step", model_id=server.model(), adam_params={})
    failure = codec.encode(results.Failure(message="no gradient", category=ErrorCategory.USER))
    request_id = RequestId(step.json()["request_id"])
    server.store.write(
        lambda tx: futures.complete(tx, request_id, failure, failed=True, effect_order=None, now=time.time())
    )
    assert server.result(step) == {"error": "no gradient", "category": "user"}


def test_large_result_is_announced_by_its_size(server: Server) -> None:
    step = server.post("optim_step", model_id=server.model(), adam_params={})
    request_id = RequestId(step.json()["request_id"])
    size = server.settings.large_result_bytes + 1
    done = codec.encode(results.OptimStepOutput(metrics={"x" * size: 1.0}))
    server.store.write(
        lambda tx: futures.complete(tx, request_id, done, failed=False, effect_order=None, now=time.time())
    )
    announced = server.post("retrieve_future", request_id=request_id, allow_metadata_only=True).json()
    whole = server.post("retrieve_future", request_id=request_id, allow_metadata_only=False)
    assert announced.keys() == {"status", "response_payload_size"} and announced["status"] == "complete_metadata"
    assert len(whole.content) <= announced["response_payload_size"] <= 7 * len(whole.content), "an upper bound"
    assert whole.json()["metrics"] and len(whole.content) > size
    assert server.post("retrieve_future", request_id=request_id).content == whole.content, (
        "SDK releases that do not set allow_metadata_only"
    )


def publish_status(server: Server, status: EngineStatus, **activity: Any) -> None:
    row = EngineStateRow(
        boot_id="b", pid=1, status=status, capabilities={}, base_models=[], updated_at=time.time(), **activity
    )
    server.store.write(lambda tx: engine_state.publish(tx, row))


def test_long_activity_of_a_healthy_engine_is_reported(server: Server) -> None:
    """The SDK shows a reason only for a paused queue.

    For a load balancer, a long step is not an outage.
    """
    step = server.post("optim_step", model_id=server.model(), adam_params={})
    publish_status(server, "ready", activity="forward (compiling)", activity_since=time.time() - 40)
    reason = "the engine has been busy for 40 s: forward (compiling)"
    for probe in ("healthz", "livez"):
        health = server.client.get(f"/api/v1/{probe}")
        assert health.status_code == 200 and health.json() == {"status": "ok", "detail": reason}
    held = server.post("retrieve_future", request_id=step.json()["request_id"]).json()
    assert (held["queue_state"], held["queue_state_reason"]) == ("paused_capacity", reason)


def test_an_outage_is_reported_to_samples_that_wait_for_it_and_not_to_training(server: Server) -> None:
    session, model = server.session(), server.settings.base_model
    sampling = server.post("create_sampling_session", session_id=session, base_model=model, sampling_session_seq_id=0)
    sample = server.post(
        "asample",
        sampling_session_id=sampling.json()["sampling_session_id"],
        seq_id=0,
        prompt={"chunks": [{"type": "encoded_text", "tokens": [1]}]},
        sampling_params={"max_tokens": 1},
        num_samples=1,
    )

    step = server.post("optim_step", model_id=server.model(), adam_params={})
    outage = "vLLM has not responded for 12 s (ConnectError); samples wait"
    nothing: dict[str, Any] = {"totals": {}, "device_seconds": {}, "queues": {}, "places": {}}
    publish_status(server, "ready", meters={**nothing, "backend": {"outage": outage}})
    for probe in ("healthz", "livez"):
        health = server.client.get(f"/api/v1/{probe}")
        assert health.status_code == 200 and health.json() == {"status": "ok", "detail": outage}
    held = server.post("retrieve_future", request_id=sample.json()["request_id"]).json()
    assert (held["queue_state"], held["queue_state_reason"]) == ("paused_capacity", outage)
    assert "queue_state_reason" not in server.post("retrieve_future", request_id=step.json()["request_id"]).json()


def test_livez_does_not_wait_for_the_database(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()

    def report(_: EngineHealth) -> EngineReport:
        released.wait(20)
        return EngineReport()

    with monkeypatch.context() as patch:
        patch.setattr(EngineHealth, "read_report", report)
        started = time.monotonic()
        answer = server.client.get("/api/v1/livez")
        elapsed_s = time.monotonic() - started
        released.set()
    assert answer.status_code == 200 and elapsed_s < 10


def test_death_of_a_thread_turns_health_red(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    failures = signals._Failures()
    monkeypatch.setattr(signals, "_failures", failures)
    failures.report("result-watcher", ValueError("no such row"))
    publish_status(server, "ready")
    for probe in ("healthz", "livez"):
        health = server.client.get(f"/api/v1/{probe}")
        assert health.status_code == 503 and "'result-watcher' ended: ValueError: no such" in health.json()["detail"]


def test_busy_engine_keeps_the_queue_active(server: Server) -> None:
    def publish(status: EngineStatus) -> None:
        publish_status(server, status)

    step = server.post("optim_step", model_id=server.model(), adam_params={})
    publish("ready")
    held = server.post("retrieve_future", request_id=step.json()["request_id"])
    assert held.json()["queue_state"] == "active" and "queue_state_reason" not in held.json()
    assert server.client.get("/api/v1/healthz").json() == {"status": "ok"}
    publish("starting")
    assert "starting" in server.client.get("/api/v1/healthz").json()["detail"]


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/api/v1/sessions/no"), ("POST", "/api/v1/oai"), ("GET", "/no-such-page")]
)
def test_errors_have_a_detail(server: Server, method: str, path: str) -> None:
    answer = server.client.request(method, path)
    assert answer.status_code == 404 and isinstance(answer.json()["detail"], str)


def test_shutdown_does_not_wait_for_long_polls(server: Server) -> None:
    """Must be the last test in this file, because it ends the server."""
    step = server.post("optim_step", model_id=server.model(), adam_params={})
    object.__setattr__(server.settings, "retrieve_hold_s", 30.0)
    answers: list[httpx.Response] = []
    poll = threading.Thread(
        target=lambda: answers.append(server.post("retrieve_future", request_id=step.json()["request_id"]))
    )
    poll.start()
    time.sleep(0.1)
    server.api.should_exit = True
    poll.join(timeout=15)
    assert not poll.is_alive() and answers[0].status_code == 408
