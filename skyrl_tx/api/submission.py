"""Requests into the store: once each, however often they are sent."""

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from http import HTTPStatus

import msgspec
from sqlmodel import Session

from skyrl_tx.api import lookup
from skyrl_tx.api.errors import ApiError, bad_request
from skyrl_tx.api.principal import Principal
from skyrl_tx.api.schemas.training import Promise
from skyrl_tx.api.translate.translated import Translated
from skyrl_tx.contract import codec
from skyrl_tx.contract.ids import ModelId, SamplingSessionId, SessionId
from skyrl_tx.contract.ids import model_id as model_id_of
from skyrl_tx.contract.requests import ModelSpec, Rejected, Request
from skyrl_tx.store import futures, models, samplers, stability
from skyrl_tx.store.pruning import RequestForgotten
from skyrl_tx.store.tables import SamplingSessionRow

_TOUCH_MODEL_EVERY_S = 1.0
_TOUCH_SAMPLER_EVERY_S = 60.0


@dataclass(frozen=True, slots=True)
class Encoded:
    """A request in bytes, made before the writer's turn; `identity` is what a repetition must agree in."""

    kind: str
    body: bytes
    identity: bytes

    @classmethod
    def of(cls, request: Translated) -> "Encoded":
        """Encode a request, once if nothing in it was drawn or looked up."""
        body = codec.encode(request.request)
        identity = body if request.identity is request.request else codec.encode(request.identity)
        if request.provenance:
            identity += msgspec.msgpack.encode(request.provenance)
        return cls(_kind(request.request), body, identity)


def _kind(request: Request) -> str:
    """The kind that a row shows: a refused barrier is still one, also to an engine that never read it."""
    return request.kind if isinstance(request, Rejected) else codec.kind_of(request)


@dataclass(frozen=True, slots=True)
class NewModel:
    """What is noted of a model that is to be made."""

    base_model: str
    spec: ModelSpec
    user_metadata: Mapping[str, str] | None


def _key(stem: str, seq_id: int | None, idempotency_key: str | None) -> str:
    """What makes a request one of a kind: its number, or without one what the client's retries have in common."""
    if seq_id is not None:
        return f"{stem}/{seq_id}"
    return "" if idempotency_key is None else f"{stem}/key/{idempotency_key}"


def to_model(
    tx: Session,
    caller: Principal,
    model_id: ModelId,
    seq_id: int | None,
    request: Encoded,
    idempotency_key: str | None,
    sequence_ids: Collection[str] = (),
) -> Promise:
    """Queue work for a model, which makes use of some sequences. A `seq_id` of 0 is none."""
    now = time.time()
    row = lookup.addressed_model(tx, caller, model_id)
    new = futures.NewRequest(
        key=_key(f"model/{model_id}", seq_id or None, idempotency_key),
        kind=request.kind,
        owner=row.owner,
        session_id=row.session_id,
        body=request.body,
        digest_body=request.identity,
        model_id=model_id,
        seq_id=seq_id,
    )
    request_id = _submit(tx, new, now).request_id
    if row.last_request_at < now - _TOUCH_MODEL_EVERY_S:
        models.touch(tx, model_id, now)
    stability.touch(tx, sequence_ids, now)
    return Promise(request_id=request_id, model_id=model_id)


def creation(
    tx: Session, caller: Principal, session_id: SessionId, model_seq_id: int, request: Encoded, model: NewModel | None
) -> Promise:
    """Queue the making of a model; without `model` the request is one that will fail, and there will be none.

    `create_model` and `load_weights` share the count of a session's models, so they share its keys.
    """
    now = time.time()
    session = lookup.open_session(tx, caller, session_id)
    model_id = model_id_of(session_id, model_seq_id)
    new = futures.NewRequest(
        key=f"create/{session_id}/{model_seq_id}",
        kind=request.kind,
        owner=session.owner,
        session_id=session_id,
        body=request.body,
        digest_body=request.identity,
        model_id=None if model is None else model_id,
        seq_id=0,
    )
    submitted = _submit(tx, new, now)
    if model is not None and submitted.is_new:
        models.create(
            tx,
            model_id=model_id,
            session_id=session_id,
            base_model=model.base_model,
            spec=codec.encode(model.spec),
            user_metadata=model.user_metadata,
            now=now,
        )
    return Promise(request_id=submitted.request_id, model_id=model_id)


def sampling_key(sampling_session_id: SamplingSessionId, seq_id: int | None, idempotency_key: str | None) -> str:
    """What makes a prompt one of a kind; its sequence ids are derived from it too."""
    return _key(f"sample/{sampling_session_id}", seq_id, idempotency_key)


def to_sampler(
    tx: Session, row: SamplingSessionRow, owner: str, seq_id: int | None, key: str, request: Encoded
) -> futures.Submitted:
    """Queue a prompt for a sampling session, as it was looked up before; `key` is its `sampling_key`."""
    now = time.time()
    sampling_session_id = row.sampling_session_id
    new = futures.NewRequest(
        key=key,
        kind=request.kind,
        owner=owner,
        session_id=row.session_id,
        body=request.body,
        digest_body=request.identity,
        seq_id=seq_id,
        sampling_session_id=sampling_session_id,
    )
    submitted = _submit(tx, new, now)
    if row.last_used_at < now - _TOUCH_SAMPLER_EVERY_S:
        samplers.touch(tx, sampling_session_id, now)
    return submitted


def _submit(tx: Session, new: futures.NewRequest, now: float) -> futures.Submitted:
    try:
        return futures.submit(tx, new, now)
    except futures.ConflictingRequest as error:
        raise bad_request(str(error)) from error
    except RequestForgotten as error:
        raise ApiError(HTTPStatus.GONE, str(error)) from error
