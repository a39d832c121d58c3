"""Endpoints to create, train and describe models, and to upload custom losses.

The other functions translate the requests from the wire to the contract.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import islice

import numpy as np
from fastapi import APIRouter
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from skyrl_tx.contract import requests
from skyrl_tx.contract.arrays import Int32Array, NumberArray
from skyrl_tx.contract.errors import UserError
from skyrl_tx.contract.ids import ModelId, SessionId
from skyrl_tx.contract.losses import LOSS_SPECS
from skyrl_tx.contract.requests import LossConfigValue, OptimizerParams
from skyrl_tx.server.context import ApiCall, Incoming, IncomingData
from skyrl_tx.server.errors import bad_request, not_found
from skyrl_tx.server.identity import access
from skyrl_tx.server.schemas import training as schemas
from skyrl_tx.server.schemas.base import CreationIds, ModelRequestIds, describe_body
from skyrl_tx.server.settings import ApiSettings
from skyrl_tx.server.submission import provenance, submission, wire_pb2
from skyrl_tx.server.submission.loss_graph.compile import compile_loss
from skyrl_tx.server.submission.submission import Submission, submit, submit_json
from skyrl_tx.server.submission.tensors import DenseBudget, from_bytes, from_json, from_numbers, from_proto
from skyrl_tx.server.submission.validation import (
    check_finite,
    check_finite_array,
    check_text,
    choose_seed,
    is_off,
    quote_value,
    refuse_extra,
    require,
)
from skyrl_tx.store import engine_state

router = APIRouter()
_ADAM = tuple(schemas.AdamParams.model_fields)
_MAX_SAMPLED_SPANS = 16_384
"""Maximum number of spans of a pass that are stored for display. Further spans are dropped."""


@router.post("/create_model", **describe_body(schemas.CreateModelRequest))
def create_model(call: Incoming) -> schemas.FutureHandle:
    """Queue the creation of a model with a new LoRA adapter."""
    request = call.body.parse_request()
    ids = request.parse_ids(CreationIds)
    create = submission.from_json(
        "create_model",
        schemas.CreateModelRequest,
        request,
        lambda schema: translate_create_model(schema, call.settings),
        call.check_unknown,
    )
    return call.store.write(lambda tx: submission.submit_creation(tx, call, ids, create))


@router.post("/forward_backward", **describe_body(schemas.ForwardBackwardRequest, is_also_protobuf=True))
def forward_backward(call: IncomingData) -> schemas.FutureHandle:
    """Queue a forward/backward request, in protobuf or JSON."""
    if call.body.is_protobuf:
        return _queue_forward_backward_protobuf(call)
    return submit_json(
        call,
        "model_pass",
        schemas.ForwardBackwardRequest,
        lambda schema: pass_from_json(schema.forward_backward_input, call.body.max_dense_bytes, backward=True),
        backward=True,
    )


@router.post("/forward", **describe_body(schemas.ForwardRequest))
def forward(call: IncomingData) -> schemas.FutureHandle:
    """Queue a forward request without gradients, in JSON (SDK up to 0.24)."""
    return submit_json(
        call,
        "model_pass",
        schemas.ForwardRequest,
        lambda schema: pass_from_json(schema.forward_input, call.body.max_dense_bytes, backward=False),
    )


@router.post("/optim_step", **describe_body(schemas.OptimStepRequest))
def optim_step(call: Incoming) -> schemas.FutureHandle:
    """Queue an optimizer step."""
    return submit_json(call, "optim_step", schemas.OptimStepRequest, translate_optim_step)


@router.post("/unload_model", **describe_body(schemas.UnloadModelRequest))
def unload_model(call: Incoming) -> schemas.FutureHandle:
    """Queue the removal of a model (SDK up to 0.25)."""
    unload = Submission.from_request(requests.UnloadModel())
    return submit_json(call, "unload_model", schemas.UnloadModelRequest, lambda schema: unload)


@router.post("/get_info", **describe_body(schemas.GetInfoRequest))
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


@router.post("/create_custom_loss", **describe_body(schemas.CreateCustomLossRequest))
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
        model_pass = pass_from_proto(message, call.body.max_dense_bytes)
    except UserError as error:
        model_pass = Submission.from_error("model_pass", error.message, backward=not message.forward_only)
    return submit(call, ModelRequestIds(model_id=message.model_id, seq_id=message.seq_id), model_pass)


def translate_create_model(request: schemas.CreateModelRequest, settings: ApiSettings) -> Submission:
    """Translate `create_model`. Draws the adapter's seed if the client sent none."""
    base_model = settings.resolve_model_name(request.base_model)
    lora = request.lora_config
    if lora is None:
        raise UserError("lora_config: missing; this server trains LoRA adapters only")

    create = requests.CreateModel(
        base_model=base_model,
        spec=requests.ModelSpec(
            lora=lora.make_spec(choose_seed(lora.seed, "lora_config.seed")),
            optimizer=read_optimizer_kind(request.optimizer_config),
        ),
    )

    # The digest covers what the client sent, without the drawn seed.
    as_sent = create
    if lora.seed is None:
        as_sent = replace(create, spec=replace(create.spec, lora=replace(create.spec.lora, seed=0)))
    return Submission.from_request(create, as_sent=as_sent, base_model=base_model)


