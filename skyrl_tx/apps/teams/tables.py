"""The tables of usage and storage.

Columns whose names end in `_at` hold seconds since the epoch.
"""

# pyright: reportAssignmentType=false
# sqlmodel declares __tablename__ as a descriptor, but documents that a string is assigned to it.

from typing import Literal

from sqlalchemy import BigInteger, Index, String
from sqlmodel import Field

from skyrl_tx.contract.ids import SessionId
from skyrl_tx.store.tables import AppTable, partial_index

UsageKind = Literal["training", "forward", "prefill", "prefill_cached", "sampled", "checkpoint"]


class UsageRow(AppTable, table=True):
    """Completed work of one kind for one session and one model, in an interval of five minutes."""

    __tablename__ = "usage"
    __table_args__ = (
        Index("ix_usage_session_id", "session_id"),
        partial_index("ix_usage_fine", "bucket_at", "bucket_at % 3600 <> 0"),
    )

    bucket_at: int = Field(primary_key=True, sa_type=BigInteger, sa_column_kwargs={"autoincrement": False})
    """Start of the interval. The intervals of old rows are hours."""
    session_id: SessionId = Field(primary_key=True, sa_type=String)
    model_id: str = Field(primary_key=True)
    """The model that was trained or sampled from; empty for base weights."""
    kind: UsageKind = Field(primary_key=True, sa_type=String)
    owner: str
    """Owner of the session. Stored here because the session may be removed before its usage."""
    tokens: int = Field(default=0, sa_type=BigInteger)
    requests: int = Field(default=0, sa_type=BigInteger)
    device_s: float = 0.0


class StorageHourRow(AppTable, table=True):
    """The size of a session's checkpoints in one hour in which an engine ran."""

    __tablename__ = "storage_hours"

    hour_at: int = Field(primary_key=True, sa_type=BigInteger, sa_column_kwargs={"autoincrement": False})
    session_id: SessionId = Field(primary_key=True, sa_type=String)
    owner: str
    """Owner of the session. Stored here because the session may be removed before its usage."""
    num_bytes: int = Field(sa_type=BigInteger)
