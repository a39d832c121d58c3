"""Loss functions that clients upload. Each belongs to one session."""

from sqlalchemy import bindparam, delete, exists, func, insert, or_, select, update
from sqlmodel import Session, col

from skyrl_tx.contract.errors import UserError
from skyrl_tx.contract.ids import SessionId
from skyrl_tx.store.database import execute
from skyrl_tx.store.sessions import SessionRef
from skyrl_tx.store.tables import CustomLossRow, SessionRow

RETENTION_S = 30 * 86_400.0
"""How long a loss is kept after its last use."""
FINISHED_RETENTION_S = 86_400.0
"""How long a loss is kept after its session has finished.

Open requests can run even later, because each request contains a copy of its loss.
"""
MAX_PER_SESSION = 256
MAX_PER_OWNER = 2048
_TOUCH_EVERY_S = 3600.0


_BODY = select(col(CustomLossRow.body)).where(
    col(CustomLossRow.loss_id) == bindparam("loss_id"), col(CustomLossRow.session_id) == bindparam("session_id")
)
_COUNTS = select(
    func.count().filter(col(CustomLossRow.session_id) == bindparam("session_id")),
    func.count(),
).where(col(CustomLossRow.owner) == bindparam("owner"))
_NEW = insert(CustomLossRow)
_TOUCH = (
    update(CustomLossRow)
    .where(col(CustomLossRow.loss_id) == bindparam("used"), col(CustomLossRow.last_used_at) < bindparam("before"))
    .values(last_used_at=bindparam("now"))
)
_EXPIRE = delete(CustomLossRow).where(
    or_(
        col(CustomLossRow.last_used_at) < bindparam("unused_since"),
        exists().where(
            col(SessionRow.session_id) == col(CustomLossRow.session_id),
            col(SessionRow.finished_at) < bindparam("finished_before"),
        ),
    )
)


def create(tx: Session, loss_id: str, session: SessionRef, *, name: str, body: bytes, now: float) -> None:
    """Store a loss, unless the same loss is stored already.

    Raises UserError if the id was used for a different loss, if the session has `MAX_PER_SESSION`
    losses, and if the owner has `MAX_PER_OWNER`.
    """
    session_id, owner = session.session_id, session.owner
    stored = find(tx, loss_id, session_id)
    if stored is not None:
        if stored != body:
            raise UserError(f"custom_loss_seq_id: loss {loss_id} exists already with other contents")
        return

    num_in_session, num_of_owner = execute(tx, _COUNTS, {"session_id": session_id, "owner": owner}).one()
    if num_in_session >= MAX_PER_SESSION:
        raise UserError(f"this session has {num_in_session} custom losses, the maximum: create a new session for more")
    if num_of_owner >= MAX_PER_OWNER:
        raise UserError(
            f"the sessions of {owner!r} have {num_of_owner} custom losses, the maximum: losses are removed a day after "
            "their session has finished"
        )

    common = {"session_id": session_id, "owner": owner, "name": name, "body": body}
    execute(tx, _NEW, {"loss_id": loss_id, "created_at": now, "last_used_at": now, **common})


def find(tx: Session, loss_id: str, session_id: SessionId) -> bytes | None:
    """Return an encoded loss of a session, or None if it does not exist."""
    return execute(tx, _BODY, {"loss_id": loss_id, "session_id": session_id}).scalar_one_or_none()


def touch(tx: Session, loss_id: str, now: float) -> None:
    """Record a use of a loss, at most once per hour."""
    execute(tx, _TOUCH, {"used": loss_id, "now": now, "before": now - _TOUCH_EVERY_S})


def expire(tx: Session, now: float) -> int:
    """Delete the losses whose retention has ended, and return their number."""
    limits = {"unused_since": now - RETENTION_S, "finished_before": now - FINISHED_RETENTION_S}
    return execute(tx, _EXPIRE, limits).rowcount
