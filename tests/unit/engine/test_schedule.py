"""Order of a model's requests, and turns of owners and models."""

import time
from dataclasses import replace
from itertools import count

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from skyrl_tx.contract import codec
from skyrl_tx.contract.ids import ModelId, RequestId, SessionId
from skyrl_tx.contract.requests import CreateModel, LoraSpec, ModelSpec, Rejected
from skyrl_tx.engine.extension import START, Admission, Decision, Fail, Wait
from skyrl_tx.engine.request_log import QueuedRequest
from skyrl_tx.engine.schedule import MAX_RUNNING_BATCHES, RunningBatch, Schedule, SequenceCursor
from tests.support.engine_harness import datum, forward_backward, optim_step

A, B, C = (ModelId(name) for name in "abc")
CREATE = CreateModel(base_model="tiny", spec=ModelSpec(lora=LoraSpec(rank=1, seed=0)))
positions = count(1)


def make_request(seq_id, request=None, model_id=A, session="s", owner="ann"):
    position = next(positions)
    request = request or forward_backward()
    return QueuedRequest(
        position=position,
        request_id=RequestId(f"r{position}"),
        kind=request.kind if isinstance(request, Rejected) else codec.get_kind(request),
        owner=owner,
        session_id=SessionId(session),
        model_id=model_id,
        seq_id=seq_id,
        sampling_session_id=None,
        attempts=0,
        request=request,
    )


def schedule(*requests, cursor=None, max_pass_tokens=10_000, max_models=8):
    made = Schedule(gap_timeout_s=10.0, max_pass_tokens=max_pass_tokens, max_models=max_models)
    for request in requests:
        if request.model_id not in made:
            made.add_model(request.model_id, cursor or SequenceCursor())
        made.add(request)
    return made


def batch(*model_ids, session="s", owner="ann", is_long=False):
    return RunningBatch(models=model_ids, owner=owner, session_id=SessionId(session), is_long=is_long)


class CompilingBatch(RunningBatch):
    is_waiting = True


def take_seq_ids(made, now=0.0, blocked=()):
    step = made.take(now, blocked)
    return None if step is None else [request.seq_id for request in step.requests]


def test_passes_share_a_batch_and_the_optim_step_follows():
    made = schedule(make_request(2), make_request(1), make_request(3, optim_step()), make_request(4))
    assert [take_seq_ids(made) for _ in range(4)] == [[1, 2], [3], [4], None]


def test_forward_and_forward_backward_do_not_share_a_batch():
    made = schedule(make_request(1), make_request(2, forward_backward(backward=False)), make_request(3))
    assert [take_seq_ids(made) for _ in range(3)] == [[1], [2], [3]]


def test_pass_behind_a_sequence_gap_waits():
    made = schedule(make_request(2))
    assert made.get_next_deadline() is None
    assert take_seq_ids(made, now=5.0) is None
    assert made.get_next_deadline() == 15.0
    made.add(make_request(1))
    assert take_seq_ids(made, now=6.0) == [1, 2]
    assert made.get_next_deadline() is None


def test_gap_timeout_ends_the_wait():
    made = schedule(make_request(2), make_request(5))
    assert take_seq_ids(made, now=5.0) is None
    assert take_seq_ids(made, now=14.9) is None
    assert take_seq_ids(made, now=15.0) == [2]
    # The next sequence gap has a separate timeout, which starts when it is the model's turn.
    assert take_seq_ids(made, now=16.0) is None
    assert take_seq_ids(made, now=26.0) == [5]


def test_barrier_ends_the_wait_for_a_sequence_gap():
    made = schedule(make_request(2), make_request(4), make_request(6, optim_step()), make_request(8))
    assert [take_seq_ids(made), take_seq_ids(made)] == [[2, 4], [6]]
    assert take_seq_ids(made) is None


def test_late_request_runs_unless_a_barrier_took_effect():
    made = schedule(make_request(3), cursor=SequenceCursor(next_seq=5, barrier_seq=2))
    assert take_seq_ids(made) == [3]
    made = schedule(make_request(3), cursor=SequenceCursor(next_seq=5, barrier_seq=4))
    step = made.take(0.0)
    assert step.refusal == (
        "seq_id 3 arrived too late: seq_id 4, a later optim_step, save or load of this model, has already run"
    )
    assert take_seq_ids(made) is None


