"""Usage and storage, as a hosted business reports them."""

from pydantic import Field

from skyrl_tx.api.schemas.base import Answer


class UsageAnswer(Answer):
    """Billed usage by the hour: there is none."""

    data: list[dict[str, str]] = Field(default_factory=list[dict[str, str]])
    sessions: dict[str, dict[str, str]] = Field(default_factory=dict[str, dict[str, str]])
    cost_data_through: None = None


class StoredItem(Answer):
    """What one owner's checkpoints of one project take."""

    project_id: str | None
    org_user_urn: str
    user_email: str | None = None
    user_name: str
    checkpoint_count: int
    size_bytes: int
    size_gigabytes: float
    estimated_monthly_cost_usd: float = 0.0


class StorageAnswer(Answer):
    """What checkpoints take, by project and owner."""

    effective_rate_usd_per_gigabyte_month: float = 0.0
    data: list[StoredItem]
