"""Limits on connections, headers and slow clients that apply before a caller is authenticated.

`Listener` accepts connections, `Connections` keeps track of the open ones and enforces the limits,
and `HttpProtocol` measures how fast each client sends.
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
"""Maximum size of the request line and headers. nginx has the same limit (4 × 8 KiB)."""
_MAX_HEADERS = 128
_MAX_PIPELINED = 16
_MIN_BODY_BYTES_PER_S = 1024
_MAX_UNREAD_S = 60.0
"""Seconds after which a client that reads nothing of its response is disconnected."""
_RESERVED_FILES = 1024
"""File descriptors to keep free: for downloads, logs and the database (3 per request thread)."""
_MANY_FILES = 2**20
"""Number of file descriptors to assume if the operating system sets no limit."""
_MAX_CLOSING = 64
_OUT_OF_FILES_PAUSE_S = 0.01
_WARN_EVERY_S = 60.0
_IPV6_CLIENT_BITS = 64


class ThrottledWarning:
    """Logs a warning at most once a minute, so that unauthenticated clients cannot fill the log."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._next_at = 0.0
        self._num_omitted = 0

    def __call__(self, text: str) -> None:
        """Log a warning, unless one was logged in the last minute.

        Adds the number of omitted warnings.
        """
        now = time.monotonic()
        if now < self._next_at:
            self._num_omitted += 1
            return
        omitted = f" ({self._num_omitted} similar warnings before it were omitted)" if self._num_omitted else ""
        self._log.warning("%s%s", text, omitted)
        self._next_at, self._num_omitted = now + _WARN_EVERY_S, 0


def normalize_address(host: str) -> str:
    """Return an IP address without its zone, and an IPv4-mapped IPv6 address as IPv4.

    For example, `fe80::1%eth0` becomes `fe80::1`, and `::ffff:10.0.0.1` becomes `10.0.0.1`.
    """
    if ":" not in host:
        return host
    host = host.partition("%")[0]
    try:
        mapped = ipaddress.IPv6Address(host).ipv4_mapped
    except ValueError:
        return host
    return host if mapped is None else str(mapped)


def get_client_network(address: str) -> str:
    """Return the network that counts as one client: an IPv4 address, or the /64 of an IPv6 address.

    A single host usually owns a whole IPv6 /64, so limits per IPv6 address would be useless. IPv4
    clients of a server that listens on `::` count by their IPv4 address. Other texts, such as "" for
    a Unix socket, are returned unchanged.
    """
    address = normalize_address(address)
    if ":" not in address:
        return address
    try:
        return str(ipaddress.ip_network(f"{address}/{_IPV6_CLIENT_BITS}", strict=False))
    except ValueError:  # not an IP address
        return address


class Connection(socket.socket):
    """An accepted connection. Closing it removes it from `Connections`."""

    def __init__(self, accepted: socket.socket, address: str, connections: "Connections") -> None:
        super().__init__(accepted.family, accepted.type, accepted.proto, fileno=accepted.detach())
        self.address = address
        self.network = get_client_network(address)
        self.protocol: HttpProtocol | None = None
        self.patience_s = connections.header_timeout_s
        """Seconds that the client has left to send the missing part of the head or body."""
        self.reading_patience_s = _MAX_UNREAD_S
        """Seconds that the client has left to read more of the response."""
        self.num_unread = 0
        """Bytes of the response that the client had not read at the last check."""
        self._connections = connections

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._connections.remove(self)
        super().close()

    def end(self) -> None:
        """Make the event loop close the connection. Works during a TLS handshake, too."""
        with suppress(OSError):  # the client has disconnected
            self.shutdown(socket.SHUT_RDWR)


@dataclass(slots=True)
class _ClientConnections:
    """The open connections of one client network.

    `idle` holds the connections without a request in progress, the longest idle one first.
    """

    num_open: int = 0
    idle: dict[Connection, None] = field(default_factory=dict[Connection, None])


