"""Responses as server-sent events, and responses whose client may go away while they are computed."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress
from typing import TypeVar

import msgspec
from fastapi import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

_KEEP_ALIVE_S = 15.0
_KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"

T = TypeVar("T")


def event(data: object, name: str | None = None) -> bytes:
    """Return one event."""
    head = b"" if name is None else f"event: {name}\n".encode()
    return head + b"data: " + msgspec.json.encode(data) + b"\n\n"


class EventStream(Response):
    """Sends the events of a generator, and comments while there are none. It ends with the connection."""

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncGenerator[bytes], on_error: Callable[[Exception], bytes], close: Callable[[], None]
    ) -> None:
        """`on_error` returns the last event after an error of the generator. `close` is called at the end."""
        self.status_code = 200
        self.background = None
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})
        self._events = events
        self._on_error = on_error
        self._close = close
        self._pending: asyncio.Future[bytes | None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the response."""
        gone = asyncio.create_task(_disconnected(receive))
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            while (piece := await self._next(gone)) is not None:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            if not gone.done():
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            gone.cancel()
            self._close()
            await self._events.aclose()

    async def _next(self, gone: asyncio.Task[None]) -> bytes | None:
        """Return the next piece to send; None at the end, or when the client has gone."""
        if self._pending is None:
            self._pending = asyncio.ensure_future(anext(self._events, None))
        await asyncio.wait({self._pending, gone}, timeout=_KEEP_ALIVE_S, return_when=asyncio.FIRST_COMPLETED)
        if gone.done():
            self._pending.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await self._pending
            return None
        if not self._pending.done():
            return _KEEP_ALIVE
        done, self._pending = self._pending, None
        try:
            return done.result()
        except Exception as error:
            return self._on_error(error)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class ClientGone(Exception):
    """The client went away before its response was complete."""


async def while_connected(request: Request, work: Awaitable[T]) -> T:
    """Return the result of work; raises ClientGone, and cancels it, when the client of a request disconnects."""
    task = asyncio.ensure_future(work)
    gone = asyncio.create_task(_disconnected(request.receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        gone.cancel()
        if not task.done():
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await task
