"""Read a request, start its samples, and send the result as one response or as a stream of events.

The endpoints of the OpenAI and Anthropic APIs call `serve`. They pass a function that checks the
request and returns a `ChatReply`, which converts new tokens to the format of the API.
"""

import asyncio
import logging
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import ClassVar, TypeVar, cast

import msgspec
from fastapi import Request, Response
from fastapi.concurrency import run_in_threadpool
from sse_starlette import EventSourceResponse, ServerSentEvent
from sse_starlette.sse import AppStatus, SendTimeoutError
from starlette.types import Receive, Scope, Send

from skyrl_tx.apps.chat.errors import ApiName, describe_stream_error
from skyrl_tx.apps.chat.generation import Delta, Generation, merge_deltas, run_off_loop, wait_for_first_change
from skyrl_tx.apps.chat.schemas import GenerationFields
from skyrl_tx.apps.chat.service import ChatRequest, ChatService
from skyrl_tx.contract.errors import RequestError
from skyrl_tx.server.context import ApiCall, receive_data_call
from skyrl_tx.server.errors import ApiError
from skyrl_tx.server.identity.authentication import OWNER, authenticate_request

_log = logging.getLogger(__name__)
_KEEP_ALIVE_S = 15
_SEND_TIMEOUT_S = 60.0
"""If a client reads nothing from a stream for this time, the stream ends and its samples are cancelled."""
_CLIENT_CLOSED_REQUEST = 499
"""Status in the access log if the client disconnects before the response is ready."""

JsonObject = dict[str, object]
"""A JSON object, for example the body of a response."""
T = TypeVar("T")

# By default, sse-starlette cancels all streams as soon as uvicorn shuts down. We disable this, so
# that each stream can send a last event, which tells the client that the server is shutting down.
# `ResultWatcher.release` makes the generations raise this error.
AppStatus.disable_automatic_graceful_drain()


class ChatReply(ABC):
    """Builds the reply to one request, as one response or as a stream of events.

    There is a subclass for each endpoint. A request of a client may have multiple prompts, and
    `prompt_index` in the methods is the index of a prompt in `requests`.
    """

    api: ClassVar[ApiName]
    """The name of the API. An error in a stream is described as in this API."""
    end: ClassVar[bytes] = b""
    """Bytes after the last event of a stream."""

    def __init__(self, requests: Sequence[ChatRequest], *, is_streamed: bool) -> None:
        """`requests` has one request for the engine per prompt. They are started together."""
        self.requests = requests
        self.is_streamed = is_streamed
        self.generations: Sequence[Generation] = ()
        """The running requests, in the order of `requests`. `serve` sets them before the first tokens arrive."""

    @abstractmethod
    def add(self, prompt_index: int, delta: Delta) -> None:
        """Collect new tokens for a response that is not streamed."""

    @abstractmethod
    def make_body(self) -> JsonObject:
        """Return the body of a response that is not streamed.

        Called in a thread after all samples are complete.
        """

    def make_first_events(self) -> Iterator[JsonObject]:
        """Yield the events that come before the first token."""
        yield from ()

    @abstractmethod
    def make_events(self, prompt_index: int, delta: Delta) -> Iterator[JsonObject]:
        """Yield the events for new tokens."""

    @abstractmethod
    def make_last_events(self) -> Iterator[JsonObject]:
        """Yield the events that come after the last token."""

    @abstractmethod
    def encode(self, event: JsonObject) -> bytes:
        """Encode one event."""


class OpenAiReply(ChatReply):
    """A reply with a list of `choices`. It is used for OpenAI's completions and chat completions."""

    api = "openai"
    end = b"data: [DONE]\n\n"
    id_prefix: ClassVar[str]
    object_names: ClassVar[tuple[str, str]]
    """Two values for the field `object`: for a response that is not streamed, and for an event of a stream."""

    def __init__(self, service: ChatService, request: GenerationFields, requests: Sequence[ChatRequest]) -> None:
        super().__init__(requests, is_streamed=bool(request.stream))
        self.service = service
        options = request.stream_options
        self.ends_with_usage = options is not None and bool(options.include_usage)
        self.num_dropped = 0
        """Number of sampled tokens that are not returned, for example with `max_tokens` 0.

        They do not count as completion tokens in the usage.
        """
        self._common_fields: JsonObject = {
            "id": f"{self.id_prefix}{secrets.token_hex(14)}",
            "object": self.object_names[self.is_streamed],
            "created": int(time.time()),
            "model": request.model,
            "system_fingerprint": service.limits.fingerprint,
        }

    @abstractmethod
    def make_choices(self) -> list[JsonObject]:
        """Return the choices of a response that is not streamed."""

    def make_body(self) -> JsonObject:
        """Return the body of a response that is not streamed."""
        return {**self._common_fields, "choices": self.make_choices(), "usage": self._count_usage()}

    def make_chunk(self, choices: Sequence[JsonObject], prompt_fields: JsonObject | None = None) -> JsonObject:
        """Return one event.

        `prompt_fields` are further fields of the event, which describe the prompt. If the client
        asked for the usage in the last event, `usage` is null in all other events.
        """
        usage: JsonObject = {"usage": None} if self.ends_with_usage else {}
        return {**self._common_fields, "choices": choices, **(prompt_fields or {}), **usage}

    def make_last_events(self) -> Iterator[JsonObject]:
        """Yield the usage if the client asked for it."""
        if self.ends_with_usage:
            yield {**self._common_fields, "choices": [], "usage": self._count_usage()}

    def _count_usage(self) -> JsonObject:
        num_prompt = sum(len(request.prompt) for request in self.requests)
        num_sampled = sum(generation.num_tokens for generation in self.generations) - self.num_dropped
        cached = sum(generation.prompt_result.cache_hit_tokens for generation in self.generations)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_sampled,
            "total_tokens": num_prompt + num_sampled,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def encode(self, event: JsonObject) -> bytes:
        """Encode one event."""
        return encode_event(event)


