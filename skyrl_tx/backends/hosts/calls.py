"""The calls of a backend as messages from rank 0 to the others, and what each host replies.

Messages are msgpack: a follower decodes records of the contract and nothing else. Passes and snapshots exist on every
host under the number of the call that made them.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import PurePosixPath
from typing import Any

import msgspec
import numpy as np

from skyrl_tx.contract.backend import StatePart
from skyrl_tx.contract.batches import PassExample, SampleRequest
from skyrl_tx.contract.codec import decode_array, encode_array
from skyrl_tx.contract.errors import MemoryExhausted
from skyrl_tx.contract.ids import ModelId, RequestId, SamplerId
from skyrl_tx.contract.requests import ModelSpec, OptimizerParams

PROTOCOL = 1
_DIGEST_BYTES = 8
_RESULT = "result"
_PLAN = "plan"


class Call(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A call of the backend that all hosts make."""


class Close(Call, frozen=True, kw_only=True):
    """Close the backend and end."""


class JoinHosts(Call, frozen=True, kw_only=True):
    """`AbstractBackend.join_hosts`; each host adds its own rank."""

    size: int
    coordinator: str


class Start(Call, frozen=True, kw_only=True):
    """`AbstractBackend.start`."""


class CheckDevices(Call, frozen=True, kw_only=True):
    """`AbstractBackend.check_devices`."""


class CreateModel(Call, frozen=True, kw_only=True):
    """`AbstractBackend.create_model`."""

    model_id: ModelId
    spec: ModelSpec


class DeleteModel(Call, frozen=True, kw_only=True):
    """`AbstractBackend.delete_model`."""

    model_id: ModelId


class BeginPass(Call, frozen=True, kw_only=True):
    """`AbstractBackend.begin_pass`; its number names the pass."""

    examples: tuple[PassExample, ...]
    backward: bool


class StepPass(Call, frozen=True, kw_only=True):
    """`Pass.step`."""

    handle: int


class FinishPass(Call, frozen=True, kw_only=True):
    """`Pass.results`."""

    handle: int


class AbortPass(Call, frozen=True, kw_only=True):
    """`Pass.abort`."""

    handle: int


class OptimStep(Call, frozen=True, kw_only=True):
    """`AbstractBackend.optim_step`."""

    model_id: ModelId
    params: OptimizerParams


class GradientNorm(Call, frozen=True, kw_only=True):
    """`AbstractBackend.gradient_norm`."""

    model_id: ModelId


class ClearGradient(Call, frozen=True, kw_only=True):
    """`AbstractBackend.clear_gradient`."""

    model_id: ModelId


class Capture(Call, frozen=True, kw_only=True):
    """`AbstractBackend.capture`; its number names the snapshot."""

    model_id: ModelId
    parts: tuple[StatePart, ...]


class OpenSnapshot(Call, frozen=True, kw_only=True):
    """`AbstractBackend.open_snapshot`; its number names the snapshot.

    The bytes of the files follow in their order, each file in frames of at most CHUNK_BYTES.
    """

    files: tuple[tuple[str, int], ...]
    """Relative paths and sizes in bytes."""


class Restore(Call, frozen=True, kw_only=True):
    """`AbstractBackend.restore`."""

    model_id: ModelId
    spec: ModelSpec
    handle: int
    parts: tuple[StatePart, ...]


class LoadSampler(Call, frozen=True, kw_only=True):
    """`AbstractBackend.load_sampler`."""

    sampler: SamplerId
    handle: int


class DropSampler(Call, frozen=True, kw_only=True):
    """`AbstractBackend.drop_sampler`."""

    sampler: SamplerId


class BeginSample(Call, frozen=True, kw_only=True):
    """`AbstractBackend.begin_sample`."""

    requests: tuple[SampleRequest, ...]


class StepSample(Call, frozen=True, kw_only=True):
    """`AbstractBackend.step_sample`."""


class CancelSample(Call, frozen=True, kw_only=True):
    """`AbstractBackend.cancel_sample`."""

    request_ids: tuple[RequestId, ...]


class EndSample(Call, frozen=True, kw_only=True):
    """`AbstractBackend.end_sample`."""

    request_id: RequestId
    index: int


AnyCall = (
    Close
    | JoinHosts
    | Start
    | CheckDevices
    | CreateModel
    | DeleteModel
    | BeginPass
    | StepPass
    | FinishPass
    | AbortPass
    | OptimStep
    | GradientNorm
    | ClearGradient
    | Capture
    | OpenSnapshot
    | Restore
    | LoadSampler
    | DropSampler
    | BeginSample
    | StepSample
    | CancelSample
    | EndSample
)

CHUNK_BYTES = 8 * 2**20
"""The most bytes of a file in one frame."""


class Frame(msgspec.Struct, frozen=True, kw_only=True):
    """One call, with its number: calls are numbered from 1 in their order."""

    number: int
    released: tuple[int, ...]
    """Passes and snapshots that rank 0 has dropped since the call before."""
    call: AnyCall


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


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """The result or error of a call on one host."""

    number: int
    digests: dict[str, bytes] = {}
    """Hashes of the result, of a record one for each field."""
    error: str = ""
    """The type of what was raised."""
    message: str = ""


def reply_of(number: int, result: object) -> Reply:
    """Return the reply to a call that returned a result."""
    parts = {_RESULT: result}
    if is_dataclass(result):
        parts = {each.name: getattr(result, each.name) for each in fields(result)}
    return Reply(number=number, digests={name: _digest(part) for name, part in parts.items()})


def reply_of_error(number: int, error: Exception) -> Reply:
    """Return the reply to a call that raised."""
    digests = {_PLAN: _digest(error.plan)} if isinstance(error, MemoryExhausted) else {}
    return Reply(number=number, digests=digests, error=type(error).__name__, message=" ".join(str(error).split()))


def difference(rank: int, call: Call, reply: Reply, own: Reply) -> str | None:
    """Return how a host's reply differs from that of rank 0, or None if both did the same.

    Two that raised the same type of error did, if they go on in the same way: messages name paths and addresses.
    """
    name = name_of(call)
    if reply.error != own.error:
        return f"host {rank} {_end_of(reply)} in {name}, call {own.number}, where host 0 {_end_of(own)}"
    differing = sorted(each for each in own.digests.keys() | reply.digests.keys() if _differs(each, reply, own))
    if not differing:
        return None
    of = "" if differing == [_RESULT] else f" of {', '.join(differing)}"
    return f"host {rank} computed another result than host 0{of} in {name}, call {own.number}"


def name_of(call: Call) -> str:
    """Return the name of a call for people, such as step_sample."""
    name = type(call).__name__
    return "".join(f"_{each.lower()}" if each.isupper() else each for each in name).lstrip("_")


_DECODERS = {
    kind: msgspec.msgpack.Decoder(kind, dec_hook=decode_array) for kind in (Frame, Hello, Reply, Welcome | Refusal)
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


def _differs(name: str, reply: Reply, own: Reply) -> bool:
    return reply.digests.get(name) != own.digests.get(name)


def _end_of(reply: Reply) -> str:
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
