"""Repeated and reordered submissions of a request create only one row."""

import itertools
from collections.abc import Callable, Sequence

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlmodel import Session

from skyrl_tx.contract.ids import SessionId
from skyrl_tx.store import futures
from skyrl_tx.store.database import Store
from skyrl_tx.store.futures import ConflictingRequest, NewRequest, SubmittedRequest

BODIES = st.sampled_from([b"", b"one", b"two"])
SENDS = st.lists(st.tuples(st.integers(0, 4), BODIES), max_size=25)
on_one_store = settings(max_examples=50, deadline=None, suppress_health_check=[*HealthCheck])
rounds = itertools.count()  # one key prefix per example, because all examples share a store


def submission(session_id: SessionId, key: str, body: bytes) -> Callable[[Session], SubmittedRequest]:
    new = NewRequest(key=key, kind="model_pass", owner="ann", session_id=session_id, body=body)
    return lambda tx: futures.submit(tx, new, 1.0)


def send(store: Store, session_id: SessionId, key: str, body: bytes) -> bool | None:
    """Submit a request. Returns whether it was new, or None for a conflict."""
    try:
        submitted = store.write(submission(session_id, key, body))
    except ConflictingRequest:
        return None
    assert submitted.request_id == futures.make_request_id(key)
    return submitted.is_new


def rows_since(store: Store, position: int) -> list[tuple[str, bytes]]:
    return [(row.request_id, row.body) for row in store.read(lambda tx: futures.list_pending(tx, position, 10**6))]


def last_position(store: Store) -> int:
    return max((row.position for row in store.read(lambda tx: futures.list_pending(tx, 0, 10**6))), default=0)


@on_one_store
@given(sends=SENDS)
def test_each_key_keeps_its_first_body_and_position(
    store: Store, session_id: SessionId, sends: Sequence[tuple[int, bytes]]
) -> None:
    run, start = next(rounds), last_position(store)
    first: dict[str, bytes] = {}
    for sequence, body in sends:
        key = f"{run}/{sequence}"
        expected = True if key not in first else (False if first[key] == body else None)
        first.setdefault(key, body)
        assert send(store, session_id, key, body) is expected
    assert rows_since(store, start) == [(futures.make_request_id(key), body) for key, body in first.items()]


@on_one_store
@given(sends=SENDS, data=st.data())
def test_concurrent_submissions_create_one_row_per_key(store: Store, session_id: SessionId, sends, data) -> None:
    """A retry and the original request may be part of one group commit, in any order."""
    run, start = next(rounds), last_position(store)
    order = data.draw(st.permutations(sends + sends))
    queued = [store.write_soon(submission(session_id, f"{run}/{sequence}", body)) for sequence, body in order]
    conflicts = [isinstance(write.exception(), ConflictingRequest) for write in queued]
    rows = rows_since(store, start)
    accepted = dict(rows)
    assert len(rows) == len(accepted) == len({sequence for sequence, _ in sends})
    assert conflicts == [accepted[futures.make_request_id(f"{run}/{sequence}")] != body for sequence, body in order]
    submitted = [write.result() for write in queued if write.exception() is None]
    assert sorted(one.request_id for one in submitted if one.is_new) == sorted(accepted)
