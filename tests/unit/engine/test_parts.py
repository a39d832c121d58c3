"""A request of more samples than there are slots is handed over bit by bit, and is answered as if it were not."""

import time
from dataclasses import replace

import numpy as np
import pytest

from skyrl_tx.backends.fake.backend import FakeBackend
from skyrl_tx.contract import codec
from skyrl_tx.contract.errors import BackendLost, ErrorCategory
from skyrl_tx.contract.requests import PromptOptions
from skyrl_tx.contract.results import Failure
from skyrl_tx.store import cancellations, futures, sessions, stability
from skyrl_tx.testing.engine_house import OWNER, House, datum, forward_backward, sample

NUM_SAMPLES = 30
MANY = replace(
    sample((65, 66, 67), max_tokens=40, temperature=1.0, eos_stops=True),
    num_samples=NUM_SAMPLES,
    options=PromptOptions(logprobs=True, topk=2, sample_topk=3),
)


class Watched(FakeBackend):
    """Notes the parts that it is handed, and fails or is lost in its n-th slice."""

    def __init__(self, house, at_slice=0, error=None):
        super().__init__("tiny", house.config)
        self.parts, self.at_slice, self.error = [], at_slice, error

    def begin_sample(self, batch):
        for request in batch.requests:
            end = request.first_index + request.num_samples
            self.parts.append((request.request_id, request.first_index, end, request.options.wants_prompt))
        super().begin_sample(batch)
        assert sum(map(len, self._running.values())) <= self._config.sample_slots + 1

    def step_sample(self):
        self.at_slice -= 1
        if self.at_slice == 0:
            raise self.error
        return super().step_sample()

    def handed(self, request_id):
        return [(first, end, asks) for name, first, end, asks in self.parts if name == request_id]


@pytest.fixture
def few(tmp_path):
    house = House(tmp_path)
    house.config = house.config.model_copy(update={"sample_slots": 4})
    yield house
    house.close()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    house = House(tmp_path_factory.mktemp("whole"))
    output = house.answer(MANY)
    house.close()
    return output


def same(left, right):
    """Whether two results are equal to the last bit."""
    return codec.encode(left) == codec.encode(right)


def test_parts_are_joined_to_what_the_whole_is(few, whole):
    backend = Watched(few)
    request_id = few.submit(MANY)
    few.run(request_id, backend=backend)
    assert len({len(sequence.tokens) for sequence in whole.sequences}) > 5, "they end at different times"
    assert same(few.result(request_id), whole)
    parts = backend.handed(request_id)
    assert parts[0] == (0, 5, True) and len(parts) > 5
    assert [first for first, _, _ in parts[1:]] == [end for _, end, _ in parts[:-1]] and parts[-1][1] == NUM_SAMPLES
    assert not any(asks for _, _, asks in parts[1:]), "the prompt is asked about once"


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
    found = few.api.read(lambda tx: stability.find(tx, OWNER, ids, 0.0))
    for name, sequence in zip(ids, whole.sequences, strict=True):
        np.testing.assert_array_equal(found[name].logprobs, sequence.logprobs)


def test_a_cancelled_request_begins_no_more(few):
    doomed, other = few.submit(MANY), few.submit(sample(max_tokens=400, eos_stops=False))

    class Cancelling(Watched):
        def begin_sample(self, batch):
            super().begin_sample(batch)
            if len(self.handed(doomed)) == 3:
                over = codec.encode(Failure(message="cancelled", category=ErrorCategory.USER))
                few.api.write(lambda tx: cancellations.cancel(tx, doomed, OWNER, over, time.time()))

    backend = Cancelling(few)
    few.run(doomed, other, backend=backend)
    assert backend.handed(doomed)[-1][1] < NUM_SAMPLES and not backend._running
    assert len(few.result(other).sequences[0].tokens) == 400


def test_after_a_failed_slice_each_request_runs_alone_to_its_end(few, whole):
    requests = [few.submit(MANY), few.submit(replace(MANY, num_samples=10))]
    few.session_id = few.new_session()
    requests.append(few.submit(MANY))
    backend = Watched(few, at_slice=4, error=RuntimeError("a slice failed"))
    few.run(*requests, backend=backend)
    assert same(few.result(requests[0]), whole) and same(few.result(requests[2]), whole)
    assert len(few.result(requests[1]).sequences) == 10


def test_what_was_begun_in_part_is_begun_anew_by_the_next_engine(few, whole):
    request_id = few.submit(MANY)
    with pytest.raises(BackendLost):
        few.run(request_id, backend=Watched(few, at_slice=5, error=BackendLost("unplugged")))
    assert few.api.read(lambda tx: futures.attempts(tx, [request_id])) == 1
    backend = Watched(few)
    few.run(request_id, backend=backend)
    assert same(few.result(request_id), whole) and backend.handed(request_id)[0] == (0, 5, True)


def test_a_suspect_pass_waits_until_all_parts_have_ended(few, whole):
    """Of what was begun before it; what waits then begins after it."""
    model_id, created = few.create()
    few.run(created)
    many, after = few.submit(MANY), []
    backend = Watched(few)
    step_sample = backend.step_sample

    def arrive():
        if len(backend.parts) == 3 and not after:
            suspect = few.submit(forward_backward(data=(datum(),)), model_id=model_id, seq_id=1)
            few.api.write(lambda tx: futures.mark_attempt(tx, [suspect]))
            after.extend([suspect, few.submit(sample())])
        return step_sample()

    backend.step_sample = arrive
    few.run(many, backend=backend)
    assert same(few.result(many), whole)
    few.run(*after)
    assert few.result(after[0]).metrics["num_datums:sum"] == 1


def test_what_began_goes_on_while_others_wait_for_its_sampler_to_leave(few):
    """Else its sampler would never leave, and nobody would ever begin again."""
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
def test_a_session_that_ends_begins_no_more_of_what_it_began(tmp_path):
    house = House(tmp_path, housekeeping_interval_s=0.001)
    house.config = house.config.model_copy(update={"sample_slots": 4})
    other = house.submit(sample(max_tokens=400, eos_stops=False))
    house.session_id = gone = house.new_session()
    doomed = [house.submit(MANY) for _ in range(2)]

    class Finishing(Watched):
        def begin_sample(self, batch):
            super().begin_sample(batch)
            if len(self.handed(doomed[0])) == 3:
                house.api.write(lambda tx: sessions.finish(tx, gone, "errored", time.time()))

    backend = Finishing(house)
    house.run(*doomed, other, backend=backend)
    assert all("errored" in house.result(request_id).message for request_id in doomed)
    assert backend.handed(doomed[0])[-1][1] < NUM_SAMPLES and not backend.handed(doomed[1])
    assert len(house.result(other).sequences[0].tokens) == 400
    house.close()
