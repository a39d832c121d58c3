"""The pages about teams: quotas and what is used of them, and projects with their members."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast, get_args

from sqlmodel import Session
from starlette.responses import Response

from skyrl_tx.apps.console.format import format_count
from skyrl_tx.apps.console.visit import Page, PageTable, Visit, see_other
from skyrl_tx.apps.teams import quotas
from skyrl_tx.apps.teams.amounts import format_amount, parse_amount
from skyrl_tx.apps.teams.quota_use import QuotaUse, read_quota_uses
from skyrl_tx.apps.teams.quotas import LIMITS, WEIGHT, Rules, Subject
from skyrl_tx.contract.errors import UserError
from skyrl_tx.server.errors import bad_request, not_found
from skyrl_tx.store import projects
from skyrl_tx.store.tables import OverQuota, ProjectRole, QuotaRow

pages = PageTable()
_MAX_SHOWN = 200
_ROLES: tuple[ProjectRole, ...] = get_args(ProjectRole)
_TITLES = {"checkpoint_bytes": "Checkpoints"}
"""Titles of quotas that differ from their names."""
_BEYOND: dict[OverQuota, str] = {"wait": "waits until 00:00 UTC", "fail": "fails until 00:00 UTC"}
_UNITS = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3))


@pages.get("/quotas", menu="Quotas")
def list_quotas(visit: Visit) -> Page:
    """Show what is used of the visitor's quotas, to admins of all."""

    def look(tx: Session) -> tuple[Rules, list[QuotaUse], list[QuotaRow]]:
        rules = quotas.read_rules(tx)
        shown = read_quota_uses(tx, rules, visit.caller.owner_filter, visit.now, limit=_MAX_SHOWN)
        return rules, shown, quotas.list_rows(tx) if visit.caller.is_admin else []

    rules, found, rows = visit.read(look)
    return Page(
        "quotas.jinja",
        {
            "lines": list(describe_quotas(found)),
            "is_cut": len(found) == _MAX_SHOWN,
            "weight": rules.weights.get(visit.caller.owner, 1),
            "is_weighted": bool(rules.weights),
            "rows": [
                (str(Subject(row.subject_kind, row.subject)), row.name, format_amount(row.value), row.over)
                for row in rows
            ],
            "names": (*LIMITS, WEIGHT),
        },
    )


@pages.post("/quotas")
def set_quota(visit: Visit) -> Response:
    """Set a quota or a weight."""
    over = visit.get_field("over") or "wait"
    if over not in get_args(OverQuota):
        raise UserError(f"over {over[:40]!r}: must be one of {', '.join(get_args(OverQuota))}")
    _put_quota(visit, parse_amount(visit.get_field("value")), cast(OverQuota, over))
    return see_other("/quotas")


@pages.post("/quotas/remove")
def remove_quota(visit: Visit) -> Response:
    """Remove a quota or a weight."""
    if not _put_quota(visit, None):
        raise not_found(f"{visit.get_field('subject')[:80]!r} has no {visit.get_field('limit')[:80]!r}")
    return see_other("/quotas")


def _put_quota(visit: Visit, value: int | None, over: OverQuota = "wait") -> bool:
    visit.require_admin("quotas are set by an admin")
    subject, limit, actor = Subject.parse(visit.get_field("subject")), visit.get_field("limit"), visit.caller.actor
    return visit.write(lambda tx: quotas.put(tx, subject, limit, value, actor, visit.now, over=over))


@dataclass(frozen=True, slots=True)
class QuotaLine:
    """One quota of one subject."""

    subject: str
    title: str
    used: str
    allowed: str
    share: float
    beyond: str | None
    """Says whether new work waits or fails, if the quota of a day is used up."""


def describe_quotas(uses: Sequence[QuotaUse]) -> Iterator[QuotaLine]:
    """Describe quotas, each with what is used of it."""
    for use in uses:
        quota, used = use.quota, use.used
        is_used_up = used >= quota.value
        yield QuotaLine(
            subject=quota.subject.label,
            title=_TITLES.get(quota.limit) or quota.limit.replace("_per_", " a ").replace("_", " ").capitalize(),
            used=_write_amount(quota.limit, used),
            allowed=_write_amount(quota.limit, quota.value),
            share=min(used / quota.value, 1.0) if quota.value else 1.0,
            beyond=_BEYOND[quota.over] if is_used_up and quota.limit.endswith("_per_day") else None,
        )


def _write_amount(limit: str, value: int) -> str:
    """Return the value of a limit in few digits, bytes in decimal units, as storage is billed."""
    if not limit.endswith("_bytes"):
        return format_count(value)
    for unit, size in _UNITS:
        if value >= size:
            return f"{value / size:.1f} {unit}"
    return f"{value} B"


@pages.get("/projects", menu="Projects")
def list_projects(visit: Visit) -> Page:
    """Show the projects that the visitor works in or is a member of, to admins all."""
    found = visit.read(lambda tx: projects.list_visible(tx, visit.caller.owner_filter, _MAX_SHOWN))
    return Page("projects.jinja", {"projects": found, "is_cut": len(found) == _MAX_SHOWN, "roles": _ROLES})


@pages.post("/projects")
def set_member(visit: Visit) -> Response:
    """Give an owner a role in a project."""
    role = visit.get_field("role")
    if role not in _ROLES:
        raise bad_request(f"role: {role[:50]!r} is not one of {', '.join(_ROLES)}")
    _put_member(visit, role)
    return see_other("/projects")


@pages.post("/projects/remove")
def remove_member(visit: Visit) -> Response:
    """Take a member out of a project."""
    if not _put_member(visit, None):
        raise not_found(
            f"{visit.get_field('owner')[:80]!r} is no member of project {visit.get_field('project')[:80]!r}"
        )
    return see_other("/projects")


def _put_member(visit: Visit, role: ProjectRole | None) -> bool:
    visit.require_admin("members of projects are set by an admin")
    project_id, owner, actor = visit.get_field("project"), visit.get_field("owner"), visit.caller.actor
    return visit.write(lambda tx: projects.put_member(tx, project_id, owner, role, actor, visit.now))
