"""Results, by long poll."""

import asyncio
import logging
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
from skyrl_tx.store.errors import StoreError

_log = logging.getLogger(__name__)
_PAUSE_S = 1.0
router = APIRouter()

QueueState = Literal["active", "paused_capacity"]


@router.post("/retrieve_future", response_model=None)
async def retrieve_future(call: Incoming, request: Request) -> Response:
    """Give a result as soon as there is one; 408 after a while, upon which the client asks again at once."""
    asked = call.body.model(RetrieveFutureRequest)
    request_id = RequestId(asked.request_id)
    limit = call.settings.large_result_bytes if asked.allow_metadata_only else None
    try:
        return await _held(call, request_id, request.headers.get("accept", ""), limit)
    except StoreError as error:
        # Any 5xx would be asked again at once and for ever, without a pause (SDK 0.38, lib/api_future_impl.py).
        _log.error("no result can be looked up: %s", error)
        await asyncio.sleep(_PAUSE_S)
        return _patience(request_id, f"the database cannot serve now: {error}")


async def _held(call: Call, request_id: RequestId, accept: str, limit: int | None) -> Response:
    """The answer, or a plea for patience after the time that a poll is held."""
    with call.parts.waiters.expecting(request_id) as answered:
        response = await run_in_threadpool(_finished, call, request_id, accept, limit)
        if response is not None:
            return response
        try:
            await asyncio.wait_for(answered.wait(), call.settings.retrieve_hold_s)
        except TimeoutError:
            return await run_in_threadpool(_try_again, call, request_id)
        response = await run_in_threadpool(_finished, call, request_id, accept, limit)
        return response or await run_in_threadpool(_try_again, call, request_id)


def _finished(call: Call, request_id: RequestId, accept: str, limit: int | None) -> Response | None:
    """The answer, if there is one; it can be had again and again.

    One of more than `limit` bytes is only announced: the client makes room for so much before it asks anew, without
    a limit (SDK 0.16 … 0.38, lib/api_future_impl.py).
    """
    state = call.store.read(lambda tx: futures.result(tx, request_id, call.caller.owner))
    if state.status == "unknown":
        raise not_found(f"request_id {shown(request_id)} does not exist")
    if state.status == "pruned":
        raise ApiError(HTTPStatus.GONE, f"request_id {shown(request_id)}: its result was fetched long ago and is gone")
    if state.result is None:
        return None
    result = codec.decode(state.result)
    assert isinstance(result, results.Result)
    response = answer(result, accept)
    size = len(response.body)
    if limit is not None and size > limit:
        return JSONResponse({"status": "complete_metadata", "response_payload_size": size})
    call.parts.waiters.note_fetched(request_id)
    return response


def _try_again(call: Call, request_id: RequestId) -> Response:
    """Ask for patience, and say why when the engine is not at work."""
    return _patience(request_id, call.parts.engine_trouble())


def _patience(request_id: RequestId, trouble: str | None) -> Response:
    state: QueueState = "active" if trouble is None else "paused_capacity"
    content = {"type": "try_again", "request_id": request_id, "queue_state": state}
    if trouble is not None:
        content["queue_state_reason"] = trouble
    return JSONResponse(content, status_code=HTTPStatus.REQUEST_TIMEOUT)
