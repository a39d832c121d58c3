"""The order of a model's requests, and whose turn it is."""

from dataclasses import replace
from itertools import count

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from skyrl_tx.contract.ids import ModelId, RequestId, SessionId
from skyrl_tx.contract.requests import CreateModel, LoraSpec, ModelSpec, Rejected
from skyrl_tx.engine.schedule import MOST_UNDER_WAY, Place, Schedule
from skyrl_tx.engine.work import Unread, Work
from skyrl_tx.testing.engine_house import datum, forward_backward, optim_step

A, B, C = (ModelId(name) for name in "abc")
CREATE = CreateModel(base_model="tiny", spec=ModelSpec(lora=LoraSpec(rank=1, seed=0)))
positions = count(1)


def work(seq_id, request=None, model_id=A, attempts=0, session="s"):
    position = next(positions)
    return Work(
        position=position,
        request_id=RequestId(f"r{position}"),
        session_id=SessionId(session),
        model_id=model_id,
        seq_id=seq_id,
        sampling_session_id=None,
        attempts=attempts,
        request=request or forward_backward(),
    )


def schedule(*works, place=None, max_pass_tokens=10_000, max_models=8):
    made = Schedule(hole_wait_s=10.0, max_pass_tokens=max_pass_tokens, max_models=max_models)
    for each in works:
        if each.model_id not in made:
            made.open(each.model_id, place or Place())
        made.add(each)
    return made


def taken(made, now=0.0, held=()):
    step = made.take(now, held)
    return None if step is None else [each.seq_id for each in step.works]


def test_passes_side_by_side_then_the_step():
    made = schedule(work(2), work(1), work(3, optim_step()), work(4))
    assert [taken(made) for _ in range(4)] == [[1, 2], [3], [4], None]


def test_forward_and_backward_do_not_share_a_batch():
    made = schedule(work(1), work(2, forward_backward(backward=False)), work(3))
    assert [taken(made) for _ in range(3)] == [[1], [2], [3]]


def test_a_pass_above_a_hole_waits_for_it():
    made = schedule(work(2))
    assert made.next_deadline() is None
    assert taken(made, now=5.0) is None
    assert made.next_deadline() == 15.0
    made.add(work(1))
    assert taken(made, now=6.0) == [1, 2]
    assert made.next_deadline() is None


def test_a_pass_above_a_hole_waits_no_longer_than_said():
    made = schedule(work(2), work(5))
    assert taken(made, now=5.0) is None
    assert taken(made, now=14.9) is None
    assert taken(made, now=15.0) == [2]
    # The next hole has a wait of its own, begun when its model had its turn.
    assert taken(made, now=16.0) is None
    assert taken(made, now=26.0) == [5]


def test_a_barrier_says_that_what_is_missing_never_comes():
    made = schedule(work(2), work(4), work(6, optim_step()), work(8))
    assert [taken(made), taken(made)] == [[2, 4], [6]]
    assert taken(made) is None


def test_what_comes_late_runs_until_a_barrier_took_effect():
    made = schedule(work(3), place=Place(next_seq=5, barrier_seq=2))
    assert taken(made) == [3]
    made = schedule(work(3), place=Place(next_seq=5, barrier_seq=4))
    step = made.take(0.0)
    assert step.refusal == (
        "seq_id 3 came too late: seq_id 4, an optim_step, save or load that comes after it, has taken effect"
    )
    assert taken(made) is None


def test_requests_without_a_number_run_in_order_of_arrival():
    create = work(None, CREATE)
    made = schedule(create, work(1), work(0), work(2, optim_step()), work(None))
    assert [taken(made) for _ in range(4)] == [[None], [1, 0], [2], [None]]
    made = schedule(work(2), work(None))
    assert taken(made) == [None], "one without a number does not wait for a hole"


def test_models_take_turns():
    made = schedule(*(work(n, optim_step()) for n in range(1, 4)), work(1, optim_step(), B), work(1, optim_step(), C))
    steps = [made.take(0.0).works[0].model_id for _ in range(5)]
    assert steps == [A, B, C, A, A]


def test_a_batch_holds_many_models_within_its_budget():
    works = [work(n, model_id=name) for name in (A, B, C) for n in (1, 2)]  # of 10 tokens each
    assert [each.model_id for each in schedule(*works).take(0.0).works] == [A, A, B, B, C, C]
    assert [each.model_id for each in schedule(*works, max_models=2).take(0.0).works] == [A, A, B, B]
    assert [each.model_id for each in schedule(*works, max_pass_tokens=30).take(0.0).works] == [A, A, B]
    assert [each.model_id for each in schedule(*works, max_pass_tokens=5).take(0.0).works] == [A]


def test_a_budget_never_breaks_a_models_order():
    small, large = forward_backward(data=(datum(0, 2),)), forward_backward(data=(datum(0, 50),))
    made = schedule(work(1, small), work(2, large), work(3, small), max_pass_tokens=20)
    assert [taken(made) for _ in range(3)] == [[1], [2], [3]]


def test_held_models_are_passed_over():
    made = schedule(work(1), work(1, model_id=B))
    assert made.take(0.0, {A}).works[0].model_id == B
    assert made.take(0.0, {A}) is None
    assert taken(made) == [1]


def test_what_was_tried_before_runs_alone():
    made = schedule(work(1), work(2, attempts=1), work(3), work(1, model_id=B, attempts=2))
    assert [len(step.works) for step in iter(lambda: made.take(0.0), None)] == [1] * 4


