from dataclasses import replace

import pytest

from skyrl_tx.contract.ids import ModelId, RequestId, SamplingSessionId, SessionId
from skyrl_tx.store import futures
from skyrl_tx.store.database import Store
from skyrl_tx.store.futures import ConflictingRequest, FutureState, NewRequest

MODEL = ModelId("run")


@pytest.fixture
def new(session_id: SessionId) -> NewRequest:
    return NewRequest(
        key="model/run/1",
        kind="model_pass",
        owner="ann",
        session_id=session_id,
        body=b"body",
        model_id=MODEL,
        seq_id=2**62,
        sampling_session_id=SamplingSessionId("sampling"),
    )


def submit(store: Store, new: NewRequest, now: float = 1.0) -> futures.SubmittedRequest:
    return store.write(lambda tx: futures.submit(tx, new, now))


def pending(store: Store, after: int = 0, limit: int = 100) -> list[futures.PendingRequest]:
    return store.read(lambda tx: futures.list_pending(tx, after, limit))


def complete(store: Store, request_id: RequestId, effect_order: int | None = None, failed: bool = False) -> bool:
    return store.write(
        lambda tx: futures.complete(tx, request_id, b"result", failed=failed, effect_order=effect_order, now=5.0)
    )


def state(store: Store, request_id: RequestId, owner: str = "ann") -> FutureState:
    return store.read(lambda tx: futures.get_state(tx, request_id, owner))


def test_pending_returns_a_request_as_submitted(store: Store, new: NewRequest) -> None:
    submitted = submit(store, new, now=7.5)
    (request,) = pending(store)

    assert submitted.is_new
    assert request == futures.PendingRequest(
        position=1,
        request_id=submitted.request_id,
        created_at=7.5,
        kind="model_pass",
        owner="ann",
        body=b"body",
        session_id=new.session_id,
        model_id=MODEL,
        seq_id=2**62,
        sampling_session_id=SamplingSessionId("sampling"),
        attempts=0,
        effect_order=None,
        failed=False,
    )
    assert state(store, submitted.request_id).created_at == 7.5


def test_request_ids_derive_from_the_idempotency_key() -> None:
    assert futures.make_request_id("model/run/1") == "req-c3b2mhfnzrvgamsrdb2jp7ihhr2jbxxj"
    assert futures.make_request_id("model/run/1") != futures.make_request_id("model/run/2")
    assert futures.make_request_id("") != futures.make_request_id("")


def test_requests_without_a_key_are_never_duplicates(store: Store, new: NewRequest) -> None:
    first, second = [submit(store, replace(new, key="")) for _ in range(2)]
    assert first.is_new and second.is_new and first.request_id != second.request_id


def test_duplicates_may_differ_outside_the_digest(store: Store, new: NewRequest) -> None:
    submit(store, replace(new, body=b"seed 1", digest=b"seed _"))
    assert not submit(store, replace(new, body=b"seed 2", digest=b"seed _")).is_new
    assert [request.body for request in pending(store)] == [b"seed 1"]


def test_a_key_with_another_body_conflicts(store: Store, new: NewRequest) -> None:
    submit(store, new)
    with pytest.raises(ConflictingRequest, match="'model/run/1'"):
        submit(store, replace(new, body=b"other"))
    assert [request.body for request in pending(store)] == [b"body"]


def test_duplicates_may_differ_in_kind(store: Store, new: NewRequest) -> None:
    """If a checkpoint is deleted between two submissions of a load, the second is a rejected request."""
    submit(store, replace(new, kind="load_weights", digest=b"as sent"))
    assert not submit(store, replace(new, kind="rejected", body=b"no such path", digest=b"as sent")).is_new
    assert [request.kind for request in pending(store)] == ["load_weights"]


def test_a_duplicate_of_a_complete_request_is_not_pending(store: Store, new: NewRequest) -> None:
    request_id = submit(store, new).request_id
    complete(store, request_id)
    assert submit(store, new) == futures.SubmittedRequest(request_id, is_new=False)
    assert pending(store) == []


