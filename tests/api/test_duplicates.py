"""Every kind of request with a used idempotency key: an equal request is a duplicate, a different one is refused.

All requests are sent to one API process and engine, and again after both were restarted on the same
data directory.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlmodel import Session, col, func, select

from skyrl_tx.engine.settings import EngineSettings
from skyrl_tx.server.settings import ApiSettings
from skyrl_tx.store import models
from skyrl_tx.store.tables import RequestRow, SamplingSessionRow
from tests.support.live_api import Server, live_api
from tests.support.live_engine import live_engine
from tests.support.live_stack import PUBLIC_NAME, small_backend
from tests.support.polling import until

PROMPT = {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]}
DATUM = {"model_input": PROMPT, "loss_fn_inputs": {"target_tokens": {"data": [2, 3, 4], "dtype": "int64"}}}
PASS = {"data": [DATUM], "loss_fn": "cross_entropy"}
OTHER_PASS = {"data": [DATUM, DATUM], "loss_fn": "cross_entropy"}
ASKED = {"prompt": PROMPT, "sampling_params": {"max_tokens": 4}, "num_samples": 2}  # the server draws the seed
OTHER_PROMPT = {"prompt": {"chunks": [{"type": "encoded_text", "tokens": [4]}]}}
KEYED = {"x-idempotency-key": "stainless-python-retry-1"}
NUM_SHARED_EFFECTS = 7
"""Effects on the shared model: its creation, two passes, a step, an unnamed save and two loads."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A request with an idempotency key, and changes that make it a different request."""

    endpoint: str
    body: dict[str, Any]
    changes: dict[str, Any]
    headers: dict[str, str] = field(default_factory=dict)

    def post(self, server: Server, **changes: Any) -> Any:
        body = {name: value for name, value in {**self.body, **changes}.items() if value is not None}
        return server.client.post(f"/api/v1/{self.endpoint}", json=body, headers=self.headers)


def kinds(session_id: str, model_id: str, saved: str, sampler: str) -> dict[str, Kind]:
    """Return the requests in the order of sending.

    Requests 1 and 2 of the model created the two paths.
    """
    model, session = {"model_id": model_id}, {"session_id": session_id}
    load = {**model, "path": saved}

    return {
        "forward": Kind("forward", {**model, "seq_id": 3, "forward_input": PASS}, {"forward_input": OTHER_PASS}),
        "forward_backward": Kind(
            "forward_backward",
            {**model, "seq_id": 4, "forward_backward_input": PASS},
            {"forward_backward_input": OTHER_PASS},
        ),
        "optim_step": Kind(
            "optim_step",
            {**model, "seq_id": 5, "adam_params": {"learning_rate": 0.01}},
            {"adam_params": {"learning_rate": 0.02}},
        ),
        # Saves and loads.
        "save_weights": Kind("save_weights", {**model, "seq_id": 6, "path": "a"}, {"path": "b"}),
        "save_weights_for_sampler": Kind(
            "save_weights_for_sampler", {**model, "seq_id": 7, "path": "a"}, {"path": "b"}
        ),
        "an unnamed save": Kind(
            "save_weights_for_sampler",
            {**model, "seq_id": 8, "sampling_session_seq_id": 1},
            {"kind": "inflight"},
        ),
        "load_weights": Kind("load_weights", {**load, "seq_id": 9, "optimizer": False}, {"optimizer": True}),
        "load_weights with the optimizer": Kind(
            "load_weights", {**load, "seq_id": 10, "optimizer": True}, {"path": saved.replace("start", "elsewhere")}
        ),
        # This pass is identified by its header.
        "a pass without a number": Kind(
            "forward_backward", {**model, "forward_backward_input": PASS}, {"forward_backward_input": OTHER_PASS}, KEYED
        ),
        # Creation of models.
        "create_model": Kind(
            "create_model",
            {**session, "model_seq_id": 1, "base_model": PUBLIC_NAME, "lora_config": {"rank": 8}},
            {"lora_config": {"rank": 4}},
        ),
        "create_model_from_state": Kind(
            "load_weights", {**session, "model_seq_id": 2, "path": saved, "optimizer": True}, {"optimizer": False}
        ),
        "create_model_from_state that is not there": Kind(
            "load_weights", {**session, "model_seq_id": 3, "path": f"{saved}-not"}, {"path": saved}
        ),
        # Sampling sessions.
        "create_sampling_session": Kind(
            "create_sampling_session",
            {**session, "sampling_session_seq_id": 2, "base_model": PUBLIC_NAME},
            {"model_path": sampler},
        ),
        "create_sampling_session of a path": Kind(
            "create_sampling_session",
            {**session, "sampling_session_seq_id": 3, "model_path": sampler},
            {"model_path": None, "base_model": PUBLIC_NAME},
        ),
        # Samples.
        "asample": Kind(
            "asample", {**ASKED, "sampling_session_id": f"{session_id}:sample:0", "seq_id": 0}, OTHER_PROMPT
        ),
        "asample from an unnamed save, dropped by now": Kind(
            "asample", {**ASKED, "sampling_session_id": f"{session_id}:sample:1", "seq_id": 0}, OTHER_PROMPT
        ),
        "stateless asample": Kind("asample", {**ASKED, "base_model": PUBLIC_NAME}, OTHER_PROMPT, KEYED),
    }


