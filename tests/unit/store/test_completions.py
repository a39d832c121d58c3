"""Completion order, and cancellation of samples."""

from collections.abc import Callable

import pytest

from skyrl_tx.contract.ids import RequestId, SamplingSessionId, SessionId
from skyrl_tx.store import completions, futures, sessions
from skyrl_tx.store.completions import SampleCompletion
from skyrl_tx.store.database import Store
from skyrl_tx.store.futures import CLONE_STRIDE, NewRequest

SAMPLING = SamplingSessionId("s:sample:0")
OpenStore = Callable[..., Store]
Submit = Callable[..., RequestId]


@pytest.fixture
def submit(store: Store, session_id: SessionId) -> Submit:
    def submit(seq_id: int, kind: str = "sample") -> RequestId:
        new = NewRequest(
            key=f"{kind}/{seq_id}",
            kind=kind,
            owner="ann",
            session_id=session_id,
            body=b"body",
            seq_id=seq_id,
            sampling_session_id=SAMPLING,
        )
        return store.write(lambda tx: futures.submit(tx, new, 1.0)).request_id

    return submit


def complete(store: Store, request_id: RequestId, *, failed: bool = False) -> None:
    assert store.write(
        lambda tx: futures.complete(tx, request_id, b"result", failed=failed, effect_order=None, now=1.0)
    )


def cancel(store: Store, request_id: RequestId, owner: str = "ann") -> str:
    return store.write(lambda tx: completions.cancel(tx, request_id, owner, b"over", 2.0))


def list_for_client(store: Store, clone: int = 0, after: int = 0, limit: int = 10) -> list[SampleCompletion]:
    return store.read(lambda tx: completions.list_by_client(tx, SAMPLING, clone, after, limit))


def test_completions_are_listed_in_commit_order(store: Store, submit: Submit) -> None:
    first, second, third = (submit(seq_id) for seq_id in range(3))
    assert store.read(completions.get_last_position) == 0
    complete(store, third)
    complete(store, first, failed=True)
    assert list_for_client(store) == [SampleCompletion(1, third, False, 6), SampleCompletion(2, first, True, 6)]
    assert [completion.request_id for completion in list_for_client(store, limit=1)] == [third]
    cursor = list_for_client(store)[-1].answer_order
    assert list_for_client(store, after=cursor) == []
    complete(store, second)
    assert [completion.request_id for completion in list_for_client(store, after=cursor)] == [second]
    assert store.read(lambda tx: completions.list_completed(tx, 1, 10)) == [
        (2, first, SAMPLING, 1.0),
        (3, second, SAMPLING, 1.0),
    ]
    assert store.read(completions.get_last_position) == 3


def test_a_clone_lists_its_own_completions_only(store: Store, submit: Submit) -> None:
    original, last_of_copy, copy = submit(5), submit(8 * CLONE_STRIDE - 1), submit(7 * CLONE_STRIDE)
    for request_id in (original, last_of_copy, copy):
        complete(store, request_id)
    assert [completion.request_id for completion in list_for_client(store)] == [original]
    assert [completion.request_id for completion in list_for_client(store, clone=7)] == [last_of_copy, copy]
    assert list_for_client(store, clone=8) == []


def test_a_cancelled_sample_fails_and_the_engine_reads_it_once(store: Store, submit: Submit) -> None:
    running, other = submit(0), submit(1)
    assert cancel(store, running) == "cancelled"
    state = store.read(lambda tx: futures.get_state(tx, running, "ann"))
    assert (state.status, state.result) == ("failed", b"over")
    assert [request.request_id for request in store.read(lambda tx: futures.list_pending(tx, 0, 10))] == [other]
    ((position, cancelled_id),) = store.read(lambda tx: completions.list_cancelled(tx, 0))
    assert cancelled_id == running
    store.write(lambda tx: completions.forget_cancellations(tx, position))
    assert cancel(store, other) == "cancelled"
    ((later, cancelled_id),) = store.read(lambda tx: completions.list_cancelled(tx, position))
    assert cancelled_id == other and later > position
    store.write(completions.forget_cancellations)
    assert store.read(lambda tx: completions.list_cancelled(tx, 0)) == []


def test_only_open_samples_of_the_owner_are_cancelled(store: Store, submit: Submit) -> None:
    answered, foreign, training = submit(0), submit(1), submit(2, kind="model_pass")
    complete(store, answered)
    assert cancel(store, answered) == "over"
    assert cancel(store, foreign, owner="bob") == "over"
    assert cancel(store, RequestId("req-never")) == "over"
    assert cancel(store, training) == "no sample"
    assert cancel(store, foreign) == "cancelled"
    assert cancel(store, foreign) == "over"
    assert store.read(lambda tx: futures.get_state(tx, answered, "ann")).result == b"result"


def test_open_calls_of_chat_endpoints_are_cancelled(store: Store, submit: Submit) -> None:
    kept = submit(1)
    chat = store.write(lambda tx: sessions.create(tx, owner="bob", display_name=sessions.OPENAI, now=1.0))
    new = NewRequest(
        key="chat/1", kind="sample", owner="bob", session_id=chat, body=b"body", sampling_session_id=SAMPLING
    )
    called = store.write(lambda tx: futures.submit(tx, new, 1.0)).request_id
    assert store.write(lambda tx: completions.cancel_unread_calls(tx, b"over", 2.0)) == 1
    assert store.write(lambda tx: completions.cancel_unread_calls(tx, b"over", 3.0)) == 0
    assert store.read(lambda tx: futures.get_state(tx, called, "bob")).result == b"over"
    assert [request_id for _, request_id in store.read(lambda tx: completions.list_cancelled(tx, 0))] == [called]
    assert store.read(lambda tx: futures.get_state(tx, kept, "ann")).status == "open"


def test_a_process_knows_whether_it_is_alone(store: Store, open_store: OpenStore, database_url: str | None) -> None:
    assert store.is_alone()
    if database_url is not None:  # SQLite allows one API process
        second = open_store()
        assert not store.is_alone() and not second.is_alone()
        second.close()
        assert store.is_alone()
