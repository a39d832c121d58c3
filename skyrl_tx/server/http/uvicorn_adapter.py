"""The private parts of uvicorn that this server depends on, behind names of our own.

uvicorn has no limits for the head of a request and for slow clients, and no hooks to add them, so `HttpProtocol`
extends uvicorn's HTTP connection. A release of uvicorn may rename what this module uses. Then
`tests/unit/server/http/test_uvicorn_adapter.py` fails and names the missing attribute; no other module needs a change.
"""

from collections.abc import Mapping

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

USED_NAMES: Mapping[str, tuple[str, ...]] = {
    "HttpToolsProtocol": (
        "_unset_keepalive_if_required",
        "cycle",
        "flow",
        "headers",
        "loop",
        "parser",
        "pipeline",
        "timeout_keep_alive",
        "timeout_keep_alive_handler",
        "timeout_keep_alive_task",
        "transport",
    ),
    "FlowControl": ("read_paused",),
    "RequestResponseCycle": ("response_complete",),
}
"""The attributes of uvicorn's classes that this module uses. Those of asyncio and httptools are public."""
OVERRIDDEN_NAMES = (
    "connection_made",
    "data_received",
    "on_body",
    "on_header",
    "on_headers_complete",
    "on_message_begin",
    "on_message_complete",
    "on_response_complete",
)
"""The methods of uvicorn's `HttpToolsProtocol` that `HttpProtocol` extends: uvicorn must go on calling them."""


class UvicornConnection(HttpToolsProtocol):
    """uvicorn's HTTP connection with public names for what a subclass reads and does."""

    @property
    def is_open(self) -> bool:
        """Whether bytes of the client can be parsed: it is connected, and no error response was sent."""
        return self.parser is not None and not self.transport.is_closing()

    @property
    def num_headers(self) -> int:
        """The number of headers of the current request so far."""
        return len(self.headers)

    @property
    def num_waiting_requests(self) -> int:
        """The number of requests that came before the response to the first one."""
        return len(self.pipeline)

    @property
    def is_reading_paused(self) -> bool:
        """Whether the server reads no body, because the application has not taken what came before."""
        return self.flow.read_paused

    @property
    def is_response_complete(self) -> bool:
        """Whether the response to the latest request is complete."""
        return self.cycle.response_complete

    def parse(self, data: bytes) -> None:
        """Parse received bytes, which calls the methods `on_…`. Raises httptools.HttpParserError."""
        assert self.parser is not None, "the connection is not open"
        self.parser.feed_data(data)

    def send_and_close(self, data: bytes) -> None:
        """Send bytes, then close the connection."""
        self.transport.write(data)
        self.transport.close()

    def start_keep_alive(self) -> None:
        """Close the connection after the keep-alive timeout, unless a request comes before."""
        self.stop_keep_alive()
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def stop_keep_alive(self) -> None:
        """Stop the keep-alive timeout, if it runs."""
        self._unset_keepalive_if_required()
