"""Connections: how many there may be, and how long and how much a client may send, before anyone is authenticated.

`Listener` accepts the connections of a server, `Connections` counts them, and `HttpProtocol` limits each of them.
"""

import errno
import ipaddress
import logging
import os
import resource
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import httptools

from skyrl_tx.server.http.uvicorn_adapter import UvicornConnection

_log = logging.getLogger(__name__)

_MAX_HEAD_BYTES = 32 * 2**10
"""Limit of a request line with its headers, as in nginx (4 buffers of 8 KiB)."""
_MAX_HEADERS = 128
_MAX_PIPELINED = 16
_MIN_BODY_BYTES_PER_S = 1024
_RESERVED_FILES = 1024
"""Descriptors for the database (up to three for each request thread), downloads and the log."""
_MANY_FILES = 2**20
"""Stands for an unlimited number of open files."""
_MAX_CLOSING = 64
_OUT_OF_FILES_PAUSE_S = 0.01
_WARN_EVERY_S = 60.0
_IPV6_CLIENT_BITS = 64


class ThrottledWarning:
    """Logs warnings of one kind at most once a minute, so that strangers cannot fill the log."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._next_at = 0.0
        self._num_omitted = 0

    def __call__(self, text: str) -> None:
        """Log a text, with the number of those that were omitted before it."""
        now = time.monotonic()
        if now < self._next_at:
            self._num_omitted += 1
            return
        omitted = f" ({self._num_omitted} similar warnings before it were omitted)" if self._num_omitted else ""
        self._log.warning("%s%s", text, omitted)
        self._next_at, self._num_omitted = now + _WARN_EVERY_S, 0


def normalize_address(host: str) -> str:
    """Return an address without its zone; an IPv4 address that IPv6 maps is returned as IPv4."""
    if ":" not in host:
        return host
    host = host.partition("%")[0]
    try:
        mapped = ipaddress.IPv6Address(host).ipv4_mapped
    except ValueError:
        return host
    return host if mapped is None else str(mapped)


def _get_client_network(address: str) -> str:
    """Return what counts as one client: an IPv4 address, or an IPv6 network of 64 bits, which one host may own."""
    if ":" not in address:
        return address
    return str(ipaddress.ip_network(f"{address}/{_IPV6_CLIENT_BITS}", strict=False))


class Connection(socket.socket):
    """An accepted connection. Closing it ends its count."""

    def __init__(self, accepted: socket.socket, address: str, connections: "Connections") -> None:
        super().__init__(accepted.family, accepted.type, accepted.proto, fileno=accepted.detach())
        self.address = address
        self.site = _get_client_network(address)
        self.protocol: HttpProtocol | None = None
        self.patience_s = connections.header_timeout_s
        """Time that the client has left to send what is missing."""
        self._connections = connections

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._connections.remove(self)
        super().close()

    def end(self) -> None:
        """Make the event loop close the connection, also in the middle of a TLS handshake."""
        with suppress(OSError):  # the client has disconnected
            self.shutdown(socket.SHUT_RDWR)


@dataclass(slots=True)
class _ClientConnections:
    """The open connections of one client address; those without a request in progress in order, longest idle first."""

    num_open: int = 0
    idle: dict[Connection, None] = field(default_factory=dict[Connection, None])


class Connections:
    """The open connections of a server and their limits, for one event loop.

    A new connection beyond a limit takes the place of the one that has been idle longest, that is, without a complete
    request head. So half-sent requests never keep out others, whatever their number.
    """

    def __init__(
        self,
        *,
        max_open: int,
        max_per_address: int,
        header_timeout_s: float,
        body_timeout_s: float,
        is_exempt: Callable[[str], bool],
    ) -> None:
        """`is_exempt(address)`: whether an address has no limit of its own, such as a proxy of many clients."""
        self.header_timeout_s = header_timeout_s
        self.body_timeout_s = body_timeout_s
        self._max_open = max_open
        self._max_per_address = max_per_address
        self._is_exempt = is_exempt
        self._open: dict[int, Connection] = {}
        self._sites: dict[str, _ClientConnections] = {}
        self._idle: dict[Connection, None] = {}
        self._receiving: set[Connection] = set()
        self._closing: set[Connection] = set()
        self._warn = ThrottledWarning(_log)

    @property
    def is_closing_many(self) -> bool:
        """Whether the event loop must close connections before more are accepted."""
        return len(self._closing) >= _MAX_CLOSING

    @property
    def num_open(self) -> int:
        """The number of open connections."""
        return len(self._open)

    def get(self, descriptor: int) -> Connection:
        """Return the open connection with a file descriptor."""
        return self._open[descriptor]

    def add(self, connection: Connection) -> bool:
        """Add a new connection; return False if a limit is reached and no other connection is idle."""
        site = self._sites.setdefault(connection.site, _ClientConnections())
        if site.num_open >= self._max_per_address and not self._is_exempt(connection.address):
            has_room = self._close_longest_idle(site.idle, f"{connection.site} has {site.num_open} open connections")
        elif len(self._open) >= self._max_open:
            has_room = self._close_longest_idle(self._idle, f"{len(self._open)} connections are open")
        else:
            has_room = True
        if has_room:
            site.num_open += 1
            self._open[connection.fileno()] = connection
            self.mark_idle(connection)
            self._receiving.add(connection)
        elif not site.num_open:
            del self._sites[connection.site]
        return has_room

    def remove(self, connection: Connection) -> None:
        """Forget a connection that closes. Idempotent."""
        if self._open.get(connection.fileno()) is not connection:
            return
        del self._open[connection.fileno()]
        self.mark_active(connection)
        self._receiving.discard(connection)
        self._closing.discard(connection)
        site = self._sites[connection.site]
        site.num_open -= 1
        if not site.num_open:
            del self._sites[connection.site]

    def mark_idle(self, connection: Connection) -> None:
        """Mark a connection as the one whose last request ended most recently."""
        self._idle[connection] = self._sites[connection.site].idle[connection] = None

    def mark_active(self, connection: Connection) -> None:
        """Mark a connection as having a request in progress."""
        self._idle.pop(connection, None)
        self._sites[connection.site].idle.pop(connection, None)

    def start_timeout(self, connection: Connection, within_s: float) -> None:
        """Start to wait for bytes of the client."""
        connection.patience_s = within_s
        self._receiving.add(connection)

    def stop_timeout(self, connection: Connection) -> None:
        """Stop waiting for bytes of the client."""
        self._receiving.discard(connection)

    def has_timeout(self, connection: Connection) -> bool:
        """Whether bytes of the client are waited for."""
        return connection in self._receiving

    def close_late(self, elapsed_s: float) -> None:
        """End the connections whose clients are too slow. `elapsed_s` is the time since the last call.

        A time in which the process did not run does not count, and neither does one in which it reads no body.
        """
        late: list[Connection] = []
        for connection in self._receiving:
            if connection.protocol is None or not connection.protocol.is_reading_paused:
                connection.patience_s -= elapsed_s
                if connection.patience_s <= 0:
                    late.append(connection)
        for connection in late:
            self._end(connection)

    def close_longest_idle(self) -> None:
        """End the connection that has been idle longest, because the process has no file descriptor left."""
        self._close_longest_idle(self._idle, f"no file descriptor is left; {len(self._open)} connections are open")

    def _close_longest_idle(self, idle: dict[Connection, None], reason: str) -> bool:
        longest_idle = next(iter(idle), None)
        if longest_idle is None:
            self._warn(f"{reason}: refusing a new one, because all have a request in progress")
            return False
        self._warn(f"{reason}: closing the one that has been idle longest for a new one")
        self._end(longest_idle)
        return True

    def _end(self, connection: Connection) -> None:
        self.mark_active(connection)  # not to be ended twice
        self._receiving.discard(connection)
        self._closing.add(connection)
        connection.end()


def compute_max_connections() -> int:
    """Return how many connections the limit of open files allows: all but a reserve, which is at most half."""
    max_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if max_files == resource.RLIM_INFINITY:
        max_files = _MANY_FILES
    return max_files - min(_RESERVED_FILES, max_files // 2)


class Listener(socket.socket):
    """A listening socket whose accepted sockets are counted. asyncio accepts until it raises BlockingIOError."""

    def __init__(self, listening: socket.socket, connections: Connections) -> None:
        """Listen on a duplicate of a listening socket."""
        super().__init__(listening.family, listening.type, listening.proto, fileno=os.dup(listening.fileno()))
        self._connections = connections
        self._spare = os.open(os.devnull, os.O_RDONLY)

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept a connection within the limits. Others are accepted and closed, so that clients learn it at once."""
        while not self._connections.is_closing_many:
            try:
                accepted, address = super().accept()
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE):
                    raise
                self._refuse_without_descriptor()
                break
            connection = Connection(accepted, normalize_address(str(address[0])), self._connections)
            if self._connections.add(connection):
                return connection, address
            connection.close()
        raise BlockingIOError

    def close(self) -> None:
        """Stop listening. Idempotent."""
        if self._spare >= 0:
            os.close(self._spare)
            self._spare = -1
        super().close()

    def _refuse_without_descriptor(self) -> None:
        """Close a waiting connection by the spare descriptor, or the event loop would call `accept` again and again."""
        self._connections.close_longest_idle()
        if self._spare >= 0:
            os.close(self._spare)
            self._spare = -1
            with suppress(OSError):
                super().accept()[0].close()
        try:
            self._spare = os.open(os.devnull, os.O_RDONLY)
        except OSError:  # another thread took it
            time.sleep(_OUT_OF_FILES_PAUSE_S)


