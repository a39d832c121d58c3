"""Rows by the ids that clients send; someone else's are as unknown as those that never existed."""

from dataclasses import dataclass

from sqlmodel import Session

from skyrl_tx.api.errors import bad_request, not_found
from skyrl_tx.api.principal import Principal
from skyrl_tx.api.schemas.base import shown
from skyrl_tx.contract import codec
from skyrl_tx.contract.errors import UserError
from skyrl_tx.contract.ids import ArtifactId, CheckpointPath, ModelId, SamplingSessionId, SessionId
from skyrl_tx.contract.requests import ModelSpec
from skyrl_tx.store import checkpoints, models, samplers, sessions
from skyrl_tx.store.tables import CheckpointRow, ModelRow, SamplingSessionRow, SessionRow


@dataclass(frozen=True, slots=True)
class SavedWeights:
    """A checkpoint, and what it was made from."""

    checkpoint: CheckpointRow
    base_model: str
    spec: ModelSpec

    @property
    def artifact_id(self) -> ArtifactId:
        """Where the files are."""
        return self.checkpoint.artifact_id


@dataclass(frozen=True, slots=True)
class Run:
    """A model, and whose it is."""

    model: ModelRow
    owner: str


def session(tx: Session, caller: Principal, session_id: SessionId) -> SessionRow:
    """Find a session."""
    row = sessions.get(tx, session_id)
    if row is None or not caller.may_see(row.owner):
        raise not_found(f"session {shown(session_id)} does not exist")
    return row


def open_session(tx: Session, caller: Principal, session_id: SessionId) -> SessionRow:
    """Find a session in which something new may begin."""
    row = session(tx, caller, session_id)
    if row.finished_at is not None:
        raise bad_request(f"session {shown(session_id)} has finished ({row.finish_reason})")
    return row


def model(tx: Session, caller: Principal, model_id: ModelId) -> ModelRow:
    """Find a model."""
    row = models.get(tx, model_id)
    if row is None or not caller.may_see(models.owner(tx, model_id)):
        raise not_found(f"model {shown(model_id)} does not exist")
    return row


def readable_run(tx: Session, caller: Principal, model_id: ModelId, now: float) -> tuple[Run, list[CheckpointRow]]:
    """Find a run to read about, and its checkpoints; of another's run, those that are published."""
    row = models.get(tx, model_id)
    owner = models.owner(tx, model_id)
    is_visible = caller.may_see(owner)
    saved = checkpoints.list_of_run(tx, model_id, now, only_public=not is_visible)
    if row is None or owner is None or not (is_visible or saved):
        raise not_found(f"model {shown(model_id)} does not exist")
    return Run(row, owner), saved


def addressed_model(tx: Session, caller: Principal, model_id: ModelId) -> models.Addressed:
    """Find a model for one more request."""
    found = models.addressed(tx, model_id)
    if found is None or not caller.may_see(found.owner):
        raise not_found(f"model {shown(model_id)} does not exist")
    return found


def sampling_session(tx: Session, caller: Principal, sampling_session_id: SamplingSessionId) -> SamplingSessionRow:
    """Find a sampling session."""
    return owned_sampling_session(tx, caller, sampling_session_id)[0]


def owned_sampling_session(
    tx: Session, caller: Principal, sampling_session_id: SamplingSessionId
) -> tuple[SamplingSessionRow, str]:
    """Find a sampling session, and whose it is."""
    row = samplers.get(tx, sampling_session_id)
    owning = None if row is None else sessions.get(tx, row.session_id)
    if row is None or owning is None or not caller.may_see(owning.owner):
        raise not_found(
            f"sampling session {shown(sampling_session_id)} does not exist, or was not used for long and is forgotten; "
            "save weights to sample from with a name to keep them"
        )
    return row, owning.owner


def saved_weights(
    tx: Session, caller: Principal, path: CheckpointPath, now: float, lender: Principal | None = None
) -> SavedWeights:
    """Find a checkpoint; raises UserError, because it is named in requests whose mistakes the future tells.

    `lender` is somebody else who lets the caller read what is theirs, see `Call.lender`.
    """
    row = checkpoints.get(tx, path, now)
    maker = models.get(tx, path.model_id)
    owner = models.owner(tx, path.model_id)
    lends = lender is not None and lender.may_see(owner)
    may_read = row is not None and (row.public or caller.may_see(owner) or lends)
    if row is None or maker is None or not may_read:
        raise UserError(f"path {shown(str(path))}: there is no such checkpoint")
    return SavedWeights(row, maker.base_model, spec_of(maker))


def spec_of(row: ModelRow) -> ModelSpec:
    """What a model is made of."""
    spec = codec.decode(row.spec)
    assert isinstance(spec, ModelSpec)
    return spec
