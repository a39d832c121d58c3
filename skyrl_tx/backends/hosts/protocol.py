"""The protocol between rank 0 and the other hosts: how they join, and the messages that they exchange.

The hosts connect over TCP. The two sides of a connection prove to each other that they have the
same key. Then the follower sends `Hello`, and rank 0 answers with `Welcome` or `Refusal`. After that
rank 0 sends backend calls, and each host replies.

Messages are msgpack, and a follower decodes only these types and the records of the contract. For
example, the message of `optim_step` has the fields `model_id` and `params`, with the types of the
method's annotations. Passes and snapshots exist on every host. A message refers to them by the
number of the call that made them.
"""

import hashlib
import inspect
import logging
import os
import socket
import struct
import time
from collections.abc import Collection, Mapping
from dataclasses import fields, is_dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import PurePosixPath
from typing import Any, Union, get_args, get_origin, get_type_hints

import msgspec
import numpy as np

from skyrl_tx import __version__
from skyrl_tx.backends.hosts.settings import HostsSettings
from skyrl_tx.contract.backend import AbstractBackend, Pass, Snapshot
from skyrl_tx.contract.codec import decode_array, encode_array
from skyrl_tx.contract.errors import MemoryExhausted, UserError

PROTOCOL_VERSION = 2
_DIGEST_BYTES = 8
_RESULT = "result"
_PLAN = "plan"
"""Keys of `HostReply.digests`: a result that is not a dataclass, the plan of MemoryExhausted."""
_HANDSHAKE_TIMEOUT_S = 10
_MAX_HANDSHAKE_BYTES = 2**20
_RETRY_S = 0.5
_KEEPALIVE = (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))
"""The kernel closes a connection whose host has been unreachable for 25 seconds (10 + 3 × 5)."""

_log = logging.getLogger(__name__)


class BackendCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call that all hosts make. Each method of `AbstractBackend` and `Pass` has a subclass."""


def _make_call_type(name: str, owner: type, method: str) -> type[BackendCall]:
    """Return the message type of a method.

    Its fields are the parameters of the method, and its tag is `name`. A pass or a snapshot is sent
    as the number of the call that made it. A collection is sent as a tuple, so that its order is
    the same on all hosts.
    """
    function = getattr(owner, method)
    types = get_type_hints(function)
    parameters = list(inspect.signature(function).parameters)[1:]
    fields_ = [(parameter, _get_wire_type(types[parameter])) for parameter in parameters]
    if owner is Pass:
        fields_.insert(0, ("handle", int))
    call_type: Any = msgspec.defstruct(
        name, fields_, bases=(BackendCall,), frozen=True, kw_only=True, tag=name, module=__name__
    )
    return call_type


def _get_wire_type(annotation: Any) -> Any:
    if annotation is Snapshot:
        return int
    if get_origin(annotation) is Collection:
        return tuple[get_args(annotation)[0], ...]
    return annotation


_BACKEND_METHODS = (
    *("close", "join_hosts", "start", "check_devices", "create_model", "delete_model", "begin_pass", "optim_step"),
    *("gradient_norm", "clear_gradient", "capture", "restore", "load_sampler", "drop_sampler", "begin_sample"),
    *("step_sample", "cancel_sample", "end_sample"),
)
PASS_METHODS = {"step_pass": "step", "finish_pass": "results", "abort_pass": "abort"}
"""The methods of `Pass` by the names of their calls."""
CALLS: Mapping[str, type[BackendCall]] = {
    **{name: _make_call_type(name, AbstractBackend, name) for name in _BACKEND_METHODS},
    **{name: _make_call_type(name, Pass, method) for name, method in PASS_METHODS.items()},
}


class OpenSnapshot(BackendCall, frozen=True, kw_only=True, tag="open_snapshot"):
    """A call of `AbstractBackend.open_snapshot`.

    Rank 0 then sends the contents of the files in this order, in chunks of at most CHUNK_BYTES.
    """

    files: tuple[tuple[str, int], ...]
    """Relative paths and sizes in bytes."""


AnyCall = Union[OpenSnapshot, *CALLS.values()]  # type checkers cannot evaluate it

CHUNK_BYTES = 8 * 2**20
"""Size of the chunks in which rank 0 sends a file."""


class Frame(msgspec.Struct, frozen=True, kw_only=True):
    """One call, with its number. Calls are numbered from 1."""

    number: int
    released: tuple[int, ...]
    """Numbers of the passes and snapshots that rank 0 has dropped since the previous call."""
    call: AnyCall  # pyright: ignore[reportInvalidTypeForm]


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """The first message that a follower sends to rank 0."""

    protocol: int
    version: str
    """Version of this package."""
    rank: int
    size: int


class Welcome(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Rank 0's answer to `Hello`: the backend that all hosts run.

    The settings of rank 0 apply to all hosts.
    """

    backend: str
    base_model: str
    config: bytes
    """The backend's settings as JSON."""


