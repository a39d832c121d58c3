"""Portions: what each of several engines may use of a quota of what runs at once.

An engine may run as much as it holds. It holds what it has taken in a transaction that saw what all others hold, and
write transactions come one after the other, so the engines together never hold more than the quota. Each takes again
several times a second: an engine with more than its fair portion releases what it does not run when others want it.
What an ended engine held is free with its lease.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from sqlalchemy import bindparam, delete, insert, select
from sqlmodel import Session, col

from skyrl_tx.store import leases
from skyrl_tx.store.database import execute
from skyrl_tx.store.quotas import Quota
from skyrl_tx.store.tables import PortionRow


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """The work of a quota's subject in one engine."""

    quota: Quota
    num_running: int
    num_wanted: int
    """The number that runs or could start if there were no quota."""
    waits_since: float
    """When the oldest request that waits arrived; infinite if none waits."""


class _Other(NamedTuple):
    """The portion and the demand of another engine for the same quota."""

    num_held: int
    num_wanted: int
    waits_since: float


_COLUMNS = (
    *(col(PortionRow.engine), col(PortionRow.name), col(PortionRow.subject_kind), col(PortionRow.subject)),
    *(col(PortionRow.num_held), col(PortionRow.num_wanted), col(PortionRow.waits_since)),
)
_OF_OTHERS = select(*_COLUMNS).where(col(PortionRow.engine) != bindparam("own"))
_FORGET = delete(PortionRow).where(col(PortionRow.engine) == bindparam("own"))
_INSERT = insert(PortionRow)
_Key = tuple[str, str, str]


def _key(quota: Quota) -> _Key:
    return quota.limit, quota.subject.kind, quota.subject.name


def forget(tx: Session, engine: int) -> None:
    """Release all that an engine holds, which runs nothing."""
    execute(tx, _FORGET, {"own": engine})


def take(tx: Session, engine: int, demands: Collection[Demand]) -> dict[Quota, int]:
    """Replace what an engine holds by what it may have for its demands; return how much it may run of each quota.

    It holds more than that as long as more runs.
    """
    running = leases.holders(tx).keys()
    others: defaultdict[_Key, dict[int, _Other]] = defaultdict(dict)
    for number, limit, kind, subject, num_held, num_wanted, since in execute(tx, _OF_OTHERS, {"own": engine}):
        if number in running:
            others[limit, kind, subject][number] = _Other(num_held, num_wanted, since)
    may_run = {each.quota: _portion(engine, each, others[_key(each.quota)]) for each in demands}
    forget(tx, engine)
    rows = [
        {
            "engine": engine,
            "name": each.quota.limit,
            "subject_kind": each.quota.subject.kind,
            "subject": each.quota.subject.name,
            "num_held": max(may_run[each.quota], each.num_running),
            "num_wanted": each.num_wanted,
            "waits_since": each.waits_since,
        }
        for each in demands
    ]
    if rows:
        execute(tx, _INSERT, rows)
    return may_run


def _portion(engine: int, own: Demand, others: Mapping[int, _Other]) -> int:
    """Return how much an engine may run: its fair portion and what no other wants, as far as others do not hold it."""
    value = own.quota.value
    wanted = {number: (other.num_wanted, other.waits_since) for number, other in others.items()}
    fair = fair_portions(value, {**wanted, engine: (own.num_wanted, own.waits_since)})
    unwanted = value - sum(fair.values())
    free = value - sum(other.num_held for other in others.values())
    return max(0, min(fair[engine] + unwanted, free))


def fair_portions(value: int, wanted: Mapping[int, tuple[int, float]]) -> dict[int, int]:
    """Divide a quota among engines, each with how much it wants and since when.

    None gets more than it wants, and none that wants more gets less than another, but for what is left by the
    division: of that the engines whose requests have waited longest get 1 each.
    """
    left, level = value, value
    ascending = sorted(num_wanted for num_wanted, _ in wanted.values())
    for index, num_wanted in enumerate(ascending):
        level = left // (len(ascending) - index)
        if num_wanted > level:
            break
        left -= num_wanted
    else:
        level = value
    fair = {engine: min(num_wanted, level) for engine, (num_wanted, _) in wanted.items()}
    left = value - sum(fair.values())
    for engine in sorted(wanted, key=lambda engine: (wanted[engine][1], engine)):
        if left and wanted[engine][0] > fair[engine]:
            fair[engine] += 1
            left -= 1
    return fair
