"""Read a request, start its samples, and send the result as one response or as a stream of events.

The endpoints of the OpenAI and Anthropic APIs call `serve`. They pass a function that checks the
request and returns a `ChatReply`, which converts new tokens to the format of the API.
"""

import asyncio
import json
import logging
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from typing import ClassVar, Literal, TypeVar, cast

import msgspec
from fastapi import Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse
from sse_starlette import EventSourceResponse, ServerSentEvent
from sse_starlette.sse import AppStatus, SendTimeoutError
from starlette.types import Receive, Scope, Send

from skyrl_tx.apps.chat import logprobs
from skyrl_tx.apps.chat.generation import Delta, Generation, merge_deltas, run_off_loop, wait_for_first_change
from skyrl_tx.apps.chat.logprobs import TokenLogprob
from skyrl_tx.apps.chat.schemas import GenerationFields
from skyrl_tx.apps.chat.service import ChatRequest, ChatService
from skyrl_tx.apps.chat.text import ContextTooLong
from skyrl_tx.contract.errors import FieldError, RequestError
from skyrl_tx.process.text import make_line
from skyrl_tx.server.context import ApiCall, receive_data_call
from skyrl_tx.server.errors import ApiError
from skyrl_tx.server.identity.authentication import OWNER, authenticate_request

_log = logging.getLogger(__name__)
_KEEP_ALIVE_S = 15
_SEND_TIMEOUT_S = 60.0
"""If a client reads nothing from a stream for this time, the stream ends and its samples are cancelled."""
_CLIENT_CLOSED_REQUEST = 499
"""Status in the access log if the client disconnects before the response is ready."""
_OVERLOADED = 529
"""Anthropic's HTTP status for an overloaded server. Used instead of 503."""
_MAX_PARAM_CHARS = 200
_KEPT_HEADERS = frozenset({"retry-after", "www-authenticate", "x-should-retry"})
_OPENAI_TYPES: Mapping[int, tuple[str, str | None]] = {
    HTTPStatus.BAD_REQUEST: ("invalid_request_error", None),
    HTTPStatus.UNAUTHORIZED: ("invalid_request_error", "invalid_api_key"),
    HTTPStatus.FORBIDDEN: ("invalid_request_error", "insufficient_permissions"),
    HTTPStatus.NOT_FOUND: ("invalid_request_error", "model_not_found"),
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: ("invalid_request_error", None),
    HTTPStatus.TOO_MANY_REQUESTS: ("rate_limit_error", "rate_limit_exceeded"),
}
_ANTHROPIC_TYPES: Mapping[int, str] = {
    HTTPStatus.BAD_REQUEST: "invalid_request_error",
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "overloaded_error",
}

ApiName = Literal["openai", "anthropic"]
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
    def make_body(self, samples: Sequence[tuple[int, Delta]]) -> JsonObject:
        """Return the body of a response that is not streamed. Called in a thread.

        `samples` are all samples in order, each as one delta with the index of its prompt.
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

    def encode(self, event: JsonObject) -> bytes:
        """Encode one event."""
        return encode_event(event)


class OpenAiReply(ChatReply):
    """A reply with a list of `choices`. It is used for OpenAI's completions and chat completions."""

    api = "openai"
    end = b"data: [DONE]\n\n"
    id_prefix: ClassVar[str]
    object_names: ClassVar[tuple[str, str]]
    """Two values for the field `object`: for a response that is not streamed, and for an event of a stream."""

    def __init__(self, service: ChatService, request: GenerationFields, requests: Sequence[ChatRequest]) -> None:
        super().__init__(requests, is_streamed=bool(request.stream))
        self.text = service.text
        self._fields = request
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
    def make_choice(self, prompt_index: int, delta: Delta) -> JsonObject:
        """Return the choice of a sample in a response that is not streamed."""

    def make_body(self, samples: Sequence[tuple[int, Delta]]) -> JsonObject:
        """Return the body of a response that is not streamed."""
        choices = [self.make_choice(prompt_index, delta) for prompt_index, delta in samples]
        return {**self._common_fields, "choices": choices, "usage": self._count_usage()}

    def make_chunk(self, choices: Sequence[JsonObject], prompt_fields: JsonObject | None = None) -> JsonObject:
        """Return one event.

        `prompt_fields` are further fields of the event, which describe the prompt. If the client
        asked for the usage in the last event, `usage` is null in all other events.
        """
        usage: JsonObject = {"usage": None} if self.ends_with_usage else {}
        return {**self._common_fields, "choices": choices, **(prompt_fields or {}), **usage}

    def score_prompt(self, prompt_index: int, k: int) -> Iterator[list[TokenLogprob]]:
        """Yield the tokens of a prompt in slices, with log-probabilities and the top `k` at each position."""
        tokens, result = self.requests[prompt_index].prompt, self.generations[prompt_index].prompt_result
        return logprobs.score_prompt(tokens, result, k)

    def describe_prompt(self, prompt_index: int) -> JsonObject:
        """Return the tokens and log-probabilities of a prompt, if the client asked for them."""
        described: JsonObject = {}
        if (k := self._fields.prompt_logprobs) is not None:
            described["prompt_logprobs"] = logprobs.describe_prompt(self.text, self.score_prompt(prompt_index, k), k)
        if self._fields.return_token_ids:
            described["prompt_token_ids"] = self.requests[prompt_index].prompt
        return described

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


