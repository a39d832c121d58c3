"""Uploads of custom losses: stored once per session, refused with a reason if invalid, and attached to passes."""

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from skyrl_tx.contract.custom_loss import CustomLoss, CustomLossInput, Operation
from skyrl_tx.contract.requests import ModelPass, Rejected
from skyrl_tx.server.settings import ApiSettings
from skyrl_tx.store import custom_losses, engine_state, keys
from skyrl_tx.store.tables import EngineStateRow
from tests.support.live_api import Server, live_api

REF = {"ref": "logprobs"}
NODES: list[dict[str, Any]] = [
    {"op": "placeholder", "name": "logprobs", "target": "logprobs"},
    {"op": "placeholder", "name": "advantages", "target": "advantages"},
    {"op": "call_function", "name": "mul", "target": "operator.mul", "args": [REF, {"ref": "advantages"}]},
    {"op": "call_method", "name": "sum_1", "target": "sum", "args": [{"ref": "mul"}]},
    {"op": "output", "name": "output", "target": "output", "args": [{"tuple": [{"ref": "sum_1"}, {"dict": {}}]}]},
]
LOSS = CustomLoss(
    name="gain",
    inputs=(CustomLossInput(name="logprobs", rank=1), CustomLossInput(name="advantages", rank=1)),
    constants=(),
    operations=(Operation(name="mul", values=(0, 1)), Operation(name="sum", values=(2,), options=(0, 0))),
    loss=3,
)


def publish_engine(server: Server, is_offered: bool = True) -> None:
    row = EngineStateRow(
        boot_id="boot",
        pid=1,
        status="ready",
        capabilities={"custom_losses": is_offered},
        base_models=[],
        updated_at=time.time(),
    )
    server.store.write(lambda tx: engine_state.publish(tx, row))


@pytest.fixture(scope="module")
def offering(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    settings = ApiSettings(port=0, data_dir=tmp_path_factory.mktemp("data"), base_model="Qwen/Qwen3-8B")
    with live_api(settings) as server:
        publish_engine(server)
        yield server


def create_key(server: Server, owner: str) -> str:
    made, _ = server.store.write(lambda tx: keys.create(tx, owner=owner, scope="user", name="k", note="", now=1.0))
    return made


def upload(server: Server, session: str, seq_id: int = 0, **changes: Any) -> Any:
    inputs = [{"name": name, "rank": 1} for name in ("logprobs", "advantages")]
    body = {"name": "gain", "inputs": inputs, "graph": {"format": 1, "nodes": NODES}, "type": "create_custom_loss"}
    return server.post("create_custom_loss", session_id=session, custom_loss_seq_id=seq_id, **{**body, **changes})


def submit_pass(server: Server, model: str, seq_id: int, **config: Any) -> Any:
    tensor = {"data": [0.5, 1.0], "dtype": "float32", "shape": [2]}
    inputs = {"target_tokens": {"data": [1, 2], "dtype": "int64"}, "advantages": tensor, "mask": tensor}
    datum = {"model_input": {"chunks": [{"type": "encoded_text", "tokens": [3, 4]}]}, "loss_fn_inputs": inputs}
    sent = {"data": [datum], "loss_fn": "custom", "loss_fn_config": config}
    answer = server.post("forward_backward", model_id=model, seq_id=seq_id, forward_backward_input=sent)
    assert answer.status_code == 200, answer.text
    return server.read_request(answer.json()["request_id"])


def test_the_flag_follows_the_engine_and_the_setting(tmp_path) -> None:
    for switches in ({}, {"no_custom_losses": True}):
        settings = ApiSettings(port=0, data_dir=tmp_path, base_model="Qwen/Qwen3-8B", **switches)
        with live_api(settings) as server:
            for is_offered in (False, True):
                publish_engine(server, is_offered)
                config = server.post("client/config").json()
                assert config["custom_loss_server_side"] is (is_offered and not switches)
                answer = upload(server, server.session())
                assert answer.status_code == (200 if is_offered and not switches else 404)
                if answer.status_code == 404:
                    assert "with a Python function runs the loss in the client" in answer.json()["detail"]


def test_a_loss_is_stored_once_and_its_future_has_the_id(offering: Server) -> None:
    session = offering.session()
    first = upload(offering, session)
    assert offering.result(first) == {"type": "create_custom_loss", "loss_id": f"{session}:loss:0"}
    assert upload(offering, session).json() == first.json()
    other = upload(offering, session, name="another")
    assert other.status_code == 400 and "used for another request" in other.json()["detail"]


def test_a_pass_carries_its_loss_and_only_what_the_loss_reads(offering: Server) -> None:
    session = offering.session()
    loss_id = offering.result(upload(offering, session))["loss_id"]
    model = offering.model(session)
    stored = submit_pass(offering, model, 1, loss_id=loss_id)
    assert isinstance(stored, ModelPass) and stored.custom == LOSS
    assert stored.data[0].loss_inputs.keys() == {"target_tokens", "advantages"}
    offering.store.write(lambda tx: custom_losses.expire(tx, time.time() + 2 * custom_losses.RETENTION_S))
    assert submit_pass(offering, model, 1, loss_id=loss_id).custom == LOSS, "a repeated pass returns the stored request"
    later = submit_pass(offering, model, 2, loss_id=loss_id)
    assert isinstance(later, Rejected) and later.backward and "has no such custom loss" in later.message


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({}, "loss_fn_config.loss_id None: the session of this model has no such custom loss"),
        ({"loss_id": "nonsense"}, "loss_fn_config.loss_id 'nonsense'"),
        ({"loss_id": 1.0}, "loss_fn_config.loss_id 1.0"),
        ({"loss_id": "x", "beta": 1.0}, "loss_fn_config.beta: custom takes loss_id"),
    ],
)
def test_a_pass_without_a_loss_of_its_session_fails(offering: Server, config: dict[str, Any], text: str) -> None:
    stored = submit_pass(offering, offering.model(), 1, **config)
    assert isinstance(stored, Rejected) and text in stored.message


