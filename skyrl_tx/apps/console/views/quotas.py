"""Quotas as the page shows them: what is used of each, as text and as a share."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from skyrl_tx.apps.console.format import count
from skyrl_tx.apps.teams.quota_use import QuotaUse
from skyrl_tx.apps.teams.quotas import DAY_LIMITS
from skyrl_tx.store.tables import OverQuota

_TITLES = {
    "training_tokens_per_day": "Training tokens a day",
    "sample_tokens_per_day": "Sample tokens a day",
    "models_in_training": "Models in training",
    "checkpoint_bytes": "Checkpoints",
}
_BEYOND: dict[OverQuota, str] = {"wait": "waits until 00:00 UTC", "fail": "fails until 00:00 UTC"}
_UNITS = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3))


@dataclass(frozen=True, slots=True)
class QuotaLine:
    """One quota of one subject."""

    subject: str
    title: str
    used: str
    allowed: str
    share: float
    beyond: str | None
    """The fate of work now, if the quota of a day is used up."""


def quota_lines(uses: Sequence[QuotaUse]) -> Iterator[QuotaLine]:
    """Yield the lines of a page."""
    for use in uses:
        quota, used = use.quota, use.used
        yield QuotaLine(
            subject=quota.subject.label,
            title=_TITLES[quota.limit],
            used=shown(quota.limit, used),
            allowed=shown(quota.limit, quota.value),
            share=min(used / quota.value, 1.0) if quota.value else 1.0,
            beyond=_BEYOND[quota.over] if used >= quota.value and quota.limit in DAY_LIMITS else None,
        )


def shown(name: str, value: int) -> str:
    """Return the value of a limit in few digits, bytes in decimal units, as storage is billed."""
    if name != "checkpoint_bytes":
        return count(value)
    for unit, size in _UNITS:
        if value >= size:
            return f"{value / size:.1f} {unit}"
    return f"{value} B"
