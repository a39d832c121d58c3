"""View models of the page of usage."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime, timedelta

from skyrl_tx.apps.teams.usage_report import UsageLine

_WIDTH, _HEIGHT = 800.0, 120.0
_GAP = 0.2
"""The free part of the width of a day."""
_MAX_BARS = 100


@dataclass(frozen=True, slots=True)
class Bar:
    """One day as a stacked bar: a box of each kind of tokens, from the bottom up."""

    title: str
    boxes: tuple[tuple[str, float, float, float, float], ...]
    """Kind, x, y, width and height in a box of 800 by 120."""


def day_bars(lines: Sequence[UsageLine], days: int, now: float) -> list[Bar]:
    """Return a bar for each of the last days, at most 100, also for those without usage."""
    by_day = {line.subject: line for line in lines}
    shown = min(days, _MAX_BARS)
    today = datetime.fromtimestamp(now, UTC).date()
    wanted = [(today - timedelta(days=back)).isoformat() for back in range(shown - 1, -1, -1)]
    found = [by_day.get(day, UsageLine(subject=day)) for day in wanted]
    most = max((line.tokens for line in found), default=0)
    step = _WIDTH / shown
    return [
        Bar(f"{line.subject}: {line.tokens:,} tokens", _boxes(line, index * step, step * (1 - _GAP), most))
        for index, line in enumerate(found)
    ]


def _boxes(line: UsageLine, x: float, width: float, most: int) -> tuple[tuple[str, float, float, float, float], ...]:
    boxes: list[tuple[str, float, float, float, float]] = []
    bottom = _HEIGHT
    for kind, tokens in (
        ("training", line.training_tokens),
        ("sampled", line.sampled_tokens),
        ("prefill", line.prefill_tokens + line.cached_tokens),
    ):
        if tokens:
            height = tokens / most * _HEIGHT
            bottom -= height
            boxes.append((kind, round(x, 2), round(bottom, 2), round(width, 2), round(height, 2)))
    return tuple(boxes)


def total_of(lines: Sequence[UsageLine]) -> UsageLine:
    """Return the sums of all lines."""
    names = [field.name for field in fields(UsageLine) if field.name not in ("subject", "cost_usd")]
    sums = {name: sum(getattr(line, name) for line in lines) for name in names}
    costs = [line.cost_usd for line in lines if line.cost_usd is not None]
    return UsageLine(subject="total", **sums, cost_usd=sum(costs) if costs else None)
