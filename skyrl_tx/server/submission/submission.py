"""Stores requests in the queue of the engine.

Clients retry, so the same request may arrive multiple times. It is stored only once.
"""

import functools
import logging
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import TypeVar

import msgspec
from pydantic import ValidationError
from sqlmodel import Session

from skyrl_tx.contract import codec
from skyrl_tx.contract.custom_loss import CUSTOM, LOGPROBS, CustomLoss
from skyrl_tx.contract.errors import UserError
from skyrl_tx.contract.ids import ModelId, SamplerId, SamplingSessionId, SessionId, custom_loss_id
from skyrl_tx.contract.ids import model_id as model_id_of
from skyrl_tx.contract.losses import TARGET_TOKENS
from skyrl_tx.contract.requests import (
    CreateCustomLoss,
    CreateModel,
    LoadWeights,
    ModelPass,
    ModelSpec,
    Rejected,
    Request,
)
from skyrl_tx.contract.results import CreateCustomLossOutput
from skyrl_tx.server.context import ApiCall
from skyrl_tx.server.errors import ApiError, bad_request
from skyrl_tx.server.http.body import JsonRequest
from skyrl_tx.server.identity import access
from skyrl_tx.server.identity.authentication import Principal
from skyrl_tx.server.schemas.base import SHARE_PREFIXES, CreationIds, ModelRequestIds, WireModel
from skyrl_tx.server.schemas.training import FutureHandle
from skyrl_tx.server.submission.provenance import Provenance, fill_recorded
from skyrl_tx.server.submission.validation import describe_first_error, quote_value
from skyrl_tx.store import custom_losses, futures, models, placement, recorded_logprobs, sampling_sessions, sessions
from skyrl_tx.store.database import Store
from skyrl_tx.store.tables import ModelRow, SamplingSessionRow

_log = logging.getLogger(__name__)
_TOUCH_MODEL_EVERY_S = 1.0
_TOUCH_SAMPLER_EVERY_S = 60.0

SchemaT = TypeVar("SchemaT", bound=WireModel)


@dataclass(frozen=True, slots=True)
class Submission:
    """A translated request that is ready to be stored.

    Attributes:
        request: The request that the engine will execute.
        body: The encoded request. It is encoded before the transaction starts, to keep the
            transaction short.
        digest: The idempotency digest. It covers the request as the client sent it, without the
            values that the server drew or looked up. So it is the same when a client sends the
            request again.
        provenance: The provenance spans of each datum, if recorded samples will be added to the
            request.
        sequence_ids: The ids of the recorded samples that were added.
        base_model: The base model of the model that the request creates, if it creates one.
    """

    request: Request
    body: bytes
    digest: bytes
    provenance: tuple[Provenance, ...] = ()
    sequence_ids: Collection[str] = ()
    base_model: str | None = None

    @classmethod
    def from_request(
        cls,
        request: Request,
        *,
        as_sent: Request | None = None,
        provenance: tuple[Provenance, ...] = (),
        base_model: str | None = None,
    ) -> "Submission":
        """Encode a request. The digest covers `as_sent`, which is the request itself by default."""
        body = codec.encode(request)
        sent = body if as_sent is None or as_sent is request else codec.encode(as_sent)
        if provenance:
            sent += msgspec.msgpack.encode(provenance)
        return cls(request, body, futures.compute_digest(sent), provenance, base_model=base_model)

    @classmethod
    def from_error(
        cls, kind: str, message: str, *, backward: bool = False, as_sent: Request | None = None
    ) -> "Submission":
        """Return a rejected request, which takes its sequence number and fails with this message."""
        return cls.from_request(Rejected(kind=kind, message=message, backward=backward), as_sent=as_sent)

    @property
    def kind(self) -> str:
        """The kind of the request.

        A rejected request keeps the kind of the request that was sent. For example, the scheduler
        still treats a rejected barrier as a barrier.
        """
        return self.request.kind if isinstance(self.request, Rejected) else codec.get_kind(self.request)

    def reject(self, message: str) -> "Submission":
        """Return a rejected request in the place of this one, with the same digest."""
        backward = isinstance(self.request, ModelPass) and self.request.backward
        return self.replace_request(Rejected(kind=self.kind, message=message, backward=backward))

    def replace_request(self, request: Request, sequence_ids: Collection[str] = ()) -> "Submission":
        """Return this submission with another request and the same digest."""
        return replace(self, request=request, body=codec.encode(request), sequence_ids=sequence_ids)