def read_optimizer_kind(config: schemas.OptimizerConfig | None) -> str:
    """Return the name of the optimizer. Raises UserError unless it is AdamW."""
    kind = "adamw" if config is None else config.type
    require(kind == "adamw", f"optimizer_config.type {quote_value(kind)}: this server offers 'adamw' only")
    return kind


def translate_optim_step(request: schemas.OptimStepRequest) -> Submission:
    """Translate an AdamW step. A field that the client does not send has the SDK's default."""
    if request.optimizer_params is not None:
        kind = request.optimizer_params.get("type")
        raise UserError(f"optimizer_params.type {quote_value(kind)}: this server offers 'adamw', through adam_params")
    adam = request.adam_params
    if adam is None:
        raise UserError("adam_params: missing")
    given = {
        name: _check_number(getattr(adam, name), f"adam_params.{name}")
        for name in _ADAM
        if name in adam.model_fields_set
    }
    return Submission.from_request(requests.OptimStep(params=OptimizerParams(**given)))


def _check_number(value: float | None, where: str) -> float:
    """Return a finite number.

    The SDK sends NaN and infinity as null, and null must not silently become the default.
    """
    if value is None:
        raise UserError(f"{where} null: must be a finite number (NaN and infinity arrive as null)")
    return check_finite(value, where)


def pass_from_proto(message: wire_pb2.ForwardBackwardRequest, max_dense_bytes: int) -> Submission:
    """Translate a forward/backward request in protobuf (SDK 0.25 and later)."""
    budget = DenseBudget(max_dense_bytes)
    check_text(message.loss_fn, "loss_fn")
    config: dict[str, LossConfigValue] = dict(message.loss_fn_config)
    for name, value in message.loss_fn_config_v2.items():
        refuse_unknown(value, f"loss_fn_config[{quote_value(name)}]")
        config[name] = value.text if value.WhichOneof("value") == "text" else value.number
    data = (datum_from_proto(datum, budget, f"data[{index}]") for index, datum in enumerate(message.data))
    request = _make_pass(data, message.loss_fn, config, backward=not message.forward_only)
    return _make_submission(request, message.data)


def pass_from_json(request: schemas.PassInput, max_dense_bytes: int, *, backward: bool) -> Submission:
    """Translate a forward/backward request in JSON (SDK up to 0.24)."""
    budget = DenseBudget(max_dense_bytes)
    data = (datum_from_json(datum, budget, f"data[{index}]") for index, datum in enumerate(request.data))
    model_pass = _make_pass(data, request.loss_fn, request.loss_fn_config or {}, backward=backward)
    return _make_submission(model_pass, request.data)


def _make_submission(request: requests.ModelPass, data: Sequence[wire_pb2.Datum | schemas.WireDatum]) -> Submission:
    """Return a pass with its provenance spans.

    The digest covers the spans only if the loss needs them.
    """
    spans = tuple(map(provenance.read_provenance, data)) if _needs_provenance(request.loss) else ()
    if not any(datum.loss_fn_input_spans for datum in data):
        return Submission.from_request(request, provenance=spans)
    spans_of_samples = provenance.find_sampled_spans(data, (datum.tokens.size for datum in request.data))
    sampled = tuple(islice(spans_of_samples, _MAX_SAMPLED_SPANS))
    complete = replace(request, sampled=sampled) if sampled else request
    return Submission.from_request(complete, as_sent=request, provenance=spans)


