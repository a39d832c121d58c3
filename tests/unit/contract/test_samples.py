"""The lifecycle of a sample, tested without a device."""

import time
from dataclasses import replace

import numpy as np
import pytest

from skyrl_tx.contract.batches import PreparedSampleBatch, SampleRequest
from skyrl_tx.contract.ids import RequestId
from skyrl_tx.contract.requests import PromptOptions, SamplingParams
from skyrl_tx.contract.results import TopK
from skyrl_tx.contract.samples import OpenSample, OpenSamples, select_ready


def request(name: str = "one", num_samples: int = 1, first_index: int = 0, **params) -> SampleRequest:
    return SampleRequest(
        request_id=RequestId(name),
        sampler=None,
        prompt=np.array([5, 6], np.int32),
        num_samples=num_samples,
        params=SamplingParams(seed=1, max_tokens=4, **params),
        options=PromptOptions(),
        first_index=first_index,
    )


def open_samples(*requests: SampleRequest) -> OpenSamples:
    opened = OpenSamples([9])
    opened.begin(PreparedSampleBatch(requests=requests))
    return opened


@pytest.mark.parametrize(
    ("params", "tokens", "expected", "reason"),
    [
        ({}, [1, 2], [1, 2], None),
        ({}, [1, 2, 3, 4, 5], [1, 2, 3, 4], "length"),
        ({}, [1, 9, 3], [1, 9], "stop"),
        ({"eos_stops": False}, [1, 9, 3], [1, 9, 3], None),
        ({"stop_token_ids": (3,)}, [1, 3, 9], [1, 3], "stop"),
        ({"stop_token_ids": (4,)}, [1, 2, 3, 4], [1, 2, 3, 4], "stop"),
    ],
)
def test_a_sample_ends_after_a_stop_token_or_at_its_length(params, tokens, expected, reason):
    [sample] = open_samples(request(**params)).first(8)
    assert sample.last_token == 6 and sample.num_left == 4
    drawn = np.array(tokens, np.int32)
    topk = TopK(token_ids=drawn[:, None], logprobs=-np.ones((len(drawn), 1), np.float32))
    delta = sample.take(drawn, -drawn.astype(np.float32), topk)
    assert (delta.tokens.tolist(), delta.stop_reason) == (expected, reason)
    assert delta.topk is not None and len(delta.logprobs) == len(delta.topk.token_ids) == len(expected)
    assert sample.last_token == expected[-1]


def test_samples_beyond_the_slots_wait_in_order_of_arrival():
    opened = open_samples(request("one", 2), request("two"), request("one", 2, first_index=2))
    places = [(open_sample.request.request_id, open_sample.index) for open_sample in opened.first(9)]
    assert places == [("one", 0), ("one", 1), ("two", 0), ("one", 2), ("one", 3)]
    first, second = opened.first(2)
    first.take(np.array([9], np.int32), np.zeros(1, np.float32))
    opened.drop_ended()
    assert opened.first(2)[0] is second and opened.first(2)[1].request.request_id == "two"
    opened.end(RequestId("one"), 1)
    opened.end(RequestId("one"), 1)
    opened.cancel([RequestId("two"), RequestId("unknown")])
    assert [open_sample.index for open_sample in opened.first(9)] == [2, 3] and len(opened) == 2


def test_numbers_depend_on_seed_index_and_position():
    one, two = open_samples(request("one", 2)).first(2)
    [again] = open_samples(request("other", 1, first_index=1)).first(1)
    assert one.uniform() != two.uniform() == again.uniform()
    assert two.uniform(1) != two.uniform(0) == two.uniform()


class Mask:
    """A constraint that notes how long callers wait for its mask."""

    def __init__(self) -> None:
        self.is_computed, self.waits = False, list[bool]()

    def is_ready(self, timeout_s: float = 0.0) -> bool:
        self.waits.append(timeout_s > 0)
        return self.is_computed

    def fill_mask(self, mask: np.ndarray) -> None:
        raise AssertionError("nothing is drawn")

    def accept(self, token: int) -> None:
        raise AssertionError("nothing is drawn")


def open_constrained(*masks: Mask) -> list[OpenSample]:
    opened = OpenSamples([9], vocab_size=64)
    requests = (replace(request(f"{n}"), make_constraint=lambda mask=mask: mask) for n, mask in enumerate(masks))
    opened.begin(PreparedSampleBatch(requests=tuple(requests)))
    return opened.first(len(masks))


def test_a_late_mask_is_waited_for_once_while_other_samples_decode():
    fast, slow = Mask(), Mask()
    fast.is_computed = True
    samples = open_constrained(fast, slow)
    deadline = time.monotonic() + 600

    assert select_ready(samples, deadline) == samples[:1] and slow.waits == [True]
    for _ in range(2):
        assert select_ready(samples, deadline) == samples[:1]
    assert slow.waits == [True, False, False] and fast.waits == [True] * 3

    slow.is_computed = True
    assert select_ready(samples, deadline) == samples
    slow.is_computed = False  # the mask after the next token
    select_ready(samples, deadline)
    assert slow.waits[3:] == [False, True]


def test_a_round_in_which_nothing_else_decodes_waits_for_late_masks():
    masks = [Mask(), Mask()]
    samples = open_constrained(*masks)
    deadline = time.monotonic() + 600
    select_ready(samples, deadline, others_decode=True)
    for others_decode, waits in ((True, [False]), (False, [False, True])):
        for mask in masks:
            mask.waits.clear()
        assert select_ready(samples, deadline, others_decode=others_decode) == []
        assert [mask.waits for mask in masks] == [waits, waits]
