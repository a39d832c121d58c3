"""Metrics that clients log: with a POST request, with the SDK, and with trackio's protocol."""

import json
import logging
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import tinker

from skyrl_tx.apps.history import hints, logged_metrics, points
from skyrl_tx.apps.history.client_metrics import ACTIVE_S
from skyrl_tx.apps.history.points import Point
from skyrl_tx.compose import APPS
from skyrl_tx.contract.ids import ModelId
from skyrl_tx.engine.extension import Retention
from skyrl_tx.launch.command import load_engine_extensions
from skyrl_tx.server.settings import ApiSettings
from skyrl_tx.store import keys, models
from skyrl_tx.store.tables import KeyScope, ModelRow
from tests.support.live_api import Server, live_api
from tests.support.live_stack import PUBLIC_NAME, LiveStack, live_stack


@dataclass
class User:
    """An owner with a key and a session, who sends requests to the server."""

    server: Server
    owner: str
    key: str

    def call(self, method: str, path: str, **body: Any) -> httpx.Response:
        headers = {"X-API-Key": self.key}
        content = json.dumps(body) if body else None
        return self.server.client.request(method, f"/api/v1/{path}", content=content, headers=headers)

    def trackio(self, name: str, **arguments: Any) -> httpx.Response:
        headers = {"x-trackio-write-token": self.key}
        content = json.dumps({"args": [], "kwargs": {**arguments, "hf_token": None}})  # NaN too, which httpx refuses
        return self.server.client.post(f"/trackio/api/{name}", content=content, headers=headers)

    def run(self, rank: int = 8, display_name: str | None = None) -> str:
        """Create a model in a new session and wait until it exists."""
        session = self.call("POST", "create_session", tags=[], display_name=display_name).json()["session_id"]
        lora = {"rank": rank}
        made = self.call(
            "POST", "create_model", session_id=session, model_seq_id=0, base_model=PUBLIC_NAME, lora_config=lora
        )
        request_id = made.json()["request_id"]
        while self.call("POST", "retrieve_future", request_id=request_id).status_code == 408:
            pass
        return made.json()["model_id"]

    def log(self, step: int, run: str = "brave-sunset-1", run_id: str = "r1", **changed: Any) -> httpx.Response:
        entry = {
            "project": "gsm8k",
            "run": run,
            "run_id": run_id,
            "step": step,
            "metrics": {"reward": step / 10},
            "config": None,
            "log_id": f"{run_id}-{step}",
        }
        return self.trackio("bulk_log", logs=[{**entry, **changed}])

    def get_logged_points(self, run_id: str) -> list[tuple[int, dict[str, float | None]]]:
        found = self.call("GET", f"training_runs/{run_id}/metrics").json()["logged"]
        return [(point["step"], point["metrics"]) for point in found]

    def list_logged_runs(self) -> list[dict[str, Any]]:
        return self.call("GET", "logged_runs").json()["logged_runs"]


@pytest.fixture(scope="module")
def stack_with_keys(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveStack]:
    with live_stack("fake", tmp_path_factory.mktemp("keyed")) as stack:
        yield stack


_numbers = iter(range(1000))


@pytest.fixture
def ann(stack_with_keys: LiveStack) -> User:
    """Return a user that only this test uses."""
    return user(stack_with_keys, f"ann-{next(_numbers)}")


def user(stack: LiveStack, owner: str, scope: KeyScope = "user") -> User:
    key, _ = stack.server.store.write(lambda tx: keys.create(tx, owner=owner, scope=scope, name="n", note="", now=1.0))
    return User(stack.server, owner, key)


