"""Sampling sessions and prompts."""

import time
from dataclasses import replace

from fastapi import APIRouter
from sqlmodel import Session

from skyrl_tx.api import lookup, submission
from skyrl_tx.api.context import Call, Incoming
from skyrl_tx.api.errors import bad_request, not_found
from skyrl_tx.api.schemas.addresses import SampleAddress
from skyrl_tx.api.schemas.base import shown
from skyrl_tx.api.schemas.sampling import (
    CreateSamplingSessionAnswer,
    CreateSamplingSessionRequest,
    JoinSamplingSessionAnswer,
    JoinSamplingSessionRequest,
    SamplerAnswer,
    SampleRequest,
)
from skyrl_tx.api.schemas.training import Promise
from skyrl_tx.api.submission import Encoded
from skyrl_tx.api.translate import sampling, weights
from skyrl_tx.api.translate.translated import Translated, translated
from skyrl_tx.api.wire import parse
from skyrl_tx.contract.errors import UserError
from skyrl_tx.contract.ids import CheckpointPath, SamplerId, SamplingSessionId, SessionId
from skyrl_tx.contract.ids import sampling_session_id as sampling_session_id_of
from skyrl_tx.contract.requests import Rejected
from skyrl_tx.store import futures, samplers, sessions
from skyrl_tx.store.tables import SamplingSessionRow

router = APIRouter()

_DIRECT = "samples without a sampling session"


@router.post("/create_sampling_session", response_model_exclude_none=True)
def create_sampling_session(call: Incoming) -> CreateSamplingSessionAnswer:
    """Begin to sample from the base model, or from saved weights."""
    request = call.body.model(CreateSamplingSessionRequest)
    base_model, path = _named_weights(call, request.base_model, request.model_path)
    session_id = SessionId(request.session_id)
    name = sampling_session_id_of(session_id, request.sampling_session_seq_id)
    path_text = None if path is None else str(path)

    def work(tx: Session) -> None:
        lookup.open_session(tx, call.caller, session_id)
        existing = samplers.get(tx, name)
        if existing is None:
            _begin(tx, call, session_id, name, base_model, path)
        elif existing.model_id is not None or (existing.base_model, existing.model_path) != (base_model, path_text):
            raise bad_request(f"sampling_session_seq_id {request.sampling_session_seq_id}: is in use for other weights")

    call.store.write(work)
    return CreateSamplingSessionAnswer(sampling_session_id=name)


@router.post("/join_sampling_session")
def join_sampling_session(call: Incoming) -> JoinSamplingSessionAnswer:
    """Number a copy of a sampling client, so that its requests are told from those of the others."""
    name = SamplingSessionId(call.body.model(JoinSamplingSessionRequest).sampling_session_id)

    def work(tx: Session) -> int:
        lookup.sampling_session(tx, call.caller, name)
        return samplers.add_clone(tx, name)

    return JoinSamplingSessionAnswer(client_counter=call.store.write(work))


@router.get("/samplers/{sampler_id}", response_model_exclude_none=True)
def get_sampler(sampler_id: str, call: Incoming) -> SamplerAnswer:
    """Say what a sampling session samples from."""
    row = call.store.read(lambda tx: lookup.sampling_session(tx, call.caller, SamplingSessionId(sampler_id)))
    return SamplerAnswer(sampler_id=sampler_id, base_model=row.base_model, model_path=row.model_path)


