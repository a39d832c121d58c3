"""Endpoints to save, load, copy and describe weights.

The `translate` functions translate saves and loads from the wire to the contract.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from fastapi import APIRouter
from sqlmodel import Session

from skyrl_tx.artifacts.files import parse_recipients
from skyrl_tx.contract import requests
from skyrl_tx.contract.errors import UserError
from skyrl_tx.contract.ids import (
    ArtifactId,
    CheckpointKind,
    CheckpointPath,
    ModelId,
    SessionId,
    checkpoint_name,
    sampling_session_id,
)
from skyrl_tx.contract.ids import model_id as model_id_of
from skyrl_tx.server.context import ApiCall, Incoming
from skyrl_tx.server.errors import bad_request, not_found
from skyrl_tx.server.identity import access
from skyrl_tx.server.identity.authentication import Principal
from skyrl_tx.server.routes.training import read_optimizer_kind
from skyrl_tx.server.schemas import weights as schemas
from skyrl_tx.server.schemas.base import CreationIds, ModelRequestIds, describe_body
from skyrl_tx.server.schemas.training import FutureHandle, OptimizerConfig
from skyrl_tx.server.settings import ApiSettings
from skyrl_tx.server.submission import submission
from skyrl_tx.server.submission.submission import Submission, submit_json
from skyrl_tx.server.submission.validation import check_ttl, quote_value, require
from skyrl_tx.store import audit, checkpoints, models, sessions
from skyrl_tx.store.tables import CheckpointRow, ModelRow

router = APIRouter()

UPLOADED = "uploaded"
"""The name of uploaded external weights. Clients can train and sample from them."""
_INFLIGHT = "inflight"
_DIGEST_SPEC = requests.ModelSpec(lora=requests.LoraSpec(rank=1, seed=0))
"""Replaces the spec of a checkpoint in the idempotency digest of a load.

