"""The endpoint for losses that clients upload."""

from fastapi import APIRouter

from skyrl_tx.contract.ids import SessionId
from skyrl_tx.server.context import Incoming
from skyrl_tx.server.errors import not_found
from skyrl_tx.server.schemas.custom_loss import CreateCustomLossRequest
from skyrl_tx.server.schemas.training import FutureHandle
from skyrl_tx.server.submission import custom_losses, submission
from skyrl_tx.server.submission.loss_graph.compile import compile_loss

router = APIRouter()


@router.post("/create_custom_loss", response_model_exclude_none=True)
def create_custom_loss(call: Incoming) -> FutureHandle:
    """Check a traced loss against the vocabulary and store it for its session; 400 names the node that is refused.

    404 if this server evaluates no custom losses: the SDK retries other statuses for minutes (0.38,
    execute_with_retries).
    """
    if not custom_losses.are_offered(call):
        raise not_found(
            "custom losses on the server are not offered; forward_backward_custom with a Python function runs the loss "
            "in the client, with the same gradients"
        )
    request = call.body.model(CreateCustomLossRequest)
    call.check_unknown(request)
    loss = compile_loss(request)
    session_id = SessionId(request.session_id)
    handle = call.store.write(lambda tx: submission.custom_loss(tx, call, session_id, request.custom_loss_seq_id, loss))
    call.context.metrics.submitted("create_custom_loss").inc()
    return handle
