"""The order in which sample requests start: sessions take turns, and no request starves."""

from itertools import count

from skyrl_tx.contract.batches import STARVATION_BOUND
from skyrl_tx.contract.ids import RequestId, SessionId
from skyrl_tx.engine.request import QueuedRequest
from skyrl_tx.engine.sample_queue import SampleQueue, queue_key
from tests.support.engine_harness import sample

positions = count(1)


def queued(session="a", max_tokens=8):
    position = next(positions)
    return QueuedRequest(
        position=position,
        request_id=RequestId(f"r{position}"),
        kind="sample",
        session_id=SessionId(session),
        model_id=None,
        seq_id=None,
        sampling_session_id=None,
        attempts=0,
        request=sample(max_tokens=max_tokens),
    )


def queue_of(*requests):
    queue = SampleQueue()
    for each in requests:
        queue.add(each)
    return queue


def next_of(queue, running=(), *, has_capacity=lambda key: True, may_start=lambda queued: True):
    return queue.next(running, has_capacity=has_capacity, may_start=may_start)


def started(queue, number, **changes):
    """Start requests of one sample each."""
    found = []
    for _ in range(number):
        head = next_of(queue, **changes)
        queue.note_start(head)
        queue.end_turn(head, has_more=False)
        found.append(head)
    return found


def test_sessions_take_turns():
    first, second, third, other = queued(), queued(), queued(), queued("b")
    queue = queue_of(first, second, third, other)
    assert started(queue, 4) == [first, other, second, third]
    assert next_of(queue) is None and len(queue) == 0


def test_request_with_more_samples_stays_the_head_of_its_queue():
    first, second, other = queued(), queued(), queued("b")
    queue = queue_of(first, second, other)
    queue.note_start(first)
    queue.end_turn(first, has_more=True)
    assert next_of(queue, {first.request_id}) == other
    queue.end_turn(other, has_more=False)
    assert next_of(queue, {first.request_id}) == first


def test_running_request_continues_while_no_other_may_start():
    first, other = queued(), queued("b")
    queue = queue_of(other, first)
    assert next_of(queue, {first.request_id}, may_start=lambda queued: False) == first
    assert next_of(queue, may_start=lambda queued: False) is None


def test_one_token_requests_have_a_queue_and_a_capacity_of_their_own():
    decoding, scored = queued(), queued(max_tokens=1)
    queue = queue_of(decoding, scored)
    assert next_of(queue, has_capacity=lambda key: not key.decodes) == scored
    assert not queue_key(scored).decodes and queue_key(decoding).decodes


def test_blocked_queue_is_passed_until_the_starvation_bound():
    blocked, others = queued("blocked"), [queued(f"s{n % 3}") for n in range(STARVATION_BOUND + 5)]
    queue = queue_of(blocked, *others)
    num_started = 0
    while True:
        queue.start_round()
        assert next_of(queue) == blocked
        queue.block(blocked)
        if (head := next_of(queue)) is None:
            break
        queue.note_start(head)
        queue.end_turn(head, has_more=False)
        num_started += 1
    assert num_started == STARVATION_BOUND
    queue.start_round()
    assert started(queue, 1) == [blocked], "its sampler has a slot now"
    assert len(started(queue, 5)) == 5


def test_blocked_queue_is_skipped_for_one_round():
    first, other = queued(), queued("b")
    queue = queue_of(first, other)
    queue.block(first)
    assert next_of(queue) == other
    queue.start_round()
    assert next_of(queue) == first


def test_removed_requests_do_not_start():
    first, second, other = queued(), queued(), queued("b")
    queue = queue_of(first, second, other)
    assert queue.remove({first.request_id, other.request_id, RequestId("unknown")}) == [first, other]
    assert list(queue) == [second]


def test_requeued_request_is_the_head_of_its_queue():
    first, second = queued(), queued()
    queue = queue_of(second)
    queue.add_first(first)
    assert started(queue, 2) == [first, second]
