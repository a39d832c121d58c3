"""The SDK respects Retry-After headers and session ends of this server."""

import asyncio
import time
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
from tinker import types
from tinker.lib import api_future_impl, internal_client_holder

from skyrl_tx.contract.ids import SessionId
from skyrl_tx.store import sessions
from tests.support.live_stack import PUBLIC_NAME, LiveStack, live_stack
from tests.support.polling import until

BEAT_S = 10  # the interval of the SDK's heartbeats
HASTE = 100


class Clock:
    """Replaces `asyncio` in a module of the SDK. Records waits and shortens them to a hundredth."""

    def __init__(self) -> None:
        self.waits: list[float] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    async def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)
        await asyncio.sleep(seconds / HASTE)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveStack]:
    directory: Path = tmp_path_factory.mktemp("stack")
    with live_stack("fake", directory) as stack:
        yield stack


def new_client(stack: LiveStack) -> tinker.TrainingClient:
    return tinker.ServiceClient(base_url=stack.url).create_lora_training_client(PUBLIC_NAME, rank=4).result()


def test_heartbeats_continue_after_a_failure_and_stop_at_the_session_end(
    stack: LiveStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(internal_client_holder, "asyncio", Clock())
    with stack.recorder.recording(include_periodic=True) as calls:

        def beats() -> list[int]:
            return [call.status for call in calls if call.path == "session_heartbeat"]

        stack.recorder.replace_responses("session_heartbeat", [HTTPStatus.INTERNAL_SERVER_ERROR])
        session_id = SessionId(new_client(stack).model_id.partition(":")[0])
        until(lambda: len(beats()) >= 3)
        assert beats()[0] == HTTPStatus.INTERNAL_SERVER_ERROR and set(beats()[1:]) == {HTTPStatus.OK}

        heard_at = get_last_heartbeat(stack, session_id)
        until(lambda: get_last_heartbeat(stack, session_id) > heard_at)
        stack.server.post(f"sessions/{session_id}/finish", reason={"type": "success"})
        until(lambda: beats()[-1] == HTTPStatus.GONE)
        after = len(beats())
        time.sleep(5 * BEAT_S / HASTE)
        assert len(beats()) == after and beats().count(HTTPStatus.GONE) == 1


def get_last_heartbeat(stack: LiveStack, session_id: SessionId) -> float:
    row = stack.server.store.read(lambda tx: sessions.get(tx, session_id))
    assert row is not None
    return row.last_heartbeat_at


def test_retried_create_session_honours_retry_after_and_creates_one_session(stack: LiveStack) -> None:
    started, before = time.monotonic(), list_sessions(stack)
    stack.recorder.replace_responses("create_session", [HTTPStatus.SERVICE_UNAVAILABLE], headers={"Retry-After": "2"})
    with stack.recorder.recording() as calls:
        session_id = new_client(stack).model_id.partition(":")[0]
    assert time.monotonic() - started >= 2, "without Retry-After it would have retried after half a second"
    lost, answered = [call for call in calls if call.path == "create_session"]
    assert lost.headers["x-idempotency-key"] == answered.headers["x-idempotency-key"]
    assert list_sessions(stack) - before == {session_id}
    new_client(stack)
    assert len(list_sessions(stack) - before) == 2, "a second client has a second session"


def list_sessions(stack: LiveStack) -> set[str]:
    return set(stack.server.store.read(lambda tx: sessions.list_ids(tx, None, 1000, 0)))


def test_poll_honours_retry_after(stack: LiveStack, monkeypatch: pytest.MonkeyPatch) -> None:
    """The delay doubles with each response until the result arrives."""
    client, clock = new_client(stack), Clock()
    monkeypatch.setattr(api_future_impl, "asyncio", clock)
    stack.recorder.replace_responses("retrieve_future", [HTTPStatus.TOO_MANY_REQUESTS] * 3, "ForwardBackward")
    arrays = {"target_tokens": np.array([2]), "weights": np.ones(1, np.float32)}
    datum = types.Datum(model_input=types.ModelInput.from_ints([1]), loss_fn_inputs=arrays)
    assert client.forward_backward([datum], "cross_entropy").result().metrics["loss:sum"] > 0
    assert clock.waits == [1, 2, 4]