class Connections:
    """The open connections of a server and their limits. Used on one event loop.

    If a new connection exceeds a limit, the connection that has been idle longest is closed. A
    connection is idle until a complete request head has arrived, so a client cannot lock other
    clients out with half-sent requests.
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
        """`is_exempt(address)`: whether the limit per address does not apply, as for a proxy."""
        self.header_timeout_s = header_timeout_s
        self.body_timeout_s = body_timeout_s
        self._max_open = max_open
        self._max_per_address = max_per_address
        self._is_exempt = is_exempt
        self._open: dict[int, Connection] = {}
        self._by_network: dict[str, _ClientConnections] = {}
        self._idle: dict[Connection, None] = {}
        self._receiving: set[Connection] = set()
        """The connections on which the server waits for bytes. Their clients have a timeout."""
        self._sending: set[Connection] = set()
        """The connections whose client has not read enough yet for the server to send more."""
        self._closing: set[Connection] = set()
        """The connections that the event loop is about to close, because they reached a limit."""
        self._warn = ThrottledWarning(_log)

    @property
    def is_closing_many(self) -> bool:
        """Whether the event loop must close some connections before it accepts more."""
        return len(self._closing) >= _MAX_CLOSING

    @property
    def num_open(self) -> int:
        """The number of open connections."""
        return len(self._open)

    def get(self, descriptor: int) -> Connection:
        """Return the open connection with a file descriptor."""
        return self._open[descriptor]

    def add(self, connection: Connection) -> bool:
        """Add a new connection.

        Returns False if a limit is reached and no other connection is idle.
        """
        client = self._by_network.setdefault(connection.network, _ClientConnections())
        if client.num_open >= self._max_per_address and not self._is_exempt(connection.address):
            is_accepted = self._close_longest_idle(
                client.idle, f"{connection.network} has {client.num_open} open connections"
            )
        elif len(self._open) >= self._max_open:
            is_accepted = self._close_longest_idle(self._idle, f"{len(self._open)} connections are open")
        else:
            is_accepted = True

        if is_accepted:
            client.num_open += 1
            self._open[connection.fileno()] = connection
            self.mark_idle(connection)
            self._receiving.add(connection)
        elif not client.num_open:
            del self._by_network[connection.network]
        return is_accepted

    def remove(self, connection: Connection) -> None:
        """Remove a connection that is being closed. Idempotent."""
        if self._open.get(connection.fileno()) is not connection:
            return

        del self._open[connection.fileno()]
        self.mark_active(connection)
        self._receiving.discard(connection)
        self._sending.discard(connection)
        self._closing.discard(connection)
        client = self._by_network[connection.network]
        client.num_open -= 1
        if not client.num_open:
            del self._by_network[connection.network]

    def mark_idle(self, connection: Connection) -> None:
        """Mark a connection as idle.

        When limits are reached, all connections that have been idle longer are closed before it.
        """
        self._idle[connection] = self._by_network[connection.network].idle[connection] = None

    def mark_active(self, connection: Connection) -> None:
        """Mark a connection as having a request in progress."""
        self._idle.pop(connection, None)
        self._by_network[connection.network].idle.pop(connection, None)

    def start_timeout(self, connection: Connection, within_s: float) -> None:
        """Give the client `within_s` seconds to send the next bytes."""
        connection.patience_s = within_s
        self._receiving.add(connection)

    def stop_timeout(self, connection: Connection) -> None:
        """Stop the timeout of a connection: the server expects no bytes from the client."""
        self._receiving.discard(connection)

    def has_timeout(self, connection: Connection) -> bool:
        """Return whether the server is waiting for bytes from the client."""
        return connection in self._receiving

    def start_write_timeout(self, connection: Connection, num_unread: int) -> None:
        """Give the client time to read `num_unread` bytes of a response."""
        connection.reading_patience_s, connection.num_unread = _MAX_UNREAD_S, num_unread
        self._sending.add(connection)

    def stop_write_timeout(self, connection: Connection) -> None:
        """Stop the timeout: the client has read most of the response."""
        self._sending.discard(connection)

    def close_late(self, elapsed_s: float) -> None:
        """Close the connections of clients that send or read too slowly.

        `elapsed_s` is the time since the last call. A client does not lose time while the server
        itself has paused reading its body. Callers pass a constant for `elapsed_s`, so a client
        does not lose time while the process is suspended either.
        """
        late: list[Connection] = []
        for connection in self._receiving:
            if connection.protocol is None or not connection.protocol.is_reading_paused:
                connection.patience_s -= elapsed_s
                if connection.patience_s <= 0:
                    late.append(connection)
        for connection in self._sending:
            # Each KiB that the client reads gives it another second, up to the limit.
            left = 0 if connection.protocol is None else connection.protocol.num_unread
            earned_s = max(connection.num_unread - left, 0) / _MIN_BODY_BYTES_PER_S
            connection.num_unread = left
            connection.reading_patience_s = min(connection.reading_patience_s + earned_s, _MAX_UNREAD_S) - elapsed_s
            if connection.reading_patience_s <= 0:
                late.append(connection)
        for connection in late:
            self._end(connection)

    def close_longest_idle(self) -> None:
        """Close the connection that has been idle longest.

        Called when no file descriptor is left.
        """
        self._close_longest_idle(self._idle, f"no file descriptor is left; {len(self._open)} connections are open")

    def _close_longest_idle(self, idle: dict[Connection, None], reason: str) -> bool:
        longest_idle = next(iter(idle), None)
        if longest_idle is None:
            self._warn(f"{reason}: refusing a new connection, because all have a request in progress")
            return False
        self._warn(f"{reason}: closing the connection that has been idle longest to accept a new one")
        self._end(longest_idle)
        return True

    def _end(self, connection: Connection) -> None:
        self.mark_active(connection)  # so that it is not chosen again before the loop closes it
        self._receiving.discard(connection)
        self._sending.discard(connection)
        self._closing.add(connection)
        connection.end()


def compute_max_connections() -> int:
    """Return how many connections the limit on open files allows.

    Keeps `_RESERVED_FILES` descriptors free, or half of them if the limit is low. For example, a
    limit of 1,024 files allows 512 connections.
    """
    max_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if max_files == resource.RLIM_INFINITY:
        max_files = _MANY_FILES
    return max_files - min(_RESERVED_FILES, max_files // 2)


class Listener(socket.socket):
    """A listening socket that counts the connections it accepts.

    asyncio calls `accept` repeatedly, until it raises BlockingIOError.
    """

    def __init__(self, listening: socket.socket, connections: Connections) -> None:
        """Duplicate a listening socket. The caller still closes the original."""
        super().__init__(listening.family, listening.type, listening.proto, fileno=os.dup(listening.fileno()))
        self._connections = connections
        self._spare = os.open(os.devnull, os.O_RDONLY)
        """A descriptor that `_refuse_without_descriptor` uses when no other descriptor is left."""

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept a connection within the limits.

        A connection beyond the limits is accepted and closed at once, so that the client gets an
        error instead of waiting.
        """
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
        """Use the spare file descriptor to accept and close a waiting connection.

        The connection would otherwise stay in the queue, and the event loop would call `accept` in
        a busy loop.
        """
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
    """A request has too many headers, or too many requests are waiting on the connection."""


