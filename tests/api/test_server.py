"""The server on an inherited socket, as `serve` passes it, and the server without optional features."""

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from skyrl_tx.server.app import ApiServer
from skyrl_tx.server.settings import ApiSettings
from skyrl_tx.store import futures, sessions
from skyrl_tx.store.database import Store
from tests.support.live_api import Server, live_api
from tests.support.scripted_engine import scripted_engine


@pytest.fixture(scope="module")
def plain_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server without optional features."""
    settings = ApiSettings(port=0, data_dir=tmp_path_factory.mktemp("plain"), base_model="Qwen/Qwen3-8B")
    with live_api(settings, apps=()) as server:
        yield server


def test_responses_on_an_inherited_socket_are_not_delayed(tmp_path: Path) -> None:
    """Without TCP_NODELAY each answer takes 40 ms longer, because its body waits for a delayed acknowledgement."""
    store = Store.open(tmp_path, role="api")
    api = ApiServer(ApiSettings(port=0, data_dir=tmp_path, base_model="Qwen/Qwen3-8B"), store)
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()

    async def read_nodelay_option() -> int:
        serving = asyncio.create_task(api.serve(sockets=[listener]))
        while not api.started:
            await asyncio.sleep(0.005)
        option = listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        api.should_exit = True
        await serving
        return option

    try:
        assert asyncio.run(read_nodelay_option()) != 0
    finally:
        store.close()


def test_a_server_without_optional_features_trains(tmp_path: Path) -> None:
    settings = ApiSettings(port=0, data_dir=tmp_path, base_model="Qwen/Qwen3-8B")
    with live_api(settings, apps=()) as server, scripted_engine(tmp_path):
        created = server.post("create_session", tags=[], sdk_version="0.38.0").json()
        model = server.model(created["session_id"])
        assert "live:" not in created["info_message"], "there is no page to name"
        assert server.post("telemetry", events=[]).json() == {"status": "accepted"}
        answer = server.post("optim_step", model_id=model, seq_id=1, adam_params={"learning_rate": 0.1})
        assert server.result(answer)["type"] == "optim_step"


@pytest.mark.parametrize(
    ("path", "detail"),
    [
        ("/api/v1/audit", "this server has no endpoint GET /api/v1/audit"),
        ("/api/v1/logged_runs", "this server has no endpoint GET /api/v1/logged_runs"),
        ("/v1/models", "Not Found"),
        ("/trackio/version", "Not Found"),
        ("/overview", "Not Found"),
    ],
)
def test_a_server_without_optional_features_does_not_know_their_paths(
    plain_server: Server, path: str, detail: str
) -> None:
    response = plain_server.client.get(path)
    assert (response.status_code, response.json()) == (404, {"detail": detail})


def test_chat_calls_of_a_killed_process_are_cancelled_at_the_next_start(tmp_path: Path) -> None:
    settings = ApiSettings(port=0, data_dir=tmp_path, base_model="fake")
    with live_api(settings) as server:
        chat = server.store.write(lambda tx: sessions.create(tx, owner="local", display_name=sessions.OPENAI, now=1.0))
        new = futures.NewRequest(key="chat/1", kind="sample", owner="local", session_id=chat, body=b"body")
        called = server.store.write(lambda tx: futures.submit(tx, new, 1.0)).request_id
    with live_api(settings) as server:
        server.store.write(lambda tx: None)  # the cancellation was written before
        state = server.store.read(lambda tx: futures.get_state(tx, called, "local"))
        assert state.status == "failed" and state.result is not None and b"cancelled" in state.result
