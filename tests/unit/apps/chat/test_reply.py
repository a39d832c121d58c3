"""Event streams end when their client disconnects or stops reading."""

import asyncio
from collections.abc import AsyncGenerator, Iterator
from http import HTTPStatus
from typing import cast

import pytest
from fastapi import Request
from sse_starlette.sse import AppStatus
from starlette.types import Message

from skyrl_tx.apps.chat import reply
from skyrl_tx.apps.chat.generation import Generation
from skyrl_tx.apps.chat.reply import ChatReply, EventStream, JsonObject, encode_event
from skyrl_tx.server.errors import ApiError

SCOPE = {"type": "http", "method": "POST", "path": "/v1/completions"}


class FakeGeneration:
    """Counts how often it is closed."""

    num_closed = 0

    def close(self) -> None:
        self.num_closed += 1


class Client:
    """The client of one stream. It stops after `reads` messages."""

    def __init__(self, reads: int = 1000) -> None:
        self.reads = reads
        self.sent: list[Message] = []
        self.left = asyncio.Event()

    async def receive(self) -> Message:
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if len(self.sent) >= self.reads:
            await asyncio.Event().wait()
        self.sent.append(message)

    @property
    def body(self) -> bytes:
        return b"".join(message["body"] for message in self.sent if message["type"] == "http.response.body")


ended: list[str] = []
"""The event generators that have ended."""


async def endless_events(delay_s: float = 0.01) -> AsyncGenerator[bytes]:
    try:
        while True:
            yield encode_event({"text": "a"})
            await asyncio.sleep(delay_s)
    finally:
        ended.append("endless")


def serve(events: AsyncGenerator[bytes], client: Client, leave_after_s: float | None = None) -> FakeGeneration:
    """Serve a stream until it ends and return its generation."""
    generation = FakeGeneration()
    stream = EventStream(events, [cast(Generation, generation)])

    async def run() -> None:
        if leave_after_s is not None:
            asyncio.get_running_loop().call_later(leave_after_s, client.left.set)
        await asyncio.wait_for(stream(SCOPE, client.receive, client.send), 5.0)

    ended.clear()
    asyncio.run(run())
    return generation


class BrokenReply:
    """A reply that fails after its first event."""

    api, end = "openai", b"data: [DONE]\n\n"

    def make_first_events(self) -> Iterator[JsonObject]:
        yield {"n": 1}
        raise ApiError(HTTPStatus.BAD_REQUEST, "broken")

    def encode(self, event: JsonObject) -> bytes:
        return encode_event(event, "part")


def test_events_come_in_order_and_an_error_is_the_last() -> None:
    client = Client()
    generation = serve(reply._stream(Request(SCOPE), cast(ChatReply, BrokenReply())), client)
    headers = dict(client.sent[0]["headers"])
    assert headers[b"content-type"].startswith(b"text/event-stream") and headers[b"cache-control"] == b"no-cache"
    error = b'{"message":"broken","type":"invalid_request_error","param":null,"code":null}'
    assert client.body == (
        b'event: part\ndata: {"n":1}\n\nevent: part\ndata: {"error":' + error + b"}\n\ndata: [DONE]\n\n"
    )
    assert client.sent[-1]["more_body"] is False and generation.num_closed == 1


def test_comments_keep_an_idle_connection_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reply, "_KEEP_ALIVE_S", 0.05)
    client = Client()
    serve(endless_events(delay_s=60.0), client, leave_after_s=0.5)
    assert client.body.startswith(b'data: {"text":"a"}\n\n: keep-alive\n\n: keep-alive\n\n')


@pytest.mark.parametrize("delay_s", [0.0, 60.0])
def test_disconnect_ends_the_stream(delay_s: float) -> None:
    client = Client()
    generation = serve(endless_events(delay_s), client, leave_after_s=0.1)
    assert client.body and ended == ["endless"] and generation.num_closed == 1


@pytest.mark.parametrize("reads", [1, 5])
def test_client_that_does_not_read_ends_the_stream(monkeypatch: pytest.MonkeyPatch, reads: int) -> None:
    monkeypatch.setattr(reply, "_SEND_TIMEOUT_S", 0.05)
    client = Client(reads)
    generation = serve(endless_events(), client)
    assert len(client.sent) == reads and ended == ["endless"] and generation.num_closed == 1


def test_client_that_does_not_read_comments_ends_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reply, "_KEEP_ALIVE_S", 0.05)
    monkeypatch.setattr(reply, "_SEND_TIMEOUT_S", 0.05)
    client = Client(reads=2)
    generation = serve(endless_events(delay_s=60.0), client)
    assert len(client.sent) == 2 and ended == ["endless"] and generation.num_closed == 1


def test_library_leaves_the_end_at_a_shutdown_to_the_server() -> None:
    assert not AppStatus.enable_automatic_graceful_drain and not AppStatus.should_exit
