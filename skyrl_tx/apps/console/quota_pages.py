"""The page of quotas: what is used of them, and for admins the forms that set and remove them."""

from http import HTTPStatus
from typing import cast, get_args

from sqlmodel import Session
from starlette.responses import RedirectResponse, Response

from skyrl_tx.apps.console.views.quotas import quota_lines
from skyrl_tx.apps.console.visit import Page, PageTable, Visit
from skyrl_tx.apps.teams import quotas
from skyrl_tx.apps.teams.amounts import amount_text, parse_amount
from skyrl_tx.apps.teams.quota_use import QuotaUse, quota_uses
from skyrl_tx.apps.teams.quotas import LIMITS, WEIGHT, Rules, Subject
from skyrl_tx.contract.errors import UserError
from skyrl_tx.server.errors import ApiError, not_found
from skyrl_tx.store.tables import OverQuota, QuotaRow

pages = PageTable()
_MAX_SHOWN = 200


@pages.get("/quotas")
def list_quotas(visit: Visit) -> Page:
    """Show what is used of the visitor's quotas, to admins of all."""

    def look(tx: Session) -> tuple[Rules, list[QuotaUse], list[QuotaRow]]:
        rules = quotas.read(tx)
        shown = quota_uses(tx, rules, visit.caller.owner_filter, visit.now, limit=_MAX_SHOWN)
        return rules, shown, quotas.rows(tx) if visit.caller.is_admin else []

    rules, found, rows = visit.read(look)
    return Page(
        "quotas.jinja",
        {
            "lines": list(quota_lines(found)),
            "is_cut": len(found) == _MAX_SHOWN,
            "weight": rules.weights.get(visit.caller.owner, 1),
            "is_weighted": bool(rules.weights),
            "rows": [
                (str(Subject(row.subject_kind, row.subject)), row.name, amount_text(row.value), row.over)
                for row in rows
            ],
            "names": (*LIMITS, WEIGHT),
        },
    )


@pages.post("/quotas")
def put(visit: Visit) -> Response:
    """Set a quota or a weight."""
    over = visit.field("over") or "wait"
    if over not in get_args(OverQuota):
        raise UserError(f"over {over[:40]!r}: must be one of {', '.join(get_args(OverQuota))}")
    _put(visit, parse_amount(visit.field("value")), cast(OverQuota, over))
    return RedirectResponse("/quotas", HTTPStatus.SEE_OTHER)


@pages.post("/quotas/remove")
def remove(visit: Visit) -> Response:
    """Remove a quota or a weight."""
    if not _put(visit, None):
        raise not_found(f"{visit.field('subject')[:80]!r} has no {visit.field('limit')[:80]!r}")
    return RedirectResponse("/quotas", HTTPStatus.SEE_OTHER)


def _put(visit: Visit, value: int | None, over: OverQuota = "wait") -> bool:
    if not visit.caller.is_admin:
        raise ApiError(HTTPStatus.FORBIDDEN, "quotas are set by an admin")
    subject, limit, actor = Subject.parse(visit.field("subject")), visit.field("limit"), visit.caller.actor
    return visit.write(lambda tx: quotas.put(tx, subject, limit, value, actor, visit.now, over=over))