@router.post("/asample", response_model_exclude_none=True)
def asample(call: Incoming) -> Promise:
    """Queue a prompt; the ids of the sequences to come are settled here."""
    call.parts.sample_budget.check(len(call.body.raw))
    value = call.body.mapping()
    address = parse(SampleAddress, value)
    if address.sampling_session_id is None:
        session_id, seq_id = _directly(call, address), None  # there is no client whose requests it could count
    else:
        session_id, seq_id = SamplingSessionId(address.sampling_session_id), address.seq_id
    row, owner = call.store.read(lambda tx: lookup.owned_sampling_session(tx, call.caller, session_id))
    key = submission.sampling_key(session_id, seq_id, call.idempotency_key)
    sequence_ids = _sequence_ids(key, address.num_samples)

    def translate(schema: SampleRequest) -> Translated:
        limit = call.settings.max_request_bytes
        request = sampling.sample(schema, row.sampler_id, sequence_ids, limit)
        return replace(request, request=_dropped(row)) if row.sampler_id is None and row.model_id else request

    encoded = Encoded.of(translated("sample", SampleRequest, value, translate, call.check_unknown))
    submitted = call.store.write(lambda tx: submission.to_sampler(tx, row, owner, seq_id, key, encoded))
    if submitted.position is not None:
        call.parts.sample_budget.note(submitted.position, len(encoded.body))
    return Promise(request_id=submitted.request_id, sample_sequence_ids=sequence_ids)


def _named_weights(call: Call, base_model: str | None, model_path: str | None) -> tuple[str, CheckpointPath | None]:
    """Read the names of what to sample from."""
    if model_path is None and base_model is None:
        raise bad_request("base_model: missing, and model_path too; one of them must say what to sample from")
    try:
        name = call.settings.known_model_name(base_model or call.settings.public_model_name)
        return name, None if model_path is None else weights.sampler_path(model_path)
    except UserError as error:
        raise bad_request(error.message) from error


def _directly(call: Call, address: SampleAddress) -> SamplingSessionId:
    """Find or begin a sampling session for a prompt that names its weights itself; all of an owner share a session."""
    base_model, path = _named_weights(call, address.base_model, address.model_path)
    owner = call.caller.owner

    def work(tx: Session) -> SamplingSessionId:
        now = time.time()
        session_id = sessions.unfinished(tx, owner, _DIRECT)
        if session_id is None:
            session_id = sessions.create(
                tx,
                owner=owner,
                tags=[],
                user_metadata=None,
                sdk_version=None,
                project_id=None,
                display_name=_DIRECT,
                now=now,
            )
        sessions.heartbeat(tx, session_id, now)  # nobody else keeps it
        sampler = _saved(tx, call, path)
        existing = samplers.find(tx, session_id, None if path is None else str(path), sampler)
        if existing is not None:
            return existing.sampling_session_id
        name = sampling_session_id_of(session_id, len(samplers.ids_of_session(tx, session_id)))
        _begin(tx, call, session_id, name, base_model, path)
        return name

    return call.store.write(work)


def _saved(tx: Session, call: Call, path: CheckpointPath | None) -> SamplerId | None:
    """Find the weights at a path, as they are now; None is the base model."""
    if path is None:
        return None
    try:
        return SamplerId(lookup.saved_weights(tx, call.caller, path, time.time()).artifact_id)
    except UserError as error:
        raise not_found(error.message) from error


def _begin(
    tx: Session,
    call: Call,
    session_id: SessionId,
    name: SamplingSessionId,
    base_model: str,
    path: CheckpointPath | None,
) -> None:
    now = time.time()
    samplers.create_session(
        tx,
        SamplingSessionRow(
            sampling_session_id=name,
            session_id=session_id,
            base_model=base_model,
            model_path=None if path is None else str(path),
            sampler_id=_saved(tx, call, path),
            created_at=now,
            last_used_at=now,
        ),
    )


def _dropped(row: SamplingSessionRow) -> Rejected:
    """Say that there is nothing to sample from any more; a prompt that was sent before is still recognised."""
    message = (
        f"sampling_session_id {shown(row.sampling_session_id)}: its unnamed weights were not used for long "
        "and have been dropped; save weights to sample from with a name to keep them"
    )
    return Rejected(kind="sample", message=message)


def _sequence_ids(key: str, num_samples: int) -> list[str]:
    """Name the sequences to come; a repeated request gets the same names. None where the request cannot succeed."""
    stem = futures.request_id(key).replace("req-", "seq-", 1)
    count = num_samples if num_samples <= sampling.MAX_SAMPLES else 0
    return [f"{stem}-{index}" for index in range(count)]