class _HeadersRefused(Exception):
    """A request has too many headers, or too many requests wait on a connection."""


class HttpProtocol(UvicornConnection):
    """uvicorn's HTTP connection, with limits on the bytes of heads and trailers and on the pace of heads and bodies."""

    def __init__(self, *arguments: Any, connections: Connections, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._connections = connections
        self._num_head_bytes = 0
        """Bytes received since a message or a piece of a body ended."""
        self._has_progressed = False
        self._is_in_body = False

    def connection_made(self, transport: Any) -> None:
        """Find the counted connection of a transport."""
        super().connection_made(transport)
        self._connection = self._connections.get(transport.get_extra_info("socket").fileno())
        self._connection.protocol = self

    def _is_open(self) -> bool:
        """Whether bytes of the client can be parsed: it is connected, and no error response was sent."""
        return self.open_parser is not None and not self.is_closing()

    def data_received(self, data: bytes) -> None:
        """Parse received bytes; refuse a head that is malformed or too large.

        uvicorn logs a warning for each malformed request, and has no limit.
        """
        self.stop_keep_alive()
        if not self._connections.has_timeout(self._connection):
            self._connections.start_timeout(self._connection, self._connections.header_timeout_s)
        while data and self._is_open():
            piece, data = self._split(data)
            self._has_progressed = False
            try:
                self.open_parser.feed_data(piece)
            except httptools.HttpParserUpgrade:  # not offered: the request is served as HTTP/1.1
                pass
            except httptools.HttpParserError as error:
                if isinstance(error.__context__, _HeadersRefused):
                    self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, str(error.__context__))
                else:
                    self._refuse(HTTPStatus.BAD_REQUEST, "not an HTTP request")
                return
            self._num_head_bytes = 0 if self._has_progressed else self._num_head_bytes + len(piece)
            if self._num_head_bytes >= _MAX_HEAD_BYTES:
                self._refuse(
                    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"headers of more than {_MAX_HEAD_BYTES} bytes"
                )

    def _split(self, data: bytes) -> tuple[bytes, bytes]:
        """Cut off as many bytes as a head may still have."""
        room = _MAX_HEAD_BYTES - self._num_head_bytes
        return (data, b"") if len(data) <= room else (data[:room], data[room:])

    def _refuse(self, status: HTTPStatus, detail: str) -> None:
        """Send an error response and close."""
        content = b'{"detail":"%s"}' % detail.encode()
        self.send_and_close(
            b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%s"
            % (status, status.phrase.encode(), len(content), content)
        )

    def on_message_begin(self) -> None:
        """Start to wait for the head of a request."""
        if not self._connections.has_timeout(self._connection):
            self._connections.start_timeout(self._connection, self._connections.header_timeout_s)
        self._is_in_body = False
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Add a header. Trailers are discarded, because the headers have been checked by then."""
        if self._is_in_body:
            return
        if len(self.current_headers) >= _MAX_HEADERS:
            raise _HeadersRefused(f"more than {_MAX_HEADERS} headers")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Start the request, and wait for its body."""
        if len(self.waiting_requests) >= _MAX_PIPELINED:
            raise _HeadersRefused(f"more than {_MAX_PIPELINED} requests before the response to the first")
        self._has_progressed = self._is_in_body = True
        self._connections.start_timeout(self._connection, self._connections.body_timeout_s)
        self._connections.mark_active(self._connection)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Add a piece of the body, which earns the client time for the next one."""
        self._has_progressed = True
        earned_s = self._connection.patience_s + len(body) / _MIN_BODY_BYTES_PER_S
        self._connection.patience_s = min(earned_s, self._connections.body_timeout_s)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Wait for nothing until the next request begins."""
        self._has_progressed = True
        self._connections.stop_timeout(self._connection)
        super().on_message_complete()
        if self.is_response_complete:  # the response came before the end of the body
            self.start_keep_alive()

    def on_response_complete(self) -> None:
        """Start the next request; without one the connection is idle."""
        super().on_response_complete()
        if self._is_open() and self.is_response_complete:
            self._connections.mark_idle(self._connection)
