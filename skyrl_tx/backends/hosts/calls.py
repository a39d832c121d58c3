"""The messages between rank 0 and the other hosts: backend calls, and each host's reply.

Messages are msgpack, and a follower decodes only these types and the records of the contract. For
example, the message of `optim_step` has the fields `model_id` and `params`, with the types of the
method's annotations. Passes and snapshots exist on every host. A message refers to them by the
number of the call that made them.
"""

import hashlib
import inspect
from collections.abc import Collection, Mapping
from dataclasses import fields, is_dataclass
from pathlib import PurePosixPath
from typing import Any, Union, get_args, get_origin, get_type_hints

import msgspec
import numpy as np

from skyrl_tx.contract.backend import AbstractBackend, Pass, Snapshot
from skyrl_tx.contract.codec import decode_array, encode_array
from skyrl_tx.contract.errors import MemoryExhausted

PROTOCOL_VERSION = 2
_DIGEST_BYTES = 8
_RESULT = "result"
_PLAN = "plan"
"""Keys of `HostReply.digests`: a result that is not a dataclass, the plan of MemoryExhausted."""


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