class HttpProtocol(UvicornConnection):
    """uvicorn's HTTP connection with limits on the size of headers and on slow clients."""

    def __init__(self, *arguments: Any, connections: Connections, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._connections = connections
        self._num_head_bytes = 0
        """Bytes received since the last complete head, piece of a body, or message."""
        self._has_progressed = False
        """Whether the last `feed_data` completed a head, a piece of a body, or a message."""
        self._is_in_body = False

    def connection_made(self, transport: Any) -> None:
        """Look up the `Connection` that belongs to a new transport."""
        super().connection_made(transport)
        self._connection = self._connections.get(transport.get_extra_info("socket").fileno())
        self._connection.protocol = self

    def pause_writing(self) -> None:
        """Start the timeout for a client that does not read."""
        super().pause_writing()
        self._connections.start_write_timeout(self._connection, self.num_unread)

    def resume_writing(self) -> None:
        """Stop the timeout, because the client has read most of the response."""
        super().resume_writing()
        self._connections.stop_write_timeout(self._connection)

    def _is_open(self) -> bool:
        """Return whether the client is connected and no error response was sent."""
        return self.open_parser is not None and not self.is_closing()

    def data_received(self, data: bytes) -> None:
        """Parse received bytes, and answer a malformed or too large head with an error.

        uvicorn alone would log a warning for each malformed request, and would accept a head of any
        size.
        """
        self.stop_keep_alive()
        if not self._connections.has_timeout(self._connection):
            self._connections.start_timeout(self._connection, self._connections.header_timeout_s)

        while data and self._is_open():
            # Parse at most as many bytes as the head may still have.
            piece, data = self._split(data)
            self._has_progressed = False
            try:
                self.open_parser.feed_data(piece)
            except httptools.HttpParserUpgrade:  # not supported: the request is served as HTTP/1.1
                pass
            except httptools.HttpParserError as error:
                if isinstance(error.__context__, _HeadersRefused):
                    self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, str(error.__context__))
                else:
                    self._refuse(HTTPStatus.BAD_REQUEST, "not an HTTP request")
                return

            # Count the bytes of a head or of trailers that are still incomplete.
            self._num_head_bytes = 0 if self._has_progressed else self._num_head_bytes + len(piece)
            if self._num_head_bytes >= _MAX_HEAD_BYTES:
                self._refuse(
                    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"headers of more than {_MAX_HEAD_BYTES} bytes"
                )

    def _split(self, data: bytes) -> tuple[bytes, bytes]:
        """Split `data` after the last byte that still fits into the head limit."""
        limit = _MAX_HEAD_BYTES - self._num_head_bytes
        return (data, b"") if len(data) <= limit else (data[:limit], data[limit:])

    def _refuse(self, status: HTTPStatus, detail: str) -> None:
        """Send an error response and close the connection."""
        content = b'{"detail":"%s"}' % detail.encode()
        self.send_and_close(
            b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%s"
            % (status, status.phrase.encode(), len(content), content)
        )

    def on_message_begin(self) -> None:
        """Start the timeout for the head of a request."""
        if not self._connections.has_timeout(self._connection):
            self._connections.start_timeout(self._connection, self._connections.header_timeout_s)
        self._is_in_body = False
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Add a header. Trailers are discarded: the server has already checked the headers."""
        if self._is_in_body:
            return
        if len(self.current_headers) >= _MAX_HEADERS:
            raise _HeadersRefused(f"more than {_MAX_HEADERS} headers")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Start the request, and the timeout for its body."""
        if len(self.waiting_requests) >= _MAX_PIPELINED:
            raise _HeadersRefused(f"more than {_MAX_PIPELINED} pipelined requests are waiting on this connection")
        self._has_progressed = self._is_in_body = True
        self._connections.start_timeout(self._connection, self._connections.body_timeout_s)
        self._connections.mark_active(self._connection)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Pass on a piece of the body.

        Each KiB gives the client another second, up to the limit.
        """
        self._has_progressed = True
        earned_s = self._connection.patience_s + len(body) / _MIN_BODY_BYTES_PER_S
        self._connection.patience_s = min(earned_s, self._connections.body_timeout_s)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Stop the timeout until the next request begins."""
        self._has_progressed = True
        self._connections.stop_timeout(self._connection)
        super().on_message_complete()
        if self.is_response_complete:  # the response was sent before the body had arrived completely
            self.start_keep_alive()

    def on_response_complete(self) -> None:
        """Start the next request on the connection. If there is none, the connection is idle."""
        super().on_response_complete()
        if self._is_open() and self.is_response_complete:
            self._connections.mark_idle(self._connection)