async def serve(request: Request, prepare: Callable[[ChatService, ApiCall], ChatReply]) -> Response:
    """Answer one HTTP request.

    `prepare` checks the request and renders its prompts. It runs in a thread.
    """
    service = get_service(request)
    call, reply = await read_request(request, lambda call: prepare(service, call))

    generations = await service.start_all(call.caller, reply.requests)
    reply.generations = generations

    if reply.is_streamed:
        stream = EventStream(_stream(reply), lambda error: _encode_error(request, reply, error), generations)
        return await respond(request, _start_stream(stream, generations), generations)
    return await respond(request, _complete(reply), generations)


def get_service(request: Request) -> ChatService:
    """Return the chat service of this process."""
    return cast(ChatService, request.app.state.chat)


async def read_request(request: Request, prepare: Callable[[ApiCall], T]) -> tuple[ApiCall, T]:
    """Authenticate and read a request, and run `prepare` in a thread.

    The memory for the body, and for decoding it, stays reserved until `prepare` returns.
    """
    caller = await authenticate_request(request)
    async with receive_data_call(request, caller) as call:
        return call, await run_in_threadpool(prepare, call)


async def _complete(reply: ChatReply) -> Response:
    async for prompt_index, delta in merge_deltas(reply.generations):
        await run_off_loop(partial(reply.add, prompt_index, delta), delta.size)
    return await run_in_threadpool(lambda: make_json_response(reply.make_body()))


async def _start_stream(stream: "EventStream", generations: Sequence[Generation]) -> Response:
    """Return a stream when its first tokens are there.

    So a call that has to wait for a quota can still get the status 429. The client and proxies wait
    no longer than between two keep-alive comments.
    """
    await wait_for_first_change(generations, _KEEP_ALIVE_S)
    return stream


async def _stream(reply: ChatReply) -> AsyncGenerator[bytes]:
    for event in reply.make_first_events():
        yield reply.encode(event)
    async for prompt_index, delta in merge_deltas(reply.generations):
        for event in await run_off_loop(partial(_encode_events, reply, prompt_index, delta), delta.size):
            yield event
    for event in reply.make_last_events():
        yield reply.encode(event)
    if reply.end:
        yield reply.end


def _encode_events(reply: ChatReply, prompt_index: int, delta: Delta) -> list[bytes]:
    return [reply.encode(event) for event in reply.make_events(prompt_index, delta)]


def _encode_error(request: Request, reply: ChatReply, error: Exception) -> bytes:
    """Encode the last event of a stream that fails.

    Log the error, unless the server raised it on purpose to tell the client something.
    """
    if not isinstance(error, ApiError | RequestError):
        owner = {"owner": request.scope.get(OWNER)}
        _log.error("%s: the stream ended with an internal error", request.url.path, exc_info=error, extra=owner)
    return reply.encode(describe_stream_error(reply.api, error)) + reply.end


def make_json_response(body: object) -> Response:
    """Return a JSON response. It is encoded with msgspec, which is much faster than FastAPI's responses."""
    return Response(msgspec.json.encode(body), media_type="application/json")


async def respond(request: Request, work: Awaitable[Response], generations: Sequence[Generation]) -> Response:
    """Wait for `work`, which reads `generations`, and return its response.

    If the client disconnects first, the work and the generations are cancelled. A stream closes
    its generations itself.
    """
    response: Response | None = None
    task = asyncio.ensure_future(work)
    disconnected = asyncio.create_task(_wait_for_disconnect(request.receive))
    try:
        await asyncio.wait({task, disconnected}, return_when=asyncio.FIRST_COMPLETED)
        response = task.result() if task.done() else Response(status_code=_CLIENT_CLOSED_REQUEST)
        return response
    finally:
        disconnected.cancel()
        if not task.done():
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await task
        for generation in () if isinstance(response, EventStream) else generations:
            generation.close()


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def encode_event(data: object, name: str | None = None) -> bytes:
    """Encode one server-sent event."""
    head = b"" if name is None else f"event: {name}\n".encode()
    return head + b"data: " + msgspec.json.encode(data) + b"\n\n"


class EventStream(EventSourceResponse):
    """A stream of server-sent events.

    If the client disconnects or stops reading, the generations are cancelled.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes],
        encode_error: Callable[[Exception], bytes],
        generations: Sequence[Generation],
    ) -> None:
        """`encode_error` makes the last event if `events` raises an error."""
        super().__init__(
            _end_with_error(events, encode_error),
            headers={"Cache-Control": "no-cache"},
            ping=_KEEP_ALIVE_S,
            ping_message_factory=lambda: ServerSentEvent(comment="keep-alive", sep="\n"),
            send_timeout=_SEND_TIMEOUT_S,
        )
        self._generations = generations

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events, then close the generations."""
        try:
            await super().__call__(scope, receive, send)
        except SendTimeoutError:
            _log.info(
                "%s: cancelled a stream, because its client has not read from it for %g s",
                scope["path"],
                _SEND_TIMEOUT_S,
            )
        finally:
            for generation in self._generations:
                generation.close()


async def _end_with_error(
    events: AsyncGenerator[bytes], encode_error: Callable[[Exception], bytes]
) -> AsyncGenerator[bytes]:
    try:
        async for event in events:
            yield event
    except Exception as error:
        yield encode_error(error)
