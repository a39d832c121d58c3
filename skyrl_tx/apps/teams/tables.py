"""The tables of usage and of storage. Columns that end in `_at` hold seconds since the epoch."""

# pyright: reportAssignmentType=false
# sqlmodel declares __tablename__ as a descriptor and documents that it be assigned a string.

from typing import Literal

from sqlalchemy import BigInteger, Index, String
from sqlmodel import Field

from skyrl_tx.contract.ids import SessionId
from skyrl_tx.store.tables import AppTable, partial_index

UsageKind = Literal["training", "forward", "prefill", "prefill_cached", "sampled", "checkpoint"]


class UsageRow(AppTable, table=True):
    """Work of one kind that took effect for one model, or for base weights, of one session within five minutes."""

    __tablename__ = "usage"
    __table_args__ = (
        Index("ix_usage_session_id", "session_id"),
        partial_index("ix_usage_fine", "bucket_at", "bucket_at % 3600 <> 0"),
    )

    bucket_at: int = Field(primary_key=True, sa_type=BigInteger, sa_column_kwargs={"autoincrement": False})
    """Begin of the five minutes; of the hour for old rows."""
    session_id: SessionId = Field(primary_key=True, sa_type=String)
    model_id: str = Field(primary_key=True)
    """The trained model, or the one whose weights were sampled; empty for base weights."""
    kind: UsageKind = Field(primary_key=True, sa_type=String)
    owner: str
    """Repeated here, because a session may be removed before its usage."""
    tokens: int = Field(default=0, sa_type=BigInteger)
    requests: int = Field(default=0, sa_type=BigInteger)
    device_s: float = 0.0


class StorageHourRow(AppTable, table=True):
    """The checkpoints of a session at the begin of one hour in which an engine ran."""

    __tablename__ = "storage_hours"

    hour_at: int = Field(primary_key=True, sa_type=BigInteger, sa_column_kwargs={"autoincrement": False})
    session_id: SessionId = Field(primary_key=True, sa_type=String)
    owner: str
    """Repeated here, because a session may be removed before its usage."""
    num_bytes: int = Field(sa_type=BigInteger)