def test_one_post_logs_a_step_once(ann: User) -> None:
    run = ann.run()
    path = f"training_runs/{run}/metrics"
    sent = {"step": 3, "metrics": {"reward": 0.5, "kl": None, "bad": math.nan}, "log_id": "a"}
    assert ann.call("POST", path, **sent).json() == {"is_new": True}
    assert ann.call("POST", path, **sent).json() == {"is_new": False}
    assert ann.call("POST", path, step=-1, metrics={"eval": 1}).json() == {"is_new": True}
    assert ann.get_logged_points(run) == [(3, {"reward": 0.5, "kl": None, "bad": None}), (-1, {"eval": 1.0})]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"metrics": {"a": 1}}, "step: missing"),
        ({"step": 2**60, "metrics": {"a": 1}}, "step: Input should be less than or equal to 9007199254740992"),
        ({"step": 1.5, "metrics": {}}, "step: "),
        ({"step": 1, "metrics": {"a": "high"}}, "metrics.a: Input should be a valid number"),
        ({"step": 1, "metrics": {"": 1}}, "metrics"),
        ({"step": 1, "metrics": {"x" * 201: 1}}, "metrics"),
        ({"step": 1, "metrics": dict.fromkeys(map(str, range(257)), 1)}, "metrics: .*at most 256 names"),
        ({"step": 1, "metrics": [1]}, "metrics: "),
    ],
)
def test_a_wrong_field_is_named(ann: User, body: dict[str, Any], message: str) -> None:
    refused = ann.call("POST", f"training_runs/{ann.run()}/metrics", **body)
    assert refused.status_code == 400
    assert re.search(message, refused.json()["detail"])


def test_series_are_read_in_pages_that_lose_nothing(ann: User, stack_with_keys: LiveStack) -> None:
    run = ann.run()

    def write(tx) -> None:
        for number in range(5):
            points.add(
                tx,
                Point(
                    position=10**9 + number,
                    model_id=ModelId(run),
                    # Points of steps and of passes alternate.
                    kind="train" if number % 2 else "step",
                    step=number,
                    created_at=1.0,
                    started_at=2.0,
                    at=3.0,
                    device_s=0.5,
                    tokens=7,
                    datums=2,
                    values={"loss:sum": number / 2, "nan": None},
                ),
            )

    stack_with_keys.server.store.write(write)
    for step in range(3):
        ann.call("POST", f"training_runs/{run}/metrics", step=step, metrics={"reward": step})
    found, rewards, cursor, more = [], [], "0-0", True
    while more:
        page = ann.call("GET", f"training_runs/{run}/metrics?limit=2&cursor={cursor}").json()
        assert len(page["points"]) <= 2 and len(page["logged"]) <= 2
        found += page["points"]
        rewards += page["logged"]
        cursor, more = page["cursor"], page["has_more"]

    assert [point["step"] for point in found] == [*range(5)]
    assert found[1]["metrics"] == {"loss:sum": 0.5, "nan": None} and found[1]["kind"] == "train"
    assert [point["metrics"]["reward"] for point in rewards] == [0, 1, 2]
    ann.call("POST", f"training_runs/{run}/metrics", step=9, metrics={"reward": 9})
    page = ann.call("GET", f"training_runs/{run}/metrics?cursor={cursor}").json()
    assert [point["step"] for point in page["logged"]] == [9] and page["points"] == []
    refused = ann.call("GET", f"training_runs/{run}/metrics?cursor=x")
    assert refused.status_code == 400 and "cursor 'x'" in refused.json()["detail"]


