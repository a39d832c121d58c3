"""Usage is summed in buckets, totalled by group, merged into hours, and kept after the session ends."""

import pytest

from skyrl_tx.apps.teams import usage
from skyrl_tx.apps.teams.usage import GroupColumn, Total, Work
from skyrl_tx.contract.ids import SessionId
from skyrl_tx.store import sessions
from skyrl_tx.store.database import Store
from skyrl_tx.store.tables import SessionRow

DAY = 86_400
NOON = 100 * DAY + DAY // 2


def add(store: Store, now: float, *work: Work, session: str = "s", model: str = "m", owner: str = "ann") -> None:
    store.write(lambda tx: usage.add(tx, owner, SessionId(session), model, now, work))


def totals(store: Store, *group_by: GroupColumn, owner: str | None = None, since: float = 0, **where) -> list[Total]:
    return store.read(lambda tx: usage.read_totals(tx, owner, since, group_by, **where))


def buckets(store: Store) -> list[tuple[int, int, int]]:
    found = store.read(lambda tx: tx.exec(usage.select(usage.UsageRow)).scalars().all())  # type: ignore
    return sorted((row.bucket_at, row.tokens, row.requests) for row in found)


def test_work_of_five_minutes_adds_up(store: Store) -> None:
    add(store, NOON + 1, Work(kind="training", tokens=10, device_s=0.5), Work(kind="forward", tokens=1))
    add(store, NOON + 299, Work(kind="training", tokens=5, device_s=0.25))
    add(store, NOON + 300, Work(kind="training", tokens=7))
    assert buckets(store) == [(NOON, 1, 1), (NOON, 15, 2), (NOON + 300, 7, 1)]
    assert totals(store) == [
        Total(group=(), kind="forward", tokens=1, requests=1, device_s=0.0),
        Total(group=(), kind="training", tokens=22, requests=3, device_s=0.75),
    ]


def test_no_work_is_no_row(store: Store) -> None:
    add(store, NOON)
    assert buckets(store) == []


@pytest.mark.parametrize(
    ("group_by", "expected"),
    [
        (("owner",), [(("ann",), 3), (("bob",), 4)]),
        (("session_id", "model_id"), [(("s", ""), 2), (("s", "m"), 1), (("t", "m"), 4)]),
        (("hour",), [((NOON,), 1), ((NOON + 3600,), 6)]),
        (("day",), [((100 * DAY,), 7)]),
    ],
)
def test_groups_of_totals(store: Store, group_by: tuple[GroupColumn, ...], expected: list) -> None:
    add(store, NOON, Work(kind="sampled", tokens=1))
    add(store, NOON + 3600, Work(kind="sampled", tokens=2), model="")
    add(store, NOON + 3900, Work(kind="sampled", tokens=4), session="t", owner="bob")
    assert [(total.group, total.tokens) for total in totals(store, *group_by)] == expected


def test_totals_of_an_owner_a_time_and_a_model(store: Store) -> None:
    add(store, NOON, Work(kind="sampled", tokens=1))
    add(store, NOON + 600, Work(kind="sampled", tokens=2), model="n")
    add(store, NOON + 600, Work(kind="sampled", tokens=4), session="t", owner="bob")
    assert [total.tokens for total in totals(store, owner="ann")] == [3]
    assert [total.tokens for total in totals(store, since=NOON + 400)] == [6]
    assert [total.tokens for total in totals(store, until=NOON + 600)] == [1]
    assert [total.tokens for total in totals(store, model_id="n")] == [2]
    assert [total.tokens for total in totals(store, session_ids=[SessionId("t")])] == [4]
    assert len(totals(store, "session_id", limit=1)) == 1


def test_owner_outlives_the_session_and_its_project_does_not(store: Store) -> None:
    session_id = store.write(lambda tx: sessions.create(tx, owner="ann", project_id="p", now=1.0))
    add(store, NOON, Work(kind="training", tokens=3), session=session_id)
    assert [total.group for total in totals(store, "owner", "project_id", "key_id")] == [("ann", "p", None)]
    store.write(lambda tx: tx.delete(tx.get(SessionRow, session_id)))
    assert [total.group for total in totals(store, "owner", "project_id", "key_id")] == [("ann", None, None)]


def test_old_buckets_are_joined_to_hours_and_then_deleted(store: Store) -> None:
    for now in (NOON, NOON + 300, NOON + 600, NOON + 3900):
        add(store, now, Work(kind="training", tokens=1, device_s=0.5))
    later = NOON + 14 * DAY
    assert store.write(lambda tx: usage.prune(tx, later + 301)) == 1
    assert buckets(store) == [(NOON, 2, 2), (NOON + 600, 1, 1), (NOON + 3900, 1, 1)]
    assert store.write(lambda tx: usage.prune(tx, later + DAY, limit=1)) == 1
    assert store.write(lambda tx: usage.prune(tx, later + DAY, limit=1)) == 1
    assert store.write(lambda tx: usage.prune(tx, later + DAY, limit=1)) == 0
    assert buckets(store) == [(NOON, 3, 3), (NOON + 3600, 1, 1)]
    assert [(total.tokens, total.device_s) for total in totals(store)] == [(4, 2.0)]
    assert store.write(lambda tx: usage.prune(tx, NOON + 401 * DAY)) == 2
    assert buckets(store) == []
