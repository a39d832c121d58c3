"""The audit log, for admins."""

from datetime import UTC, date, datetime, timedelta
from typing import Literal

from fastapi import APIRouter

from skyrl_tx.apps.teams.schemas import audit as schemas
from skyrl_tx.contract.errors import UserError
from skyrl_tx.contract.ids import CheckpointPath
from skyrl_tx.server.context import Incoming
from skyrl_tx.server.errors import bad_request
from skyrl_tx.server.identity.scopes import API_PREFIX
from skyrl_tx.store import audit
from skyrl_tx.store.tables import AuditRow

router = APIRouter(prefix=API_PREFIX)

EventType = Literal["all", "checkpoints", "projects", "teams", "organizations"]
_MAX_ENTRIES = 100_000


@router.get("/audit", response_model_exclude_none=True)
def read(call: Incoming, event_type: EventType = "all", day: date | None = None) -> schemas.AuditResponse:
    """Return what was done on one day in UTC, today by default, to checkpoints, projects and keys."""
    day = day or datetime.now(UTC).date()
    try:
        start = datetime(day.year, day.month, day.day, tzinfo=UTC)
        end = start + timedelta(days=1)
    except OverflowError:
        raise bad_request(f"day: {day} is not a day that has an end") from None
    resources = None if event_type == "all" else {event_type.removesuffix("s")}
    found = call.store.read(
        lambda tx: audit.entries(
            tx, since=start.timestamp(), until=end.timestamp(), resources=resources, limit=_MAX_ENTRIES
        )
    )
    return schemas.AuditResponse(entries=[_entry(each) for each in found])


def _entry(row: AuditRow) -> schemas.AuditEntry:
    known = {"actor": row.actor, "key_id": row.key_id, "tinker_path": row.path, **row.details}
    purpose = row.details.get("purpose")
    return schemas.AuditEntry.model_validate(
        {
            "timestamp": datetime.fromtimestamp(row.at, UTC),
            "event": row.event,
            "event_details": {name: value for name, value in known.items() if value is not None},
            "model_id": None if row.path is None else _model_id(row.path),
            "tinker_path": row.path,
            "purpose": purpose,
        }
    )


def _model_id(path: str) -> str | None:
    try:
        return CheckpointPath.parse(path).model_id
    except UserError:
        return None