def from_json(
    kind: str,
    schema: type[SchemaT],
    request: JsonRequest,
    translate: Callable[[SchemaT], Submission],
    check_unknown: Callable[[WireModel], None],
    *,
    backward: bool = False,
) -> Submission:
    """Validate and translate a JSON request.

    An error turns the request into a rejected request, and the client gets the error from its
    future.
    """
    try:
        if request.problem is not None:
            raise UserError(request.problem)
        model = schema.model_validate(request.value)
        submission = translate(model)
        check_unknown(model)
        return submission
    except ValidationError as error:
        return Submission.from_error(kind, describe_first_error(error), backward=backward)
    except UserError as error:
        return Submission.from_error(kind, error.message, backward=backward)


def add_recorded_samples(store: Store, caller: Principal, submission: Submission) -> Submission:
    """Add recorded samples to a pass that has provenance spans.

    Rejects the pass if a span is wrong.
    """
    request = submission.request
    if not submission.provenance or not isinstance(request, ModelPass):
        return submission
    _log_own_definition(request.loss)
    sequence_ids = set[str]().union(*(datum.sequence_ids for datum in submission.provenance))
    recorded = store.read(lambda tx: recorded_logprobs.find(tx, caller.owner_filter, sequence_ids, time.time()))
    try:
        return submission.replace_request(fill_recorded(request, submission.provenance, recorded), recorded.keys())
    except UserError as error:
        return submission.reject(error.message)


def add_custom_loss(call: ApiCall, model_id: ModelId, submission: Submission) -> Submission:
    """Add the uploaded loss to a pass that uses a custom loss.

    Rejects the pass if its session has no such loss. Removes loss inputs that the loss does not
    read, because the SDK sends all inputs of a datum.
    """
    request = submission.request
    if not isinstance(request, ModelPass) or request.loss != CUSTOM:
        return submission
    loss_id = request.loss_config.get("loss_id")

    def find(tx: Session) -> bytes | None:
        row = access.find_model_ref(tx, call.caller, model_id)
        return custom_losses.find(tx, loss_id, row.session_id) if isinstance(loss_id, str) else None

    # Find the loss in the session of the model.
    unknown = sorted(request.loss_config.keys() - {"loss_id"})
    body = call.store.read(find)
    if unknown or body is None:
        return submission.reject(
            f"loss_fn_config.{unknown[0][:80]}: {CUSTOM} takes loss_id" if unknown else _describe_missing_loss(loss_id)
        )
    stored = codec.decode(body)
    assert isinstance(stored, CreateCustomLoss)

    # Keep the inputs that the loss reads.
    read = {TARGET_TOKENS, *(loss_input.name for loss_input in stored.loss.inputs)} - {LOGPROBS}
    data = tuple(
        replace(datum, loss_inputs={name: array for name, array in datum.loss_inputs.items() if name in read})
        for datum in request.data
    )
    return submission.replace_request(replace(request, custom=stored.loss, data=data))


def _describe_missing_loss(loss_id: object) -> str:
    return (
        f"loss_fn_config.loss_id {quote_value(loss_id)}: the session of this model has no such custom loss; losses "
        "unused for 30 days are removed"
    )


@functools.cache
def _log_own_definition(loss: str) -> None:
    """Log, once per process, that the formula of a loss is this project's own definition."""
    _log.info("loss %s: Tinker's formula is not public, so this server uses its own definition (see the docs)", loss)


