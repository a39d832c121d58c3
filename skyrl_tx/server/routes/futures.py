"""Endpoints for results: the long poll, the poll for many results, and cancellation."""

import asyncio
import logging
import time
from contextlib import AsyncExitStack
from dataclasses import replace
from http import HTTPStatus

from fastapi import APIRouter, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse
from sqlmodel import Session

from skyrl_tx.contract import codec, results
from skyrl_tx.contract.errors import ErrorCategory
from skyrl_tx.contract.ids import RequestId, SamplingSessionId
from skyrl_tx.server.context import ApiCall, Incoming, read_poll
from skyrl_tx.server.errors import ApiError, bad_request, not_found
from skyrl_tx.server.http.body import COMPLETIONS_POLL_LIMITS
from skyrl_tx.server.http.long_poll import wait_for
from skyrl_tx.server.http.responses import LargeResponse, estimate_response_bytes, make_result_response
from skyrl_tx.server.identity import access
from skyrl_tx.server.schemas import service as schemas
from skyrl_tx.server.schemas.base import describe_body
from skyrl_tx.server.shares import SMALL_BYTES
from skyrl_tx.server.submission.validation import quote_value
from skyrl_tx.store import StoreError, completions, engine_state, futures

_log = logging.getLogger(__name__)
_ERROR_PAUSE_S = 1.0
_MAX_COMPLETIONS = 1000
_CANCELLED = results.Failure(message="cancelled by the client", category=ErrorCategory.USER)
router = APIRouter()


@router.post("/retrieve_future", response_model=None, **describe_body(schemas.RetrieveFutureRequest))
async def retrieve_future(request: Request) -> Response:
    """Return a result, by long poll. 408 if there is none yet: the client polls again.

    The body of a 408 contains the state of the queue and, if there is one, the reason why the
    request is waiting.
    """
    call = await read_poll(request)
    poll = call.body.parse_model(schemas.RetrieveFutureRequest)
    request_id = RequestId(poll.request_id)
    max_bytes = call.settings.large_result_bytes if poll.allow_metadata_only else None
    accept = request.headers.get("accept", "")
    context = call.context
    state = "paused_capacity"
    try:
        # Wait for the result.
        owner, key_id = call.caller.owner_filter, call.caller.key_id
        if await context.results.wait_for_result(request_id, owner, call.settings.retrieve_hold_s, key_id):
            response = await _read_response(call, request_id, accept, max_bytes)
            if response is not None:
                return response

        # There is none: tell the client why its request is waiting.
        report = await context.engine.get_recent_report()
        reason = report.problem or report.activity
        if report.outage and await context.run_call(
            call.caller.owner, call.store.read, lambda tx: futures.is_open_sample(tx, request_id)
        ):
            reason = report.outage
        if report.pauses and report.problem is None:
            pause = await context.run_call(
                call.caller.owner,
                call.store.read,
                lambda tx: engine_state.find_wait_reason(tx, request_id, report.pauses),
            )
            state, reason = ("paused_rate_limit", pause) if pause is not None else (state, reason)
    except StoreError as error:
        # Do not respond with a 5xx: the SDK would retry it immediately and forever
        # (0.38, lib/api_future_impl.py).
        log_fields = {"request_id": request_id, "owner": call.caller.owner}
        _log.error("could not read a result from the database: %s", error, extra=log_fields)
        await asyncio.sleep(_ERROR_PAUSE_S)
        reason = "the database is not available; see the server's log"

    # The client polls again. The SDK shows the reason, but not together with the state "active".
    again = {"type": "try_again", "request_id": request_id, "queue_state": "active"}
    if reason is not None:
        again |= {"queue_state": state, "queue_state_reason": reason}
    return JSONResponse(again, status_code=HTTPStatus.REQUEST_TIMEOUT)


@router.post("/retrieve_futures", **describe_body(schemas.RetrieveFuturesRequest))
async def retrieve_futures(request: Request) -> schemas.RetrieveFuturesResponse:
    """List the sample requests of one client that completed after a cursor, by long poll."""
    call = await read_poll(request, COMPLETIONS_POLL_LIMITS)
    poll = call.body.parse_model(schemas.RetrieveFuturesRequest)
    # Free the ids of fetched results, because the poll may last for half a minute.
    poll.retrieved_request_ids.clear()
    call = replace(call, body=replace(call.body, raw=b""))
    session_id = SamplingSessionId(poll.target.sampling_session_id)
    hold_s = call.settings.retrieve_hold_s
    end = time.monotonic() + min(hold_s if poll.timeout is None else max(poll.timeout, 0.0), hold_s)

    while True:
        with call.context.results.subscribe(session_id, call.caller.key_id) as notification:
            response = await call.context.run_call(
                call.caller.owner, _find_completions, call, session_id, poll.target.cloned_sampler_id, poll.prev_cursor
            )
            remaining_s = end - time.monotonic()
            if response.completions or remaining_s <= 0 or call.context.results.is_closed:
                return response
            if not await wait_for(notification, remaining_s):
                return response


