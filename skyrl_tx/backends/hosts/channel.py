"""Connect rank 0 with the other ranks over TCP.

The two sides prove to each other that they have the same key. Then the follower sends `Hello`, and
rank 0 answers with `Welcome` or `Refusal`.
"""

import logging
import os
import socket
import struct
import time
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

import msgspec

from skyrl_tx import __version__
from skyrl_tx.backends.hosts.calls import PROTOCOL_VERSION, Hello, Refusal, Welcome, decode, encode
from skyrl_tx.backends.hosts.settings import HostsSettings
from skyrl_tx.contract.errors import UserError

_HANDSHAKE_TIMEOUT_S = 10
_MAX_HANDSHAKE_BYTES = 2**20
_RETRY_S = 0.5
_KEEPALIVE = (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))
"""The kernel closes a connection whose host has been unreachable for 25 seconds (10 + 3 × 5)."""

_log = logging.getLogger(__name__)


class LeaderLost(ConnectionError):
    """Rank 0 has ended, or its connection is lost, before it closed the backend."""


def listen(settings: HostsSettings) -> socket.socket:
    """Return the listening socket of rank 0.

    Raises UserError if `hosts.address` cannot be bound.
    """
    host, port = settings.host_and_port
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=settings.size)
    except OSError as error:
        raise UserError(f"hosts.address {settings.address}: cannot listen: {error.strerror or error}") from error


def accept_all(listener: socket.socket, settings: HostsSettings, welcome: Welcome) -> dict[int, Connection]:
    """Wait until all other ranks have joined, and return their connections by rank."""
    joined: dict[int, Connection] = {}
    while missing := [rank for rank in range(1, settings.size) if rank not in joined]:
        _log.info("waiting for host%s %s", "s" * (len(missing) > 1), ", ".join(map(str, missing)))
        accepted, (peer, *_) = listener.accept()

        try:
            greeted = _handshake(accepted, settings, welcome)
        except (OSError, EOFError, AuthenticationError, msgspec.DecodeError) as error:
            _log.warning(
                "ignoring a connection from %s, which is not a host with the same hosts.key: %s",
                peer,
                error or type(error).__name__,
            )
            continue

        if greeted is not None:
            rank, connection = greeted
            if rank in joined:  # the host was restarted
                joined[rank].close()
            joined[rank] = connection
    return joined


def _handshake(accepted: socket.socket, settings: HostsSettings, welcome: Welcome) -> tuple[int, Connection] | None:
    """Return the rank and the connection of a host. Returns None if the host was refused."""
    connection = _make_connection(accepted, timeout_s=_HANDSHAKE_TIMEOUT_S)
    try:
        # Both sides check the key.
        deliver_challenge(connection, settings.key_bytes)
        answer_challenge(connection, settings.key_bytes)

        hello: Hello = decode(connection.recv_bytes(_MAX_HANDSHAKE_BYTES), Hello)
        if reason := _find_refusal(hello, settings):
            _log.warning("host %d cannot join: %s", hello.rank, reason)
            connection.send_bytes(encode(Refusal(reason=reason)))
            connection.close()
            return None
        connection.send_bytes(encode(welcome))
    except BaseException:
        connection.close()
        raise
    _set_timeout(connection.fileno(), 0)
    return hello.rank, connection


def _find_refusal(hello: Hello, settings: HostsSettings) -> str:
    if (hello.protocol, hello.version) != (PROTOCOL_VERSION, __version__):
        return f"it runs skyrl_tx {hello.version}, but host 0 runs {__version__}"
    if hello.size != settings.size:
        return f"its hosts.size is {hello.size}, but the hosts.size of host 0 is {settings.size}"
    if not 0 < hello.rank < settings.size:
        return f"its hosts.rank is {hello.rank}, but host 0 waits for ranks 1 to {settings.size - 1}"
    return ""


def connect(settings: HostsSettings) -> tuple[Connection, Welcome]:
    """Wait until rank 0 accepts connections, and join it.

    Raises UserError if rank 0 refuses this host.
    """
    is_first = True
    while True:
        try:
            return _join(settings)
        except (OSError, EOFError) as error:
            if is_first:
                _log.info("waiting for host 0 at %s (%s)", settings.address, error or type(error).__name__)
            is_first = False
            time.sleep(_RETRY_S)


def _join(settings: HostsSettings) -> tuple[Connection, Welcome]:
    connection = _make_connection(
        socket.create_connection(settings.host_and_port, _HANDSHAKE_TIMEOUT_S), timeout_s=_HANDSHAKE_TIMEOUT_S
    )
    try:
        # Both sides check the key.
        try:
            answer_challenge(connection, settings.key_bytes)
            deliver_challenge(connection, settings.key_bytes)
        except AuthenticationError as error:
            raise UserError(
                f"hosts.key: host 0 at {settings.address} has a different key. Give all hosts the same one"
            ) from error

        hello = Hello(protocol=PROTOCOL_VERSION, version=__version__, rank=settings.rank, size=settings.size)
        connection.send_bytes(encode(hello))
        _set_timeout(connection.fileno(), 0)  # rank 0 may wait for other hosts before it answers or calls
        reply = decode(connection.recv_bytes(_MAX_HANDSHAKE_BYTES), Welcome | Refusal)
        if isinstance(reply, Refusal):
            raise UserError(f"host 0 at {settings.address} refuses this host: {reply.reason}")
    except BaseException:
        connection.close()
        raise
    return connection, reply


def _make_connection(connected: socket.socket, *, timeout_s: int) -> Connection:
    connected.settimeout(None)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE:
        if hasattr(socket, name):  # Linux
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    descriptor = connected.detach()
    _set_timeout(descriptor, timeout_s)
    return Connection(descriptor)


def _set_timeout(descriptor: int, timeout_s: int) -> None:
    """Set the timeout of each read and each write; 0 means none."""
    with socket.socket(fileno=os.dup(descriptor)) as handle:
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            handle.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", timeout_s, 0))