It must never change, because digests are stored.
"""
_FINISH_REASON = "success: made by copy_weights"


@router.post("/save_weights", **describe_body(schemas.SaveWeightsRequest))
def save_weights(call: Incoming) -> FutureHandle:
    """Queue a save of weights and optimizer state under a name."""
    return submit_json(call, "save_weights", schemas.SaveWeightsRequest, translate_save_weights)


@router.post("/save_weights_for_sampler", **describe_body(schemas.SaveWeightsForSamplerRequest))
def save_weights_for_sampler(call: Incoming) -> FutureHandle:
    """Queue a save of weights to sample from, with or without a name."""
    model_id = ModelId(call.body.parse_request().parse_ids(ModelRequestIds).model_id)
    session_id = call.store.read(lambda tx: access.find_model(tx, call.caller, model_id)).session_id
    return submit_json(
        call,
        "save_weights",
        schemas.SaveWeightsForSamplerRequest,
        lambda schema: translate_save_weights_for_sampler(schema, session_id),
    )


@router.post("/save_weights_external", **describe_body(schemas.SaveWeightsExternalRequest))
def save_weights_external(call: Incoming) -> FutureHandle:
    """Queue a save of weights for download, in the PEFT layout."""
    return submit_json(call, "save_weights", schemas.SaveWeightsExternalRequest, translate_save_weights_external)


@router.post("/load_weights", **describe_body(schemas.LoadWeightsRequest))
def load_weights(call: Incoming) -> FutureHandle:
    """Queue a load of a checkpoint into a model, or the creation of a model from a checkpoint."""
    request = call.body.parse_request()
    value = request.value
    if (value.get("model_id") is None) == (value.get("session_id") is None):
        raise bad_request("set either model_id (with seq_id) to load into a model, or session_id (with model_seq_id)")
    ids = request.parse_ids(ModelRequestIds if value.get("session_id") is None else CreationIds)

    def work(tx: Session) -> FutureHandle:
        # Find the checkpoint in the transaction that stores the request, which keeps its files.
        def translate(schema: schemas.LoadWeightsRequest) -> Submission:
            readers = call.list_readers(tx, schema.weights_access_token)
            return translate_load_weights(tx, readers, schema, call.settings, time.time())

        load = submission.from_json("load_weights", schemas.LoadWeightsRequest, request, translate, call.check_unknown)
        if isinstance(ids, ModelRequestIds):
            return submission.submit_to_model(tx, call, ids, load)
        return submission.submit_creation(tx, call, ids, load)

    return call.store.write(work)


@router.post("/weights_info", **describe_body(schemas.WeightsInfoRequest))
def get_weights_info(call: Incoming) -> schemas.WeightsInfoResponse:
    """Describe the weights of a checkpoint."""
    # SDKs up to 0.36 create the model from this response before they load the checkpoint into it.
    path = CheckpointPath.parse(call.body.parse_model(schemas.WeightsInfoRequest).tinker_path)
    _, maker = call.store.read(lambda tx: access.find_readable_checkpoint(tx, call.caller, path))
    spec = access.decode_spec(maker)
    lora = spec.lora
    return schemas.WeightsInfoResponse(
        base_model=maker.base_model,
        lora_rank=lora.rank,
        train_unembed=lora.train_unembed,
        train_mlp=lora.train_mlp,
        train_attn=lora.train_attn,
        optimizer_config=OptimizerConfig(type=spec.optimizer),
    )


@router.post("/copy_weights", **describe_body(schemas.CopyWeightsRequest))
def copy_weights(call: Incoming) -> dict[str, str]:
    """Copy a checkpoint to another path, in a run that cannot be trained."""
    # A retry, recognized by the destination or by the idempotency key, returns the same path.
    request = call.body.parse_model(schemas.CopyWeightsRequest)
    source = CheckpointPath.parse(request.source_path)
    check_ttl(request.ttl_seconds, "ttl_seconds")
    session_id, model_seq_id = _choose_destination(call, request)
    path = CheckpointPath(model_id_of(session_id, model_seq_id), source.kind, source.name)

    def work(tx: Session) -> None:
        # Find the session of the copy, or create a session that only has the copy and is finished.
        if request.destination_project_id is None:
            access.find_open_session(tx, call.caller, session_id)
        elif sessions.find(tx, session_id) is None:
            access.check_can_use_project(tx, call.caller, request.destination_project_id)
            now = time.time()
            sessions.create(
                tx,
                session_id=session_id,
                owner=call.caller.owner,
                key_id=call.caller.quota_key_id,
                sdk_version=call.sdk_version,
                project_id=request.destination_project_id,
                now=now,
            )
            sessions.finish(tx, session_id, _FINISH_REASON, now)

        readers = call.list_readers(tx, request.weights_access_token or call.weights_access_token)
        if _copy(tx, readers, source, path, session_id, request.ttl_seconds):
            now, actor = time.time(), call.caller.actor
            call.admit_checkpoint(tx, session_id, now)
            audit.record(tx, "checkpoint_read", actor, now, path=source, purpose="copy")
            audit.record(tx, "checkpoint_create", actor, now, path=path, copied_from=str(source))

    call.store.write(work)
    return {"tinker_path": str(path)}


def _choose_destination(call: ApiCall, request: schemas.CopyWeightsRequest) -> tuple[SessionId, int]:
    """Return the session and the number of the run for the copy.

    A copy into a project gets a new session, whose id is derived from the idempotency key.
    """
    has_session = request.session_id is not None and request.model_seq_id is not None
    if has_session == (request.destination_project_id is not None):
        raise bad_request("set either destination_project_id, or session_id and model_seq_id, to say where to copy to")
    if request.session_id is not None and request.model_seq_id is not None:
        return SessionId(request.session_id), request.model_seq_id
    session_id = call.derive_session_id("copy")
    if session_id is None:
        raise bad_request("X-Idempotency-Key: missing; without it a retry would make a second copy")
    return session_id, 0


def _copy(
    tx: Session,
    readers: Sequence[Principal],
    source: CheckpointPath,
    path: CheckpointPath,
    session_id: SessionId,
    ttl_s: int | None,
) -> bool:
    """Copy a checkpoint. Returns False if an earlier attempt has already done so."""
    now = time.time()
    run_id = path.model_id

    # Find the source, and the copy of an earlier attempt.
    copied = checkpoints.get(tx, path, now)
    try:
        saved, maker = access.find_saved_weights(tx, readers, source, now)
    except UserError as error:
        if copied is not None:  # a retry, and the source has been deleted since
            return False
        raise not_found(error.message) from error
    if copied is not None and copied.artifact_id == saved.artifact_id:
        return False

    # Create a run that cannot be trained.
    is_visible = any(access.can_see_run(tx, reader, source.model_id) for reader in readers)
    copy = ModelRow(
        model_id=run_id,
        session_id=session_id,
        base_model=maker.base_model,
        spec=maker.spec,
        user_metadata=access.filter_metadata(maker, is_visible),
        status="unloaded",
        created_at=now,
        last_request_at=now,
    )
    if not models.create(tx, copy):
        raise bad_request(f"model {run_id}: exists already and is not a copy of {source}")

    # Add the checkpoint, which shares the files of the source.
    row = CheckpointRow(
        model_id=run_id,
        kind=source.kind,
        name=source.name,
        artifact_id=saved.artifact_id,
        created_at=now,
        expires_at=None if ttl_s is None else now + ttl_s,
        size_bytes=saved.size_bytes,
        user_metadata=access.filter_metadata(saved, is_visible),
        step=saved.step,
        copied_from=str(source),
    )
    checkpoints.put(tx, row, overwrite=False)
    return True


def translate_save_weights(request: schemas.SaveWeightsRequest) -> Submission:
    """Translate a save of weights and optimizer state under a name (a training checkpoint)."""
    require(request.path is not None, "path: missing; a training checkpoint needs a name")
    save = _make_save(request, CheckpointKind.TRAINING)
    return Submission.from_request(replace(save, overwrite=request.overwrite, user_metadata=request.user_metadata))


def translate_save_weights_for_sampler(
    request: schemas.SaveWeightsForSamplerRequest, session_id: SessionId
) -> Submission:
    """Translate a save of weights to sample from.

    A request with a path saves a named checkpoint. A request without a path saves an ephemeral
    sampler of the model's session.
    """
    is_inflight = request.kind == _INFLIGHT
    require(
        is_inflight or request.kind == "snapshot", f"kind {quote_value(request.kind)}: must be 'snapshot' or 'inflight'"
    )
    require(
        not is_inflight or request.path is None,
        f"kind 'inflight': path {quote_value(request.path)} names weights that never change; leave it out",
    )

    as_sent = _make_save(request, CheckpointKind.SAMPLER)
    as_sent = replace(as_sent, is_inflight=is_inflight, user_metadata=request.user_metadata)
    if request.path is not None:
        return Submission.from_request(as_sent)

    # An ephemeral sampler. A client increments sampling_session_seq_id with each retry, so the
    # digest does not cover it, and a retry gets the sampling session of the first POST
    # (SDK 0.38, training_client.py).
    seq_id = request.sampling_session_seq_id
    if seq_id is None:
        raise UserError("path: missing, and sampling_session_seq_id too; one of them must name the saved weights")
    save = replace(as_sent, sampling_session_id=sampling_session_id(session_id, seq_id))
    return Submission.from_request(save, as_sent=as_sent)


def translate_save_weights_external(request: schemas.SaveWeightsExternalRequest) -> Submission:
    """Translate a save for download, which must have a name."""
    require(request.path is not None, "path: missing; external weights need a name")
    recipients = tuple(request.age_encryption_recipients or ())
    parse_recipients(recipients)  # the client, not the engine, gets the error
    return Submission.from_request(replace(_make_save(request, CheckpointKind.EXTERNAL), age_recipients=recipients))


def _make_save(request: schemas.SaveRequest, kind: CheckpointKind) -> requests.SaveWeights:
    return requests.SaveWeights(
        kind=kind.value,
        name=None if request.path is None else checkpoint_name(request.path),
        ttl_s=check_ttl(request.ttl_seconds, "ttl_seconds"),
    )


def translate_load_weights(
    tx: Session, readers: Sequence[Principal], request: schemas.LoadWeightsRequest, settings: ApiSettings, now: float
) -> Submission:
    """Translate a load of a checkpoint.

    The checkpoint is found in the transaction that stores the request. The digest covers the path,
    but not the content of the checkpoint. So a retry returns the first future even if the
    checkpoint was replaced or deleted in the meantime.
    """
    read_optimizer_kind(request.optimizer_config)
    path = parse_training_path(request.path)

    load = partial(
        requests.LoadWeights,
        path=str(path),
        optimizer=request.optimizer,
        create=request.model_id is None,
        base_model=None if request.base_model is None else settings.resolve_model_name(request.base_model),
    )
    as_sent = load(artifact_id=ArtifactId(""), spec=_DIGEST_SPEC)

    try:
        checkpoint, maker = access.find_saved_weights(tx, readers, path, now)
    except UserError as error:
        return Submission.from_error("load_weights", error.message, as_sent=as_sent)
    spec = access.decode_spec(maker)
    own = None if request.model_id is None else models.get(tx, ModelId(request.model_id))
    if own is not None:  # a replay loads with this spec
        spec = replace(spec, shares_prefixes=access.decode_spec(own).shares_prefixes)
    request_to_store = load(artifact_id=checkpoint.artifact_id, spec=spec)
    return Submission.from_request(request_to_store, as_sent=as_sent, base_model=maker.base_model)


def parse_training_path(text: str) -> CheckpointPath:
    """Parse the path of a training checkpoint. Raises UserError for other kinds."""
    path = CheckpointPath.parse(text)
    require(
        path.kind is CheckpointKind.TRAINING or _is_uploaded(path),
        f"path {quote_value(text)}: holds no optimizer state to train from; "
        "save with save_state to get a weights/ path",
    )
    return path


def parse_sampler_path(text: str) -> CheckpointPath:
    """Parse the path of a checkpoint to sample from. Raises UserError for other kinds."""
    path = CheckpointPath.parse(text)
    require(
        path.kind is CheckpointKind.SAMPLER or _is_uploaded(path),
        f"model_path {quote_value(text)}: is not for sampling; "
        "save with save_weights_for_sampler to get a sampler_weights/ path",
    )
    return path


def _is_uploaded(path: CheckpointPath) -> bool:
    return path.kind is CheckpointKind.EXTERNAL and path.name == UPLOADED