def _find_completions(
    call: ApiCall, session_id: SamplingSessionId, clone_id: int, cursor: int
) -> schemas.RetrieveFuturesResponse:
    def read(tx: Session) -> list[completions.SampleCompletion]:
        access.find_sampling_session(tx, call.caller, session_id)
        return completions.list_by_client(tx, session_id, clone_id, cursor, _MAX_COMPLETIONS)

    completed = call.store.read(read)
    return schemas.RetrieveFuturesResponse(
        completions=[
            schemas.CompletedRequest(
                state="failed" if sample.failed else "finished",
                request_id=sample.request_id,
                response_payload_uncompressed_size=None if sample.failed else sample.num_bytes or None,
            )
            for sample in completed
        ],
        cursor=completed[-1].answer_order if completed else cursor,
    )


@router.post("/cancel_future", **describe_body(schemas.CancelFutureRequest))
def cancel_future(call: Incoming) -> dict[str, str]:
    """Cancel a sample request. No effect if it is completed or unknown."""
    request_id = RequestId(call.body.parse_model(schemas.CancelFutureRequest).request_id)
    failure = codec.encode(_CANCELLED)
    owner = call.caller.owner_filter
    outcome = call.store.write(lambda tx: completions.cancel(tx, request_id, owner, failure, time.time()))
    if outcome == "no sample":
        raise bad_request(f"request_id {quote_value(request_id)}: only samples can be cancelled")
    call.store.wake()  # the commit notifies the engine, but not the polls of this process
    return {"type": "cancel_future"}


async def _read_response(call: ApiCall, request_id: RequestId, accept: str, max_bytes: int | None) -> Response | None:
    """Read and encode a result. None if the request is still open.

    A result can be read repeatedly. If the result is larger than `max_bytes`, the response only
    contains an upper bound on its size. The client then reserves memory for the result, and polls
    again without a limit (SDK 0.16 to 0.38, lib/api_future_impl.py).
    """
    context, shares, owner = call.context, call.context.shares, call.caller.owner
    with context.priority.mark_writing(owner):
        async with shares.result_readers.reserve(owner):
            found = await run_in_threadpool(_read_result, call, request_id, accept, SMALL_BYTES)
    size = estimate_response_bytes(found, accept) if isinstance(found, int) else len(found.body) if found else 0
    if max_bytes is not None and size > max_bytes:
        return JSONResponse({"status": "complete_metadata", "response_payload_size": size})

    # A large result waits for memory. Meanwhile it holds no thread, so other requests can run.
    if isinstance(found, int):
        async with AsyncExitStack() as reservation:
            await reservation.enter_async_context(shares.result_bytes.reserve(owner, size))
            async with shares.result_readers.reserve(owner):
                found = await run_in_threadpool(_read_result, call, request_id, accept)
            if isinstance(found, Response):
                found = LargeResponse(found, reservation.pop_all())
    assert not isinstance(found, int)
    if found is not None:
        context.results.mark_fetched(request_id)
    return found


def _read_result(
    call: ApiCall, request_id: RequestId, accept: str, max_result_bytes: int = 2**62
) -> Response | int | None:
    """Read and encode a result. Returns None if the request is still open.

    A stored result that is larger than `max_result_bytes` is not read. Then the function returns
    the size of the result in bytes.
    """
    state = call.store.read(lambda tx: futures.get_state(tx, request_id, call.caller.owner_filter, max_result_bytes))
    if state.status == "unknown" and not futures.is_request_id(request_id):
        raise not_found(f"request_id {quote_value(request_id)} does not exist: this server issues no ids of that form")
    if state.status in ("unknown", "pruned"):
        # After a 410, the client sends the request again. Other statuses end it
        # (SDK 0.38, lib/api_future_impl.py).
        raise ApiError(
            HTTPStatus.GONE,
            f"request_id {quote_value(request_id)}: its result was fetched long ago and is gone, or never existed",
        )
    if state.status == "damaged":
        message = f"request_id {quote_value(request_id)}: its stored result is damaged, its checksum does not match"
        return make_result_response(results.Failure(message=message, category=ErrorCategory.SERVER), accept)
    if state.num_left_out:
        return state.num_left_out
    if state.result is None:
        return None

    try:
        result = codec.decode(state.result)
    except codec.CodecError as error:  # for example, a newer release wrote it
        message = f"request_id {quote_value(request_id)}: its stored result cannot be read: {error}"
        result = results.Failure(message=message, category=ErrorCategory.SERVER)
    assert isinstance(result, results.Result)
    return make_result_response(result, accept)
