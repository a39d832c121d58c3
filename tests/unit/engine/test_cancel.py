"""Cancelled samples are removed from the device without affecting other samples."""

import time
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from skyrl_tx.apps.teams import usage
from skyrl_tx.contract import codec
from skyrl_tx.contract.errors import ErrorCategory
from skyrl_tx.contract.results import Failure
from skyrl_tx.server import engine_status
from skyrl_tx.server.engine_status import AdmissionControl
from skyrl_tx.server.errors import ApiError
from skyrl_tx.store import completions
from skyrl_tx.store.engine_state import REQUEST_BYTES
from skyrl_tx.store.futures import SubmittedRequest
from skyrl_tx.testing.fake.backend import FakeBackend
from tests.support.engine_harness import OWNER, EngineHarness, sample
from tests.support.logged_error import find_logged_error

OVER = Failure(message="cancelled", category=ErrorCategory.USER)


def check(admission: AdmissionControl, owner: str, num_bytes: int) -> None:
    """Raise ApiError if a sample would be refused now."""
    with admission.reserve(owner, num_bytes):
        pass


class CancellingBackend(FakeBackend):
    """Cancels requests during the n-th decode slice, in the same way as the API."""

    def __init__(self, harness: EngineHarness, doomed: list, at_slice: int) -> None:
        super().__init__("tiny", harness.config)
        self.harness, self.doomed, self.at_slice = harness, doomed, at_slice
        self.started, self.cancelled, self.slices_of = [], [], {}

    def begin_sample(self, batch):
        self.started += [request.request_id for request in batch.requests]
        super().begin_sample(batch)

    def step_sample(self):
        self.at_slice -= 1
        if self.at_slice == 0:
            for request_id in self.doomed:
                cancel(self.harness, request_id)
        deltas = super().step_sample()
        for delta in deltas:
            self.slices_of[delta.request_id] = self.slices_of.get(delta.request_id, 0) + 1
        return deltas

    def cancel_sample(self, request_ids):
        self.cancelled += [request_id for request_id in request_ids if request_id in self._open.by_request()]
        super().cancel_sample(request_ids)


def cancel(harness, request_id):
    return harness.api.write(lambda tx: completions.cancel(tx, request_id, OWNER, codec.encode(OVER), time.time()))


def long(**params):
    return sample(**{"max_tokens": 1600, "eos_stops": False, "temperature": 1.0, **params})


def test_cancelled_running_sample_leaves_the_device_and_others_continue(harness):
    alone = harness.answer(long(seed=9))
    doomed, neighbour = harness.submit(long(seed=8)), harness.submit(long(seed=9))
    backend = CancellingBackend(harness, [doomed], at_slice=3)
    harness.run(doomed, neighbour, backend=backend)
    assert harness.result(doomed) == OVER
    assert backend.cancelled == [doomed]
    assert backend.slices_of[doomed] == 3 and backend.slices_of[neighbour] == 100
    np.testing.assert_array_equal(harness.result(neighbour).sequences[0].tokens, alone.sequences[0].tokens)


@pytest.mark.parametrize(("max_tokens", "at_slice", "num_drawn"), [(1600, 3, 48), (16, 1, 16)])
def test_the_tokens_of_a_cancelled_sample_count_as_usage(harness, max_tokens, at_slice, num_drawn):
    """Also if the cancellation arrives during the last slice, when the engine completes the sample."""
    doomed = harness.submit(long(max_tokens=max_tokens))
    harness.run(doomed, backend=CancellingBackend(harness, [doomed], at_slice))
    harness.answer(sample(max_tokens=1, eos_stops=False))  # the engine drops the cancelled sample first
    assert harness.result(doomed) == OVER
    used = Counter()
    for total in harness.api.read(lambda tx: usage.read_totals(tx, OWNER, 0.0)):
        used[total.kind] = total.tokens
    assert used == {"prefill": 2 * sample().prompt.size, "sampled": num_drawn + 1}