def submit_json(
    call: ApiCall,
    kind: str,
    schema: type[SchemaT],
    translate: Callable[[SchemaT], Submission],
    *,
    backward: bool = False,
) -> FutureHandle:
    """Queue a JSON request for a model. The future of the request reports errors of the request."""
    request = call.body.parse_request()
    ids = request.parse_ids(ModelRequestIds)
    return submit(call, ids, from_json(kind, schema, request, translate, call.check_unknown, backward=backward))


def submit(call: ApiCall, ids: ModelRequestIds, submission: Submission) -> FutureHandle:
    """Queue a request for a model, with recorded samples or a custom loss if the request needs them."""
    complete = add_recorded_samples(call.store, call.caller, submission)
    complete = add_custom_loss(call, ModelId(ids.model_id), complete)
    return call.store.write(lambda tx: submit_to_model(tx, call, ids, complete))


def submit_to_model(tx: Session, call: ApiCall, ids: ModelRequestIds, submission: Submission) -> FutureHandle:
    """Queue a request for a model. A `seq_id` of 0 counts as absent, as in protobuf."""
    now = time.time()
    model_id = ModelId(ids.model_id)
    row = access.find_model_ref(tx, call.caller, model_id)
    key = _make_key(f"model/{model_id}", ids.seq_id or None, call.idempotency_key)
    call.add_stored(len(submission.body))
    submitted = _insert(
        tx, submission, key, row.owner, row.session_id, ids.seq_id, model_id=model_id, engine=row.engine
    )

    # Record the last use of everything that pruning may remove.
    if row.last_request_at < now - _TOUCH_MODEL_EVERY_S:
        models.touch(tx, model_id, now)
    if submission.sequence_ids:
        recorded_logprobs.touch(tx, submission.sequence_ids, now)
    if isinstance(submission.request, ModelPass) and submission.request.loss == CUSTOM:
        custom_losses.touch(tx, str(submission.request.loss_config["loss_id"]), now)
    return FutureHandle(request_id=submitted.request_id, model_id=model_id)


def submit_creation(tx: Session, call: ApiCall, ids: CreationIds, submission: Submission) -> FutureHandle:
    """Queue a request that creates a model, and create the row of the model.

    A rejected request creates no row. `create_model` and `load_weights` number the models of a
    session together: `model_seq_id` 3 is one model, whichever of them created it. So both kinds of
    requests have the same idempotency keys.
    """
    now = time.time()
    session_id = SessionId(ids.session_id)
    session = access.find_open_session(tx, call.caller, session_id)
    model_id = model_id_of(session_id, ids.model_seq_id)
    request = submission.request
    spec: ModelSpec | None = None
    if isinstance(request, CreateModel | LoadWeights):
        metadata = {**sessions.get_metadata(tx, [session_id]).get(session_id, {}), **(ids.user_metadata or {})}
        shares = metadata.get(SHARE_PREFIXES) != "false" and not call.settings.no_shared_prefixes
        spec = replace(request.spec, shares_prefixes=shares)
        submission = submission.replace_request(replace(request, spec=spec))
    key = f"create/{session_id}/{ids.model_seq_id}"
    call.add_stored(len(submission.body))

    engine = placement.choose_engine(tx)
    submitted = _insert(
        tx, submission, key, session.owner, session_id, 0, model_id=model_id if spec else None, engine=engine
    )

    if spec is not None and submitted.is_new:
        assert submission.base_model is not None
        row = ModelRow(
            model_id=model_id,
            session_id=session_id,
            base_model=submission.base_model,
            spec=codec.encode(spec),
            user_metadata=ids.user_metadata,
            created_at=now,
            last_request_at=now,
            engine=engine,
        )
        models.create(tx, row)
    return FutureHandle(request_id=submitted.request_id, model_id=model_id)