@dataclass(slots=True)
class Responses:
    """The responses of one server by kind: acknowledgements, the refusal of a changed request, and the result."""

    acknowledged: dict[str, list[Any]] = field(default_factory=dict)
    refusals: dict[str, Any] = field(default_factory=dict)
    results: dict[str, Any] = field(default_factory=dict)
    num_requests: int = 0
    effects: dict[str, int] = field(default_factory=dict)

    def send_all(self, server: Server, sent: dict[str, Kind]) -> None:
        for name, kind in sent.items():
            first = kind.post(server)
            assert first.status_code == HTTPStatus.OK, (name, first.text)
            second, self.refusals[name] = kind.post(server), kind.post(server, **kind.changes)
            self.results[name] = server.result(first) if "request_id" in first.json() else None
            self.acknowledged[name] = [first.json(), second.json(), kind.post(server).json()]
        self.num_requests = server.store.read(lambda tx: tx.exec(select(func.count()).select_from(RequestRow)).one())
        self.effects = {
            row.model_id.rpartition(":")[2]: row.effect_order for row in server.store.read(models.list_live)
        }


@dataclass(frozen=True, slots=True)
class RestartResponses:
    """The responses before and after the restart."""

    before: Responses
    after: Responses


@contextmanager
def run_server(directory: Path, **engine_options: Any) -> Iterator[Server]:
    base_model, backend = small_backend("fake", directory)
    common: Any = {"data_dir": directory, "base_model": base_model, "served_model_name": PUBLIC_NAME}
    with (
        live_api(ApiSettings(port=0, **common)) as server,
        live_engine(EngineSettings(**common, **engine_options), backend),
    ):
        yield server


def prepare(server: Server) -> dict[str, Kind]:
    """Create the model, the checkpoint and the sampling session that all requests use."""
    session_id = server.session()
    model_id = server.model(session_id)
    saved = server.result(server.post("save_weights", model_id=model_id, path="start", seq_id=1))
    sampler = server.result(server.post("save_weights_for_sampler", model_id=model_id, path="start", seq_id=2))
    answer = server.post(
        "create_sampling_session", session_id=session_id, sampling_session_seq_id=0, base_model=PUBLIC_NAME
    )
    assert answer.status_code == HTTPStatus.OK, answer.text
    return kinds(session_id, model_id, str(saved["path"]), str(sampler["path"]))


def drop_unnamed(tx: Session) -> None:
    for row in tx.exec(select(SamplingSessionRow).where(col(SamplingSessionRow.model_id).is_not(None))):
        row.sampler_id = None


@pytest.fixture(scope="module")
def lives(tmp_path_factory: pytest.TempPathFactory) -> RestartResponses:
    directory = tmp_path_factory.mktemp("lives")
    lives = RestartResponses(Responses(), Responses())
    with run_server(directory) as server:
        sent = prepare(server)
        lives.before.send_all(server, sent)
        refused = sent["create_sampling_session"].post(server, sampling_session_seq_id=1)
        assert refused.status_code == HTTPStatus.BAD_REQUEST, "an unnamed save created this session"
        server.store.write(drop_unnamed)
    with run_server(directory) as server:
        lives.after.send_all(server, sent)
    return lives


@pytest.mark.parametrize("name", list(kinds("", "", "", "")))
def test_idempotency_key_identifies_one_request(lives: RestartResponses, name: str) -> None:
    acknowledged = lives.before.acknowledged[name] + lives.after.acknowledged[name]
    assert all(response == acknowledged[0] for response in acknowledged), acknowledged
    assert lives.before.results[name] == lives.after.results[name]
    for refusal in (lives.before.refusals[name], lives.after.refusals[name]):
        assert refusal.status_code == HTTPStatus.BAD_REQUEST, refusal.text
        assert "used for another request" in refusal.text or "in use for other weights" in refusal.text


def test_duplicates_are_stored_and_executed_once(lives: RestartResponses) -> None:
    with_future = [name for name, result in lives.before.results.items() if result is not None]
    assert lives.before.num_requests == lives.after.num_requests == len(with_future) + 3, (
        "and three requests that prepare the test"
    )
    assert lives.before.effects == lives.after.effects == {"0": NUM_SHARED_EFFECTS, "1": 1, "2": 1}


def test_only_the_expected_request_fails(lives: RestartResponses) -> None:
    failed = {name for name, result in lives.before.results.items() if result is not None and "error" in result}
    assert failed == {"create_model_from_state that is not there"}


def test_sequence_number_of_a_pruned_request_returns_410(tmp_path: Path) -> None:
    soon = {"result_retention_s": 0.0, "request_retention_s": 0.0, "housekeeping_interval_s": 0.02}
    with run_server(tmp_path, snapshot_interval_s=0.02, **soon) as server:
        body: dict[str, Any] = {"model_id": server.model(), "adam_params": {"learning_rate": 0.01}}
        first = server.post("optim_step", **body, seq_id=1)
        assert "error" not in server.result(first)

        def post_until_refused() -> httpx.Response | None:
            again = server.post("optim_step", **body, seq_id=1)
            if again.status_code != HTTPStatus.OK:
                return again
            assert again.json() == first.json()

        again = until(post_until_refused)
        assert again is not None
        other = server.post("optim_step", **{**body, "adam_params": {}}, seq_id=1)
        for refused in (again, other):
            assert refused.status_code == HTTPStatus.GONE and "its sequence number was used" in refused.text
        gone = server.post("retrieve_future", request_id=first.json()["request_id"])
        assert gone.status_code == HTTPStatus.GONE and "fetched long ago and is gone" in gone.text
        assert "error" not in server.result(server.post("optim_step", **body, seq_id=2))
        (model,) = server.store.read(models.list_live)
        assert model.effect_order == 3, "its creation and two steps"
