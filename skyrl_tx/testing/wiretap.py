"""What a client really sent, and answers that get lost on their way back to it."""

import json
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus

from starlette.types import ASGIApp, Message, Receive, Scope, Send

_UNASKED = ("/session_heartbeat", "/telemetry")
_PREFIX = "/api/v1/"


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One request and how it was answered; header names are in lower case."""

    method: str
    path: str
    """With its query, without the prefix."""
    headers: dict[str, str]
    body: bytes
    status: int
    answer_type: str

    def __str__(self) -> str:
        return f"{self.method} {self.path}"


@dataclass(slots=True)
class Wiretap:
    """Watches the calls to an application; of those that clients make on a clock of their own only when asked to."""

    _heard: list[Call] | None = None
    _hears_clocks: bool = False
    _losses: dict[tuple[str, str | None], list[HTTPStatus]] = field(default_factory=dict)
    _losses_say: dict[str, Mapping[str, str]] = field(default_factory=dict[str, Mapping[str, str]])
    _canned: dict[str, bytes] = field(default_factory=dict[str, bytes])

    def wrap(self, app: ASGIApp) -> ASGIApp:
        """Return an application that is watched."""

        async def watched(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "http" and (self._hears_clocks or not scope["path"].endswith(_UNASKED)):
                await self._watch(app, scope, receive, send)
            else:
                await app(scope, receive, send)

        return watched

    @contextmanager
    def listening(self, *, to_clocks: bool = False) -> Generator[list[Call]]:
        """Give the calls that are answered within the context; `to_clocks`: heartbeats and telemetry too."""
        self._heard, self._hears_clocks = [], to_clocks
        yield self._heard
        self._heard, self._hears_clocks = None, False

    def lose_answers(
        self,
        path: str,
        statuses: list[HTTPStatus],
        kind: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Let the next calls of a path take effect, and answer each with a failure in place of what it gave.

        `kind` picks the polls for results of one kind, as clients name it in `x-tinker-request-type`.
        """
        self._losses[path, kind] = list(statuses)
        self._losses_say[path] = headers or {}

    def answer(self, path: str, body: object) -> None:
        """Answer the calls of a path with this JSON from now on, in place of the application."""
        self._canned[path] = json.dumps(body).encode()

    async def _watch(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        path, kind = scope["path"].removeprefix(_PREFIX), _text(scope["headers"]).get("x-tinker-request-type")
        losses = self._losses.get((path, kind)) or self._losses.get((path, None))
        lost_as = losses.pop(0) if losses else None
        received: list[bytes] = []

        async def hear() -> Message:
            message = await receive()
            received.append(message.get("body", b""))
            return message

        async def say(message: Message) -> None:
            if message["type"] == "http.response.start" and self._heard is not None:  # before the client can see it
                status = lost_as or message["status"]
                self._heard.append(_call(scope, b"".join(received), status, _text(message["headers"])))
            if lost_as is None:
                await send(message)

        if path in self._canned:
            headers = [(b"content-type", b"application/json")]
            await send({"type": "http.response.start", "status": int(HTTPStatus.OK), "headers": headers})
            await send({"type": "http.response.body", "body": self._canned[path]})
            return
        await app(scope, hear, say)
        if lost_as is not None:
            said = [(name.encode(), value.encode()) for name, value in self._losses_say[path].items()]
            await send({"type": "http.response.start", "status": int(lost_as), "headers": said})
            await send({"type": "http.response.body", "body": b""})


def _call(scope: Scope, body: bytes, status: int, answer_headers: dict[str, str]) -> Call:
    path, query = scope["path"].removeprefix(_PREFIX), scope["query_string"].decode()
    return Call(
        method=scope["method"],
        path=f"{path}?{query}" if query else path,
        headers=_text(scope["headers"]),
        body=body,
        status=status,
        answer_type=answer_headers.get("content-type", ""),
    )


def _text(headers: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    return {name.decode(): value.decode() for name, value in headers}