async def serve(request: Request, prepare: Callable[[ChatService, ApiCall], ChatReply]) -> Response:
    """Answer one HTTP request.

    `prepare` checks the request and renders its prompts. It runs in a thread.
    """
    service = get_service(request)
    call, reply = await read_request(request, lambda call: prepare(service, call))

    generations = await service.start_all(call.caller, reply.requests)
    reply.generations = generations

    if reply.is_streamed:
        stream = EventStream(_stream(request, reply), generations)
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
    # A request that is not streamed has one delta per sample, when all its samples are complete
    samples = [item async for item in merge_deltas(reply.generations)]
    samples.sort(key=lambda item: item[0])
    return await run_in_threadpool(lambda: make_json_response(reply.make_body(samples)))


async def _start_stream(stream: "EventStream", generations: Sequence[Generation]) -> Response:
    """Return a stream when its first tokens are there.

    So a call that has to wait for a quota can still get the status 429. The client and proxies wait
    no longer than between two keep-alive comments.
    """
    await wait_for_first_change(generations, _KEEP_ALIVE_S)
    return stream


async def _stream(request: Request, reply: ChatReply) -> AsyncGenerator[bytes]:
    try:
        for event in reply.make_first_events():
            yield reply.encode(event)
        async for prompt_index, delta in merge_deltas(reply.generations):
            for event in await run_off_loop(partial(_encode_events, reply, prompt_index, delta), delta.size):
                yield event
        for event in reply.make_last_events():
            yield reply.encode(event)
        if reply.end:
            yield reply.end
    except Exception as error:
        yield _encode_error(request, reply, error)


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

    def __init__(self, events: AsyncGenerator[bytes], generations: Sequence[Generation]) -> None:
        super().__init__(
            events,
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


def convert_error_response(api: ApiName, response: Response, error: Exception) -> Response:
    """Convert an error response of this server to an error response of an API."""
    detail = str(json.loads(bytes(response.body)).get("detail", ""))
    headers = {name: value for name, value in response.headers.items() if name in _KEPT_HEADERS}
    if response.status_code in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE):
        headers.setdefault("retry-after", "5")

    status = response.status_code
    is_overloaded = api == "anthropic" and status == HTTPStatus.SERVICE_UNAVAILABLE
    return JSONResponse(
        describe_error(api, status, detail, error),
        status_code=_OVERLOADED if is_overloaded else status,
        headers=headers,
    )


def describe_error(api: ApiName, status: int, detail: str, error: Exception | None = None) -> dict[str, object]:
    """Return the body of an error response.

    `detail` is the message of this server's own error response.
    """
    # Clients recognize the error for a too long prompt by its text (Anthropic) or code (OpenAI)
    too_long = error if isinstance(error, ContextTooLong) else None
    if api == "anthropic":
        if too_long is not None:
            detail = f"prompt is too long: {too_long.num_prompt} tokens > {too_long.limit} maximum"
        kind = _ANTHROPIC_TYPES.get(status, "api_error")
        return {"type": "error", "error": {"type": kind, "message": detail}}

    # OpenAI's `code` of 404 says that a model does not exist, which would mislead for an unknown
    # path
    kind, code = _OPENAI_TYPES.get(status, ("server_error", None))
    if too_long is not None:
        code = "context_length_exceeded"
    if status == HTTPStatus.NOT_FOUND and "not offered" in detail:
        code = None

    # A field can be a key that the client sent
    field = error.field if isinstance(error, ApiError | FieldError) else None
    param = None if field is None else make_line(field, _MAX_PARAM_CHARS)
    return {"error": {"message": detail, "type": kind, "param": param, "code": code}}


def describe_stream_error(api: ApiName, error: Exception) -> dict[str, object]:
    """Return the body of an error event, for an error after the response has started."""
    status = error.status if isinstance(error, ApiError) else HTTPStatus.INTERNAL_SERVER_ERROR
    detail = error.detail if isinstance(error, ApiError) else "internal error"
    if isinstance(error, RequestError):
        status, detail = HTTPStatus.BAD_REQUEST, error.message
    return describe_error(api, status, detail, error)
