"""What Tinker has and this server has not: each says so, at once and by name."""

from fastapi import APIRouter

from skyrl_tx.api.context import Incoming
from skyrl_tx.api.errors import not_found

router = APIRouter()

# Any other status than 404 would be asked again for minutes (SDK 0.38, execute_with_retries).


@router.get("/audit", include_in_schema=False)
def audit(call: Incoming) -> None:
    """There is no audit log."""
    raise not_found("the audit log is not offered by this server; its log on standard error tells what it does")


@router.get("/sessions/{session_id}/trace_export", include_in_schema=False)
def trace_export(session_id: str, call: Incoming) -> None:
    """There are no traces."""
    raise not_found("trace export is not offered by this server")


@router.post("/create_custom_loss", include_in_schema=False)
def create_custom_loss(call: Incoming) -> None:
    """Custom losses run in the client; the flag that would upload them is off."""
    raise not_found(
        "custom losses on the server are not offered; forward_backward_custom with a Python function runs the loss "
        "in the client, with the same gradients"
    )
