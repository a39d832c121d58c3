"""Endpoints to create, train and describe models, and to upload custom losses."""

from fastapi import APIRouter
from google.protobuf.unknown_fields import UnknownFieldSet

from skyrl_tx.contract import requests
from skyrl_tx.contract.errors import UserError
from skyrl_tx.contract.ids import ModelId, SessionId
from skyrl_tx.server.context import ApiCall, Incoming, IncomingData
from skyrl_tx.server.errors import bad_request, not_found
from skyrl_tx.server.identity import access
from skyrl_tx.server.schemas import training as schemas
from skyrl_tx.server.schemas.base import CreationIds, ModelRequestIds, describe_body
from skyrl_tx.server.submission import submission, training, wire_pb2
from skyrl_tx.server.submission.loss_graph.compile import compile_loss
from skyrl_tx.server.submission.submission import Submission, submit, submit_json
from skyrl_tx.store import engine_state

router = APIRouter()


@router.post("/create_model", response_model_exclude_none=True, openapi_extra=describe_body(schemas.CreateModelRequest))
def create_model(call: Incoming) -> schemas.FutureHandle:
    """Queue the creation of a model with a new LoRA adapter."""
    request = call.body.parse_request()
    ids = request.parse_ids(CreationIds)
    create = submission.from_json(
        "create_model",
        schemas.CreateModelRequest,
        request,
        lambda schema: training.translate_create_model(schema, call.settings),
        call.check_unknown,
    )
    return call.store.write(lambda tx: submission.submit_creation(tx, call, ids, create))


@router.post(
    "/forward_backward",
    response_model_exclude_none=True,
    openapi_extra=describe_body(schemas.ForwardBackwardRequest, is_also_protobuf=True),
)
def forward_backward(call: IncomingData) -> schemas.FutureHandle:
    """Queue a forward/backward request, in protobuf or JSON."""
    if call.body.is_protobuf:
        return _queue_forward_backward_protobuf(call)
    return submit_json(
        call,
        "model_pass",
        schemas.ForwardBackwardRequest,
        lambda schema: training.pass_from_json(schema.forward_backward_input, call.body.max_dense_bytes, backward=True),
        backward=True,
    )


@router.post("/forward", response_model_exclude_none=True, openapi_extra=describe_body(schemas.ForwardRequest))
def forward(call: IncomingData) -> schemas.FutureHandle:
    """Queue a forward request without gradients, in JSON (SDK up to 0.24)."""
    return submit_json(
        call,
        "model_pass",
        schemas.ForwardRequest,
        lambda schema: training.pass_from_json(schema.forward_input, call.body.max_dense_bytes, backward=False),
    )


@router.post("/optim_step", response_model_exclude_none=True, openapi_extra=describe_body(schemas.OptimStepRequest))
def optim_step(call: Incoming) -> schemas.FutureHandle:
    """Queue an optimizer step."""
    return submit_json(call, "optim_step", schemas.OptimStepRequest, training.translate_optim_step)


@router.post("/unload_model", response_model_exclude_none=True, openapi_extra=describe_body(schemas.UnloadModelRequest))
def unload_model(call: Incoming) -> schemas.FutureHandle:
    """Queue the removal of a model (SDK up to 0.25)."""
    unload = Submission.from_request(requests.UnloadModel())
    return submit_json(call, "unload_model", schemas.UnloadModelRequest, lambda schema: unload)


@router.post("/get_info", response_model_exclude_none=True, openapi_extra=describe_body(schemas.GetInfoRequest))
def get_info(call: Incoming) -> schemas.GetInfoResponse:
    """Describe a model: its base model, tokenizer and LoRA rank."""
    model_id = ModelId(call.body.parse_model(schemas.GetInfoRequest).model_id)
    row = call.store.read(lambda tx: access.find_model(tx, call.caller, model_id))
    spec = access.decode_spec(row)
    return schemas.GetInfoResponse(
        model_id=model_id,
        model_data=schemas.ModelData(model_name=row.base_model, tokenizer_id=call.settings.client_tokenizer_id),
        model_name=row.base_model,
        lora_rank=spec.lora.rank,
        optimizer_config=schemas.OptimizerConfig(type=spec.optimizer),
    )


@router.post(
    "/create_custom_loss",
    response_model_exclude_none=True,
    openapi_extra=describe_body(schemas.CreateCustomLossRequest),
)
def create_custom_loss(call: Incoming) -> schemas.FutureHandle:
    """Compile an uploaded loss and store it for its session. 400 names an unsupported node.

    The response is 404 if this server evaluates no custom losses: the SDK would retry other
    statuses for minutes (0.38, execute_with_retries).
    """
    if not has_custom_losses(call):
        raise not_found(
            "this server does not evaluate custom losses; forward_backward_custom with a Python function runs the loss "
            "in the client, with the same gradients"
        )
    request = call.body.parse_model(schemas.CreateCustomLossRequest)
    call.check_unknown(request)
    loss = compile_loss(request)
    session_id = SessionId(request.session_id)
    return call.store.write(
        lambda tx: submission.store_custom_loss(tx, call, session_id, request.custom_loss_seq_id, loss)
    )


def has_custom_losses(call: ApiCall) -> bool:
    """Return whether this server evaluates custom losses.

    The backend of the engine must support custom losses, and the operator must not have disabled
    them. Returns False before an engine has started for the first time.
    """
    if call.settings.no_custom_losses:
        return False
    state = call.store.read(engine_state.get)
    return state is not None and state.capabilities.get("custom_losses") is True


def _queue_forward_backward_protobuf(call: ApiCall) -> schemas.FutureHandle:
    message = call.body.parse_message(wire_pb2.ForwardBackwardRequest)
    if message.seq_id < 0:
        raise bad_request(f"seq_id {message.seq_id}: must not be negative")
    for field in UnknownFieldSet(message):
        call.context.unknown_fields.log(f"ForwardBackwardRequest.{field.field_number}", call.sdk_version)
    try:
        model_pass = training.pass_from_proto(message, call.body.max_dense_bytes)
    except UserError as error:
        model_pass = Submission.from_error("model_pass", error.message, backward=not message.forward_only)
    return submit(call, ModelRequestIds(model_id=message.model_id, seq_id=message.seq_id), model_pass)
