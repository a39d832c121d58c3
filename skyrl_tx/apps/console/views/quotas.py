"""Quotas as the page shows them: what is used of each, as text and as a share."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from skyrl_tx.apps.console.format import count
from skyrl_tx.store.allowances import Allowance
from skyrl_tx.store.quotas import DAY_LIMITS
from skyrl_tx.store.tables import OverQuota

_TITLES = {
    "training_tokens_per_day": "Training tokens a day",
    "sample_tokens_per_day": "Sample tokens a day",
    "sample_tokens_per_minute": "Sample tokens a minute",
    "sample_requests_per_second": "Sample requests a second",
    "samples_at_once": "Samples at once",
    "training_steps_at_once": "Training steps at once",
    "models_in_training": "Models in training",
    "checkpoint_bytes": "Checkpoints",
}
_BEYOND: dict[OverQuota, str] = {"wait": "waits until 00:00 UTC", "fail": "fails until 00:00 UTC"}
_UNITS = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3))


@dataclass(frozen=True, slots=True)
class QuotaLine:
    """One quota of one subject. `used` and `share` are None where only the running server knows them."""

    subject: str
    title: str
    used: str | None
    allowed: str
    share: float | None
    beyond: str | None
    """The fate of work now, if the quota of a day is used up."""


def quota_lines(allowances: Sequence[Allowance]) -> Iterator[QuotaLine]:
    """Yield the lines of a page."""
    for each in allowances:
        quota, used = each.quota, each.used
        share = None if used is None else min(used / quota.value, 1.0) if quota.value else 1.0
        yield QuotaLine(
            subject=quota.subject.label,
            title=_TITLES[quota.limit],
            used=None if used is None else shown(quota.limit, used),
            allowed=shown(quota.limit, quota.value),
            share=share,
            beyond=_BEYOND[quota.over]
            if used is not None and used >= quota.value and quota.limit in DAY_LIMITS
            else None,
        )


def shown(name: str, value: int) -> str:
    """Return the value of a limit in few digits, bytes in decimal units, as storage is billed."""
    if name != "checkpoint_bytes":
        return count(value)
    for unit, size in _UNITS:
        if value >= size:
            return f"{value / size:.1f} {unit}"
    return f"{value} B"
