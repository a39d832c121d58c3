"""The page of usage: tokens, device seconds, storage and costs by owner, project, key, session, run or day."""

import csv
import io
from urllib.parse import quote

from starlette.responses import Response

from skyrl_tx.apps.console.views.usage import day_bars, total_of
from skyrl_tx.apps.console.visit import Page, PageTable, Visit
from skyrl_tx.apps.teams.prices import TeamsSettings
from skyrl_tx.apps.teams.usage_report import SUBJECTS, Subject, UsageLine, usage_lines
from skyrl_tx.server.errors import bad_request

pages = PageTable()
_DAY_S = 86_400
_WINDOWS = (1, 7, 30, 90, 365)
_MAX_SHOWN = 200
_COLUMNS = (
    *("subject", "training_tokens", "prefill_tokens", "cached_tokens", "sampled_tokens"),
    *("checkpoints", "device_s", "gigabyte_hours", "cost_usd"),
)
_PAGE_OF_SUBJECT = {"session": "/sessions/", "run": "/training_runs/"}


@pages.get("/usage")
def usage(visit: Visit) -> Page:
    """Show what each subject has used; to users of their own, to admins of all owners."""
    by, days = _subject(visit), visit.whole("days", 30, least=1, most=400)
    lines = _lines(visit, by, days)
    daily = lines if by == "day" else _lines(visit, "day", days)
    return Page(
        "usage.jinja",
        {
            "by": by,
            "days": days,
            "subjects": SUBJECTS,
            "windows": sorted({*_WINDOWS, days}),
            "lines": lines[-_MAX_SHOWN:] if by == "day" else lines[:_MAX_SHOWN],
            "hidden": max(len(lines) - _MAX_SHOWN, 0),
            "total": total_of(lines),
            "bars": day_bars(daily, days, visit.now),
            "has_costs": any(line.cost_usd is not None for line in lines),
            "page_of": {
                line.subject: _PAGE_OF_SUBJECT[by] + quote(line.subject, safe=":")
                for line in lines[:_MAX_SHOWN]
                if by in _PAGE_OF_SUBJECT and " " not in line.subject
            },
            "csv": visit.address(by=by, days=days).replace("/usage", "/usage.csv", 1),
        },
    )


@pages.get("/usage.csv")
def usage_csv(visit: Visit) -> Response:
    """Send the same lines as CSV."""
    by, days = _subject(visit), visit.whole("days", 30, least=1, most=400)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([by, *_COLUMNS[1:]])
    for line in _lines(visit, by, days):
        writer.writerow([_cell(getattr(line, name)) for name in _COLUMNS])
    name = f"usage-by-{by}.csv"
    return Response(
        text.getvalue(),
        media_type="text/csv; charset=utf-8",
        headers={"Content-Disposition": f'attachment; filename="{name}"'},
    )


def _subject(visit: Visit) -> Subject:
    by = visit.query("by", "owner" if visit.caller.is_admin else "run")
    if by not in SUBJECTS:
        raise bad_request(f"by: {by[:30]!r} is not one of {', '.join(SUBJECTS)}")
    return by


def _lines(visit: Visit, by: Subject, days: int) -> list[UsageLine]:
    prices, owner = visit.context.settings.for_app(TeamsSettings).prices, visit.caller.owner_filter
    since = visit.now - visit.now % _DAY_S - (days - 1) * _DAY_S
    return list(visit.read(lambda tx: usage_lines(tx, owner, by, since, prices)))


def _cell(value: object) -> object:
    """Return a value of a CSV cell. Text that a spreadsheet would read as a formula gets an apostrophe (OWASP)."""
    if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r"):
        return f"'{value}"
    return round(value, 4) if isinstance(value, float) else value
