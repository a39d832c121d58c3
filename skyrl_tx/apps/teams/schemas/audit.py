"""The audit log as the SDK reads it (`types/audit_log_response.py`)."""

from datetime import datetime

from skyrl_tx.server.schemas.base import Response


class AuditEntry(Response):
    """One act. The last three fields repeat details of events about checkpoints, for SDKs that read them there."""

    timestamp: datetime
    event: str
    event_details: dict[str, str | int | float | bool]
    model_id: str | None = None
    tinker_path: str | None = None
    purpose: str | None = None


class AuditResponse(Response):
    """The entries of a day, in order."""

    entries: list[AuditEntry]
