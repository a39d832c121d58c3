"""The private parts of uvicorn that this server depends on, behind names of our own.

uvicorn has no limits for the head of a request and for slow clients, and no hooks to add them, so `HttpProtocol`
extends uvicorn's HTTP connection. A release of uvicorn may rename what this module uses. Then
`tests/unit/server/http/test_uvicorn_adapter.py` fails and names the missing attribute; no other module needs a change.
"""

from collections.abc import Mapping
from operator import attrgetter

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
    """uvicorn's HTTP connection with public names for what a subclass reads and does.

    They are called for each header and each piece of a body, so most are implemented in C.
    """

    open_parser = property(attrgetter("parser"))
    """The parser of the client's bytes; None before the connection is made and after it was lost."""
    is_closing = property(attrgetter("transport.is_closing"))
    """A function that returns whether the connection is closed, or will be once all is sent."""
    current_headers = property(attrgetter("headers"))
    """The headers of the current request so far."""
    waiting_requests = property(attrgetter("pipeline"))
    """The requests that came before the response to the first one."""
    is_reading_paused = property(attrgetter("flow.read_paused"))
    """Whether the server reads no body, because the application has not taken what came before."""
    is_response_complete = property(attrgetter("cycle.response_complete"))
    """Whether the response to the latest request is complete."""
    stop_keep_alive = HttpToolsProtocol._unset_keepalive_if_required
    """Stops the keep-alive timeout, if it runs."""

    def send_and_close(self, data: bytes) -> None:
        """Send bytes, then close the connection."""
        self.transport.write(data)
        self.transport.close()

    def start_keep_alive(self) -> None:
        """Close the connection after the keep-alive timeout, unless a request comes before."""
        self.stop_keep_alive()
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)
