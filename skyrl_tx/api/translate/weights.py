"""Keeping weights and taking them up again."""

from dataclasses import replace

from skyrl_tx import age
from skyrl_tx.api.schemas.base import shown
from skyrl_tx.api.schemas.weights import (
    LoadWeightsRequest,
    SaveWeightsExternalRequest,
    SaveWeightsForSamplerRequest,
    SaveWeightsRequest,
)
from skyrl_tx.api.settings import ApiSettings
from skyrl_tx.api.translate.checks import require, ttl
from skyrl_tx.api.translate.training import optimizer_kind
from skyrl_tx.api.translate.translated import Translated
from skyrl_tx.contract import requests
from skyrl_tx.contract.errors import UserError
from skyrl_tx.contract.ids import (
    ArtifactId,
    CheckpointKind,
    CheckpointPath,
    SessionId,
    checkpoint_name,
    sampling_session_id,
)

_INFLIGHT = "inflight"
_NOT_LOOKED_UP = requests.ModelSpec(lora=requests.LoraSpec(rank=1, seed=0))


def save_weights(request: SaveWeightsRequest) -> Translated:
    """Weights and optimizer under a name."""
    if request.path is None:
        raise UserError("path: missing; a training checkpoint needs a name")
    return Translated.exactly(
        requests.SaveWeights(
            kind=CheckpointKind.TRAINING.value,
            name=checkpoint_name(request.path),
            ttl_s=ttl(request.ttl_seconds, "ttl_seconds"),
            overwrite=request.overwrite,
            user_metadata=request.user_metadata,
        )
    )


def save_weights_for_sampler(request: SaveWeightsForSamplerRequest, session_id: SessionId) -> Translated:
    """Weights to sample from: under a name, or as a sampling session of the model's session."""
    is_inflight = request.kind == _INFLIGHT
    require(is_inflight or request.kind == "snapshot", f"kind {shown(request.kind)}: must be 'snapshot' or 'inflight'")
    require(
        not is_inflight or request.path is None,
        f"kind 'inflight': path {shown(request.path)} names weights that never change; leave it out",
    )
    if request.path is None and request.sampling_session_seq_id is None:
        raise UserError("path: missing, and sampling_session_seq_id too; one of them must name what is saved")
    seq_id = request.sampling_session_seq_id
    save = requests.SaveWeights(
        kind=CheckpointKind.SAMPLER.value,
        name=None if request.path is None else checkpoint_name(request.path),
        sampling_session_id=(
            sampling_session_id(session_id, seq_id) if request.path is None and seq_id is not None else None
        ),
        is_inflight=is_inflight,
        ttl_s=ttl(request.ttl_seconds, "ttl_seconds"),
        user_metadata=request.user_metadata,
    )
    # A client that sends it again counts on: the session is the one of the first (SDK 0.38, training_client.py).
    return Translated(save, identity=replace(save, sampling_session_id=None))


def save_weights_external(request: SaveWeightsExternalRequest) -> Translated:
    """Weights for download, under a name."""
    if request.path is None:
        raise UserError("path: missing; external weights need a name")
    recipients = tuple(request.age_encryption_recipients or ())
    age.check_recipients(recipients, "age_encryption_recipients")
    return Translated.exactly(
        requests.SaveWeights(
            kind=CheckpointKind.EXTERNAL.value,
            name=checkpoint_name(request.path),
            ttl_s=ttl(request.ttl_seconds, "ttl_seconds"),
            age_recipients=recipients,
        )
    )


def load_weights(request: LoadWeightsRequest, settings: ApiSettings) -> requests.LoadWeights:
    """A load whose checkpoint is still to be looked up; what is found there is no part of the identity."""
    optimizer_kind(request.optimizer_config)
    return requests.LoadWeights(
        path=str(training_path(request.path)),
        artifact_id=ArtifactId(""),
        spec=_NOT_LOOKED_UP,
        optimizer=request.optimizer,
        create=request.model_id is None,
        base_model=None if request.base_model is None else settings.known_model_name(request.base_model),
    )


def training_path(text: str) -> CheckpointPath:
    """Read the path of a checkpoint that can be trained on."""
    path = CheckpointPath.parse(text)
    require(
        path.kind is CheckpointKind.TRAINING,
        f"path {shown(text)}: holds no optimizer state to train from; save with save_state to get a weights/ path",
    )
    return path


def sampler_path(text: str) -> CheckpointPath:
    """Read the path of a checkpoint that can be sampled from."""
    path = CheckpointPath.parse(text)
    require(
        path.kind is CheckpointKind.SAMPLER,
        f"model_path {shown(text)}: is not for sampling; "
        "save with save_weights_for_sampler to get a sampler_weights/ path",
    )
    return path