def test_pending_lists_open_requests_in_pages_by_arrival(store: Store, new: NewRequest) -> None:
    ids = [submit(store, replace(new, key=f"model/run/{number}")).request_id for number in range(6)]
    complete(store, ids[2])
    first = pending(store, limit=2)
    rest = pending(store, after=first[-1].position)
    assert [request.request_id for request in first + rest] == [ids[0], ids[1], ids[3], ids[4], ids[5]]


def test_delivery_attempts_are_counted(store: Store, new: NewRequest) -> None:
    ids = [submit(store, replace(new, key=f"k/{number}")).request_id for number in range(3)]
    for _ in range(2):
        store.write(lambda tx: futures.count_delivery_attempt(tx, ids[:2]))
    assert [request.attempts for request in pending(store)] == [2, 2, 0]


def test_a_delivery_attempt_can_be_undone(store: Store, new: NewRequest) -> None:
    request_id = submit(store, new).request_id
    store.write(lambda tx: futures.count_delivery_attempt(tx, [request_id]))
    store.write(lambda tx: futures.undo_delivery_attempt(tx, [request_id]))
    assert [request.attempts for request in pending(store)] == [0]


def test_last_answered_sequence_number(store: Store, new: NewRequest) -> None:
    for seq_id, kind in ((1, "model_pass"), (2, "optim_step"), (3, "model_pass")):
        submit(store, replace(new, key=f"k/{seq_id}", seq_id=seq_id, kind=kind))
    assert store.read(lambda tx: futures.get_last_answered_seq(tx, MODEL)) == 0
    complete(store, futures.make_request_id("k/1"))
    complete(store, futures.make_request_id("k/2"), failed=True)
    assert store.read(lambda tx: futures.get_last_answered_seq(tx, MODEL)) == 2
    assert store.read(lambda tx: futures.get_last_answered_seq(tx, MODEL, ["model_pass"])) == 1


@pytest.mark.parametrize(("failed", "status"), [(False, "done"), (True, "failed")])
def test_a_result_is_visible_to_its_owner_only(store: Store, new: NewRequest, failed: bool, status: str) -> None:
    request_id = submit(store, new).request_id
    assert state(store, request_id) == FutureState(status="open", kind="model_pass", created_at=1.0)
    assert complete(store, request_id, failed=failed)
    assert state(store, request_id) == FutureState(status=status, kind="model_pass", result=b"result", created_at=1.0)
    assert state(store, request_id, owner="bob") == FutureState(status="unknown")
    assert state(store, RequestId("9" * 30)) == FutureState(status="unknown")


def test_the_first_result_stays(store: Store, new: NewRequest) -> None:
    request_id = submit(store, new).request_id
    assert complete(store, request_id)
    assert not complete(store, request_id, failed=True)
    assert state(store, request_id).status == "done"
    assert not complete(store, RequestId("req-unknown"))


def test_statuses_of_complete_requests_only(store: Store, new: NewRequest) -> None:
    ids = [submit(store, replace(new, key=f"k/{number}")).request_id for number in range(3)]
    complete(store, ids[0])
    complete(store, ids[1], failed=True)
    many = [*ids, *(RequestId(f"req-{number}") for number in range(2500))]
    assert store.read(lambda tx: futures.get_outcomes(tx, many)) == {ids[0]: "done", ids[1]: "failed"}
    assert store.read(lambda tx: futures.get_outcomes(tx, [])) == {}


def test_log_order(store: Store, new: NewRequest) -> None:
    ids = [submit(store, replace(new, key=f"k/{number}")).request_id for number in range(5)]
    other = submit(store, replace(new, key="other", model_id=ModelId("other"))).request_id
    for request_id, order in ((ids[3], 1), (ids[0], 3), (ids[1], 2), (other, 2)):
        complete(store, request_id, effect_order=order, failed=request_id == ids[0])
    complete(store, ids[4], effect_order=None)
    replayed = store.read(lambda tx: futures.read_log(tx, MODEL, 1))
    assert [(request.request_id, request.effect_order, request.failed) for request in replayed] == [
        (ids[1], 2, False),
        (ids[0], 3, True),
    ]