def test_requests_without_seq_id_run_in_order_of_arrival():
    create = make_request(None, CREATE)
    made = schedule(create, make_request(1), make_request(0), make_request(2, optim_step()), make_request(None))
    assert [take_seq_ids(made) for _ in range(4)] == [[None], [1, 0], [2], [None]]
    made = schedule(make_request(2), make_request(None))
    assert take_seq_ids(made) == [None], "a request without seq_id does not wait for a gap"


def test_models_take_turns():
    made = schedule(
        *(make_request(n, optim_step()) for n in range(1, 4)),
        make_request(1, optim_step(), B),
        make_request(1, optim_step(), C),
    )
    steps = [made.take(0.0).requests[0].model_id for _ in range(5)]
    assert steps == [A, B, C, A, A]


def test_batch_holds_many_models_within_its_token_budget():
    requests = [make_request(n, model_id=name) for name in (A, B, C) for n in (1, 2)]  # 10 tokens each
    assert [request.model_id for request in schedule(*requests).take(0.0).requests] == [A, A, B, B, C, C]
    assert [request.model_id for request in schedule(*requests, max_models=2).take(0.0).requests] == [A, A, B, B]
    assert [request.model_id for request in schedule(*requests, max_pass_tokens=30).take(0.0).requests] == [A, A, B]
    assert [request.model_id for request in schedule(*requests, max_pass_tokens=5).take(0.0).requests] == [A]


def test_token_budget_keeps_a_models_order():
    small, large = forward_backward(data=(datum(0, 2),)), forward_backward(data=(datum(0, 50),))
    made = schedule(make_request(1, small), make_request(2, large), make_request(3, small), max_pass_tokens=20)
    assert [take_seq_ids(made) for _ in range(3)] == [[1], [2], [3]]


def test_blocked_models_are_skipped():
    made = schedule(make_request(1), make_request(1, model_id=B))
    assert made.take(0.0, {A}).requests[0].model_id == B
    assert made.take(0.0, {A}) is None
    assert take_seq_ids(made) == [1]


