"""Endpoints for results: the long poll, the poll for many results, and cancellation."""

import asyncio
import logging
import time
from http import HTTPStatus

from anyio import to_thread
from fastapi import APIRouter, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse
from sqlmodel import Session

from skyrl_tx.contract import codec, results
from skyrl_tx.contract.errors import ErrorCategory
from skyrl_tx.contract.ids import RequestId, SamplingSessionId
from skyrl_tx.server.context import ApiCall, Incoming, read_poll
from skyrl_tx.server.errors import ApiError, bad_request, not_found
from skyrl_tx.server.http.long_poll import wait_for
from skyrl_tx.server.http.responses import make_result_response
from skyrl_tx.server.identity import access
from skyrl_tx.server.identity.authentication import authenticate_request
from skyrl_tx.server.schemas import service as schemas
from skyrl_tx.server.submission.validation import quote_value
from skyrl_tx.store import completions, futures, pauses
from skyrl_tx.store.errors import StoreError

_log = logging.getLogger(__name__)
_ERROR_PAUSE_S = 1.0
_MAX_COMPLETIONS = 1000
_CANCELLED = results.Failure(message="cancelled by the client", category=ErrorCategory.USER)
router = APIRouter()


@router.post("/retrieve_future", response_model=None)
async def retrieve_future(request: Request) -> Response:
    """Return a result, by long poll. 408 if there is none yet: the client polls again.

    The body of a 408 contains the state of the queue and, if there is one, the reason why the
    request is waiting.
    """
    call = await read_poll(request, await authenticate_request(request))
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
            with context.priority.mark_writing():
                response = await to_thread.run_sync(
                    _read_result, call, request_id, accept, max_bytes, limiter=context.result_readers
                )
            if response is not None:
                return response

        # There is none: tell the client why its request is waiting.
        report = await context.engine.get_recent_report()
        reason = report.problem or report.activity
        if report.outage and await run_in_threadpool(
            call.store.read, lambda tx: futures.is_open_sample(tx, request_id)
        ):
            reason = report.outage
        if report.pauses and report.problem is None:
            pause = await run_in_threadpool(
                call.store.read, lambda tx: pauses.find_wait_reason(tx, request_id, report.pauses)
            )
            state, reason = ("paused_rate_limit", pause) if pause is not None else (state, reason)
    except StoreError as error:
        # Do not respond with a 5xx: the SDK would retry it immediately and forever
        # (0.38, lib/api_future_impl.py).
        log_fields = {"request_id": request_id, "owner": call.caller.owner}
        _log.error("could not read a result from the database: %s", error, extra=log_fields)
        await asyncio.sleep(_ERROR_PAUSE_S)
        reason = f"the database is not available: {error}"

    # The client polls again. The SDK shows the reason, but not together with the state "active".
    again = {"type": "try_again", "request_id": request_id, "queue_state": "active"}
    if reason is not None:
        again |= {"queue_state": state, "queue_state_reason": reason}
    return JSONResponse(again, status_code=HTTPStatus.REQUEST_TIMEOUT)


@router.post("/retrieve_futures", response_model_exclude_none=True)
async def retrieve_futures(call: Incoming) -> schemas.RetrieveFuturesResponse:
    """List the sample requests of one client that completed after a cursor, by long poll."""
    poll = call.body.parse_model(schemas.RetrieveFuturesRequest)
    name = SamplingSessionId(poll.target.sampling_session_id)
    hold_s = call.settings.retrieve_hold_s
    end = time.monotonic() + min(hold_s if poll.timeout is None else max(poll.timeout, 0.0), hold_s)

    while True:
        with call.context.results.subscribe(name, call.caller.key_id) as notification:
            response = await run_in_threadpool(
                _find_completions, call, name, poll.target.cloned_sampler_id, poll.prev_cursor
            )
            remaining_s = end - time.monotonic()
            if response.completions or remaining_s <= 0 or call.context.results.is_closed:
                return response
            if not await wait_for(notification, remaining_s):
                return response


def _find_completions(
    call: ApiCall, name: SamplingSessionId, clone: int, cursor: int
) -> schemas.RetrieveFuturesResponse:
    def read(tx: Session) -> list[completions.SampleCompletion]:
        access.find_sampling_session(tx, call.caller, name)
        return completions.list_by_client(tx, name, clone, cursor, _MAX_COMPLETIONS)

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


@router.post("/cancel_future")
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


def _read_result(call: ApiCall, request_id: RequestId, accept: str, max_bytes: int | None) -> Response | None:
    """Read and encode a result. None if the request is still open.

    A result can be read repeatedly. If the result is larger than `max_bytes`, the response only
    contains its size. The client then reserves memory for the result, and polls again without a
    limit (SDK 0.16 to 0.38, lib/api_future_impl.py).
    """
    state = call.store.read(lambda tx: futures.get_state(tx, request_id, call.caller.owner_filter))
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
    if state.result is None:
        return None

    result = codec.decode(state.result)
    assert isinstance(result, results.Result)
    response = make_result_response(result, accept)
    size = len(response.body)
    if max_bytes is not None and size > max_bytes:
        return JSONResponse({"status": "complete_metadata", "response_payload_size": size})
    call.context.results.mark_fetched(request_id)
    return response