def _make_pass(
    data: Iterable[requests.Datum], loss: str, config: dict[str, LossConfigValue], *, backward: bool
) -> requests.ModelPass:
    for name, value in config.items():
        check_text(name, "loss_fn_config: key")
        where = f"loss_fn_config[{quote_value(name)}]"
        if isinstance(value, str):
            check_text(value, where)
        else:
            check_finite(value, where)
    request = requests.ModelPass(
        data=tuple(data), loss=loss, loss_config=dict(sorted(config.items())), backward=backward
    )
    require(len(request.data) > 0, "data: holds no datum")
    return request


def datum_from_proto(message: wire_pb2.Datum, budget: DenseBudget, where: str) -> requests.Datum:
    """Read one training sequence, without its provenance spans."""
    runs: list[NumberArray] = []
    for index, chunk in enumerate(message.model_input):
        kind = chunk.WhichOneof("chunk")
        if kind != "encoded_text":
            raise _make_unsupported_error(kind or "unknown", f"{where}.model_input[{index}]")
        runs.append(from_bytes(chunk.encoded_text.tokens, "int32", f"{where}.model_input[{index}].tokens"))

    inputs: dict[str, NumberArray] = {}
    for name, tensor in sorted(message.loss_fn_inputs.items()):
        check_text(name, f"{where}.loss_fn_inputs: key")
        inner = f"{where}.loss_fn_inputs[{quote_value(name)}]"
        refuse_unknown(tensor, inner)
        inputs[name] = check_finite_array(from_proto(tensor, budget, inner), inner)
    return requests.Datum(tokens=_join_tokens(runs, where), loss_inputs=inputs)


def datum_from_json(datum: schemas.WireDatum, budget: DenseBudget, where: str) -> requests.Datum:
    """Read one training sequence, without its provenance spans."""
    refuse_extra(datum, f"{where}.")
    inputs: dict[str, NumberArray] = {}
    for name, tensor in sorted(datum.loss_fn_inputs.items()):
        inner = f"{where}.loss_fn_inputs[{quote_value(name)}]"
        refuse_extra(tensor, f"{inner}.")
        inputs[name] = check_finite_array(from_json(tensor, budget, inner), inner)
    return requests.Datum(tokens=tokens_from_json(datum.model_input, where), loss_inputs=inputs)


def tokens_from_json(model_input: schemas.ModelInput, where: str) -> Int32Array:
    """Concatenate the text chunks of a model input to tokens [T].

    Raises UserError for other chunks.
    """
    refuse_extra(model_input, f"{where}.")
    runs: list[NumberArray] = []
    for index, chunk in enumerate(model_input.chunks):
        inner = f"{where}.chunks[{index}]"
        kind = _get_chunk_kind(chunk)
        if kind != "encoded_text" or chunk.tokens is None:
            raise _make_unsupported_error(kind, inner)
        refuse_extra(chunk, f"{inner}.")
        runs.append(from_numbers(chunk.tokens, "int32", f"{inner}.tokens"))
    return _join_tokens(runs, where)


def refuse_unknown(message: Message, where: str) -> None:
    """Raise UserError for an unknown protobuf field that is set."""
    for field in UnknownFieldSet(message):
        if not is_off(field.data) and field.data != b"":
            raise UserError(f"{where}: field number {field.field_number} is not known to this server")


def _get_chunk_kind(chunk: schemas.InputChunk) -> str:
    """Return the type of a chunk.

    SDK releases up to 0.16 do not send a type. Then the fields that are set identify it.
    """
    if chunk.type is not None:
        return chunk.type
    by_field = {"encoded_text": chunk.tokens, "image_asset_pointer": chunk.location, "image": chunk.data}
    return next((kind for kind, value in by_field.items() if value is not None), "dmel" if chunk.dmel else "unknown")


def _make_unsupported_error(kind: str, where: str) -> UserError:
    return UserError(f"{where}: chunks of type {quote_value(kind)} are not supported: this server reads text only")


def _join_tokens(runs: Sequence[NumberArray], where: str) -> Int32Array:
    tokens = runs[0] if len(runs) == 1 else np.concatenate([np.empty(0, np.int32), *runs])
    require(tokens.size > 0, f"{where}: holds no tokens")
    return tokens


def _needs_provenance(loss: str) -> bool:
    """Return whether a loss reads provenance spans. Other losses accept and ignore them."""
    spec = LOSS_SPECS.get(loss)
    return spec is not None and spec.needs_provenance
