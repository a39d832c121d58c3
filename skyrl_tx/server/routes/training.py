"""Endpoints that create, train and describe models."""

from fastapi import APIRouter
from google.protobuf.unknown_fields import UnknownFieldSet

from skyrl_tx.contract import requests
from skyrl_tx.contract.errors import UserError
from skyrl_tx.contract.ids import ModelId
from skyrl_tx.server.context import Call, Incoming, IncomingData
from skyrl_tx.server.errors import bad_request
from skyrl_tx.server.http.body import parse
from skyrl_tx.server.identity import access
from skyrl_tx.server.schemas import training as schemas
from skyrl_tx.server.schemas.base import CreationIds, ModelRequestIds
from skyrl_tx.server.submission import submission
from skyrl_tx.server.submission.proto import wire_pb2
from skyrl_tx.server.submission.submission import Submission, submit, submit_json
from skyrl_tx.server.submission.translate import training

router = APIRouter()


@router.post("/create_model", response_model_exclude_none=True)
def create_model(call: Incoming) -> schemas.FutureHandle:
    """Queue the creation of a model with a new LoRA adapter."""
    value = call.body.mapping()
    ids = parse(CreationIds, value)
    create = submission.from_json(
        "create_model",
        schemas.CreateModelRequest,
        value,
        lambda schema: training.create_model(schema, call.settings),
        call.check_unknown,
    )
    return call.store.write(lambda tx: submission.creation(tx, call, ids, create))


@router.post("/forward_backward", response_model_exclude_none=True)
def forward_backward(call: IncomingData) -> schemas.FutureHandle:
    """Queue a forward/backward request, in protobuf or JSON."""
    if call.body.is_protobuf:
        return _forward_backward_protobuf(call)
    return submit_json(
        call,
        "model_pass",
        schemas.ForwardBackwardRequest,
        lambda schema: training.pass_from_json(schema.forward_backward_input, call.body.max_dense_bytes, backward=True),
        backward=True,
    )


@router.post("/forward", response_model_exclude_none=True)
def forward(call: IncomingData) -> schemas.FutureHandle:
    """Queue a forward request without gradients, in JSON (SDK up to 0.24)."""
    return submit_json(
        call,
        "model_pass",
        schemas.ForwardRequest,
        lambda schema: training.pass_from_json(schema.forward_input, call.body.max_dense_bytes, backward=False),
    )


@router.post("/optim_step", response_model_exclude_none=True)
def optim_step(call: Incoming) -> schemas.FutureHandle:
    """Queue an optimizer step."""
    return submit_json(call, "optim_step", schemas.OptimStepRequest, training.optim_step)


@router.post("/unload_model", response_model_exclude_none=True)
def unload_model(call: Incoming) -> schemas.FutureHandle:
    """Queue the removal of a model (SDK up to 0.25)."""
    unload = Submission.of(requests.UnloadModel())
    return submit_json(call, "unload_model", schemas.UnloadModelRequest, lambda schema: unload)


@router.post("/get_info", response_model_exclude_none=True)
def get_info(call: Incoming) -> schemas.GetInfoResponse:
    """Describe a model: its base model, tokenizer and LoRA rank."""
    model_id = ModelId(call.body.model(schemas.GetInfoRequest).model_id)
    row = call.store.read(lambda tx: access.model(tx, call.caller, model_id))
    spec = access.spec_of(row)
    return schemas.GetInfoResponse(
        model_id=model_id,
        model_data=schemas.ModelData(model_name=row.base_model, tokenizer_id=call.settings.client_tokenizer_id),
        model_name=row.base_model,
        lora_rank=spec.lora.rank,
        optimizer_config=schemas.OptimizerConfig(type=spec.optimizer),
    )


def _forward_backward_protobuf(call: Call) -> schemas.FutureHandle:
    message = call.body.message(wire_pb2.ForwardBackwardRequest)
    if message.seq_id < 0:
        raise bad_request(f"seq_id {message.seq_id}: must not be negative")
    for field in UnknownFieldSet(message):
        call.context.unknown_fields.log(f"ForwardBackwardRequest.{field.field_number}", call.sdk_version)
    try:
        model_pass = training.pass_from_proto(message, call.body.max_dense_bytes)
    except UserError as error:
        model_pass = Submission.rejected("model_pass", error.message, backward=not message.forward_only)
    return submit(call, ModelRequestIds(model_id=message.model_id, seq_id=message.seq_id), model_pass)
