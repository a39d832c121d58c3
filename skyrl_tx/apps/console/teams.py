"""The pages for teams: quotas with their use, projects with their members, and usage."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime, timedelta
from typing import cast, get_args
from urllib.parse import quote

from sqlmodel import Session
from starlette.responses import Response

from skyrl_tx.apps.console.rendering import Bar, format_count, stack_bars
from skyrl_tx.apps.console.visit import Page, PageTable, Visit, make_csv_response, see_other
from skyrl_tx.apps.teams import quotas
from skyrl_tx.apps.teams.prices import TeamsSettings
from skyrl_tx.apps.teams.quotas import QuotaUse, Rules, Subject, format_amount
from skyrl_tx.apps.teams.usage_report import SUBJECTS, UsageLine, read_usage_lines
from skyrl_tx.apps.teams.usage_report import Subject as UsageSubject
from skyrl_tx.contract.errors import UserError
from skyrl_tx.server.errors import bad_request, not_found
from skyrl_tx.store import projects
from skyrl_tx.store.tables import OverQuota, ProjectRole, QuotaRow

pages = PageTable()
_MAX_SHOWN = 200
_ROLES: tuple[ProjectRole, ...] = get_args(ProjectRole)
_TITLES = {"checkpoint_bytes": "Checkpoints"}
"""Titles of limits, where they differ from the name of the limit."""
_BEYOND: dict[OverQuota, str] = {"wait": "waits until 00:00 UTC", "fail": "fails until 00:00 UTC"}
_UNITS = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3))

_DAY_S = 86_400
_WINDOWS = (1, 7, 30, 90, 365)
_COLUMNS = (
    *("subject", "training_tokens", "prefill_tokens", "cached_tokens", "sampled_tokens"),
    *("checkpoints", "device_s", "gigabyte_hours", "cost_usd"),
)
_PAGE_PATHS = {"session": "/sessions/", "run": "/training_runs/"}
_MAX_BARS = 100


@pages.get("/quotas", menu="Quotas")
def list_quotas(visit: Visit) -> Page:
    """Show the visitor's quotas and how much of them is used. Admins see all quotas."""

    def read_quotas(tx: Session) -> tuple[Rules, list[QuotaUse], list[QuotaRow]]:
        rules = quotas.read_rules(tx)
        uses = quotas.read_quota_uses(tx, rules, visit.caller.owner_filter, visit.now, limit=_MAX_SHOWN)
        return rules, uses, quotas.list_rows(tx) if visit.caller.is_admin else []

    rules, uses, rows = visit.read(read_quotas)
    return Page(
        "quotas.jinja",
        {
            "lines": list(describe_quotas(uses)),
            "is_cut": len(uses) == _MAX_SHOWN,
            "weight": rules.weights.get(visit.caller.owner, 1),
            "is_weighted": bool(rules.weights),
            "rows": [
                (str(Subject(row.subject_kind, row.subject)), row.name, format_amount(row.value), row.over)
                for row in rows
            ],
            "names": (*quotas.LIMITS, quotas.WEIGHT),
        },
    )


@pages.post("/quotas")
def set_quota(visit: Visit) -> Response:
    """Set a quota or a weight."""
    over = visit.get_field("over") or "wait"
    if over not in get_args(OverQuota):
        raise UserError(f"over {over[:40]!r}: must be one of {', '.join(get_args(OverQuota))}")
    _put_quota(visit, quotas.parse_amount(visit.get_field("value")), cast(OverQuota, over))
    return see_other("/quotas")


@pages.post("/quotas/remove")
def remove_quota(visit: Visit) -> Response:
    """Remove a quota or a weight."""
    if not _put_quota(visit, None):
        raise not_found(f"{visit.get_field('subject')[:80]!r} has no {visit.get_field('limit')[:80]!r}")
    return see_other("/quotas")


def _put_quota(visit: Visit, value: int | None, over: OverQuota = "wait") -> bool:
    visit.require_admin("only admins can set quotas")
    subject, limit, actor = Subject.parse(visit.get_field("subject")), visit.get_field("limit"), visit.caller.actor
    return visit.write(lambda tx: quotas.put(tx, subject, limit, value, actor, visit.now, over=over))


@dataclass(frozen=True, slots=True)
class QuotaLine:
    """A quota and its use, as the page shows it."""

    subject: str
    title: str
    used: str
    allowed: str
    share: float
    beyond: str | None
    """If a daily quota is used up: whether new requests wait or fail until 00:00 UTC, as text."""


def describe_quotas(uses: Sequence[QuotaUse]) -> Iterator[QuotaLine]:
    """Describe quotas and their use."""
    for use in uses:
        quota, used = use.quota, use.used
        is_used_up = used >= quota.value
        yield QuotaLine(
            subject=quota.subject.label,
            title=_TITLES.get(quota.limit) or quota.limit.replace("_per_", " a ").replace("_", " ").capitalize(),
            used=_format_value(quota.limit, used),
            allowed=_format_value(quota.limit, quota.value),
            share=min(used / quota.value, 1.0) if quota.value else 1.0,
            beyond=_BEYOND[quota.over] if is_used_up and quota.limit.endswith("_per_day") else None,
        )


