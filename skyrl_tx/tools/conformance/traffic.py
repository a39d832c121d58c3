"""The calls that the SDK makes to the server: their record, and responses that are lost on the way."""

import re
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, NamedTuple

import httpx

from skyrl_tx.tools.conformance.endpoints import SDK_ENDPOINTS, SdkEndpoint
from skyrl_tx.tools.conformance.rows import Result

_PREFIX = "/api/v1"
_ABSENT = {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN, HTTPStatus.NOT_FOUND, HTTPStatus.NOT_IMPLEMENTED}


class Call(NamedTuple):
    """A call to the server. The path is below `/api/v1`."""

    method: str
    path: str
    status: int


@dataclass(slots=True)
class Traffic:
    """The calls to one server."""

    url: str
    calls: list[Call] = field(default_factory=list[Call])
    losses: list[str] = field(default_factory=list[str])
    """The paths whose next successful response is replaced by status 503."""

    @contextmanager
    def recording(self) -> Generator[None]:
        """Record the calls of all httpx clients of this process to the server."""
        send = httpx.AsyncClient.send

        async def record(client: httpx.AsyncClient, request: httpx.Request, **options: Any) -> httpx.Response:
            response = await send(client, request, **options)
            address, found, rest = str(request.url).partition(_PREFIX)
            if not found or httpx.URL(address) != httpx.URL(self.url):
                return response
            path = rest.partition("?")[0]
            self.calls.append(Call(request.method, path, response.status_code))
            if path not in self.losses or not response.is_success:
                return response
            self.losses.remove(path)
            await response.aclose()
            return httpx.Response(HTTPStatus.SERVICE_UNAVAILABLE, request=request, json={"detail": "lost on purpose"})

        httpx.AsyncClient.send = record  # type: ignore[method-assign]
        try:
            yield
        finally:
            httpx.AsyncClient.send = send  # type: ignore[method-assign]

    def count(self, path: str) -> int:
        """Return the number of successful calls of a path so far."""
        return sum(call.path == path and call.status < HTTPStatus.BAD_REQUEST for call in self.calls)

    def list_endpoints(self) -> list[Result]:
        """Return a result for each endpoint of the SDK: it passes if one of its calls succeeded."""
        return [self._judge(endpoint) for endpoint in SDK_ENDPOINTS]

    def _judge(self, endpoint: SdkEndpoint) -> Result:
        name = f"endpoint: {endpoint.method} {endpoint.path}"
        pattern = re.compile(re.sub(r"\\\{\w+\\\}", "[^/]+", re.escape(endpoint.path)))
        calls = [call for call in self.calls if call.method == endpoint.method and pattern.fullmatch(call.path)]
        if not calls:
            return Result(name=name, status="not run", detail="no row calls it with this SDK")
        if any(call.status < HTTPStatus.BAD_REQUEST for call in calls):
            return Result(name=name, status="pass", detail=f"calls: {len(calls)}")
        is_absent = {call.status for call in calls} <= _ABSENT
        return Result(name=name, status="not offered" if is_absent else "fail", detail=f"status {calls[-1].status}")