class Refusal(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Rank 0's answer to the `Hello` of a host that cannot join."""

    reason: str


class HostReply(msgspec.Struct, frozen=True, kw_only=True):
    """The result or error of a call on one host."""

    number: int
    digests: dict[str, bytes] = {}
    """Hashes of the result.
    A dataclass has one hash for each field, so that a difference can be named."""
    error: str = ""
    """Name of the error's class, for example "CapacityError"; empty if the call returned."""
    message: str = ""
    """The error's message, in one line."""


def make_reply(number: int, result: object) -> HostReply:
    """Return the reply for a call that returned a result."""
    parts = {_RESULT: result}
    if is_dataclass(result):
        parts = {field.name: getattr(result, field.name) for field in fields(result)}
    return HostReply(number=number, digests={name: _digest(part) for name, part in parts.items()})


def make_error_reply(number: int, error: Exception) -> HostReply:
    """Return the reply for a call that raised an error."""
    digests = {_PLAN: _digest(error.plan)} if isinstance(error, MemoryExhausted) else {}
    return HostReply(number=number, digests=digests, error=type(error).__name__, message=" ".join(str(error).split()))


def describe_difference(rank: int, call: BackendCall, reply: HostReply, own: HostReply) -> str | None:
    """Describe how the reply of host `rank` differs from rank 0's `own` reply.

    Returns None if they agree. Errors of the same class agree although their messages may differ,
    because messages can contain paths and addresses. Two MemoryExhausted errors must also have the
    same plan.
    """
    name = get_call_name(call)
    if reply.error != own.error:
        return (
            f"host {rank} {_describe_outcome(reply)} in {name}, call {own.number}, but host 0 {_describe_outcome(own)}"
        )

    keys = own.digests.keys() | reply.digests.keys()
    differing = sorted(key for key in keys if reply.digests.get(key) != own.digests.get(key))
    if not differing:
        return None
    suffix = "" if differing == [_RESULT] else f" in {', '.join(differing)}"
    return f"the results of host {rank} and host 0 in {name}, call {own.number}, differ{suffix}"


def get_call_name(call: BackendCall) -> str:
    """Return the name of a call, for example "step_sample"."""
    return str(call.__struct_config__.tag)


_DECODERS = {
    kind: msgspec.msgpack.Decoder(kind, dec_hook=decode_array) for kind in (Frame, Hello, HostReply, Welcome | Refusal)
}
"""Made at import, because two threads must not make decoders of one class; see `contract.codec`."""


def encode(message: msgspec.Struct) -> bytes:
    """Return the bytes of a message."""
    return msgspec.msgpack.encode(message, enc_hook=encode_array)


def decode(data: bytes, kind: Any) -> Any:
    """Decode a message.

    `kind` is a key of `_DECODERS`. Raises msgspec.DecodeError for other data.
    """
    return _DECODERS[kind].decode(data)


def is_inside(path: str) -> bool:
    """Return whether a path is relative and does not leave its directory."""
    parts = PurePosixPath(path).parts
    return bool(parts) and ".." not in parts and not PurePosixPath(path).is_absolute()


def _describe_outcome(reply: HostReply) -> str:
    return f"raised {reply.error}: {reply.message}" if reply.error else "returned"


def _digest(value: object) -> bytes:
    data = msgspec.msgpack.encode(value, enc_hook=_encode_number, order="deterministic")
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()


def _encode_number(value: object) -> object:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return dict(value)
    return encode_array(value)


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
