"""The page of usage: tokens, device seconds, storage and costs by owner, project, key, session, run or day."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime, timedelta
from urllib.parse import quote

from starlette.responses import Response

from skyrl_tx.apps.console.visit import Page, PageTable, Visit, make_csv_response
from skyrl_tx.apps.teams.prices import TeamsSettings
from skyrl_tx.apps.teams.usage_report import SUBJECTS, Subject, UsageLine, read_usage_lines
from skyrl_tx.server.errors import bad_request

Box = tuple[str, float, float, float, float]
"""Kind of tokens, x, y, width and height in a box of 800 by 120."""

pages = PageTable()
_DAY_S = 86_400
_WINDOWS = (1, 7, 30, 90, 365)
_MAX_SHOWN = 200
_COLUMNS = (
    *("subject", "training_tokens", "prefill_tokens", "cached_tokens", "sampled_tokens"),
    *("checkpoints", "device_s", "gigabyte_hours", "cost_usd"),
)
_ADDRESSES = {"session": "/sessions/", "run": "/training_runs/"}
_WIDTH, _HEIGHT = 800.0, 120.0
_GAP = 0.2
"""The free part of the width of a day."""
_MAX_BARS = 100


@pages.get("/usage", menu="Usage")
def show_usage(visit: Visit) -> Page:
    """Show what each subject has used; to users of their own, to admins of all owners."""
    by, days = _read_choice(visit)
    lines = _read_lines(visit, by, days)
    daily = lines if by == "day" else _read_lines(visit, "day", days)

    return Page(
        "usage.jinja",
        {
            "by": by,
            "days": days,
            "subjects": SUBJECTS,
            "windows": sorted({*_WINDOWS, days}),
            "lines": lines[-_MAX_SHOWN:] if by == "day" else lines[:_MAX_SHOWN],
            "hidden": max(len(lines) - _MAX_SHOWN, 0),
            "total": add_lines(lines),
            "bars": draw_days(daily, days, visit.now),
            "has_costs": any(line.cost_usd is not None for line in lines),
            "page_of": {
                line.subject: _ADDRESSES[by] + quote(line.subject, safe=":")
                for line in lines[:_MAX_SHOWN]
                if by in _ADDRESSES and " " not in line.subject
            },
            "csv": visit.make_address(by=by, days=days).replace("/usage", "/usage.csv", 1),
        },
    )


@pages.get("/usage.csv")
def send_usage(visit: Visit) -> Response:
    """Send the same lines as CSV."""
    by, days = _read_choice(visit)
    rows = [[_write_cell(getattr(line, name)) for name in _COLUMNS] for line in _read_lines(visit, by, days)]
    return make_csv_response(f"usage-by-{by}.csv", [[by, *_COLUMNS[1:]], *rows], line_end="\n")


def _read_choice(visit: Visit) -> tuple[Subject, int]:
    """Return by what the visitor wants to see usage, and of how many days."""
    by = visit.get_query("by", "owner" if visit.caller.is_admin else "run")
    if by not in SUBJECTS:
        raise bad_request(f"by: {by[:30]!r} is not one of {', '.join(SUBJECTS)}")
    return by, visit.get_whole("days", 30, least=1, most=400)


def _read_lines(visit: Visit, by: Subject, days: int) -> list[UsageLine]:
    prices, owner = visit.context.settings.get_app_settings(TeamsSettings).prices, visit.caller.owner_filter
    since = visit.now - visit.now % _DAY_S - (days - 1) * _DAY_S
    return list(visit.read(lambda tx: read_usage_lines(tx, owner, by, since, prices)))


def _write_cell(value: object) -> object:
    """Return a value of a CSV cell. Text that a spreadsheet would read as a formula gets an apostrophe (OWASP)."""
    if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r"):
        return f"'{value}"
    return round(value, 4) if isinstance(value, float) else value


@dataclass(frozen=True, slots=True)
class Bar:
    """One day as a stacked bar: a box of each kind of tokens, from the bottom up."""

    title: str
    boxes: tuple[Box, ...]


def draw_days(lines: Sequence[UsageLine], days: int, now: float) -> list[Bar]:
    """Return a bar for each of the last days, at most 100, also for those without usage."""
    by_day = {line.subject: line for line in lines}
    shown = min(days, _MAX_BARS)
    today = datetime.fromtimestamp(now, UTC).date()
    wanted = [(today - timedelta(days=back)).isoformat() for back in range(shown - 1, -1, -1)]
    found = [by_day.get(day, UsageLine(subject=day)) for day in wanted]
    most = max((line.tokens for line in found), default=0)
    step = _WIDTH / shown
    return [
        Bar(f"{line.subject}: {line.tokens:,} tokens", _stack_boxes(line, index * step, step * (1 - _GAP), most))
        for index, line in enumerate(found)
    ]


def _stack_boxes(line: UsageLine, x: float, width: float, most: int) -> tuple[Box, ...]:
    boxes: list[Box] = []
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


def add_lines(lines: Sequence[UsageLine]) -> UsageLine:
    """Return the sums of all lines."""
    names = [field.name for field in fields(UsageLine) if field.name not in ("subject", "cost_usd")]
    sums = {name: sum(getattr(line, name) for line in lines) for name in names}
    costs = [line.cost_usd for line in lines if line.cost_usd is not None]
    return UsageLine(subject="total", **sums, cost_usd=sum(costs) if costs else None)
