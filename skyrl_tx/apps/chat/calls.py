"""Common parts of the endpoints: receiving a request, and the values of every response."""

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import TypeVar, cast

from fastapi import Request, Response
from fastapi.concurrency import run_in_threadpool

from skyrl_tx.apps.chat.errors import Form, in_stream
from skyrl_tx.apps.chat.generation import Delta, Generation
from skyrl_tx.apps.chat.resolve import Weights, resolve
from skyrl_tx.apps.chat.server_sent_events import ClientGone, while_connected
from skyrl_tx.apps.chat.service import ChatService
from skyrl_tx.contract.errors import RequestError
from skyrl_tx.server.context import Call, data_call
from skyrl_tx.server.errors import ApiError
from skyrl_tx.server.identity.authentication import OWNER, authenticate_request

_log = logging.getLogger(__name__)
CLIENT_CLOSED_REQUEST = 499
"""Status in the log of a response that no one reads."""
STARTED_AT = int(time.time())
"""Shown as the creation time of the served model."""

T = TypeVar("T")


def service_of(request: Request) -> ChatService:
    """Return the chat service of this process."""
    return cast(ChatService, request.app.state.chat)


async def received(request: Request, prepare: Callable[[Call], Awaitable[T]]) -> tuple[Call, T]:
    """Authenticate and receive a request, and prepare it while its memory is held."""
    caller = await authenticate_request(request)
    async with data_call(request, caller) as call:
        return call, await prepare(call)


def weights_of(call: Call, model: str) -> Weights:
    """Return the weights that a request names."""
    return call.store.read(lambda tx: resolve(tx, call.caller, call.settings, model))


async def answered(request: Request, work: Awaitable[Response], generations: Sequence[Generation]) -> Response:
    """Return the response of work on generations; all of it is cancelled if the client disconnects."""
    try:
        return await while_connected(request, work)
    except ClientGone:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    finally:
        closing(generations)()


def new_id(prefix: str) -> str:
    """Return the id of a response."""
    return f"{prefix}{secrets.token_hex(14)}"


def now() -> int:
    """Return the time as OpenAI's API shows it."""
    return int(time.time())


def error_event(form: Form, request: Request) -> Callable[[Exception], dict[str, object]]:
    """Return what makes the body of an error within a stream. Unexpected errors are logged."""

    def body(error: Exception) -> dict[str, object]:
        if not isinstance(error, ApiError | RequestError):
            about = {"owner": request.scope.get(OWNER)}
            _log.error("%s failed while streaming", request.url.path, exc_info=error, extra=about)
        return in_stream(form, error)[1]

    return body


async def merged(generations: Sequence[Generation]) -> AsyncGenerator[tuple[int, Delta]]:
    """Yield the deltas of several generations as they come, with the number of each one's generation."""
    if len(generations) == 1:
        async with aclosing(generations[0].deltas()) as deltas:
            async for delta in deltas:
                yield 0, delta
        return
    queue: asyncio.Queue[tuple[int, Delta] | Exception | None] = asyncio.Queue()

    async def pump(number: int, generation: Generation) -> None:
        try:
            async with aclosing(generation.deltas()) as deltas:
                async for delta in deltas:
                    queue.put_nowait((number, delta))
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)

    tasks = [asyncio.create_task(pump(number, each)) for number, each in enumerate(generations)]
    try:
        num_open = len(tasks)
        while num_open:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                num_open -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def closing(generations: Sequence[Generation]) -> Callable[[], None]:
    """Return what cancels those of the generations that are not complete."""

    def close() -> None:
        for generation in generations:
            generation.close()

    return close


in_thread = run_in_threadpool
"""Runs what takes longer than the event loop may wait: parsing, rendering, encoding."""
