"""A request with more samples than slots runs in parts, with bit-identical results."""

import time
from dataclasses import replace

import numpy as np
import pytest

from skyrl_tx.contract import codec
from skyrl_tx.contract.errors import BackendLost, ErrorCategory
from skyrl_tx.contract.requests import PromptOptions
from skyrl_tx.contract.results import Failure
from skyrl_tx.store import completions, futures, recorded_logprobs, sessions
from skyrl_tx.testing.fake.backend import FakeBackend
from tests.support.engine_harness import OWNER, EngineHarness, sample

NUM_SAMPLES = 30
MANY = replace(
    sample((65, 66, 67), max_tokens=40, temperature=1.0, eos_stops=True),
    num_samples=NUM_SAMPLES,
    options=PromptOptions(logprobs=True, topk=2, sample_topk=3),
)


class RecordingBackend(FakeBackend):
    """Records the parts of requests, and can raise an error in the n-th decode slice."""

    def __init__(self, harness, at_slice=0, error=None):
        super().__init__("tiny", harness.config)
        self.parts, self.at_slice, self.error = [], at_slice, error

    def begin_sample(self, batch):
        for request in batch.requests:
            end = request.first_index + request.num_samples
            self.parts.append((request.request_id, request.first_index, end, request.options.wants_prompt))
        super().begin_sample(batch)
        assert len(self._open) <= self._config.sample_slots + 1

    def step_sample(self):
        self.at_slice -= 1
        if self.at_slice == 0:
            raise self.error
        return super().step_sample()

    def get_parts(self, request_id):
        return [(first, end, asks) for name, first, end, asks in self.parts if name == request_id]


@pytest.fixture
def few(tmp_path):
    harness = EngineHarness(tmp_path)
    harness.config = harness.config.model_copy(update={"sample_slots": 4})
    yield harness
    harness.close()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    harness = EngineHarness(tmp_path_factory.mktemp("whole"))
    output = harness.answer(MANY)
    harness.close()
    return output


def same(left, right):
    """Return whether two results are bit-identical."""
    return codec.encode(left) == codec.encode(right)


def test_request_in_parts_is_bit_equal_to_the_whole(few, whole):
    backend = RecordingBackend(few)
    request_id = few.submit(MANY)
    few.run(request_id, backend=backend)
    assert len({len(sequence.tokens) for sequence in whole.sequences}) > 5, "they end at different times"
    assert same(few.result(request_id), whole)
    parts = backend.get_parts(request_id)
    assert parts[0] == (0, 5, True) and len(parts) > 5
    assert [first for first, _, _ in parts[1:]] == [end for _, end, _ in parts[:-1]] and parts[-1][1] == NUM_SAMPLES
    assert not any(asks for _, _, asks in parts[1:]), "only the first part has prompt options"


def test_stop_strings_end_samples_of_every_part(few, whole):
    text = "".join(map(chr, whole.sequences[-1].tokens))
    stop = text[3:5]
    output = few.answer(replace(MANY, params=replace(MANY.params, stop_strings=(stop,))))
    for free, sequence in zip(whole.sequences, output.sequences, strict=True):
        found = "".join(map(chr, free.tokens)).find(stop)
        assert len(sequence.tokens) == (len(free.tokens) if found < 0 else found + 2)


def test_every_sequence_is_recorded(few, whole):
    ids = tuple(f"seq-{number}" for number in range(NUM_SAMPLES))
    few.answer(replace(MANY, sequence_ids=ids, is_recorded=True))
    found = few.api.read(lambda tx: recorded_logprobs.find(tx, OWNER, ids, 0.0))
    for name, sequence in zip(ids, whole.sequences, strict=True):
        np.testing.assert_array_equal(found[name].logprobs, sequence.logprobs)


def test_cancelled_request_starts_no_more_samples(few):
    doomed, other = few.submit(MANY), few.submit(sample(max_tokens=400, eos_stops=False))

    class Cancelling(RecordingBackend):
        def begin_sample(self, batch):
            super().begin_sample(batch)
            if len(self.get_parts(doomed)) == 3:
                over = codec.encode(Failure(message="cancelled", category=ErrorCategory.USER))
                few.api.write(lambda tx: completions.cancel(tx, doomed, OWNER, over, time.time()))

    backend = Cancelling(few)
    few.run(doomed, other, backend=backend)
    assert backend.get_parts(doomed)[-1][1] < NUM_SAMPLES and not backend._open
    assert len(few.result(other).sequences[0].tokens) == 400


def test_requests_of_a_failed_slice_are_isolated(few, whole):
    requests = [few.submit(MANY), few.submit(replace(MANY, num_samples=10))]
    few.session_id = few.new_session()
    requests.append(few.submit(MANY))
    backend = RecordingBackend(few, at_slice=4, error=RuntimeError("a slice failed"))
    few.run(*requests, backend=backend)
    assert same(few.result(requests[0]), whole) and same(few.result(requests[2]), whole)
    assert len(few.result(requests[1]).sequences) == 10


def test_partly_started_request_is_recomputed_by_the_next_engine(few, whole):
    request_id = few.submit(MANY)
    with pytest.raises(BackendLost):
        few.run(request_id, backend=RecordingBackend(few, at_slice=5, error=BackendLost("unplugged")))
    assert few.attempts(request_id) == 1
    backend = RecordingBackend(few)
    few.run(request_id, backend=backend)
    assert same(few.result(request_id), whole) and backend.get_parts(request_id)[0] == (0, 5, True)


def test_quarantined_request_runs_all_its_samples_before_others_start(few, whole):
    many, other = few.submit(MANY), few.submit(sample())
    few.api.write(lambda tx: futures.count_delivery_attempt(tx, [many]))
    backend = RecordingBackend(few)
    few.run(many, other, backend=backend)
    assert same(few.result(many), whole)
    assert [request_id for request_id, *_ in backend.parts].index(other) == len(backend.get_parts(many))


def test_running_request_continues_while_others_wait_for_its_sampler_slot(few):
    """If it did not continue, its sampler slot would never be released."""
    few.config = few.config.model_copy(update={"max_samplers": 1})
    first, second = few.save_samplers(2)
    many = few.submit(replace(MANY, sampler=first, num_samples=200))
    few.session_id = few.new_session()
    waiting = few.submit(sample(sampler=second))
    few.session_id = few.new_session()
    for _ in range(100):
        few.submit(sample(sampler=first))
    few.run(many, waiting)
    assert len(few.result(many).sequences) == 200 and len(few.result(waiting).sequences) == 1


@pytest.mark.usefixtures("api_is_there_for_long")
def test_closed_session_starts_no_more_samples(tmp_path):
    harness = EngineHarness(tmp_path, housekeeping_interval_s=0.001)
    harness.config = harness.config.model_copy(update={"sample_slots": 4})
    other = harness.submit(sample(max_tokens=400, eos_stops=False))
    harness.session_id = gone = harness.new_session()
    doomed = [harness.submit(MANY) for _ in range(2)]

    class Finishing(RecordingBackend):
        def begin_sample(self, batch):
            super().begin_sample(batch)
            if len(self.get_parts(doomed[0])) == 3:
                harness.api.write(lambda tx: sessions.finish(tx, gone, "errored", time.time()))

    backend = Finishing(harness)
    harness.run(*doomed, other, backend=backend)
    assert all("errored" in harness.result(request_id).message for request_id in doomed)
    assert backend.get_parts(doomed[0])[-1][1] < NUM_SAMPLES and not backend.get_parts(doomed[1])
    assert len(harness.result(other).sequences[0].tokens) == 400
    harness.close()