def _format_value(limit: str, value: int) -> str:
    """Format the value of a limit. Bytes have decimal units, because storage is billed in them."""
    if not limit.endswith("_bytes"):
        return format_count(value)
    for unit, size in _UNITS:
        if value >= size:
            return f"{value / size:.1f} {unit}"
    return f"{value} B"


@pages.get("/projects", menu="Projects")
def list_projects(visit: Visit) -> Page:
    """List the projects in which the visitor is a member or has sessions.

    Admins see all projects.
    """
    visible = visit.read(lambda tx: projects.list_visible(tx, visit.caller.owner_filter, _MAX_SHOWN))
    return Page("projects.jinja", {"projects": visible, "is_cut": len(visible) == _MAX_SHOWN, "roles": _ROLES})


@pages.post("/projects")
def set_member(visit: Visit) -> Response:
    """Add an owner to a project, or change the owner's role."""
    role = visit.get_field("role")
    if role not in _ROLES:
        raise bad_request(f"role: {role[:50]!r} must be one of {', '.join(_ROLES)}")
    _put_member(visit, role)
    return see_other("/projects")


@pages.post("/projects/remove")
def remove_member(visit: Visit) -> Response:
    """Remove an owner from a project."""
    if not _put_member(visit, None):
        raise not_found(
            f"{visit.get_field('owner')[:80]!r} is not a member of project {visit.get_field('project')[:80]!r}"
        )
    return see_other("/projects")


def _put_member(visit: Visit, role: ProjectRole | None) -> bool:
    visit.require_admin("only admins can change the members of projects")
    project_id, owner, actor = visit.get_field("project"), visit.get_field("owner"), visit.caller.actor
    return visit.write(lambda tx: projects.put_member(tx, project_id, owner, role, actor, visit.now))


@pages.get("/usage", menu="Usage")
def show_usage(visit: Visit) -> Page:
    """Show usage per day, and per subject, for example per run.

    Admins see the usage of all owners.
    """
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
            # Totals and the chart
            "total": add_lines(lines),
            "bars": draw_days(daily, days, visit.now),
            "has_costs": any(line.cost_usd is not None for line in lines),
            "page_of": {
                line.subject: _PAGE_PATHS[by] + quote(line.subject, safe=":")
                for line in lines[:_MAX_SHOWN]
                if by in _PAGE_PATHS and " " not in line.subject
            },
            "csv": visit.make_url(by=by, days=days).replace("/usage", "/usage.csv", 1),
        },
    )


@pages.get("/usage.csv")
def send_usage(visit: Visit) -> Response:
    """Send the lines of the usage page as CSV."""
    by, days = _read_choice(visit)
    rows = [[_escape_cell(getattr(line, name)) for name in _COLUMNS] for line in _read_lines(visit, by, days)]
    return make_csv_response(f"usage-by-{by}.csv", [[by, *_COLUMNS[1:]], *rows], line_end="\n")


def _read_choice(visit: Visit) -> tuple[UsageSubject, int]:
    """Return the chosen kind of subject, for example "run", and the number of days."""
    by = visit.get_query("by", "owner" if visit.caller.is_admin else "run")
    if by not in SUBJECTS:
        raise bad_request(f"by: {by[:30]!r} must be one of {', '.join(SUBJECTS)}")
    return by, visit.get_int("days", 30, minimum=1, maximum=400)


def _read_lines(visit: Visit, by: UsageSubject, days: int) -> list[UsageLine]:
    prices, owner = visit.context.settings.get_app_settings(TeamsSettings).prices, visit.caller.owner_filter
    since = visit.now - visit.now % _DAY_S - (days - 1) * _DAY_S
    return list(visit.read(lambda tx: read_usage_lines(tx, owner, by, since, prices)))


def _escape_cell(value: object) -> object:
    """Return the value for a CSV cell.

    Text that a spreadsheet would read as a formula gets an apostrophe (OWASP).
    """
    if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r"):
        return f"'{value}"
    return round(value, 4) if isinstance(value, float) else value


def draw_days(lines: Sequence[UsageLine], days: int, now: float) -> list[Bar]:
    """Return a bar for each of the last days, at most 100. Days without usage have an empty bar."""
    # A line for each day
    by_day = {line.subject: line for line in lines}
    num_bars = min(days, _MAX_BARS)
    today = datetime.fromtimestamp(now, UTC).date()
    dates = [(today - timedelta(days=back)).isoformat() for back in range(num_bars - 1, -1, -1)]
    day_lines = [by_day.get(date, UsageLine(subject=date)) for date in dates]

    return stack_bars(
        [
            (
                f"{line.subject}: {line.tokens:,} tokens",
                {
                    "training": line.training_tokens,
                    "sampled": line.sampled_tokens,
                    "prefill": line.prefill_tokens + line.cached_tokens,
                },
            )
            for line in day_lines
        ]
    )


def add_lines(lines: Sequence[UsageLine]) -> UsageLine:
    """Return the total of all lines."""
    names = [field.name for field in fields(UsageLine) if field.name not in ("subject", "cost_usd")]
    sums = {name: sum(getattr(line, name) for line in lines) for name in names}
    costs = [line.cost_usd for line in lines if line.cost_usd is not None]
    return UsageLine(subject="total", **sums, cost_usd=sum(costs) if costs else None)