def test_telemetry_of_the_sdk_reaches_the_run(
    ann: User, stack_with_keys: LiveStack, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_TELEMETRY", "1")  # the SDK's default
    caplog.set_level(logging.INFO)

    with tinker.ServiceClient(base_url=stack_with_keys.url, api_key=ann.key, display_name="mine") as service:
        service.create_sampling_client(base_model=PUBLIC_NAME).result()
        telemetry = service.get_telemetry()
        assert telemetry is not None, "the first client of a session starts it"
        telemetry.log("metrics", {"step": 0, "before": 1})
        telemetry._trigger_flush()
        assert telemetry._wait_until_drained_sync()
        training = service.create_lora_training_client(PUBLIC_NAME, rank=8, seed=1).result()
        telemetry.log("metrics", {"step": 3, "reward": 0.25, "note": "text"})
        telemetry.log("another", {"step": 4, "reward": 1.0})
        training.get_telemetry().log("metrics", {"step": 5, "reward": 1, "model_id": training.model_id})

    assert ann.get_logged_points(training.model_id) == [(3, {"reward": 0.25}), (5, {"reward": 1.0})]
    (before,) = [run for run in ann.list_logged_runs() if run["training_run_id"] is None]
    assert before["name"] == "mine" and before["num_points"] == 1
    session = training.model_id.split(":")[0]
    logged = [line for message in caplog.messages for line in message.splitlines()]
    assert f"live: {stack_with_keys.url}/sessions/{session}" in logged, "the SDK logs the link"


def test_telemetry_of_strangers_and_narrow_keys_is_dropped(ann: User, stack_with_keys: LiveStack) -> None:
    session = ann.call("POST", "create_session", tags=[]).json()["session_id"]
    event = {"event": "GENERIC_EVENT", "event_name": "metrics", "event_id": "e", "event_data": {"step": 1, "a": 1}}
    others = [
        user(stack_with_keys, "eve"),
        user(stack_with_keys, ann.owner, "read"),
        user(stack_with_keys, ann.owner, "sample"),
    ]
    for caller in others:
        sent = caller.call("POST", "telemetry", session_id=session, events=[event])
        assert sent.json() == {"status": "accepted"}
    assert ann.list_logged_runs() == []

    for events in ("metrics", ["metrics"], [{**event, "event_data": "metrics"}], [{**event, "event_id": None}]):
        assert ann.call("POST", "telemetry", session_id=session, events=events).json() == {"status": "accepted"}
    malformed = ann.server.client.post("/api/v1/telemetry", content=b'{"metrics"', headers={"X-API-Key": ann.key})
    assert malformed.json() == {"status": "accepted"}
    assert ann.list_logged_runs() == []
    assert ann.call("POST", "telemetry", session_id=session, events=[event, event]).json() == {"status": "accepted"}
    assert [run["num_points"] for run in ann.list_logged_runs()] == [1]


def test_trackio_run_joins_the_only_active_model(ann: User) -> None:
    run = ann.run()
    config = {"lora_rank": 8, "learning_rate": 1e-4, "nested": {"a": 1}, "_Username": None}

    answer = ann.trackio(
        "bulk_log",
        logs=[
            {
                "project": "gsm8k",
                "run": "n",
                "run_id": "r1",
                "step": 1,
                "metrics": {"reward": 0.5, "nan": "NaN", "table": {"_type": "trackio.table"}, "ok": True, "t": "text"},
                "config": config,
                "log_id": "l1",
            }
        ],
    )

    assert answer.json() == {"data": {"stored": 1, "ignored": 0}, "error": None}
    assert ann.log(2, run="n").json()["data"]["stored"] == 1
    assert ann.get_logged_points(run) == [(1, {"reward": 0.5, "nan": None, "ok": 1.0}), (2, {"reward": 0.2})]
    (found,) = ann.list_logged_runs()
    assert found["config"] == {"lora_rank": 8, "learning_rate": 1e-4} and found["project"] == "gsm8k"


def test_trackio_run_joins_no_model_if_there_is_a_choice(ann: User) -> None:
    first, second = ann.run(), ann.run()
    ann.log(1)
    assert ann.get_logged_points(first) == ann.get_logged_points(second) == []
    ann.server.store.write(lambda tx: models.set_status(tx, ModelId(second), "unloaded"))
    ann.log(2)
    assert ann.get_logged_points(first) == [], "it stays apart: the first model may be the wrong one"

    (found,) = ann.list_logged_runs()
    joined = ann.call("PUT", f"logged_runs/{found['logged_run_id']}/training_run", training_run_id=first)
    assert joined.json() == {"training_run_id": first}
    assert [step for step, _ in ann.get_logged_points(first)] == [1, 2]
    ann.call("PUT", f"logged_runs/{found['logged_run_id']}/training_run", training_run_id=None)
    assert ann.get_logged_points(first) == []
    alone = ann.call("GET", f"logged_runs/{found['logged_run_id']}/metrics?limit=1").json()
    assert [point["step"] for point in alone["logged"]] == [1] and alone["has_more"]


def test_rank_and_name_in_the_config_decide(ann: User) -> None:
    small, large = ann.run(rank=4), ann.run(rank=8)
    ann.log(1, run_id="r4", config={"lora_rank": 4})
    ann.log(1, run_id="named", config={"lora_rank": 4, "training_run_id": large})
    assert (len(ann.get_logged_points(small)), len(ann.get_logged_points(large))) == (1, 1)


def test_recipes_at_the_same_time_are_kept_apart_by_their_names(ann: User) -> None:
    runs = {name: ann.run(display_name=name) for name in ("lr-1", "lr-2")}
    for name in runs:
        ann.log(1, run=name, run_id=f"id-{name}", metrics={"reward": len(name)})
    assert [ann.get_logged_points(run) for run in runs.values()] == [[(1, {"reward": 4.0})]] * 2


def test_trackio_run_waits_for_its_model(ann: User) -> None:
    ann.log(0)
    run = ann.run()
    ann.log(1)
    assert [step for step, _ in ann.get_logged_points(run)] == [0, 1]


def test_idle_models_and_those_of_others_are_not_joined(ann: User, stack_with_keys: LiveStack) -> None:
    run = ann.run()
    bob = user(stack_with_keys, f"{ann.owner}-bob")
    bob.log(1)
    bob.log(2, config={"training_run_id": run})

    def age(tx) -> None:
        row = tx.get(ModelRow, run)
        row.last_request_at -= ACTIVE_S + 1

    stack_with_keys.server.store.write(age)
    ann.log(1)
    assert [run["training_run_id"] for run in bob.list_logged_runs() + ann.list_logged_runs()] == [None, None]
    logged_run_id = bob.list_logged_runs()[0]["logged_run_id"]
    refused = bob.call("PUT", f"logged_runs/{logged_run_id}/training_run", training_run_id=run)
    assert refused.status_code == 404
    root = user(stack_with_keys, "root", "admin")
    refused = root.call("PUT", f"logged_runs/{logged_run_id}/training_run", training_run_id=run)
    assert refused.status_code == 400 and "same owner" in refused.json()["detail"]


def test_trackio_lists_and_summarizes_runs(ann: User) -> None:
    assert ann.trackio("get_runs_for_project", project="gsm8k").json() == {"data": [], "error": None}
    ann.log(3)
    ann.log(7)
    ann.log(1, run_id="r2")
    rows = ann.trackio("get_runs_for_project", project="gsm8k").json()["data"]
    assert {(row["id"], row["name"]) for row in rows} == {("r1", "brave-sunset-1"), ("r2", "brave-sunset-1")}
    assert all(row["created_at"] for row in rows)
    summary = ann.trackio("get_run_summary", project="gsm8k", run_id="r1").json()["data"]
    assert (summary["last_step"], summary["num_logs"]) == (7, 2)
    assert ann.trackio("get_run_summary", project="gsm8k", run="no").json()["data"]["last_step"] is None
    assert ann.trackio("get_runs_for_project", project="other").json()["data"] == []
    for wrong in ({"run_id": math.nan}, {"run_id": "\ud800"}, {"run": [[7]]}):
        refused = ann.trackio("get_run_summary", **{"project": "gsm8k", **wrong})
        assert refused.status_code == 400 and next(iter(wrong)) in refused.json()["detail"]


def test_trackio_shows_what_is_not_stored(ann: User) -> None:
    for name in ("bulk_log_system", "bulk_alert"):
        assert ann.trackio(name, logs=[{"a": 1}]).json() == {"data": None, "error": None}
    refused = ann.trackio("bulk_upload_media", uploads=[])
    assert refused.status_code == 200 and "no media" in refused.json()["error"]
    upload = ann.server.client.post(
        "/trackio/api/upload", files={"files": ("a.png", b"x")}, headers={"x-trackio-write-token": ann.key}
    )
    assert upload.status_code == 415


@pytest.mark.parametrize(
    "changed",
    [
        {"metrics": {"image": {"_type": "trackio.image"}}},
        {"metrics": [1]},
        {"metrics": {}},
        {"project": "x" * 201},
        {"run": None},
        {"run_id": 7},
        {"step": "x"},
        {"step": 2**70},
        {"log_id": "a\0b"},
        {"log_id": "\ud800"},
    ],
)
def test_an_entry_that_cannot_be_stored_does_not_hold_up_others(ann: User, changed: dict[str, Any]) -> None:
    good = {"project": "p", "run": "r", "run_id": "i", "step": 1, "metrics": {"a": 10**400}, "log_id": "l"}
    answer = ann.trackio("bulk_log", logs=[{**good, **changed}, good, "text"])
    assert answer.json()["data"] == {"stored": 1, "ignored": 2}


def test_a_point_has_at_most_256_metrics(ann: User) -> None:
    ann.log(1, metrics=dict.fromkeys(map(str, range(300)), 1.0))
    (found,) = ann.list_logged_runs()
    page = ann.call("GET", f"logged_runs/{found['logged_run_id']}/metrics").json()
    assert len(page["logged"][0]["metrics"]) == 256


def test_trackio_needs_a_key_and_no_foreign_page(ann: User, stack_with_keys: LiveStack, stack: LiveStack) -> None:
    client = stack_with_keys.server.client
    assert client.get("/trackio/version").json()["api_version"] == 1
    logs = {"kwargs": {"logs": []}}
    assert client.post("/trackio/api/bulk_log", json=logs).status_code == 401

    for headers in ({"Authorization": f"Bearer {ann.key}"}, {"X-API-Key": ann.key}):
        assert client.post("/trackio/api/bulk_log", json=logs, headers=headers).status_code == 200
    for scope in ("read", "sample", "metrics"):
        answer = user(stack_with_keys, "eve", scope).trackio("bulk_log", logs=[])
        assert answer.status_code == 403 and scope in answer.json()["detail"]
    keyless = stack.server.client
    assert keyless.post("/trackio/api/bulk_log", json=logs, headers={"x-trackio-write-token": "tml-x"}).is_success
    for headers in ({"Origin": "https://evil.example"}, {"Host": "evil.example"}):
        assert keyless.post("/trackio/api/bulk_log", json=logs, headers=headers).status_code == 403


def test_trackio_body_is_bounded(ann: User) -> None:
    headers = {"x-trackio-write-token": ann.key}
    refused = ann.server.client.post("/trackio/api/bulk_log", content=b" " * (2**24 + 1), headers=headers)
    assert refused.status_code == 413 and "16777216" in refused.json()["detail"]
    many = b'{"kwargs":{"logs":[' + b"{}," * 600_000 + b"{}]}}"
    refused = ann.server.client.post("/trackio/api/bulk_log", content=many, headers=headers)
    assert refused.status_code == 413


def test_a_run_deleted_for_good_takes_its_metrics_along(ann: User, stack_with_keys: LiveStack) -> None:
    run = ModelId(ann.run())
    ann.call("POST", f"training_runs/{run}/metrics", step=1, metrics={"reward": 1})

    def work(tx) -> int:
        models.set_status(tx, run, "unloaded")
        models.delete(tx, run, Retention.collect(load_engine_extensions(APPS)).delete_runs)
        logged_metrics.prune(tx, 1.0, limit=10)
        return len(logged_metrics.list_runs(tx, ann.owner))

    assert stack_with_keys.server.store.write(work) == 0


def test_the_link_has_the_public_address_and_needs_the_console(tmp_path: Path, settings: ApiSettings) -> None:
    changes = {"data_dir": tmp_path, "public_url": "https://tinker.example/"}
    with live_api(settings.model_copy(update=changes)) as server:
        made = server.post("create_session", tags=[]).json()
        link, losses = made["info_message"].split("\n")
        assert link == f"live: https://tinker.example/sessions/{made['session_id']}"
        assert losses.startswith("loss stable_reinforce:") and "own definition" in losses
    with live_api(settings.model_copy(update={**changes, "no_console": True})) as server:
        assert "live:" not in server.post("create_session", tags=[]).json()["info_message"]


def test_a_session_is_created_if_the_last_run_cannot_be_described(
    tmp_path: Path, settings: ApiSettings, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> str:
        raise ValueError("unreadable point")

    monkeypatch.setattr(hints, "describe_last_run", fail)
    with live_api(settings.model_copy(update={"data_dir": tmp_path})) as server:
        made = server.post("create_session", tags=[]).json()
    assert "stable_reinforce" in made["info_message"]
    assert f"history cannot describe session {made['session_id']}" in caplog.text
