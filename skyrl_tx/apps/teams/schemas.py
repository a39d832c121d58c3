"""Response schemas for usage, storage and the audit log.

They match `types/billing_usage_response.py` and `types/audit_log_response.py` of the SDK.
"""

from datetime import datetime
from typing import Annotated, Literal

from pydantic import Field

from skyrl_tx.server.schemas.base import Response


class TrainingEvent(Response):
    """Tokens of forward and backward passes."""

    type: Literal["training"] = "training"
    token_count: int


class PrefillEvent(Response):
    """Prompt tokens, computed or from the prefix cache."""

    type: Literal["sampling_prefill"] = "sampling_prefill"
    cached: bool
    token_count: int


class SampledEvent(Response):
    """Sampled tokens."""

    type: Literal["sampling_sample"] = "sampling_sample"
    token_count: int


class CheckpointEvent(Response):
    """Named saves."""

    type: Literal["checkpoint"] = "checkpoint"
    count: int


class StorageEvent(Response):
    """The storage of checkpoints in one hour, in gigabytes (10^9 bytes).

    The field `free` is left out, because SDK 0.30 refuses the field. The SDK treats a missing field
    as false.
    """

    type: Literal["storage"] = "storage"
    gigabyte_hours: float


EventInfo = TrainingEvent | PrefillEvent | SampledEvent | CheckpointEvent | StorageEvent


class UsageEvent(Response):
    """The usage of one kind, for example sampled tokens, in one hour of one session.

    The cost fields are set if this kind of usage has a price.
    """

    bucket_start: datetime
    bucket_end: datetime
    base_model: str | None = None
    user_id: str
    user_name: str
    session_id: str | None
    project_id: str | None = None
    estimated_cost_usd: float | None = None
    effective_rate_usd_per_million_tokens: float | None = None
    effective_rate_usd_per_gigabyte_month: float | None = None
    event_info: Annotated[EventInfo, Field(discriminator="type")]

    @property
    def num_tokens(self) -> int:
        """Number of tokens, or 0 for events without tokens."""
        return getattr(self.event_info, "token_count", 0)


class UsageSession(Response):
    """The metadata that a client gave its session."""

    user_metadata: dict[str, str] | None = None


class UsageResponse(Response):
    """Hourly events, ordered by hour, and within an hour by descending tokens.

    Costs are estimated with the current prices. Invoiced costs do not exist.
    """

    data: list[UsageEvent]
    sessions: dict[str, UsageSession]
    cost_data_through: datetime | None = None


class StoredItem(Response):
    """The storage of one owner's checkpoints in one project."""

    project_id: str | None
    org_user_urn: str
    user_email: str | None = None
    user_name: str
    checkpoint_count: int
    size_bytes: int
    size_gigabytes: float
    estimated_monthly_cost_usd: float | None = None


class StorageResponse(Response):
    """The storage of checkpoints by project and owner."""

    effective_rate_usd_per_gigabyte_month: float | None = None
    data: list[StoredItem]


class AuditEntry(Response):
    """One action.

    The last three fields repeat details of checkpoint events, because some SDKs read them there.
    """

    timestamp: datetime
    event: str
    event_details: dict[str, str | int | float | bool]
    model_id: str | None = None
    tinker_path: str | None = None
    purpose: str | None = None


class AuditResponse(Response):
    """The entries of a day, in order."""

    entries: list[AuditEntry]
