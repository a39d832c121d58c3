"""Polling for many samples, copied clients and cancelled samples, with the SDK."""

import json
import pickle
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError
from pathlib import Path

import pytest
import tinker
from tinker import types

from skyrl_tx.engine.settings import EngineSettings
from skyrl_tx.server.settings import ApiSettings
from skyrl_tx.testing.fake import FakeConfig
from skyrl_tx.testing.fake.backend import FakeBackend
from tests.support.live_api import Server, live_api
from tests.support.live_engine import live_engine
from tests.support.live_stack import LiveStack
from tests.support.polling import until
from tests.support.recording_middleware import RecordingMiddleware

BASE_MODEL = "Qwen/Qwen3-8B"
PROMPT = types.ModelInput.from_ints([5, 6, 7])


class SlowBackend(FakeBackend):
    """Samples one token per slice, so that a test can cancel a sample before it ends."""

    def __init__(self) -> None:
        super().__init__("fake", FakeConfig(vocab_size=1024, slice_tokens=1, step_delay_s=0.01))

    @property
    def num_running(self) -> int:
        return len(self._open.by_request())


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[tuple[LiveStack, SlowBackend]]:
    backend, recorder = SlowBackend(), RecordingMiddleware()
    api = ApiSettings(port=0, data_dir=tmp_path, base_model="fake", served_model_name=BASE_MODEL)
    engine = EngineSettings(data_dir=tmp_path, base_model="fake", served_model_name=BASE_MODEL)
    with live_api(api, recorder.wrap) as server, live_engine(engine, backend):
        yield LiveStack(server=server, backend=backend, recorder=recorder), backend


def long(max_tokens: int = 4000) -> types.SamplingParams:
    return types.SamplingParams(max_tokens=max_tokens, stop=[])


def test_cancelled_future_ends_its_sample(slow: tuple[LiveStack, SlowBackend]) -> None:
    stack, backend = slow
    with tinker.ServiceClient(base_url=stack.url) as service, stack.recorder.recording() as calls:
        client = service.create_sampling_client(base_model=BASE_MODEL).result()
        doomed = client.sample(PROMPT, 2, long()).future()
        neighbour = client.sample(PROMPT, 1, long(200))
        until(lambda: backend.num_running == 2)
        # The SDK does not call the server to cancel a request whose id it has not received. When
        # this later request has a result, the id of the first one has arrived.
        client.sample(PROMPT, 1, long(4)).result()
        doomed.cancel()
        (cancel,) = until(lambda: [call for call in calls if call.path == "cancel_future"])
        assert cancel.status == 200
        assert len(neighbour.result().sequences[0].tokens) == 200
        until(lambda: backend.num_running == 0, within_s=20)  # without cancelling, the sample would take twice as long
        with pytest.raises(CancelledError):
            doomed.result()


def test_one_poll_reports_completions_of_all_samples(slow: tuple[LiveStack, SlowBackend]) -> None:
    stack, _ = slow
    with tinker.ServiceClient(base_url=stack.url) as service, stack.recorder.recording() as calls:
        client = service.create_sampling_client(base_model=BASE_MODEL).result()
        pending = [client.sample(PROMPT, 1, long(10 + index)) for index in range(50)]
        assert [len(future.result().sequences[0].tokens) for future in pending] == list(range(10, 60))
        refused = client.sample(PROMPT, 1, types.SamplingParams(max_tokens=10**6))
        with pytest.raises(tinker.RequestFailedError, match="1000000"):
            refused.result()

    polls = [call for call in calls if call.path == "retrieve_futures"]
    fetches = [call for call in calls if call.path == "retrieve_future"]
    assert len(fetches) == 51 and {call.status for call in polls + fetches} == {200}
    assert all(call.response_type.startswith("application/x-protobuf") for call in fetches[:50])


