"""The connections of rank 0 with the other ranks: ordered frames over TCP."""

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
"""A host that vanished from the network is noticed after 25 seconds."""

_log = logging.getLogger(__name__)


class LeaderLost(ConnectionError):
    """Rank 0 has ended without closing the backend."""


def listen(settings: HostsSettings) -> socket.socket:
    """Return the listening socket of rank 0. Raises UserError if its address cannot be bound."""
    host, port = settings.host_and_port
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=settings.size)
    except OSError as error:
        raise UserError(f"hosts.address {settings.address}: {error.strerror or error}") from error


def accept_all(listener: socket.socket, settings: HostsSettings, welcome: Welcome) -> dict[int, Connection]:
    """Wait until all other ranks have joined; return their connections by rank."""
    joined: dict[int, Connection] = {}
    while missing := [rank for rank in range(1, settings.size) if rank not in joined]:
        _log.info("waiting for host%s %s", "s" * (len(missing) > 1), ", ".join(map(str, missing)))
        accepted, (peer, *_) = listener.accept()
        try:
            found = _handshake(accepted, settings, welcome)
        except (OSError, EOFError, AuthenticationError, msgspec.DecodeError) as error:
            _log.warning("a connection from %s is not that of a host: %s", peer, error or type(error).__name__)
            continue
        if found is not None:
            rank, connection = found
            if rank in joined:  # it has ended since, and started again
                joined[rank].close()
            joined[rank] = connection
    return joined


def _handshake(accepted: socket.socket, settings: HostsSettings, welcome: Welcome) -> tuple[int, Connection] | None:
    """Return rank and connection of a host, or None if it was refused."""
    connection = _make_connection(accepted, timeout_s=_HANDSHAKE_TIMEOUT_S)
    try:
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
        return f"it runs skyrl_tx {hello.version}, and host 0 {__version__}"
    if hello.size != settings.size:
        return f"its hosts.size is {hello.size}, and that of host 0 {settings.size}"
    return "" if 0 < hello.rank < settings.size else f"there is no host {hello.rank} to wait for"


def connect(settings: HostsSettings) -> tuple[Connection, Welcome]:
    """Wait for rank 0 and join it. Raises UserError if it refuses this host."""
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
        try:
            answer_challenge(connection, settings.key_bytes)
            deliver_challenge(connection, settings.key_bytes)
        except AuthenticationError as error:
            raise UserError(f"hosts.key: not that of host 0 at {settings.address}") from error
        hello = Hello(protocol=PROTOCOL_VERSION, version=__version__, rank=settings.rank, size=settings.size)
        connection.send_bytes(encode(hello))
        _set_timeout(connection.fileno(), 0)  # from here on rank 0 may take its time
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
    """Set how long one read or write may wait; 0: without end."""
    with socket.socket(fileno=os.dup(descriptor)) as handle:
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            handle.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", timeout_s, 0))
