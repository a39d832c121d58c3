"""Contract records to bytes and back: msgpack maps with kind and version, arrays as raw bytes.

Measured for 64 sequences of 4,096 tokens: 12 ms and 2.1 MB against 776 ms and 6.8 MB as JSON.
"""

from typing import Any, cast, get_args, get_origin

import msgspec
import numpy as np

from skyrl_tx.contract import requests, results
from skyrl_tx.contract.arrays import NumberArray

VERSION = 1

_KINDS: dict[str, type] = {
    "create_model": requests.CreateModel,
    "model_pass": requests.ModelPass,
    "optim_step": requests.OptimStep,
    "save_weights": requests.SaveWeights,
    "load_weights": requests.LoadWeights,
    "unload_model": requests.UnloadModel,
    "sample": requests.Sample,
    "rejected": requests.Rejected,
    "model_spec": requests.ModelSpec,
    "create_model_output": results.CreateModelOutput,
    "forward_backward_output": results.ForwardBackwardOutput,
    "optim_step_output": results.OptimStepOutput,
    "save_weights_output": results.SaveWeightsOutput,
    "load_weights_output": results.LoadWeightsOutput,
    "unload_model_output": results.UnloadModelOutput,
    "sample_output": results.SampleOutput,
    "failure": results.Failure,
}
_NAMES = {record: kind for kind, record in _KINDS.items()}
_DTYPES = frozenset({"int32", "int64", "float32", "float64"})


class CodecError(ValueError):
    """Bytes that this release cannot read; the text says why."""


class _Envelope(msgspec.Struct, frozen=True, array_like=True):
    version: int
    kind: str
    body: msgspec.Raw


def kind_of(record: requests.Request | results.Result) -> str:
    """The kind under which a record is stored."""
    return _NAMES[type(record)]


def encode(record: requests.Request | results.Result | requests.ModelSpec) -> bytes:
    """Write a record, its kind and the format's version."""
    body = msgspec.msgpack.encode(record, enc_hook=_encode_array)
    return msgspec.msgpack.encode(_Envelope(VERSION, _NAMES[type(record)], msgspec.Raw(body)))


def decode(data: bytes) -> requests.Request | results.Result | requests.ModelSpec:
    """Read a record back. Raises CodecError for other versions, unknown kinds and malformed bytes."""
    try:
        envelope = msgspec.msgpack.decode(data, type=_Envelope)
        if envelope.version != VERSION:
            raise CodecError(f"record of format version {envelope.version}; this release reads version {VERSION}")
        if envelope.kind not in _KINDS:
            raise CodecError(f"record of unknown kind {envelope.kind!r}")
        kind = cast(type[requests.Request], _KINDS[envelope.kind])
        return msgspec.msgpack.decode(envelope.body, type=kind, dec_hook=_decode_array)
    except (msgspec.DecodeError, ValueError) as error:
        raise CodecError(f"unreadable record: {error}") from error


def _encode_array(value: object) -> object:
    if not isinstance(value, np.ndarray):
        raise NotImplementedError(f"no encoding for {type(value).__name__}")
    array = cast(NumberArray, value)
    return [array.dtype.name, array.shape, np.ascontiguousarray(array).tobytes()]


def _decode_array(kind: type, value: Any) -> NumberArray:
    if (get_origin(kind) or kind) is not np.ndarray:
        raise NotImplementedError(f"no decoding for {kind}")
    dtype, shape, data = value
    if dtype not in _DTYPES:
        raise ValueError(f"array of dtype {dtype!r}")
    wanted = _dtype_of(kind)
    if wanted not in (None, dtype):
        raise ValueError(f"array of dtype {dtype!r} where {wanted!r} belongs")
    return np.frombuffer(data, dtype=dtype).reshape(shape)


def _dtype_of(kind: type) -> str | None:
    """The dtype that `NDArray[...]` names; None for any."""
    scalar = cast(Any, get_args(get_args(kind)[1])[0] if get_args(kind) else Any)
    return None if scalar is Any else np.dtype(scalar).name
