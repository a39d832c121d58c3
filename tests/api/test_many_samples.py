"""News of many samples in one poll, copies of clients, and samples that are wanted no more, through the SDK."""

import json
import pickle
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError
from pathlib import Path

import pytest
import tinker
from tinker import types

from skyrl_tx.api.settings import ApiSettings
from skyrl_tx.backends.fake.backend import FakeBackend
from skyrl_tx.backends.fake.config import FakeConfig
from skyrl_tx.engine.settings import EngineSettings
from skyrl_tx.testing.live_api import Server, live_api
from skyrl_tx.testing.live_engine import live_engine
from skyrl_tx.testing.live_house import House
from skyrl_tx.testing.waiting import until
from skyrl_tx.testing.wiretap import Wiretap

BASE_MODEL = "Qwen/Qwen3-8B"
PROMPT = types.ModelInput.from_ints([5, 6, 7])


class Slow(FakeBackend):
    """A token a slice, so that there is time to change one's mind."""

    def __init__(self) -> None:
        super().__init__("fake", FakeConfig(vocab_size=1024, slice_tokens=1, step_delay_s=0.01))

    @property
    def num_running(self) -> int:
        return len(self._running)


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[tuple[House, Slow]]:
    backend, wiretap = Slow(), Wiretap()
    api = ApiSettings(port=0, data_dir=tmp_path, base_model="fake", served_model_name=BASE_MODEL)
    engine = EngineSettings(data_dir=tmp_path, base_model="fake", served_model_name=BASE_MODEL)
    with live_api(api, wiretap.wrap) as server, live_engine(engine, backend):
        yield House(server=server, backend=backend, wiretap=wiretap), backend


def long(max_tokens: int = 4000) -> types.SamplingParams:
    return types.SamplingParams(max_tokens=max_tokens, stop=[])


def test_a_future_that_is_abandoned_ends_its_sample_at_once(slow: tuple[House, Slow]) -> None:
    house, backend = slow
    with tinker.ServiceClient(base_url=house.url) as service, house.wiretap.listening() as calls:
        client = service.create_sampling_client(base_model=BASE_MODEL).result()
        doomed = client.sample(PROMPT, 2, long()).future()
        neighbour = client.sample(PROMPT, 1, long(100))
        until(lambda: backend.num_running == 2)
        doomed.cancel()
        (cancel,) = until(lambda: [call for call in calls if call.path == "cancel_future"])
        assert cancel.status == 200
        assert len(neighbour.result().sequences[0].tokens) == 100
        until(lambda: backend.num_running == 0, within_s=20)  # by itself it would take twice as long
        with pytest.raises(CancelledError):
            doomed.result()


def test_results_are_announced_by_one_poll_for_all(slow: tuple[House, Slow]) -> None:
    house, _ = slow
    with tinker.ServiceClient(base_url=house.url) as service, house.wiretap.listening() as calls:
        client = service.create_sampling_client(base_model=BASE_MODEL).result()
        pending = [client.sample(PROMPT, 1, long(10 + index)) for index in range(50)]
        assert [len(each.result().sequences[0].tokens) for each in pending] == list(range(10, 60))
        refused = client.sample(PROMPT, 1, types.SamplingParams(max_tokens=10**6))
        with pytest.raises(tinker.RequestFailedError, match="1000000"):
            refused.result()
    polls = [call for call in calls if call.path == "retrieve_futures"]
    fetches = [call for call in calls if call.path == "retrieve_future"]
    assert len(fetches) == 51 and {call.status for call in polls + fetches} == {200}
    assert all(call.answer_type.startswith("application/x-protobuf") for call in fetches[:50])


def test_copies_of_a_client_sample_side_by_side(slow: tuple[House, Slow]) -> None:
    house, _ = slow
    with tinker.ServiceClient(base_url=house.url) as service:
        client = service.create_sampling_client(base_model=BASE_MODEL).result()
        copies: list[tinker.SamplingClient] = [pickle.loads(pickle.dumps(client)) for _ in range(2)]
        with house.wiretap.listening() as calls:
            pending = [each.sample(PROMPT, 1, long(5)) for each in (client, *copies) for _ in range(3)]
            ids = {each.result().sequences[0].sequence_id for each in pending}
    assert len(ids) == 9
    assert sum(call.path == "join_sampling_session" for call in calls) == 2


@pytest.fixture
def narrow(tmp_path: Path) -> Iterator[House]:
    """A server with room for twenty samples that wait."""
    backend, wiretap = (
        FakeBackend("fake", FakeConfig(vocab_size=1024, max_context_length=2**16, step_delay_s=0.02)),
        Wiretap(),
    )
    api = ApiSettings(port=0, data_dir=tmp_path, base_model="fake", served_model_name=BASE_MODEL)
    engine = EngineSettings(
        data_dir=tmp_path, base_model="fake", served_model_name=BASE_MODEL, max_waiting_sample_bytes=20 * 4400
    )
    with live_api(api, wiretap.wrap) as server, live_engine(engine, backend):
        until(lambda: server.client.get("/api/v1/healthz").status_code == 200)
        yield House(server=server, backend=backend, wiretap=wiretap)


def test_samples_that_have_no_room_come_later_under_the_same_number(narrow: House) -> None:
    with tinker.ServiceClient(base_url=narrow.url) as service, narrow.wiretap.listening() as calls:
        client = service.create_sampling_client(base_model=BASE_MODEL).result()
        pending = [client.sample(PROMPT, 1, long(64)) for _ in range(60)]
        assert all(len(each.result().sequences[0].tokens) == 64 for each in pending)
        whole = types.ModelInput.from_ints(list(range(1, 1000)) * 40)
        with pytest.raises(tinker.RequestFailedError, match=f"all that wait may take {20 * 4400}"):
            client.sample(whole, 1, types.SamplingParams(max_tokens=1)).result()
    submissions = [call for call in calls if call.path == "asample"]
    assert {call.status for call in calls} == {200, 429}
    refused = {json.loads(call.body)["seq_id"] for call in submissions if call.status == 429}
    taken = [json.loads(call.body)["seq_id"] for call in submissions if call.status == 200]
    assert refused and sorted(taken) == list(range(61)) and refused < set(taken)


def test_what_cannot_be_cancelled(server: Server) -> None:
    assert server.post("cancel_future", request_id="req-never").status_code == 200
    model_id = server.model()
    step = server.post("optim_step", model_id=model_id, adam_params={}).json()["request_id"]
    refused = server.post("cancel_future", request_id=step)
    assert refused.status_code == 400 and "only samples" in refused.json()["detail"]


def test_a_poll_for_many_ends_in_time_and_names_an_unknown_session(server: Server) -> None:
    session_id = server.session()
    made = server.post(
        "create_sampling_session", session_id=session_id, sampling_session_seq_id=0, base_model=BASE_MODEL
    )
    target = {"type": "sampling_session", "sampling_session_id": made.json()["sampling_session_id"]}
    for timeout, least_s in ((0, 0.0), (None, server.settings.retrieve_hold_s)):
        begun = time.monotonic()
        answer = server.post("retrieve_futures", target=target, prev_cursor=3, timeout=timeout)
        assert answer.json() == {"completions": [], "cursor": 3}
        assert time.monotonic() - begun >= least_s
    unknown = server.post("retrieve_futures", target={"sampling_session_id": "nobody:sample:0"})
    assert unknown.status_code == 404 and "nobody:sample:0" in unknown.json()["detail"]