def test_what_was_tried_before_is_first_where_it_may_run():
    made = schedule(work(1), work(1, model_id=B, attempts=1), work(2, model_id=C, attempts=1))
    assert made.has_suspect(0.0) and not made.has_suspect(0.0, held={B})
    assert made.take(0.0).works[0].model_id == B
    assert not made.has_suspect(9.0), "C waits for its first request"
    assert made.take(9.0).works[0].model_id == A
    assert made.has_suspect(10.0)
    assert made.take(10.0).works[0].model_id == C
    assert not made.has_suspect(20.0)


def test_what_was_tried_before_waits_until_nothing_is_under_way():
    made = schedule(work(1), work(1, model_id=B, attempts=1))
    assert made.take(0.0, num_under_way=1, busy={C}) is None, "A does not go before it"
    assert [made.take(0.0).works[0].model_id for _ in range(2)] == [B, A]


def test_batches_run_beside_one_another_on_other_models():
    made = schedule(work(1), work(2), work(1, model_id=B), work(1, optim_step(), C), max_pass_tokens=10)
    assert taken(made) == [1]
    assert made.take(0.0, busy={A}, num_under_way=1).works[0].model_id == B
    assert made.take(0.0, busy={A, B}, num_under_way=MOST_UNDER_WAY).works[0].model_id == C, "it is no pass"
    assert made.take(0.0, busy={A, B}, num_under_way=2) is None


def test_the_last_place_is_for_what_is_within_the_budget():
    large = forward_backward(data=(datum(0, 50),))
    made = schedule(work(1, large), work(1, model_id=B), max_pass_tokens=10)
    assert made.take(0.0, busy={C}, num_under_way=MOST_UNDER_WAY - 1).works[0].model_id == B
    assert made.take(0.0, busy={C}, num_under_way=MOST_UNDER_WAY - 1) is None
    assert made.take(0.0, busy={C}, num_under_way=MOST_UNDER_WAY - 2).works[0].model_id == A


def test_the_last_place_for_long_passes_is_for_a_session_that_has_none():
    large = forward_backward(data=(datum(0, 50),))
    made = schedule(work(1, large), work(1, large, B), work(1, large, C, session="other"), max_pass_tokens=10)
    first = made.take(0.0)
    assert (first.works[0].model_id, first.is_long) == (A, True)
    third = made.take(0.0, busy={A}, num_under_way=2, with_long={SessionId("s")})
    assert third.works[0].model_id == C, "B is next, but has a long one under way"
    assert made.take(0.0, busy={A, C}, num_under_way=3, with_long={SessionId("s"), SessionId("other")}) is None
    assert made.take(0.0, busy={C}, num_under_way=2, with_long={SessionId("other")}).works[0].model_id == B
    made = schedule(work(1, large), work(1, model_id=B), max_pass_tokens=10)
    assert made.take(0.0, busy={C}, num_under_way=1, with_long={SessionId("s")}).is_long, "two places are free for long"
    assert not made.take(0.0, busy={C}, num_under_way=3, with_long={SessionId("s")}).is_long, "others are as before"


def test_models_under_way_take_up_room_for_models():
    made = schedule(work(1), work(1, model_id=B), max_models=2)
    assert made.take(0.0, busy={C, ModelId("d")}, num_under_way=1) is None
    assert [each.model_id for each in made.take(0.0, busy={C}, num_under_way=1).works] == [A]


def test_a_batch_has_an_end_however_short_its_requests():
    made = schedule(*(work(n) for n in range(1, 101)))
    assert [len(step.works) for step in iter(lambda: made.take(0.0), None)] == [32, 32, 32, 4]


def test_what_is_not_read_yet_is_read_when_its_turn_is_near():
    whole = {n: work(n) for n in range(1, 9)}
    asked = []

    def read(works):
        asked.append([each.seq_id for each in works])
        return [whole[each.seq_id] for each in works]

    made = Schedule(hole_wait_s=10.0, max_pass_tokens=10, max_models=8, max_read_bytes=300, read=read)
    made.open(A, Place())
    for seq_id in (3, 1, 2, 4, 5, 6, 8, 7):
        made.add(replace(whole[seq_id], request=Unread("model_pass", 100)))
    assert [taken(made) for _ in range(8)] == [[n] for n in range(1, 9)]
    assert asked == [[1, 2, 3], [4, 5, 6], [7, 8]]
    assert made.num_bytes == 0


def test_rejected_requests_keep_their_place():
    made = schedule(
        work(2, Rejected(kind="optim_step", message="no")),
        work(1, Rejected(kind="model_pass", message="no", backward=True)),
        work(3),
    )
    assert [taken(made) for _ in range(3)] == [[1], [2], [3]]


@given(st.data())
def test_any_order_of_arrival_gives_the_order_of_numbers(data):
    """Chunks of a call arrive in any order, calls one after the other; turns are taken at any time."""
    calls = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=6))  # 0: an optim_step, else so many chunks
    made = Schedule(hole_wait_s=10.0, max_pass_tokens=data.draw(st.sampled_from([1, 25, 10_000])), max_models=1)
    made.open(A, Place())
    order = []

    def drain():
        while (step := made.take(0.0)) is not None:
            assert step.refusal is None
            order.extend(each.seq_id for each in step.works)

    seq_id = 1
    for num_chunks in calls:
        numbers = list(range(seq_id, seq_id + max(1, num_chunks)))
        seq_id += len(numbers)
        for number in data.draw(st.permutations(numbers)):
            made.add(work(number, optim_step() if num_chunks == 0 else forward_backward()))
            if data.draw(st.booleans()):
                drain()
    drain()
    assert order == list(range(1, seq_id))


def test_sizes_are_counted_in_tokens():
    assert work(1).num_tokens == 10
    assert replace(work(1), request=optim_step()).num_tokens == 0
    assert np.sum([each.tokens.size for each in forward_backward().data]) == 10
