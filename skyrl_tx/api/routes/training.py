"""Making, training and describing models."""

from collections.abc import Callable
from typing import TypeVar

from fastapi import APIRouter
from google.protobuf.unknown_fields import UnknownFieldSet

from skyrl_tx.api import lookup, submission
from skyrl_tx.api.context import Call, Incoming
from skyrl_tx.api.errors import bad_request
from skyrl_tx.api.proto import wire_pb2
from skyrl_tx.api.schemas.addresses import CreationAddress, ModelAddress
from skyrl_tx.api.schemas.base import WireModel
from skyrl_tx.api.schemas.training import (
    CreateModelRequest,
    ForwardBackwardRequest,
    ForwardRequest,
    GetInfoAnswer,
    GetInfoRequest,
    ModelData,
    OptimizerAnswer,
    OptimStepRequest,
    Promise,
    UnloadModelRequest,
)
from skyrl_tx.api.submission import Encoded, NewModel
from skyrl_tx.api.translate import training
from skyrl_tx.api.translate.translated import Translated, rejected, translated
from skyrl_tx.api.wire import parse
from skyrl_tx.contract import requests
from skyrl_tx.contract.errors import UserError
from skyrl_tx.contract.ids import ModelId, SessionId

router = APIRouter()

SchemaT = TypeVar("SchemaT", bound=WireModel)


@router.post("/create_model", response_model_exclude_none=True)
def create_model(call: Incoming) -> Promise:
    """Queue the making of a fresh adapter."""
    value = call.body.mapping()
    address = parse(CreationAddress, value)
    session_id = SessionId(address.session_id)
    request = translated(
        "create_model",
        CreateModelRequest,
        value,
        lambda schema: training.create_model(schema, call.settings),
        call.check_unknown,
    )
    made = request.request
    model = None
    if isinstance(made, requests.CreateModel):
        model = NewModel(base_model=made.base_model, spec=made.spec, user_metadata=address.user_metadata)
    encoded = Encoded.of(request)
    return call.store.write(
        lambda tx: submission.creation(tx, call.caller, session_id, address.model_seq_id, encoded, model)
    )


@router.post("/forward_backward", response_model_exclude_none=True)
def forward_backward(call: Incoming) -> Promise:
    """Queue a training pass; in protobuf it may be one without gradients."""
    if call.body.is_protobuf:
        return _forward_backward_protobuf(call)
    return _submit_json(
        call,
        "model_pass",
        ForwardBackwardRequest,
        lambda schema: training.pass_from_json(schema.forward_backward_input, _dense_limit(call), backward=True),
        backward=True,
    )


@router.post("/forward", response_model_exclude_none=True)
def forward(call: Incoming) -> Promise:
    """Queue a pass without gradients (SDK up to 0.24)."""
    return _submit_json(
        call,
        "model_pass",
        ForwardRequest,
        lambda schema: training.pass_from_json(schema.forward_input, _dense_limit(call), backward=False),
    )


@router.post("/optim_step", response_model_exclude_none=True)
def optim_step(call: Incoming) -> Promise:
    """Queue an optimizer step."""
    return _submit_json(call, "optim_step", OptimStepRequest, training.optim_step)


@router.post("/unload_model", response_model_exclude_none=True)
def unload_model(call: Incoming) -> Promise:
    """Queue the end of a model (SDK up to 0.25)."""
    unload = Translated.exactly(requests.UnloadModel())
    return _submit_json(call, "unload_model", UnloadModelRequest, lambda schema: unload)


@router.post("/get_info", response_model_exclude_none=True)
def get_info(call: Incoming) -> GetInfoAnswer:
    """Describe a model; the client takes its tokenizer and base model from here."""
    model_id = ModelId(call.body.model(GetInfoRequest).model_id)
    row = call.store.read(lambda tx: lookup.model(tx, call.caller, model_id))
    spec = lookup.spec_of(row)
    return GetInfoAnswer(
        model_id=model_id,
        model_data=ModelData(model_name=row.base_model, tokenizer_id=call.settings.client_tokenizer_id),
        model_name=row.base_model,
        lora_rank=spec.lora.rank,
        optimizer_config=OptimizerAnswer(type=spec.optimizer),
    )


def _forward_backward_protobuf(call: Call) -> Promise:
    message = call.body.message(wire_pb2.ForwardBackwardRequest)
    if message.seq_id < 0:
        raise bad_request(f"seq_id {message.seq_id}: must not be negative")
    for field in UnknownFieldSet(message):
        call.parts.unknown_fields.note(f"ForwardBackwardRequest.{field.field_number}", call.sdk_version)
    try:
        request = training.pass_from_proto(message, _dense_limit(call))
    except UserError as error:
        request = rejected("model_pass", error.message, backward=not message.forward_only)
    return _submit(call, ModelId(message.model_id), message.seq_id, request)


def _dense_limit(call: Call) -> int:
    """Sparse tensors of one request get no more memory than dense ones could have had."""
    return call.settings.max_request_bytes


def _submit_json(
    call: Call,
    kind: str,
    schema: type[SchemaT],
    translate: Callable[[SchemaT], Translated],
    *,
    backward: bool = False,
) -> Promise:
    value = call.body.mapping()
    address = parse(ModelAddress, value)
    request = translated(kind, schema, value, translate, call.check_unknown, backward=backward)
    return _submit(call, ModelId(address.model_id), address.seq_id, request)


def _submit(call: Call, model_id: ModelId, seq_id: int | None, request: Translated) -> Promise:
    recalled = call.parts.recall.complete(call.store, call.caller, request)
    encoded, used = Encoded.of(recalled.request), recalled.sequence_ids
    return call.store.write(
        lambda tx: submission.to_model(tx, call.caller, model_id, seq_id, encoded, call.idempotency_key, used)
    )
