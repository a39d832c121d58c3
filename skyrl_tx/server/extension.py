"""What an optional feature adds to the API process."""

from collections.abc import Callable
from dataclasses import dataclass

from sqlmodel import Session

from skyrl_tx.contract.ids import SessionId


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerExtension:
    """Routers, pages and error forms of one feature."""

    admission: Callable[[Session, SessionId, float], None] | None = None
    """Called at a time in the transaction that adds a checkpoint to a session; raises UserError to refuse it."""
