"""Results, by long poll, and the end of those that are wanted no more."""

import asyncio
import logging
import time
from http import HTTPStatus
from typing import Literal

from anyio import to_thread
from fastapi import APIRouter, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse
from sqlmodel import Session

from skyrl_tx.api import lookup
from skyrl_tx.api.answers import answer
from skyrl_tx.api.context import Call, Incoming, incoming
from skyrl_tx.api.errors import ApiError, bad_request, not_found
from skyrl_tx.api.principal import principal
from skyrl_tx.api.schemas.base import shown
from skyrl_tx.api.schemas.service import (
    CancelFutureAnswer,
    CancelFutureRequest,
    CompletionAnswer,
    RetrieveFutureRequest,
    RetrieveFuturesAnswer,
    RetrieveFuturesRequest,
)
from skyrl_tx.api.waiters import within
from skyrl_tx.contract import codec, results
from skyrl_tx.contract.errors import ErrorCategory
from skyrl_tx.contract.ids import RequestId, SamplingSessionId
from skyrl_tx.store import cancellations, completions, futures
from skyrl_tx.store.errors import StoreError

_log = logging.getLogger(__name__)
_PAUSE_S = 1.0
_COMPLETIONS_A_POLL = 1000
_CANCELLED = results.Failure(message="cancelled by the client", category=ErrorCategory.USER)
router = APIRouter()

QueueState = Literal["active", "paused_capacity"]


@router.post("/retrieve_future", response_model=None)
async def retrieve_future(request: Request) -> Response:
    """Give a result as soon as there is one; 408 after a while, upon which the client asks again at once."""
    call = await incoming(request, await principal(request))
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


@router.post("/retrieve_futures", response_model_exclude_none=True)
async def retrieve_futures(call: Incoming) -> RetrieveFuturesAnswer:
    """Say which samples of one client have their results, as soon as there is news; the results are asked for apart."""
    asked = call.body.model(RetrieveFuturesRequest)
    name = SamplingSessionId(asked.target.sampling_session_id)
    hold_s = call.settings.retrieve_hold_s
    end = time.monotonic() + min(hold_s if asked.timeout is None else max(asked.timeout, 0.0), hold_s)
    while True:
        with call.parts.waiters.expecting(name) as answered:
            news = await run_in_threadpool(_news, call, name, asked.target.cloned_sampler_id, asked.prev_cursor)
            left = end - time.monotonic()
            if news.completions or left <= 0 or call.parts.waiters.is_closed:
                return news
            if not await within(answered, left):
                return news


def _news(call: Call, name: SamplingSessionId, clone: int, cursor: int) -> RetrieveFuturesAnswer:
    def look(tx: Session) -> list[completions.Completion]:
        lookup.sampling_session(tx, call.caller, name)
        return completions.of_client(tx, name, clone, cursor, _COMPLETIONS_A_POLL)

    found = call.store.read(look)
    return RetrieveFuturesAnswer(
        completions=[
            CompletionAnswer(state="failed", request_id=each.request_id)
            if each.failed
            else CompletionAnswer(
                state="finished", request_id=each.request_id, response_payload_uncompressed_size=each.num_bytes or None
            )
            for each in found
        ],
        cursor=found[-1].answer_order if found else cursor,
    )


@router.post("/cancel_future")
def cancel_future(call: Incoming) -> CancelFutureAnswer:
    """End a sample that its client wants no more; of no effect once it is answered, or if it never was."""
    request_id = RequestId(call.body.model(CancelFutureRequest).request_id)
    failure = codec.encode(_CANCELLED)
    outcome = call.store.write(lambda tx: cancellations.cancel(tx, request_id, call.caller.reach, failure, time.time()))
    if outcome == "no sample":
        raise bad_request(f"request_id {shown(request_id)}: only samples can be cancelled")
    call.store.wake()  # others may wait for it: the doorbell tells the engine alone
    return CancelFutureAnswer()


async def _held(call: Call, request_id: RequestId, accept: str, limit: int | None) -> Response:
    """The answer, or a plea for patience after the time that a poll is held."""
    if await call.parts.waiters.has_news(request_id, call.caller.reach, call.settings.retrieve_hold_s):
        with call.parts.precedence.answering():
            response = await to_thread.run_sync(_finished, call, request_id, accept, limit, limiter=call.parts.reading)
        if response is not None:
            return response
    return await _try_again(call, request_id)


def _finished(call: Call, request_id: RequestId, accept: str, limit: int | None) -> Response | None:
    """The answer, if there is one; it can be had again and again.

    One of more than `limit` bytes is only announced: the client makes room for so much before it asks anew, without
    a limit (SDK 0.16 … 0.38, lib/api_future_impl.py).
    """
    state = call.store.read(lambda tx: futures.result(tx, request_id, call.caller.reach))
    if state.status == "unknown" and not futures.may_have_been(request_id):
        raise not_found(f"request_id {shown(request_id)} does not exist: this server gives none of that form")
    if state.status in ("unknown", "pruned"):
        # A client samples anew after 410; any other refusal would end it (SDK 0.38, lib/api_future_impl.py).
        raise ApiError(
            HTTPStatus.GONE,
            f"request_id {shown(request_id)}: its result was fetched long ago and is gone, or never was",
        )
    if state.status == "damaged":
        return answer(_damaged(request_id), accept)
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


def _damaged(request_id: RequestId) -> results.Failure:
    """What was stored is no longer what was read back; nothing else can be said of it."""
    message = (
        f"request_id {shown(request_id)}: its stored result is damaged, its checksum is not that of what was written"
    )
    return results.Failure(message=message, category=ErrorCategory.SERVER)


async def _try_again(call: Call, request_id: RequestId) -> Response:
    """Ask for patience, and say why when the engine is not at work."""
    return _patience(request_id, await call.parts.engine.recent_trouble())


def _patience(request_id: RequestId, trouble: str | None) -> Response:
    state: QueueState = "active" if trouble is None else "paused_capacity"
    content = {"type": "try_again", "request_id": request_id, "queue_state": state}
    if trouble is not None:
        content["queue_state_reason"] = trouble
    return JSONResponse(content, status_code=HTTPStatus.REQUEST_TIMEOUT)
