"""Requests that wait because of a published pause, and the reasons they report."""

import pytest

from skyrl_tx.contract.ids import RequestId
from skyrl_tx.store import futures, pauses, sessions
from skyrl_tx.store.database import Store
from skyrl_tx.store.futures import NewRequest
from skyrl_tx.store.pauses import Pause
from skyrl_tx.store.tables import EngineStateRow

TRAINING, SAMPLING = "training_tokens_per_day", "sample_tokens_per_day"


def pause(kind: str, name: str, limit: str) -> Pause:
    return Pause(subject_kind=kind, subject=name, limit=limit, reason=f"{kind} {name}: {limit}")  # type: ignore[arg-type]


def submit(store: Store, kind: str) -> RequestId:
    """Submit a request of owner ann with API key 3 in the project math."""

    def work(tx) -> RequestId:
        session_id = sessions.create(tx, owner="ann", now=1.0, key_id=3, project_id="math")
        new = NewRequest(key="", kind=kind, owner="ann", session_id=session_id, body=b"")
        return futures.submit(tx, new, 1.0).request_id

    return store.write(work)


@pytest.mark.parametrize(
    ("kind", "limit", "other"), [("model_pass", TRAINING, SAMPLING), ("sample", SAMPLING, TRAINING)]
)
@pytest.mark.parametrize(("subject", "name"), [("owner", "ann"), ("key", "3"), ("project", "math")])
def test_a_request_waits_for_pauses_of_its_owner_key_and_project(
    store: Store, kind: str, limit: str, other: str, subject: str, name: str
) -> None:
    request_id = submit(store, kind)
    own = pause(subject, name, limit)
    others = [pause("owner", "bob", limit), pause("key", "4", limit), pause("project", "m", limit)]
    others.append(pause(subject, name, other))

    def reason(*found: Pause) -> str | None:
        return store.read(lambda tx: pauses.find_wait_reason(tx, request_id, found))

    assert reason(*others) is None
    assert reason(*others, own) == own.reason
    store.write(lambda tx: futures.count_delivery_attempt(tx, [request_id]))
    assert reason(own) is None, "it has started"


def test_pauses_of_several_engines_are_listed_once() -> None:
    one, two = pause("owner", "ann", TRAINING), pause("key", "3", SAMPLING)
    published = [
        {
            "subject_kind": known_pause.subject_kind,
            "subject": known_pause.subject,
            "limit": known_pause.limit,
            "reason": known_pause.reason,
        }
        for known_pause in (one, two)
    ]
    rows = [
        EngineStateRow(number=n, boot_id="b", pid=1, status="ready", capabilities={}, base_models=[], updated_at=1.0)
        for n in (1, 2, 3)
    ]
    rows[0].pauses, rows[1].pauses = published, published[:1]

    assert pauses.collect_pauses(*rows, None) == (one, two)
