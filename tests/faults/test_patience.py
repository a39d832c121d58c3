"""What the SDK makes of answers that ask it to wait, and of the end of a session; and what this server does then."""

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
from skyrl_tx.testing.live_house import PUBLIC_NAME, House, live_house
from skyrl_tx.testing.waiting import until

BEAT_S = 10  # between two heartbeats
HASTE = 100


class Clock:
    """`asyncio` as a module of the SDK sees it, where waits take a hundredth of their time and are noted."""

    def __init__(self) -> None:
        self.waits: list[float] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    async def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)
        await asyncio.sleep(seconds / HASTE)


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    directory: Path = tmp_path_factory.mktemp("house")
    with live_house("fake", directory) as house:
        yield house


def new_client(house: House) -> tinker.TrainingClient:
    return tinker.ServiceClient(base_url=house.url).create_lora_training_client(PUBLIC_NAME, rank=4).result()


def test_a_session_beats_on_after_a_failure_and_no_more_after_its_end(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(internal_client_holder, "asyncio", Clock())
    with house.wiretap.listening(to_clocks=True) as calls:

        def beats() -> list[int]:
            return [call.status for call in calls if call.path == "session_heartbeat"]

        house.wiretap.lose_answers("session_heartbeat", [HTTPStatus.INTERNAL_SERVER_ERROR])
        session_id = SessionId(new_client(house).model_id.partition(":")[0])
        until(lambda: len(beats()) >= 3)
        assert beats()[0] == HTTPStatus.INTERNAL_SERVER_ERROR and set(beats()[1:]) == {HTTPStatus.OK}

        heard_at = heard(house, session_id)
        until(lambda: heard(house, session_id) > heard_at)
        house.server.post(f"sessions/{session_id}/finish", reason={"type": "success"})
        until(lambda: beats()[-1] == HTTPStatus.GONE)
        after = len(beats())
        time.sleep(5 * BEAT_S / HASTE)
        assert len(beats()) == after and beats().count(HTTPStatus.GONE) == 1


def heard(house: House, session_id: SessionId) -> float:
    row = house.server.store.read(lambda tx: sessions.get(tx, session_id))
    assert row is not None
    return row.last_heartbeat_at


def test_a_session_that_is_asked_for_again_is_begun_once_and_after_the_time_it_was_told(house: House) -> None:
    started, before = time.monotonic(), all_sessions(house)
    house.wiretap.lose_answers("create_session", [HTTPStatus.SERVICE_UNAVAILABLE], headers={"Retry-After": "2"})
    with house.wiretap.listening() as calls:
        session_id = new_client(house).model_id.partition(":")[0]
    assert time.monotonic() - started >= 2, "without being told, it would have come back after half a second"
    lost, answered = [call for call in calls if call.path == "create_session"]
    assert lost.headers["x-idempotency-key"] == answered.headers["x-idempotency-key"]
    assert all_sessions(house) - before == {session_id}
    new_client(house)
    assert len(all_sessions(house) - before) == 2, "another client has a session of its own"


def all_sessions(house: House) -> set[str]:
    return set(house.server.store.read(lambda tx: sessions.list_ids(tx, None, 1000, 0)))


def test_a_poll_that_is_told_to_come_later_does(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice as late each time, and then it has its result."""
    client, clock = new_client(house), Clock()
    monkeypatch.setattr(api_future_impl, "asyncio", clock)
    house.wiretap.lose_answers("retrieve_future", [HTTPStatus.TOO_MANY_REQUESTS] * 3, "ForwardBackward")
    arrays = {"target_tokens": np.array([2]), "weights": np.ones(1, np.float32)}
    datum = types.Datum(model_input=types.ModelInput.from_ints([1]), loss_fn_inputs=arrays)
    assert client.forward_backward([datum], "cross_entropy").result().metrics["loss:sum"] > 0
    assert clock.waits == [1, 2, 4]
