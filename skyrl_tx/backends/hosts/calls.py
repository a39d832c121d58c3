"""The calls of a backend as messages from rank 0 to the other hosts, and the replies of each host.

Messages are msgpack: a follower decodes records of the contract and nothing else. For example, the message of
`optim_step` has the fields `model_id` and `params`, with the types of the method's annotations. Passes and
snapshots exist on every host under the number of the call that made them.
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


class BackendCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call that all hosts make. Its subclasses are made from the methods of `AbstractBackend` and `Pass`."""


def _make_call_type(name: str, owner: type, method: str) -> type[BackendCall]:
    """Return the record of a call: its fields are the parameters of the method, its tag is `name`.

    A pass or a snapshot is the number of the call that made it. Collections are tuples, so that their order is the
    same on all hosts.
    """
    function = getattr(owner, method)
    types = get_type_hints(function)
    parameters = list(inspect.signature(function).parameters)[1:]
    fields_ = [(parameter, _get_wire_type(types[parameter])) for parameter in parameters]
    if owner is Pass:
        fields_.insert(0, ("handle", int))
    made: Any = msgspec.defstruct(
        name, fields_, bases=(BackendCall,), frozen=True, kw_only=True, tag=name, module=__name__
    )
    return made


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
    """`AbstractBackend.open_snapshot`; its number names the snapshot.

    The bytes of the files follow in their order, each file in frames of at most CHUNK_BYTES.
    """

    files: tuple[tuple[str, int], ...]
    """Relative paths and sizes in bytes."""


AnyCall = Union[OpenSnapshot, *CALLS.values()]  # made when this module is loaded

CHUNK_BYTES = 8 * 2**20
"""The most bytes of a file in one frame."""


class Frame(msgspec.Struct, frozen=True, kw_only=True):
    """One call, with its number: calls are numbered from 1 in their order."""

    number: int
    released: tuple[int, ...]
    """Passes and snapshots that rank 0 has dropped since the call before."""
    call: AnyCall  # pyright: ignore[reportInvalidTypeForm]


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """The first message of a follower."""

    protocol: int
    version: str
    """Version of this package."""
    rank: int
    size: int


class Welcome(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The reply of rank 0: what all hosts run. Its own settings decide."""

    backend: str
    base_model: str
    config: bytes
    """The backend's settings as JSON."""


class Refusal(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The reply of rank 0 to a host that cannot join."""

    reason: str


class HostReply(msgspec.Struct, frozen=True, kw_only=True):
    """The result or error of a call on one host."""

    number: int
    digests: dict[str, bytes] = {}
    """Hashes of the result, of a record one for each field."""
    error: str = ""
    """The type of what was raised."""
    message: str = ""


def make_reply(number: int, result: object) -> HostReply:
    """Return the reply to a call that returned a result."""
    parts = {_RESULT: result}
    if is_dataclass(result):
        parts = {each.name: getattr(result, each.name) for each in fields(result)}
    return HostReply(number=number, digests={name: _digest(part) for name, part in parts.items()})


def make_error_reply(number: int, error: Exception) -> HostReply:
    """Return the reply to a call that raised."""
    digests = {_PLAN: _digest(error.plan)} if isinstance(error, MemoryExhausted) else {}
    return HostReply(number=number, digests=digests, error=type(error).__name__, message=" ".join(str(error).split()))


def describe_difference(rank: int, call: BackendCall, reply: HostReply, own: HostReply) -> str | None:
    """Return how a host's reply differs from that of rank 0, or None if both did the same.

    Two that raised the same type of error did, if they go on in the same way: messages name paths and addresses.
    """
    name = get_call_name(call)
    if reply.error != own.error:
        return f"host {rank} {_describe_outcome(reply)} in {name}, call {own.number}, where host 0 {_describe_outcome(own)}"
    differing = sorted(each for each in own.digests.keys() | reply.digests.keys() if _differs(each, reply, own))
    if not differing:
        return None
    of = "" if differing == [_RESULT] else f" of {', '.join(differing)}"
    return f"host {rank} computed another result than host 0{of} in {name}, call {own.number}"


def get_call_name(call: BackendCall) -> str:
    """Return the name of a call for people, such as step_sample."""
    return str(call.__struct_config__.tag)


_DECODERS = {
    kind: msgspec.msgpack.Decoder(kind, dec_hook=decode_array) for kind in (Frame, Hello, HostReply, Welcome | Refusal)
}
"""Made once, because two threads cannot safely make decoders of a class; see `contract.codec`."""


def encode(message: msgspec.Struct) -> bytes:
    """Return the bytes of a message."""
    return msgspec.msgpack.encode(message, enc_hook=encode_array)


def decode(data: bytes, kind: Any) -> Any:
    """Return a message of a kind of `_DECODERS`. Raises msgspec.DecodeError for other bytes."""
    return _DECODERS[kind].decode(data)


def is_inside(path: str) -> bool:
    """Return whether a relative path stays in its directory."""
    parts = PurePosixPath(path).parts
    return bool(parts) and ".." not in parts and not PurePosixPath(path).is_absolute()


def _differs(name: str, reply: HostReply, own: HostReply) -> bool:
    return reply.digests.get(name) != own.digests.get(name)


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