def store_custom_loss(tx: Session, call: ApiCall, session_id: SessionId, seq_id: int, loss: CustomLoss) -> FutureHandle:
    """Store a custom loss of a session.

    The request is stored as completed, because it needs no engine.
    """
    now = time.time()
    session = access.find_open_session(tx, call.caller, session_id)
    loss_id = custom_loss_id(session_id, seq_id)
    submission = Submission.from_request(CreateCustomLoss(loss=loss))
    call.add_stored(len(submission.body))
    submitted = _insert(tx, submission, f"custom_loss/{session_id}/{seq_id}", session.owner, session_id, None)

    if submitted.is_new:
        custom_losses.create(tx, loss_id, session, name=loss.name, body=submission.body, now=now)
        result = codec.encode(CreateCustomLossOutput(loss_id=loss_id))
        futures.complete(tx, submitted.request_id, result, failed=False, effect_order=None, now=now)
    return FutureHandle(request_id=submitted.request_id)


def submit_to_sampler(
    tx: Session,
    row: SamplingSessionRow,
    owner: str,
    seq_id: int | None,
    key: str,
    submission: Submission,
    *,
    is_streamed: bool = False,
    engine: int = 1,
) -> futures.SubmittedRequest | None:
    """Queue a sample request of a sampling session.

    Args:
        tx: The transaction.
        row: The sampling session, as it was when the request was translated.
        owner: The owner of the sampling session.
        seq_id: The client's sequence number, if it sent one.
        key: The idempotency key from `make_sampling_key`.
        submission: The translated request.
        is_streamed: Whether the API process reads tokens while they are sampled.
        engine: The engine that should execute the request. If the weights have not been written to
            disk yet, the request goes to the engine that has the weights in memory instead.

    Returns:
        The stored request. None if the sampling session is gone, or has other weights than `row`
        now. In this case nothing is queued, and the caller must translate the request again.
    """
    now = time.time()
    name = row.sampling_session_id
    current = sampling_sessions.get(tx, name)
    if current is None or current.sampler_id != row.sampler_id:
        return None

    if current.model_id is not None and current.size_bytes is None:
        engine = models.get_engine_number(tx, current.model_id) or engine

    submitted = _insert(
        tx,
        submission,
        key,
        owner,
        row.session_id,
        seq_id,
        sampling_session_id=name,
        sampler_id=row.sampler_id,
        is_streamed=is_streamed,
        engine=engine,
    )

    if row.last_used_at < now - _TOUCH_SAMPLER_EVERY_S:
        sampling_sessions.record_use(tx, name, now)
    return submitted


def make_sampling_key(sampling_session_id: SamplingSessionId, seq_id: int | None, idempotency_key: str | None) -> str:
    """Return the idempotency key of a sample request.

    The ids of the sampled sequences are derived from this key.
    """
    return _make_key(f"sample/{sampling_session_id}", seq_id, idempotency_key)


def _make_key(stem: str, seq_id: int | None, idempotency_key: str | None) -> str:
    """Return the idempotency key of a request, which contains its sequence number or else the header.

    Returns "" if the request has neither. Such a request is never recognized as a retry.
    """
    if seq_id is not None:
        return f"{stem}/{seq_id}"
    return "" if idempotency_key is None else f"{stem}/key/{idempotency_key}"


def _insert(
    tx: Session,
    submission: Submission,
    key: str,
    owner: str,
    session_id: SessionId,
    seq_id: int | None,
    *,
    model_id: ModelId | None = None,
    sampling_session_id: SamplingSessionId | None = None,
    sampler_id: SamplerId | None = None,
    is_streamed: bool = False,
    engine: int = 1,
) -> futures.SubmittedRequest:
    new = futures.NewRequest(
        key=key,
        kind=submission.kind,
        owner=owner,
        session_id=session_id,
        body=submission.body,
        digest=submission.digest,
        model_id=model_id,
        seq_id=seq_id,
        sampling_session_id=sampling_session_id,
        sampler_id=sampler_id,
        is_streamed=is_streamed,
        engine=engine,
    )

    try:
        return futures.submit(tx, new, time.time())
    except futures.ConflictingRequest as error:
        raise bad_request(str(error)) from error
    except futures.RequestPruned as error:
        raise ApiError(HTTPStatus.GONE, str(error)) from error
