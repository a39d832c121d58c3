"""Access to private parts of uvicorn, under public names.

uvicorn neither limits the size of request heads nor closes slow connections, and it has no hooks
for such limits. So `HttpProtocol` extends uvicorn's HTTP connection class. If a uvicorn release
renames an attribute that this module uses, `tests/unit/server/http/test_uvicorn_adapter.py` fails
and names the attribute, and only this module must change.
"""

from operator import attrgetter

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


class UvicornConnection(HttpToolsProtocol):
    """uvicorn's HTTP connection, with public names for the attributes that a subclass needs.

    The properties are read for every header and every piece of a body, so most of them are
    implemented in C.
    """

    open_parser = property(attrgetter("parser"))
    """The HTTP parser of the connection. None unless the client is connected."""
    is_closing = property(attrgetter("transport.is_closing"))
    """The function `transport.is_closing`.

    It returns whether the connection is closed or about to be closed.
    """
    current_headers = property(attrgetter("headers"))
    """The headers of the current request that have arrived."""
    waiting_requests = property(attrgetter("pipeline"))
    """The pipelined requests that wait until the response to the current request is complete."""
    is_reading_paused = property(attrgetter("flow.read_paused"))
    """Whether reading is paused until the application has consumed earlier parts of the body."""
    is_response_complete = property(attrgetter("cycle.response_complete"))
    """Whether the response to the latest request is complete."""
    stop_keep_alive = HttpToolsProtocol._unset_keepalive_if_required
    """Cancels the keep-alive timer, if it is running."""

    @property
    def num_unread(self) -> int:
        """Number of bytes that were sent and are still in the buffer of this process."""
        return self.transport.get_write_buffer_size()

    def send_and_close(self, data: bytes) -> None:
        """Send bytes, then close the connection."""
        self.transport.write(data)
        self.transport.close()

    def start_keep_alive(self) -> None:
        """Close the connection after the keep-alive timeout, unless another request arrives."""
        self.stop_keep_alive()
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)
