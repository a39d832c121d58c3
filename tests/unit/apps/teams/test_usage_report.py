"""Reports of usage by subject, with costs and storage."""

from pathlib import Path

import pytest

from skyrl_tx.apps.teams import usage
from skyrl_tx.apps.teams.prices import Prices, compute_storage_cost, compute_token_cost, get_price_per_million
from skyrl_tx.apps.teams.usage import StorageHourRow, Work
from skyrl_tx.apps.teams.usage_report import Subject, UsageLine, read_usage_lines
from skyrl_tx.contract.ids import SessionId
from skyrl_tx.store import sessions
from skyrl_tx.store.database import Store

DAY = 86_400
NOON = 20_000 * DAY + DAY // 2
PRICES = Prices(training=2.0, sampled=10.0, storage=0.72)


@pytest.fixture
def store(tmp_path: Path):
    with_rows = Store.open(tmp_path, role="tool")

    def fill(tx) -> None:
        ann = sessions.create(tx, owner="ann", project_id="p", key_id=1, now=1.0, session_id=SessionId("s"))
        bob = sessions.create(tx, owner="bob", now=1.0, session_id=SessionId("t"))
        work = (Work(kind="training", tokens=1_000_000, device_s=2.0), Work(kind="forward", tokens=500_000))
        usage.add(tx, "ann", ann, "m", NOON, work)
        usage.add(tx, "ann", ann, "", NOON + DAY, (Work(kind="sampled", tokens=100_000, device_s=1.0),))
        others = Work(kind="prefill", tokens=7), Work(kind="prefill_cached", tokens=3), Work(kind="checkpoint")
        usage.add(tx, "bob", bob, "n", NOON, others)
        for hour in range(10):
            row = StorageHourRow(hour_at=NOON + hour * 3600, session_id=ann, owner="ann", num_bytes=10**9)
            tx.add(row)

    with_rows.write(fill)
    yield with_rows
    with_rows.close()


def lines(store: Store, by: Subject, *, owner: str | None = None, since: float = 0) -> list[UsageLine]:
    return list(store.read(lambda tx: read_usage_lines(tx, owner, by, since, PRICES)))


def test_lines_by_owner_have_all_sums_and_costs(store: Store) -> None:
    ann, bob = lines(store, "owner")
    assert ann == UsageLine(
        subject="ann",
        training_tokens=1_500_000,
        sampled_tokens=100_000,
        device_s=3.0,
        gigabyte_hours=10.0,
        cost_usd=pytest.approx(3.0 + 1.0 + 0.01),
    )
    assert bob == UsageLine(subject="bob", prefill_tokens=7, cached_tokens=3, checkpoints=1)
    assert ann.tokens == 1_600_000 and bob.tokens == 10


@pytest.mark.parametrize(
    ("by", "expected"),
    [
        ("project", [("p", 1_600_000), ("no project", 10)]),
        ("key", [("1", 1_600_000), ("no key", 10)]),
        ("session", [("s", 1_600_000), ("t", 10)]),
        ("run", [("m", 1_500_000), ("base weights", 100_000), ("n", 10)]),
        ("day", [("2024-10-04", 1_500_010), ("2024-10-05", 100_000)]),
    ],
)
def test_subjects(store: Store, by: Subject, expected: list[tuple[str, int]]) -> None:
    assert [(line.subject, line.tokens) for line in lines(store, by)] == expected


def test_storage_has_no_key_and_no_run(store: Store) -> None:
    stored = {by: sum(line.gigabyte_hours for line in lines(store, by)) for by in ("project", "day", "key", "run")}
    assert stored == {"project": 10.0, "day": 10.0, "key": 0, "run": 0}


def test_lines_of_one_owner_and_of_a_time(store: Store) -> None:
    assert [line.subject for line in lines(store, "owner", owner="bob")] == ["bob"]
    assert [(line.subject, line.tokens) for line in lines(store, "owner", since=NOON + DAY)] == [("ann", 100_000)]


@pytest.mark.parametrize("kind", ["checkpoint", "storage", "unknown"])
def test_other_kinds_have_no_price_of_tokens(kind: str) -> None:
    assert get_price_per_million(PRICES, kind) is None and compute_token_cost(PRICES, kind, 5) is None
    assert compute_storage_cost(Prices(), 1.0) is None