def test_a_loss_of_another_session_or_owner_does_not_exist(tmp_path) -> None:
    settings = ApiSettings(port=0, data_dir=tmp_path, base_model="Qwen/Qwen3-8B")
    with live_api(settings) as server:
        publish_engine(server)
        ann, bob = (create_key(server, owner) for owner in ("ann", "bob"))
        server.client.headers["X-API-Key"] = ann
        session = server.session()
        loss_id = server.result(upload(server, session))["loss_id"]
        other_session = server.model(server.session())
        assert isinstance(submit_pass(server, other_session, 1, loss_id=loss_id), Rejected)
        server.client.headers["X-API-Key"] = bob
        assert isinstance(submit_pass(server, server.model(), 1, loss_id=loss_id), Rejected)
        answer = upload(server, session, 1)
        assert answer.status_code == 404 and "does not exist" in answer.json()["detail"]


def node(target: str, *args: object) -> dict[str, Any]:
    return {"op": "call_function", "name": "e", "target": target, "args": list(args)}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"inputs": "logprobs"}, "inputs"),
        ({"graph": None}, "graph"),
        ({"graph": {"nodes": "x"}}, "graph.nodes"),
        ({"graph": {"nodes": [NODES[0], 7]}}, "graph.nodes.1"),
        ({"graph": {"nodes": [{**NODES[0], "name": ["x"]}]}}, "graph.nodes.0.name"),
        ({"graph": {"nodes": [{**NODES[0], "target": "x" * 10_000}]}}, "graph.nodes.0.target"),
        ({"graph": {"nodes": [*NODES[:2], node("torch.load", "/etc/passwd"), *NODES[2:]]}}, "'torch.load' is not"),
        ({"graph": {"nodes": [*NODES[:2], node("getattr", REF, "__class__"), *NODES[2:]]}}, "function 'getattr'"),
        ({"graph": {"nodes": [*NODES[:2], node("torch.exp", *[REF] * 100), *NODES[2:]]}}, "graph.nodes.2.args"),
        ({"graph": {"nodes": NODES, "code": "import os"}}, "graph.code"),
        ({"optimize": True}, "optimize"),
        ({"custom_loss_seq_id": -1}, "custom_loss_seq_id"),
    ],
)
def test_a_hostile_upload_gets_400_with_the_field(offering: Server, changes: dict[str, Any], text: str) -> None:
    seq_id = changes.pop("custom_loss_seq_id", 0)
    answer = upload(offering, offering.session(), seq_id, **changes)
    assert answer.status_code == 400 and text in answer.json()["detail"], answer.text


def test_large_and_deep_uploads_are_refused_quickly(offering: Server) -> None:
    session, started = offering.session(), time.perf_counter()
    many = [{**NODES[2], "name": f"n{index}"} for index in range(100_000)]
    assert upload(offering, session, graph={"nodes": many}).status_code == 413

    few = [{**NODES[2], "name": f"n{index}"} for index in range(600)]
    answer = upload(offering, session, graph={"nodes": few})
    assert answer.status_code == 400 and "graph.nodes" in answer.json()["detail"]
    for depth in (500, 50_000):
        nested = "[" * depth + "]" * depth
        body = json.dumps({"session_id": session, "custom_loss_seq_id": 0, "name": "a", "inputs": [], "graph": 0})
        text = body[:-1] + f', "x": {nested}' + "}"
        sent = offering.client.post("/api/v1/create_custom_loss", content=text)
        assert sent.status_code in (400, 413), sent.text

    huge = [*NODES[:2], {**NODES[2], "args": [REF, 0]}, *NODES[3:]]
    text = json.dumps({"nodes": huge}).replace("0]", "9" * 5000 + "]")
    start = f'{{"session_id": "{session}", "custom_loss_seq_id": 0, "name": "a", "graph": {text}, "inputs": []}}'
    assert offering.client.post("/api/v1/create_custom_loss", content=start).status_code == 400
    assert time.perf_counter() - started < 20
    assert offering.result(upload(offering, session))["loss_id"]


def test_losses_of_a_session_are_bounded(offering: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(custom_losses, "MAX_PER_SESSION", 2)
    session = offering.session()
    for seq_id in range(2):
        assert upload(offering, session, seq_id).status_code == 200
    answer = upload(offering, session, 2)
    assert answer.status_code == 400 and "this session has 2 custom losses" in answer.json()["detail"]
    assert upload(offering, session, 1).status_code == 200, "a retry does not count"
    assert upload(offering, offering.session()).status_code == 200
