"""Saving, loading and describing weights."""

import time
from dataclasses import replace

from fastapi import APIRouter
from sqlmodel import Session

from skyrl_tx.api import lookup, submission
from skyrl_tx.api.context import Call, Incoming
from skyrl_tx.api.errors import bad_request, not_found
from skyrl_tx.api.principal import Principal
from skyrl_tx.api.schemas.addresses import CreationAddress, ModelAddress
from skyrl_tx.api.schemas.training import OptimizerAnswer, Promise
from skyrl_tx.api.schemas.weights import (
    LoadWeightsRequest,
    SaveWeightsExternalRequest,
    SaveWeightsForSamplerRequest,
    SaveWeightsRequest,
    WeightsInfoAnswer,
    WeightsInfoRequest,
)
from skyrl_tx.api.submission import Encoded, NewModel
from skyrl_tx.api.translate import weights
from skyrl_tx.api.translate.translated import Translated, rejected, translated
from skyrl_tx.api.wire import parse
from skyrl_tx.contract import requests
from skyrl_tx.contract.errors import UserError
from skyrl_tx.contract.ids import CheckpointPath, ModelId, SessionId

router = APIRouter()


@router.post("/save_weights", response_model_exclude_none=True)
def save_weights(call: Incoming) -> Promise:
    """Queue a checkpoint of weights and optimizer."""
    value = call.body.mapping()
    address = parse(ModelAddress, value)
    request = translated("save_weights", SaveWeightsRequest, value, weights.save_weights, call.check_unknown)
    return _to_model(call, address, request)


@router.post("/save_weights_for_sampler", response_model_exclude_none=True)
def save_weights_for_sampler(call: Incoming) -> Promise:
    """Queue a checkpoint to sample from."""
    value = call.body.mapping()
    address = parse(ModelAddress, value)
    session_id = call.store.read(lambda tx: lookup.model(tx, call.caller, ModelId(address.model_id))).session_id
    request = translated(
        "save_weights",
        SaveWeightsForSamplerRequest,
        value,
        lambda schema: weights.save_weights_for_sampler(schema, session_id),
        call.check_unknown,
    )
    return _to_model(call, address, request)


@router.post("/save_weights_external", response_model_exclude_none=True)
def save_weights_external(call: Incoming) -> Promise:
    """Queue weights for download, in a layout that other software loads."""
    value = call.body.mapping()
    address = parse(ModelAddress, value)
    request = translated(
        "save_weights", SaveWeightsExternalRequest, value, weights.save_weights_external, call.check_unknown
    )
    return _to_model(call, address, request)


@router.post("/load_weights", response_model_exclude_none=True)
def load_weights(call: Incoming) -> Promise:
    """Queue a load into a model, or the making of a model from a checkpoint.

    The checkpoint is looked up in the transaction that stores the request, so that its files stay until it is done.
    """
    value = call.body.mapping()
    if (value.get("model_id") is None) == (value.get("session_id") is None):
        raise bad_request("load_weights goes into a model_id (with seq_id) or makes one of a session_id (model_seq_id)")
    request = translated(
        "load_weights",
        LoadWeightsRequest,
        value,
        lambda schema: _load(schema, call),
        call.check_unknown,
    )
    lender = None
    if isinstance(request.request, requests.LoadWeights):
        lender = call.lender(LoadWeightsRequest.model_validate(value).weights_access_token)
    if value.get("session_id") is None:
        into = parse(ModelAddress, value)

        def load(tx: Session) -> Promise:
            found, _ = _looked_up(tx, call.caller, request, lender)
            model_id, encoded = ModelId(into.model_id), Encoded.of(found)
            return submission.to_model(tx, call.caller, model_id, into.seq_id, encoded, call.idempotency_key)

        return call.store.write(load)
    made = parse(CreationAddress, value)

    def create(tx: Session) -> Promise:
        found, saved = _looked_up(tx, call.caller, request, lender)
        model = None if saved is None else NewModel(saved.base_model, saved.spec, made.user_metadata)
        session_id = SessionId(made.session_id)
        return submission.creation(tx, call.caller, session_id, made.model_seq_id, Encoded.of(found), model)

    return call.store.write(create)


@router.post("/weights_info", response_model_exclude_none=True)
def weights_info(call: Incoming) -> WeightsInfoAnswer:
    """Describe a checkpoint; SDKs up to 0.36 build the model from this before they load into it."""
    path = _path(call.body.model(WeightsInfoRequest).tinker_path)
    try:
        saved = call.store.read(lambda tx: lookup.saved_weights(tx, call.caller, path, time.time()))
    except UserError as error:
        raise not_found(error.message) from error
    lora = saved.spec.lora
    return WeightsInfoAnswer(
        base_model=saved.base_model,
        lora_rank=lora.rank,
        train_unembed=lora.train_unembed,
        train_mlp=lora.train_mlp,
        train_attn=lora.train_attn,
        optimizer_config=OptimizerAnswer(type=saved.spec.optimizer),
    )


def _path(text: str) -> CheckpointPath:
    try:
        return CheckpointPath.parse(text)
    except UserError as error:
        raise bad_request(error.message) from error


def _load(schema: LoadWeightsRequest, call: Call) -> Translated:
    call.lender(schema.weights_access_token)  # a wrong one is told like any other mistake in the request
    return Translated.exactly(weights.load_weights(schema, call.settings))


def _looked_up(
    tx: Session, caller: Principal, request: Translated, lender: Principal | None
) -> tuple[Translated, lookup.SavedWeights | None]:
    """Complete a load with what its path points at now; a repetition is recognised by the path alone."""
    load = request.request
    if not isinstance(load, requests.LoadWeights):
        return request, None
    try:
        saved = lookup.saved_weights(tx, caller, CheckpointPath.parse(load.path), time.time(), lender)
    except UserError as error:
        return Translated(rejected("load_weights", error.message).request, load), None
    return Translated(replace(load, artifact_id=saved.artifact_id, spec=saved.spec), load), saved


def _to_model(call: Call, address: ModelAddress, request: Translated) -> Promise:
    encoded = Encoded.of(request)
    model_id = ModelId(address.model_id)
    return call.store.write(
        lambda tx: submission.to_model(tx, call.caller, model_id, address.seq_id, encoded, call.idempotency_key)
    )
