"""Tokens and loss inputs, from protobuf and from JSON."""

from collections.abc import Sequence

import numpy as np
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from skyrl_tx.api.proto import wire_pb2
from skyrl_tx.api.schemas.base import asks_for_nothing, shown
from skyrl_tx.api.schemas.inputs import Chunk, Datum, ModelInput
from skyrl_tx.api.tensors import DenseBudget, from_bytes, from_json, from_proto, int32_tokens
from skyrl_tx.api.translate.checks import finite_array, require
from skyrl_tx.contract import requests
from skyrl_tx.contract.arrays import Int32Array, NumberArray
from skyrl_tx.contract.errors import UserError


def datum_from_proto(message: wire_pb2.Datum, budget: DenseBudget, where: str) -> requests.Datum:
    """Read one training sequence without its provenance."""
    runs: list[NumberArray] = []
    for index, chunk in enumerate(message.model_input):
        kind = chunk.WhichOneof("chunk")
        if kind != "encoded_text":
            raise _unsupported(kind or "unknown", f"{where}.model_input[{index}]")
        runs.append(from_bytes(chunk.encoded_text.tokens, "int32", f"{where}.model_input[{index}].tokens"))
    inputs: dict[str, NumberArray] = {}
    for name, tensor in sorted(message.loss_fn_inputs.items()):
        inner = f"{where}.loss_fn_inputs[{shown(name)}]"
        refuse_unknown(tensor, inner)
        inputs[name] = finite_array(from_proto(tensor, budget, inner), inner)
    return requests.Datum(tokens=_joined(runs, where), loss_inputs=inputs)


def datum_from_json(datum: Datum, budget: DenseBudget, where: str) -> requests.Datum:
    """Read one training sequence without its provenance."""
    inputs: dict[str, NumberArray] = {}
    for name, tensor in sorted(datum.loss_fn_inputs.items()):
        inner = f"{where}.loss_fn_inputs[{shown(name)}]"
        refuse_extra(tensor.model_extra, inner)
        inputs[name] = finite_array(from_json(tensor, budget, inner), inner)
    return requests.Datum(tokens=tokens_from_json(datum.model_input, where), loss_inputs=inputs)


def tokens_from_json(model_input: ModelInput, where: str) -> Int32Array:
    """Join the text chunks of an input."""
    runs: list[NumberArray] = []
    for index, chunk in enumerate(model_input.chunks):
        inner = f"{where}.chunks[{index}]"
        kind = _chunk_kind(chunk)
        if kind != "encoded_text" or chunk.tokens is None:
            raise _unsupported(kind, inner)
        refuse_extra(chunk.model_extra, inner)
        runs.append(int32_tokens(chunk.tokens, f"{inner}.tokens"))
    return _joined(runs, where)


def refuse_unknown(message: Message, where: str) -> None:
    """Raise UserError for protobuf fields that this server does not know and that ask for something."""
    for field in UnknownFieldSet(message):
        if not asks_for_nothing(field.data) and field.data != b"":
            raise UserError(f"{where}: field number {field.field_number} is not known to this server")


def refuse_extra(extra: dict[str, object] | None, where: str) -> None:
    """Raise UserError for JSON fields that this server does not know and that ask for something."""
    for name, value in (extra or {}).items():
        require(asks_for_nothing(value), f"{where}.{name} {shown(value)}: this server does not know the field")


def _chunk_kind(chunk: Chunk) -> str:
    """Tell chunks apart by what they hold where the client names no type (SDK up to 0.16)."""
    if chunk.type is not None:
        return chunk.type
    by_field = {"encoded_text": chunk.tokens, "image_asset_pointer": chunk.location, "image": chunk.data}
    return next((kind for kind, value in by_field.items() if value is not None), "dmel" if chunk.dmel else "unknown")


def _unsupported(kind: str, where: str) -> UserError:
    return UserError(f"{where}: chunks of type {shown(kind)} are not offered, this server reads text only")


def _joined(runs: Sequence[NumberArray], where: str) -> Int32Array:
    tokens = runs[0] if len(runs) == 1 else np.concatenate([np.empty(0, np.int32), *runs])
    require(tokens.size > 0, f"{where}: holds no tokens")
    return tokens
