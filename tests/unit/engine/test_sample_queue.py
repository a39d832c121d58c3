"""Start order of sample requests.

Owners have equal shares, sessions take turns, and no request starves.
"""

from itertools import count

from skyrl_tx.contract.batches import STARVATION_BOUND
from skyrl_tx.contract.ids import RequestId, SessionId
from skyrl_tx.engine.extension import START, Admission, Fail, Wait
from skyrl_tx.engine.request_log import QueuedRequest
from skyrl_tx.engine.sample_queue import OwnerKey, SampleQueue, get_queue_key
from tests.support.engine_harness import sample

positions = count(1)


def make_request(session="a", max_tokens=8, owner="ann"):
    position = next(positions)
    return QueuedRequest(
        position=position,
        request_id=RequestId(f"r{position}"),
        kind="sample",
        owner=owner,
        session_id=SessionId(session),
        model_id=None,
        seq_id=None,
        sampling_session_id=None,
        attempts=0,
        request=sample(max_tokens=max_tokens),
    )


def make_queue(*requests):
    queue = SampleQueue()
    for request in requests:
        queue.add(request)
    return queue


def choose_next(queue, running=(), *, num_open=None, has_capacity=lambda decodes: True, may_join=lambda queued: True):
    turn = queue.choose_next(running, num_open=num_open or {}, has_capacity=has_capacity, may_join=may_join)
    return None if turn is None else turn.queued


def make_weighted_queue(weights):
    admission = Admission()
    admission.weights = weights
    return SampleQueue(admission)


def start_requests(queue, number, **changes):
    """Start requests with one sample each and return them."""
    found = []
    for _ in range(number):
        head = choose_next(queue, **changes)
        queue.record_start(head)
        queue.end_turn(head, has_more=False)
        found.append(head)
    return found


def test_sessions_take_turns():
    first, second, third, other = make_request(), make_request(), make_request(), make_request("b")
    queue = make_queue(first, second, third, other)
    assert start_requests(queue, 4) == [first, other, second, third]
    assert choose_next(queue) is None and len(queue) == 0


def test_owners_take_turns_and_so_do_their_sessions():
    many = [make_request(f"s{n % 3}") for n in range(6)]
    few = [make_request("other", owner="bob") for _ in range(3)]
    queue = make_queue(*many, *few)
    assert start_requests(queue, 9) == [many[0], few[0], many[1], few[1], many[2], few[2], *many[3:]]


def test_owner_with_the_fewest_open_samples_is_next():
    mine, other = make_request(), make_request("b", owner="bob")
    queue = make_queue(mine, other)
    assert choose_next(queue, num_open={OwnerKey("ann", True): 2, OwnerKey("bob", True): 1}) == other
    assert choose_next(queue, num_open={OwnerKey("ann", True): 1, OwnerKey("bob", True): 2}) == mine
    assert choose_next(queue, num_open={OwnerKey("ann", False): 2, OwnerKey("bob", True): 1}) == mine, (
        "of the same kind"
    )
    queue.remove({other.request_id})
    assert choose_next(queue, num_open={OwnerKey("ann", True): 100}) == mine, (
        "no slot stays free for owners without work"
    )


def test_kinds_take_turns():
    decoding, scored = [make_request() for _ in range(2)], [make_request(max_tokens=1) for _ in range(2)]
    queue = make_queue(*decoding, *scored)
    num_open = {OwnerKey("ann", True): 100}
    assert start_requests(queue, 4, num_open=num_open) == [decoding[0], scored[0], decoding[1], scored[1]]


def test_request_with_more_samples_stays_the_head_of_its_queue():
    first, second, other = make_request(), make_request(), make_request("b")
    queue = make_queue(first, second, other)
    queue.record_start(first)
    queue.end_turn(first, has_more=True)
    assert choose_next(queue, {first.request_id}) == other
    queue.end_turn(other, has_more=False)
    assert choose_next(queue, {first.request_id}) == first


def test_running_request_continues_while_no_other_may_join():
    first, other = make_request(), make_request("b")
    queue = make_queue(other, first)
    assert choose_next(queue, {first.request_id}, may_join=lambda queued: False) == first
    assert choose_next(queue, may_join=lambda queued: False) is None


def test_one_token_requests_have_a_queue_and_a_capacity_of_their_own():
    decoding, scored = make_request(), make_request(max_tokens=1)
    queue = make_queue(decoding, scored)
    assert choose_next(queue, has_capacity=lambda decodes: not decodes) == scored
    assert not get_queue_key(scored).decodes and get_queue_key(decoding).decodes


def test_blocked_queue_is_passed_until_the_starvation_bound():
    blocked, others = make_request("blocked"), [make_request(f"s{n % 3}") for n in range(STARVATION_BOUND + 5)]
    queue = make_queue(blocked, *others)
    num_started = 0

    while True:
        queue.start_round()
        assert choose_next(queue) == blocked
        queue.block(blocked)
        if (head := choose_next(queue)) is None:
            break
        queue.record_start(head)
        queue.end_turn(head, has_more=False)
        num_started += 1

    assert num_started == STARVATION_BOUND

    queue.start_round()
    assert start_requests(queue, 1) == [blocked], "its sampler has a slot now"
    assert len(start_requests(queue, 5)) == 5


def test_others_pass_a_blocked_queue_of_weight_0_without_end():
    blocked, others = make_request("blocked", owner="bob"), [make_request() for _ in range(STARVATION_BOUND + 5)]
    queue = make_weighted_queue({"bob": 0})
    for request in (blocked, *others):
        queue.add(request)
    for expected in others:
        queue.start_round()
        queue.block(blocked)
        assert start_requests(queue, 1) == [expected]


def test_weight_0_comes_after_both_kinds_of_others():
    queue = make_weighted_queue({"bob": 0})
    for owner in ("bob", "ann"):
        for max_tokens in (1, 8):
            queue.add(make_request(owner, max_tokens, owner))
    assert [request.owner for request in start_requests(queue, 4)] == ["ann", "ann", "bob", "bob"]


def test_blocked_queue_is_skipped_for_one_round():
    first, other = make_request(), make_request("b")
    queue = make_queue(first, other)
    queue.block(first)
    assert choose_next(queue) == other
    queue.start_round()
    assert choose_next(queue) == first


def test_removed_requests_do_not_start():
    first, second, other = make_request(), make_request(), make_request("b")
    queue = make_queue(first, second, other)
    assert queue.remove({first.request_id, other.request_id, RequestId("unknown")}) == [first, other]
    assert list(queue) == [second]


def test_requeued_request_is_the_head_of_its_queue():
    first, second = make_request(), make_request()
    queue = make_queue(second)
    queue.add_first(first)
    assert start_requests(queue, 2) == [first, second]


class DecidingAdmission(Admission):
    """Returns a fixed decision for each owner."""

    is_counting_usage = True

    def __init__(self, **decisions):
        self.decisions = decisions

    def may_start(self, queued):
        return self.decisions.get(queued.owner, START)


def test_an_owner_that_waits_is_passed_and_one_that_fails_gets_the_reason():
    waiting, failing = make_request(owner="ann"), make_request("b", owner="bob")
    queue = SampleQueue(DecidingAdmission(ann=Wait("later"), bob=Fail("too much")))
    queue.add(waiting)
    assert choose_next(queue) is None and queue.is_paused(waiting)
    assert choose_next(queue, {waiting.request_id}) == waiting, "the samples of one that runs start"
    queue.add(failing)
    turn = queue.choose_next((), num_open={}, has_capacity=lambda decodes: True, may_join=lambda queued: True)
    assert turn == (failing, "too much") and not queue.is_paused(failing)
