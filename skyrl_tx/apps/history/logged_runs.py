"""Joining logged runs to training runs by hand, for the endpoint and for the page of a run."""

from sqlmodel import Session

from skyrl_tx.apps.history import logged_metrics
from skyrl_tx.apps.history.tables import LoggedRunRow
from skyrl_tx.contract.ids import ModelId
from skyrl_tx.server.errors import bad_request, not_found
from skyrl_tx.server.identity import access
from skyrl_tx.server.identity.authentication import Principal
from skyrl_tx.store import models


def find_logged_run(tx: Session, caller: Principal, logged_run_id: int) -> LoggedRunRow:
    """Find a logged run. Raises ApiError 404 if the caller has none of this id."""
    row = logged_metrics.get_run(tx, logged_run_id)
    if row is None or not caller.can_act_for(row.owner):
        raise not_found(f"logged run {logged_run_id} does not exist")
    return row


def join_logged_run(tx: Session, caller: Principal, logged_run_id: int, run_id: str | None) -> None:
    """Join a logged run to a training run of the same owner, or with None to none. Raises ApiError 400 or 404."""
    row = find_logged_run(tx, caller, logged_run_id)
    if run_id is None:
        logged_metrics.set_model(tx, row, None)
        return
    model_id = access.find_model(tx, caller, ModelId(run_id)).model_id
    if models.get_owner(tx, model_id) != row.owner:
        raise bad_request(f"training_run_id {model_id!r}: it belongs to another owner than the logged run")
    logged_metrics.set_model(tx, row, model_id)