def test_batches_of_different_models_run_together():
    made = schedule(
        make_request(1),
        make_request(2),
        make_request(1, model_id=B),
        make_request(1, optim_step(), C),
        max_pass_tokens=10,
    )
    assert take_seq_ids(made) == [1]
    assert made.take(0.0, running=[batch(A)]).requests[0].model_id == B
    full = [batch(A), batch(B)] * (MAX_RUNNING_BATCHES // 2)
    assert made.take(0.0, running=full).requests[0].model_id == C, "it is not a pass"
    assert made.take(0.0, running=[batch(A), batch(B)]) is None


def test_last_batch_slot_is_reserved_for_batches_within_the_budget():
    large = forward_backward(data=(datum(0, 50),))
    made = schedule(make_request(1, large), make_request(1, model_id=B), max_pass_tokens=10)
    assert made.take(0.0, running=[batch(C)] * (MAX_RUNNING_BATCHES - 1)).requests[0].model_id == B
    assert made.take(0.0, running=[batch(C)] * (MAX_RUNNING_BATCHES - 1)) is None
    assert made.take(0.0, running=[batch(C)] * (MAX_RUNNING_BATCHES - 2)).requests[0].model_id == A


def test_last_long_batch_slot_is_reserved_for_sessions_without_a_long_pass():
    large = forward_backward(data=(datum(0, 50),))
    made = schedule(
        make_request(1, large),
        make_request(1, large, B),
        make_request(1, large, C, session="other"),
        max_pass_tokens=10,
    )
    first = made.take(0.0)
    assert (first.requests[0].model_id, first.is_long) == (A, True)

    long_of_a, long_of_c = batch(A, is_long=True), batch(C, session="other", is_long=True)
    third = made.take(0.0, running=[long_of_a, batch(A)])
    assert third.requests[0].model_id == C, "B is next, but its session has a running long pass"
    assert made.take(0.0, running=[long_of_a, long_of_c, batch(A)]) is None
    assert made.take(0.0, running=[long_of_c, batch(C)]).requests[0].model_id == B

    made = schedule(make_request(1, large), make_request(1, model_id=B), max_pass_tokens=10)
    long_of_c = batch(C, is_long=True)
    assert made.take(0.0, running=[long_of_c]).is_long, "two places are free for long"
    assert not made.take(0.0, running=[long_of_c, batch(C), batch(C)]).is_long, "others are as before"


def test_owners_take_turns_and_so_do_their_models():
    many = [make_request(n, optim_step(), ModelId(name)) for name in "abc" for n in (1, 2)]
    few = [make_request(n, optim_step(), ModelId("z"), owner="bob") for n in range(1, 4)]
    made = schedule(*many, *few)
    steps = "".join(made.take(0.0).requests[0].model_id for _ in range(9))
    assert steps == "azbzczabc"


def test_batch_holds_a_model_of_each_owner_before_a_second_one_of_any():
    requests = [make_request(1, model_id=ModelId(name)) for name in "abc"]  # 10 tokens each
    made = schedule(*requests, make_request(1, model_id=ModelId("z"), owner="bob"), max_pass_tokens=30)
    assert [request.model_id for request in made.take(0.0).requests] == ["a", "z", "b"]


def test_one_long_batch_slot_each_is_reserved_for_other_owners_and_for_other_sessions():
    large = forward_backward(data=(datum(0, 50),))
    mine = [
        make_request(1, large, ModelId(name), session=session) for name, session in (("a", "s"), ("b", "s"), ("c", "t"))
    ]
    made = schedule(*mine, make_request(1, optim_step(), ModelId("z"), session="u", owner="bob"), max_pass_tokens=10)

    def take(*running):
        """Take the next batch while long passes of these models are running."""
        sessions = {"a": "s", "c": "t", "z": "u"}
        batches = [
            batch(name, session=sessions[name], owner="bob" if name == "z" else "ann", is_long=True) for name in running
        ]
        step = made.take(0.0, running=batches)
        return None if step is None else step.requests[0].model_id

    assert [take(), take("a"), take("a")] == ["a", "z", "c"], "b is of a session with a running long pass"
    assert take("a", "c") is None
    made.add(make_request(2, large, ModelId("z"), session="u", owner="bob"))
    assert take("a", "c") == "z"
    assert take("c", "z") is None and take("c") == "b"


def test_an_owner_that_waits_for_the_compiler_leaves_a_slot_and_joins_no_other_batch():
    mine = [make_request(1, model_id=ModelId(name)) for name in "ab"]
    made = schedule(*mine)
    compiling = CompilingBatch(models=(), owner="ann", session_id=SessionId("s"))
    made.add_model(ModelId("z"), SequenceCursor())
    made.add(make_request(1, model_id=ModelId("z"), owner="bob"))
    assert [request.model_id for request in made.take(0.0, running=[compiling] * 3).requests] == ["z"]

    assert made.take(0.0, running=[compiling] * 3) is None, "the last slot is for other owners"
    assert [request.model_id for request in made.take(0.0, running=[compiling] * 2).requests] == ["a", "b"]

    alone = schedule(*mine)
    assert len(alone.take(0.0, running=[compiling] * 3).requests) == 2, "there is no other owner"


def test_forgotten_model_is_added_again_with_its_cursor():
    made = schedule(make_request(1), make_request(1, model_id=B), make_request(2, model_id=C))
    made.take(0.0)
    made.forget_idle_models({B})
    assert A not in made and B in made and C in made, "b is active, c waits for a sequence number"
    made.add_model(A, SequenceCursor(next_seq=2))
    made.add(make_request(2))
    assert take_seq_ids(made) == [2]


def test_cost_of_a_step_does_not_depend_on_models_without_requests():
    made = schedule()
    for number in range(20_000):
        made.add_model(ModelId(f"idle {number}"), SequenceCursor())
    started = time.process_time()
    for _ in range(1000):
        assert made.take(0.0) is None and made.get_next_deadline() is None
    assert time.process_time() - started < 1.0, "a look at each model takes 7 ms a step"


def test_models_of_running_batches_count_towards_max_models():
    made = schedule(make_request(1), make_request(1, model_id=B), max_models=2)
    assert made.take(0.0, running=[batch(C, ModelId("d"))]) is None
    assert [request.model_id for request in made.take(0.0, running=[batch(C)]).requests] == [A]


def test_batch_has_a_maximum_number_of_requests():
    made = schedule(*(make_request(n) for n in range(1, 101)))
    assert [len(step.requests) for step in iter(lambda: made.take(0.0), None)] == [32, 32, 32, 4]


def test_deferred_bodies_are_read_when_their_turn_is_near():
    whole = {n: make_request(n) for n in range(1, 9)}
    asked = []

    def read(requests):
        asked.append([request.seq_id for request in requests])
        return [whole[request.seq_id] for request in requests]

    made = Schedule(gap_timeout_s=10.0, max_pass_tokens=10, max_models=8, max_read_bytes=300, read_bodies=read)
    made.add_model(A, SequenceCursor())
    for seq_id in (3, 1, 2, 4, 5, 6, 8, 7):
        made.add(replace(whole[seq_id], request=None, num_deferred_bytes=100))
    assert [take_seq_ids(made) for _ in range(8)] == [[n] for n in range(1, 9)]
    assert asked == [[1, 2, 3], [4, 5, 6], [7, 8]]
    assert made.num_bytes == 0


def test_rejected_requests_keep_their_sequence_number():
    made = schedule(
        make_request(2, Rejected(kind="optim_step", message="no")),
        make_request(1, Rejected(kind="model_pass", message="no", backward=True)),
        make_request(3),
    )
    assert [take_seq_ids(made) for _ in range(3)] == [[1], [2], [3]]


@given(st.data())
def test_any_order_of_arrival_gives_seq_id_order(data):
    """The chunks of a call arrive in any order, calls arrive one after the other, and batches are taken at any time."""
    calls = data.draw(
        st.lists(st.integers(0, 4), min_size=1, max_size=6)
    )  # 0 means optim_step, any other value is the number of chunks
    made = Schedule(gap_timeout_s=10.0, max_pass_tokens=data.draw(st.sampled_from([1, 25, 10_000])), max_models=1)
    made.add_model(A, SequenceCursor())
    order = []

    def drain():
        while (step := made.take(0.0)) is not None:
            assert step.refusal is None
            order.extend(request.seq_id for request in step.requests)

    seq_id = 1
    for num_chunks in calls:
        numbers = list(range(seq_id, seq_id + max(1, num_chunks)))
        seq_id += len(numbers)
        for number in data.draw(st.permutations(numbers)):
            made.add(make_request(number, optim_step() if num_chunks == 0 else forward_backward()))
            if data.draw(st.booleans()):
                drain()
    drain()
    assert order == list(range(1, seq_id))


def test_pass_size_is_its_number_of_tokens():
    assert make_request(1).num_tokens == 10
    assert replace(make_request(1), request=optim_step()).num_tokens == 0
    assert np.sum([example.tokens.size for example in forward_backward().data]) == 10


class RecordingAdmission(Admission):
    """Returns a fixed decision for each owner, and records which requests were checked and started."""

    is_counting_usage = True

    def __init__(self, **decisions: Decision) -> None:
        self.decisions, self.asked, self.numbers = decisions, list[int](), list[int]()

    def may_start(self, queued):
        self.asked.append(queued.seq_id)
        return self.decisions.get(queued.owner, START)

    def record_start(self, queued, num_tokens):
        self.numbers.append(queued.seq_id)


def test_admission_is_asked_once_when_there_is_a_place():
    made = schedule(*(make_request(number) for number in range(1, 4)), make_request(4, optim_step()))
    made.admission = admission = RecordingAdmission()
    assert made.take(0.0, running=[batch(A)]) is None
    assert made.take(0.0, running=[batch(C)] * MAX_RUNNING_BATCHES) is None
    assert admission.asked == []
    assert [take_seq_ids(made) for _ in range(3)] == [[1, 2, 3], [4], None]
    assert admission.asked == admission.numbers == [1, 2, 3, 4]


def test_a_request_that_waits_lets_those_of_other_owners_start():
    made = schedule(make_request(1), make_request(2), make_request(1, model_id=B, owner="bob"))
    made.admission = admission = RecordingAdmission(ann=Wait("later"))
    step = made.take(0.0)
    assert step is not None and [request.owner for request in step.requests] == ["bob"]
    assert made.num_paused == 2 and admission.numbers == [1]
    admission.decisions.clear()
    assert made.num_paused == 0 and take_seq_ids(made) == [1, 2]


def test_a_request_that_may_not_start_is_taken_alone_with_the_reason():
    made = schedule(make_request(1), make_request(2, optim_step()))
    made.admission = admission = RecordingAdmission(ann=Fail("too much"))
    steps = [made.take(0.0) for _ in range(2)]
    assert [(step.failure, len(step.requests)) for step in steps if step] == [("too much", 1)] * 2
    assert admission.numbers == [], "it does not count as started"
