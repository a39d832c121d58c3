"""Samples of which no more is wanted leave the device; others notice nothing."""

import time
from dataclasses import replace

import numpy as np
import pytest

from skyrl_tx.api import backpressure
from skyrl_tx.api.backpressure import SampleBudget
from skyrl_tx.api.errors import ApiError
from skyrl_tx.backends.fake.backend import FakeBackend
from skyrl_tx.contract import codec
from skyrl_tx.contract.errors import ErrorCategory
from skyrl_tx.contract.results import Failure
from skyrl_tx.store import cancellations
from skyrl_tx.store.engine_state import REQUEST_BYTES
from skyrl_tx.testing.engine_house import OWNER, House, sample

OVER = Failure(message="cancelled", category=ErrorCategory.USER)


class Cancelling(FakeBackend):
    """Cancels requests, as the API does, while its n-th slice is decoded."""

    def __init__(self, house: House, doomed: list, at_slice: int) -> None:
        super().__init__("tiny", house.config)
        self.house, self.doomed, self.at_slice = house, doomed, at_slice
        self.begun, self.cancelled, self.slices_of = [], [], {}

    def begin_sample(self, batch):
        self.begun += [request.request_id for request in batch.requests]
        super().begin_sample(batch)

    def step_sample(self):
        self.at_slice -= 1
        if self.at_slice == 0:
            for request_id in self.doomed:
                cancel(self.house, request_id)
        deltas = super().step_sample()
        for delta in deltas:
            self.slices_of[delta.request_id] = self.slices_of.get(delta.request_id, 0) + 1
        return deltas

    def cancel_sample(self, request_ids):
        self.cancelled += [request_id for request_id in request_ids if request_id in self._running]
        super().cancel_sample(request_ids)


def cancel(house, request_id):
    return house.api.write(lambda tx: cancellations.cancel(tx, request_id, OWNER, codec.encode(OVER), time.time()))


def long(**params):
    return sample(**{"max_tokens": 1600, "eos_stops": False, "temperature": 1.0, **params})


def test_a_running_sample_leaves_and_its_neighbour_goes_on(house):
    alone = house.answer(long(seed=9))
    doomed, neighbour = house.submit(long(seed=8)), house.submit(long(seed=9))
    backend = Cancelling(house, [doomed], at_slice=3)
    house.run(doomed, neighbour, backend=backend)
    assert house.result(doomed) == OVER
    assert backend.cancelled == [doomed]
    assert backend.slices_of[doomed] == 3 and backend.slices_of[neighbour] == 100
    np.testing.assert_array_equal(house.result(neighbour).sequences[0].tokens, alone.sequences[0].tokens)


def test_a_waiting_sample_is_never_begun(tmp_path):
    house = House(tmp_path)
    house.config = house.config.model_copy(update={"max_sample_tokens": 1602})
    first, doomed, last = (house.submit(long(seed=seed)) for seed in range(3))
    backend = Cancelling(house, [doomed], at_slice=2)
    house.run(first, doomed, last, backend=backend)
    assert house.result(doomed) == OVER and backend.begun == [first, last]
    house.close()


def test_the_next_engine_does_not_take_a_cancelled_sample_up(house):
    doomed, other = house.submit(long()), house.submit(sample())
    assert cancel(house, doomed) == "cancelled"
    backend = Cancelling(house, [], at_slice=0)
    house.run(other, backend=backend)
    assert backend.begun == [other] and house.result(doomed) == OVER
    assert house.api.read(lambda tx: cancellations.since(tx, 0)) == []


def test_a_sample_that_cannot_be_ended_fails_alone(house):
    class Stubborn(FakeBackend):
        def end_sample(self, request_id, index):
            if self.is_gathering:
                raise RuntimeError("no end")
            super().end_sample(request_id, index)

        def step_sample(self):
            self.is_gathering = False
            deltas = super().step_sample()
            self.is_gathering = True  # what is called next is called by the engine
            return deltas

    free = house.answer(long(max_tokens=100))
    stop = "".join(map(chr, free.sequences[0].tokens[20:24]))
    stuck, neighbour = house.submit(long(max_tokens=100, stop_strings=(stop,))), house.submit(long(max_tokens=320))
    house.run(stuck, neighbour, backend=Stubborn("tiny", house.config))
    failure = house.result(stuck)
    assert failure.category == ErrorCategory.SERVER and "no end" in failure.message
    assert len(house.result(neighbour).sequences[0].tokens) == 320


def test_what_is_cancelled_before_it_is_read_takes_up_no_room(tmp_path, monkeypatch):
    """The API counts what it submits until the engine has come to there, also where nothing is left to be read."""
    monkeypatch.setattr(backpressure, "_LOOK_EVERY_S", 0.0)
    house = House(tmp_path, max_waiting_sample_bytes=20 * REQUEST_BYTES)
    budget = SampleBudget(house.api)
    house.answer(sample())
    before = house.submit(long(max_tokens=320))
    doomed = [house.submit(sample()) for _ in range(20)]
    for position in range(3, 3 + len(doomed)):
        budget.note(position, 0)
    with pytest.raises(ApiError, match="send this one later"):
        budget.check(0)
    for request_id in doomed:
        cancel(house, request_id)
    house.run(before)
    budget.check(0)
    house.close()


def test_one_sample_leaves_with_its_stop_string_and_the_others_go_on(house):
    free = house.answer(replace(long(max_tokens=320), num_samples=4))
    texts = ["".join(map(chr, sequence.tokens)) for sequence in free.sequences]
    stop = texts[1][15:18]  # across the boundary of two slices
    assert stop not in texts[0]
    backend = Cancelling(house, [], at_slice=0)
    request_id = house.submit(replace(long(max_tokens=320, stop_strings=(stop,)), num_samples=4))
    house.run(request_id, backend=backend)
    result = house.result(request_id)
    for text, sequence in zip(texts, result.sequences, strict=True):
        expected = (text[: text.index(stop) + 3], "stop") if stop in text else (text, "length")
        assert ("".join(map(chr, sequence.tokens)), sequence.stop_reason) == expected
    assert backend.slices_of[request_id] == sum(-(-len(sequence.tokens) // 16) for sequence in result.sequences)