def test_copies_of_a_client_sample_concurrently(slow: tuple[LiveStack, SlowBackend]) -> None:
    stack, _ = slow
    with tinker.ServiceClient(base_url=stack.url) as service:
        client = service.create_sampling_client(base_model=BASE_MODEL).result()
        copies: list[tinker.SamplingClient] = [pickle.loads(pickle.dumps(client)) for _ in range(2)]
        with stack.recorder.recording() as calls:
            pending = [sampler.sample(PROMPT, 1, long(5)) for sampler in (client, *copies) for _ in range(3)]
            ids = {future.result().sequences[0].sequence_id for future in pending}
    assert len(ids) == 9
    assert sum(call.path == "join_sampling_session" for call in calls) == 2


@pytest.fixture
def narrow(tmp_path: Path) -> Iterator[LiveStack]:
    """A server whose byte limit allows twenty queued samples."""
    backend, recorder = (
        FakeBackend("fake", FakeConfig(vocab_size=1024, max_context_length=2**16, step_delay_s=0.02)),
        RecordingMiddleware(),
    )
    api = ApiSettings(port=0, data_dir=tmp_path, base_model="fake", served_model_name=BASE_MODEL)
    engine = EngineSettings(
        data_dir=tmp_path, base_model="fake", served_model_name=BASE_MODEL, max_queued_sample_bytes=20 * 4400
    )
    with live_api(api, recorder.wrap) as server, live_engine(engine, backend):
        until(lambda: server.client.get("/api/v1/healthz").status_code == 200)
        yield LiveStack(server=server, backend=backend, recorder=recorder)


def test_samples_refused_with_429_are_retried_with_the_same_sequence_number(narrow: LiveStack) -> None:
    with tinker.ServiceClient(base_url=narrow.url) as service, narrow.recorder.recording() as calls:
        client = service.create_sampling_client(base_model=BASE_MODEL).result()
        pending = [client.sample(PROMPT, 1, long(64)) for _ in range(60)]
        assert all(len(future.result().sequences[0].tokens) == 64 for future in pending)
        whole = types.ModelInput.from_ints(list(range(1, 1000)) * 40)
        with pytest.raises(tinker.RequestFailedError, match=f"all waiting samples together may take {20 * 4400}"):
            client.sample(whole, 1, types.SamplingParams(max_tokens=1)).result()
    submissions = [call for call in calls if call.path == "asample"]
    assert {call.status for call in calls} == {200, 429}

    refused = {json.loads(call.body)["seq_id"] for call in submissions if call.status == 429}
    taken = [json.loads(call.body)["seq_id"] for call in submissions if call.status == 200]
    assert refused and sorted(taken) == list(range(61)) and refused < set(taken)


def test_only_open_samples_can_be_cancelled(server: Server) -> None:
    assert server.post("cancel_future", request_id="req-never").status_code == 200
    model_id = server.model()
    step = server.post("optim_step", model_id=model_id, adam_params={}).json()["request_id"]
    refused = server.post("cancel_future", request_id=step)
    assert refused.status_code == 400 and "only samples" in refused.json()["detail"]


def test_poll_for_many_times_out_and_reports_an_unknown_session(server: Server) -> None:
    session_id = server.session()
    made = server.post(
        "create_sampling_session", session_id=session_id, sampling_session_seq_id=0, base_model=BASE_MODEL
    )
    target = {"type": "sampling_session", "sampling_session_id": made.json()["sampling_session_id"]}

    for timeout, least_s in ((0, 0.0), (None, server.settings.retrieve_hold_s)):
        started = time.monotonic()
        answer = server.post("retrieve_futures", target=target, prev_cursor=3, timeout=timeout)
        assert answer.json() == {"completions": [], "cursor": 3}
        assert time.monotonic() - started >= least_s

    # After a burst, the SDK names every result that it has fetched since its last poll.
    fetched = [f"req-{number:040d}" for number in range(10_000)]
    answer = server.post("retrieve_futures", target=target, timeout=0, retrieved_request_ids=fetched)
    assert answer.json() == {"completions": [], "cursor": 0}

    unknown = server.post("retrieve_futures", target={"sampling_session_id": "unknown:sample:0"})
    assert unknown.status_code == 404 and "unknown:sample:0" in unknown.json()["detail"]
