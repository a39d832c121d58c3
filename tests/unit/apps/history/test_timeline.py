"""The requests of a session as read for its timeline."""

from sqlmodel import Session

from skyrl_tx.apps.history import timeline
from skyrl_tx.contract.ids import ModelId, SamplingSessionId, SessionId
from skyrl_tx.store import futures, sessions
from skyrl_tx.store.database import Store, get_existing
from skyrl_tx.store.futures import NewRequest
from skyrl_tx.store.tables import RequestRow


def submit(store: Store, session_id: SessionId, kind: str, number: int, *, status: str = "done") -> int:
    is_sample = kind == "sample"
    new = NewRequest(
        key=f"{session_id} {number}",
        kind=kind,
        owner="ann",
        session_id=session_id,
        model_id=None if is_sample else ModelId("m"),
        sampling_session_id=SamplingSessionId("s") if is_sample else None,
        seq_id=number,
        body=b"x" * 10_000,
    )
    position = store.write(lambda tx: futures.submit(tx, new, float(number))).position
    assert position is not None

    def complete(tx: Session) -> None:
        row = get_existing(tx, RequestRow, position)
        row.status, row.completed_at = status, None if status == "open" else number + 1.0

    store.write(complete)
    return position


def test_completed_passes_are_left_to_their_points(store: Store, session_id: SessionId) -> None:
    other = store.write(
        lambda tx: sessions.create(tx, owner="ann", tags=[], user_metadata={}, sdk_version="0.38.0", now=1.0)
    )
    created = submit(store, session_id, "create_model", 1)
    submit(store, session_id, "model_pass", 2)
    failed = submit(store, session_id, "model_pass", 3, status="failed")
    submit(store, other, "sample", 4)
    sampled = submit(store, session_id, "sample", 5)
    submit(store, session_id, "optim_step", 6)
    opened = submit(store, session_id, "optim_step", 7, status="open")

    def positions(limit: int = 10, after: int = 0) -> list[int]:
        found = store.read(lambda tx: timeline.read_requests_of_session(tx, session_id, limit, after))
        return [row.position for row in found]

    assert positions() == [created, failed, sampled, opened]
    assert positions(limit=2) == [sampled, opened]
    assert positions(after=failed) == [sampled, opened]
    (row,) = store.read(lambda tx: timeline.read_requests_of_session(tx, session_id, 1, sampled))
    assert (row.kind, row.status, row.created_at, row.completed_at) == ("optim_step", "open", 7.0, None)