def test_cancelled_waiting_sample_never_starts(tmp_path):
    harness = EngineHarness(tmp_path)
    harness.config = harness.config.model_copy(update={"max_sample_tokens": 1602})
    first, doomed, last = (harness.submit(long(seed=seed)) for seed in range(3))
    backend = CancellingBackend(harness, [doomed], at_slice=2)
    harness.run(first, doomed, last, backend=backend)
    assert harness.result(doomed) == OVER and backend.started == [first, last]
    harness.close()


def test_next_engine_does_not_run_a_cancelled_sample(harness):
    doomed, other = harness.submit(long()), harness.submit(sample())
    assert cancel(harness, doomed) == "cancelled"
    backend = CancellingBackend(harness, [], at_slice=0)
    harness.run(other, backend=backend)
    assert backend.started == [other] and harness.result(doomed) == OVER
    assert harness.api.read(lambda tx: completions.list_cancelled(tx, 0)) == []


def test_sample_that_the_backend_cannot_end_fails_alone(harness, caplog):
    class Stubborn(FakeBackend):
        def end_sample(self, request_id, index):
            if self.is_gathering:
                raise RuntimeError("no end")
            super().end_sample(request_id, index)

        def step_sample(self):
            self.is_gathering = False
            deltas = super().step_sample()
            self.is_gathering = True  # from here on, only the engine calls the backend
            return deltas

    free = harness.answer(long(max_tokens=100))
    stop = "".join(map(chr, free.sequences[0].tokens[20:24]))
    stuck, neighbour = harness.submit(long(max_tokens=100, stop_strings=(stop,))), harness.submit(long(max_tokens=320))
    harness.run(stuck, neighbour, backend=Stubborn("tiny", harness.config))
    failure = harness.result(stuck)
    assert failure.category == ErrorCategory.SERVER and str(find_logged_error(failure.message, caplog)) == "no end"
    assert len(harness.result(neighbour).sequences[0].tokens) == 320


def test_requests_cancelled_before_they_are_read_do_not_count_as_back_pressure(tmp_path, monkeypatch):
    """The API counts each stored sample until the engine's position has passed it."""
    monkeypatch.setattr(engine_status, "_LOAD_MAX_AGE_S", 0.0)
    harness = EngineHarness(tmp_path, max_queued_sample_bytes=20 * REQUEST_BYTES)
    admission = AdmissionControl(harness.api)
    harness.answer(sample())
    before = harness.submit(long(max_tokens=320))
    doomed = [harness.submit(sample()) for _ in range(20)]
    for position, request_id in enumerate(doomed, start=3):
        admission.record("local", SubmittedRequest(request_id, is_new=True, position=position), 0)
    with pytest.raises(ApiError, match="send this one later"):
        check(admission, "local", 0)
    for request_id in doomed:
        cancel(harness, request_id)
    harness.run(before)
    check(admission, "local", 0)
    harness.close()


def test_stop_string_ends_one_sample_and_others_continue(harness):
    free = harness.answer(replace(long(max_tokens=320), num_samples=4))
    texts = ["".join(map(chr, sequence.tokens)) for sequence in free.sequences]
    stop = texts[1][15:18]  # the stop string spans two slices
    assert stop not in texts[0]
    backend = CancellingBackend(harness, [], at_slice=0)
    request_id = harness.submit(replace(long(max_tokens=320, stop_strings=(stop,)), num_samples=4))
    harness.run(request_id, backend=backend)
    result = harness.result(request_id)
    for text, sequence in zip(texts, result.sequences, strict=True):
        expected = (text[: text.index(stop) + 3], "stop") if stop in text else (text, "length")
        assert ("".join(map(chr, sequence.tokens)), sequence.stop_reason) == expected
    assert backend.slices_of[request_id] == sum(-(-len(sequence.tokens) // 16) for sequence in result.sequences)
