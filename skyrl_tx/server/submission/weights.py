"""Translates saves and loads of weights from the wire format to the contract."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from sqlmodel import Session

from skyrl_tx.artifacts import encryption
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
from skyrl_tx.server.identity import access
from skyrl_tx.server.identity.authentication import Principal
from skyrl_tx.server.schemas import weights as schemas
from skyrl_tx.server.settings import ApiSettings
from skyrl_tx.server.submission.submission import Submission
from skyrl_tx.server.submission.training import read_optimizer_kind
from skyrl_tx.server.submission.validation import check_ttl, quote_value, require
from skyrl_tx.store import models

UPLOADED = "uploaded"
"""The name of uploaded external weights. Clients can train and sample from them."""
_INFLIGHT = "inflight"
_DIGEST_SPEC = requests.ModelSpec(lora=requests.LoraSpec(rank=1, seed=0))
"""Replaces the spec of a checkpoint in the idempotency digest of a load.

It must never change, because digests are stored.
"""


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
    encryption.parse_recipients(recipients, "age_encryption_recipients")  # the client, not the engine, gets the error
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
