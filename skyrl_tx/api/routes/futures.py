"""Results, by long poll."""

import asyncio
from http import HTTPStatus
from typing import Literal

from fastapi import APIRouter, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse

from skyrl_tx.api.answers import answer
from skyrl_tx.api.context import Call, Incoming
from skyrl_tx.api.errors import ApiError, not_found
from skyrl_tx.api.schemas.base import shown
from skyrl_tx.api.schemas.service import RetrieveFutureRequest
from skyrl_tx.contract import codec, results
from skyrl_tx.contract.ids import RequestId
from skyrl_tx.store import futures

router = APIRouter()

QueueState = Literal["active", "paused_capacity"]


@router.post("/retrieve_future", response_model=None)
async def retrieve_future(call: Incoming, request: Request) -> Response:
    """Give a result as soon as there is one; 408 after a while, upon which the client asks again at once."""
    request_id = RequestId(call.body.model(RetrieveFutureRequest).request_id)
    accept = request.headers.get("accept", "")
    with call.parts.waiters.expecting(request_id) as answered:
        response = await run_in_threadpool(_finished, call, request_id, accept)
        if response is not None:
            return response
        try:
            await asyncio.wait_for(answered.wait(), call.settings.retrieve_hold_s)
        except TimeoutError:
            return await run_in_threadpool(_try_again, call, request_id)
        response = await run_in_threadpool(_finished, call, request_id, accept)
        return response or await run_in_threadpool(_try_again, call, request_id)


def _finished(call: Call, request_id: RequestId, accept: str) -> Response | None:
    """The answer, if there is one; it can be had again and again."""
    state = call.store.read(lambda tx: futures.result(tx, request_id, call.caller.owner))
    if state.status == "unknown":
        raise not_found(f"request_id {shown(request_id)} does not exist")
    if state.status == "pruned":
        raise ApiError(HTTPStatus.GONE, f"request_id {shown(request_id)}: its result was fetched long ago and is gone")
    if state.result is None:
        return None
    result = codec.decode(state.result)
    assert isinstance(result, results.Result)
    call.parts.waiters.note_fetched(request_id)
    return answer(result, accept)


def _try_again(call: Call, request_id: RequestId) -> Response:
    """Ask for patience, and say why when the engine is not at work."""
    trouble = call.parts.engine_trouble()
    state: QueueState = "active" if trouble is None else "paused_capacity"
    content = {"type": "try_again", "request_id": request_id, "queue_state": state}
    if trouble is not None:
        content["queue_state_reason"] = trouble
    return JSONResponse(content, status_code=HTTPStatus.REQUEST_TIMEOUT)
