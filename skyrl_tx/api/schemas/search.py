"""Searching sessions."""

from datetime import datetime
from typing import Annotated, Literal

from pydantic import AwareDatetime, Field

from skyrl_tx.api.schemas.base import Answer, WireModel

FinishReasonType = Literal["success", "errored", "interrupted"]


class SearchOwner(WireModel):
    """Whose sessions: the caller's own, all that the caller may see, or those of some owners."""

    type: Literal["own", "accessible", "user"] = "own"
    owner_urns: list[str] = Field(default_factory=list[str], max_length=10)


class StatusQuery(WireModel):
    """How a session fares; `reasons` is for `client_finished`."""

    type: Literal["active", "cancelled", "failed", "client_finished"]
    reasons: list[FinishReasonType] | None = None


class SearchCursor(WireModel):
    """The last session of a page."""

    last_created_at: AwareDatetime
    last_session_id: str


class SessionSearchRequest(WireModel):
    """What a session must be like; `session_id` and `display_name` are alternatives, all else must hold."""

    session_id: str | None = None
    project_ids: list[str] | None = None
    user_metadata: dict[str, str] = Field(default_factory=dict[str, str])
    display_name: str | None = None
    owner: SearchOwner = Field(default_factory=SearchOwner)
    statuses: list[StatusQuery] | None = None
    limit: Annotated[int, Field(ge=1, le=200)] = 50
    cursor: SearchCursor | None = None


class FinishReasonAnswer(Answer):
    """How the client ended."""

    type: FinishReasonType


class ClientFinished(Answer):
    """The client said that it was done."""

    type: Literal["client_finished"] = "client_finished"
    reason: FinishReasonAnswer
    detail: str | None = None


class Active(Answer):
    """The client was heard of lately."""

    type: Literal["active"] = "active"


class SessionSummary(Answer):
    """A session that was found; it has no status when its client went silent."""

    session_id: str
    created_at: datetime
    owner: str
    project_id: str
    status: ClientFinished | Active | None = None
    checkpoints_count: int
    display_name: str | None = None
    user_metadata: dict[str, str] | None = None
    checkpoint_storage_bytes: int | None = None


class CursorAnswer(Answer):
    """Where the next page begins."""

    last_created_at: datetime
    last_session_id: str


class SessionSearchAnswer(Answer):
    """A page of sessions; no cursor: the last."""

    sessions: list[SessionSummary]
    next_cursor: CursorAnswer | None = None
