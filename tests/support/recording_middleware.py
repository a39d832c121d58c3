"""ASGI middleware that records calls and replaces responses."""

import json
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus

from starlette.types import ASGIApp, Message, Receive, Scope, Send

_PERIODIC = ("/session_heartbeat", "/telemetry")
_PREFIX = "/api/v1/"


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One request and its response; header names are in lower case."""

    method: str
    path: str
    """The path with its query, without the prefix."""
    headers: dict[str, str]
    body: bytes
    status: int
    response_type: str

    def __str__(self) -> str:
        return f"{self.method} {self.path}"


@dataclass(slots=True)
class RecordingMiddleware:
    """Records the calls to an application; periodic calls of clients only on request."""

    _recorded: list[Call] | None = None
    _include_periodic: bool = False
    _replacements: dict[tuple[str, str | None], list[HTTPStatus]] = field(default_factory=dict)
    _replacement_headers: dict[str, Mapping[str, str]] = field(default_factory=dict[str, Mapping[str, str]])
    _fixed_responses: dict[str, bytes] = field(default_factory=dict[str, bytes])

    def wrap(self, app: ASGIApp) -> ASGIApp:
        """Return the application with recording."""

        async def record_calls(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "http" and (self._include_periodic or not scope["path"].endswith(_PERIODIC)):
                await self._record(app, scope, receive, send)
            else:
                await app(scope, receive, send)

        return record_calls

    @contextmanager
    def recording(self, *, include_periodic: bool = False) -> Generator[list[Call]]:
        """Give the calls that complete within the context; `include_periodic` includes heartbeats and telemetry."""
        self._recorded, self._include_periodic = [], include_periodic
        yield self._recorded
        self._recorded, self._include_periodic = None, False

    def replace_responses(
        self,
        path: str,
        statuses: list[HTTPStatus],
        kind: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Execute the next calls of a path, and replace each response by a failure.

        `kind` selects polls for results of one kind, as named in `x-tinker-request-type`.
        """
        self._replacements[path, kind] = list(statuses)
        self._replacement_headers[path] = headers or {}

    def respond_with(self, path: str, body: object) -> None:
        """Respond to all later calls of a path with this JSON, without calling the application."""
        self._fixed_responses[path] = json.dumps(body).encode()

    async def _record(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        path, kind = scope["path"].removeprefix(_PREFIX), _text(scope["headers"]).get("x-tinker-request-type")
        replacements = self._replacements.get((path, kind)) or self._replacements.get((path, None))
        replaced_by = replacements.pop(0) if replacements else None
        received: list[bytes] = []
        is_left = False  # the client is gone, so no client reads the response

        async def record_receive() -> Message:
            nonlocal is_left
            message = await receive()
            received.append(message.get("body", b""))
            is_left |= message["type"] == "http.disconnect"
            return message

        async def record_send(message: Message) -> None:
            is_start = message["type"] == "http.response.start"
            if is_start and self._recorded is not None and not is_left:  # before the client receives it
                status = replaced_by or message["status"]
                self._recorded.append(_call(scope, b"".join(received), status, _text(message["headers"])))
            if replaced_by is None:
                await send(message)

        if path in self._fixed_responses:
            headers = [(b"content-type", b"application/json")]
            await send({"type": "http.response.start", "status": int(HTTPStatus.OK), "headers": headers})
            await send({"type": "http.response.body", "body": self._fixed_responses[path]})
            return
        await app(scope, record_receive, record_send)
        if replaced_by is not None:
            headers = [(name.encode(), value.encode()) for name, value in self._replacement_headers[path].items()]
            await send({"type": "http.response.start", "status": int(replaced_by), "headers": headers})
            await send({"type": "http.response.body", "body": b""})


def _call(scope: Scope, body: bytes, status: int, response_headers: dict[str, str]) -> Call:
    path, query = scope["path"].removeprefix(_PREFIX), scope["query_string"].decode()
    return Call(
        method=scope["method"],
        path=f"{path}?{query}" if query else path,
        headers=_text(scope["headers"]),
        body=body,
        status=status,
        response_type=response_headers.get("content-type", ""),
    )


def _text(headers: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    return {name.decode(): value.decode() for name, value in headers}
