"""Notices and gauge history, on SQLite and PostgreSQL."""

import logging
import time
from collections.abc import Iterator

import pytest

from skyrl_tx.store import engine_state, notices
from skyrl_tx.store.database import Store
from skyrl_tx.store.notices import MAX_NOTICES, Notice, record_notices
from tests.support.polling import until

log = logging.getLogger("skyrl_tx.test_notices")


@pytest.fixture(autouse=True)
def _own_log(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ignore log records of SDK clients from earlier tests whose servers have ended."""
    monkeypatch.setattr(logging.getLogger("tinker"), "propagate", False)
    level = log.level
    log.setLevel(logging.INFO)
    yield
    log.setLevel(level)


def test_warnings_and_errors_are_kept_and_nothing_else(store: Store) -> None:
    with record_notices(store, "api"):
        log.info("all is well")
        log.warning("disk is %d %% full", 93)
        logging.getLogger("skyrl_tx.launch.supervisor").error("engine exited")
        until(lambda: len(store.read(notices.list_newest)) == 2, within_s=10)
    last, first = store.read(notices.list_newest)
    assert (first.process, first.level, first.text) == ("api", "warning", "disk is 93 % full")
    assert (last.process, last.level, last.text) == ("supervisor", "error", "engine exited")
    assert abs(last.at - time.time()) < 60


def test_the_last_lines_are_written_at_the_end_and_long_ones_are_cut(store: Store) -> None:
    with record_notices(store, "engine"):
        log.error("x" * 5000 + "\x00")
    (notice,) = store.read(notices.list_newest)
    assert len(notice.text) == 1000 and notice.text.endswith("…")


def test_a_flood_of_lines_is_bounded_and_counted(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    with record_notices(store, "engine"):
        for number in range(500):
            record = log.makeRecord(log.name, logging.WARNING, "", 0, f"line {number}", (), None)
            record.created = 6_000_000.0 if number < 499 else 6_000_060.0
            log.handle(record)
    found = store.read(notices.list_newest)
    assert len(found) in (60, 61), "at most 60 wait; those of the first minute may have been written before the last"
    assert found[0].text == "line 499 (439 earlier lines were omitted)"


def test_only_the_newest_are_kept(store: Store) -> None:
    for first in range(0, MAX_NOTICES + 500, 500):
        batch = [Notice(float(number), "api", "warning", str(number)) for number in range(first, first + 500)]
        store.write(lambda tx, batch=batch: notices.add(tx, batch))
    found = store.read(lambda tx: notices.list_newest(tx, 5000))
    assert len(found) == MAX_NOTICES and found[0].text == str(MAX_NOTICES + 499)


def test_one_of_several_processes_writes_a_point(store: Store) -> None:
    store.write(lambda tx: engine_state.add_gauges(tx, 100, {"a": 1.0}))
    store.write(lambda tx: engine_state.add_gauges(tx, 100, {"a": 2.0}))
    assert store.read(lambda tx: engine_state.list_gauges(tx, 0)) == [(100, {"a": 1.0})]
    assert store.read(lambda tx: engine_state.list_gauges(tx, 100)) == []


def test_points_are_thinned_to_minutes_after_a_day_and_deleted_after_a_month(store: Store) -> None:
    day, now = 86_400, 100 * 86_400
    times = [*range(now - 60, now, 10), *range(now - 2 * day, now - 2 * day + 120, 10), now - 31 * day]
    store.write(lambda tx: [engine_state.add_gauges(tx, at, {"a": 1.0}) for at in times])
    assert store.write(lambda tx: engine_state.thin_gauges(tx, now)) == 11
    kept = [at for at, _ in store.read(lambda tx: engine_state.list_gauges(tx, 0))]
    assert kept == [now - 2 * day, now - 2 * day + 60, *range(now - 60, now, 10)]
