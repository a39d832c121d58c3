"""Futures: requests and their results.

Each request is submitted once and completed once. These functions run many times per second, so
they select columns and never load a `RequestRow` as an object. Each statement is built once, above
the function that uses it, because building a statement takes longer than running it.
"""

import base64
import hashlib
import re
import secrets
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any, Literal
from zlib import crc32

from sqlalchemy import (
    Boolean,
    ColumnElement,
    Integer,
    String,
    and_,
    bindparam,
    case,
    func,
    insert,
    literal_column,
    or_,
    select,
    update,
)
from sqlmodel import Session, col

from skyrl_tx.contract.ids import ModelId, RequestId, SamplerId, SamplingSessionId, SessionId
from skyrl_tx.store.database import PreparedStatement, execute, execute_in_batches, is_in_batch
from skyrl_tx.store.tables import AnswerCounterRow, PrunedRow, RequestRow

_REQUEST_ID = re.compile("req-[a-z2-7]{32}")
CLONE_STRIDE = 1_000_000_000
"""Copies of a sampling client number their requests from multiples of this (`tinker.lib`)."""


class ConflictingRequest(Exception):
    """The idempotency key of a request was used before for a request with a different body."""


class RequestPruned(Exception):
    """The sequence number was used by a request that was completed and has been deleted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRequest:
    """A request that the API process submits."""

    key: str
    """Idempotency key, for example "model/{model_id}/{seq_id}"; "" if there is none."""
    kind: str
    owner: str
    session_id: SessionId
    body: bytes
    model_id: ModelId | None = None
    seq_id: int | None = None
    sampling_session_id: SamplingSessionId | None = None
    sampler_id: SamplerId | None = None
    digest: bytes | None = None
    """A duplicate must have the same digest.

    None means the digest of `body`. The API process passes the digest of the request as the client
    sent it, without values that the server adds, for example a seed.
    """
    is_streamed: bool = False
    engine: int = 1


@dataclass(frozen=True, slots=True)
class SubmittedRequest:
    """The id of a submitted request. A duplicate has `is_new` False and `position` None."""

    request_id: RequestId
    is_new: bool
    position: int | None = None
    engine: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRequest:
    """The columns of a stored request that the engine needs, without its body."""

    position: int
    """Order of arrival at the engine."""
    request_id: RequestId
    kind: str
    """The kind that the client asked for. A rejected request keeps it."""
    owner: str
    session_id: SessionId
    model_id: ModelId | None
    seq_id: int | None
    sampling_session_id: SamplingSessionId | None
    attempts: int
    """Number of delivery attempts, see `count_delivery_attempt`."""
    crashes: int = 0
    """Number of engine crashes while the request ran alone."""
    created_at: float = 0.0
    is_damaged: bool = False
    """Whether the checksum of the body does not match."""
    is_streamed: bool = False
    """Whether the client reads the tokens of the sample while they are decoded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingRequest(StoredRequest):
    """A request as the engine reads it. A damaged request has an empty body."""

    body: bytes
    effect_order: int | None
    failed: bool
    num_left_out: int = 0
    """Size in bytes of a body that was left out because it is large; 0 if the body is present."""


@dataclass(frozen=True, slots=True)
class FutureState:
    """The state of a request, with its result if it is complete."""

    status: Literal["open", "done", "failed", "pruned", "damaged", "unknown"]
    """`open`: no result yet; `pruned`: the result was deleted; `damaged`: its checksum is wrong."""
    kind: str = ""
    result: bytes | None = None
    created_at: float = 0.0
    num_left_out: int = 0
    """Size in bytes of a result that was left out; 0 if it is present."""


def make_request_id(key: str) -> RequestId:
    """Return the request id for an idempotency key, or a random id for ""."""
    raw = hashlib.blake2b(key.encode(), digest_size=20).digest() if key else secrets.token_bytes(20)
    return RequestId(f"req-{base64.b32encode(raw).decode().lower()}")


def is_request_id(text: str) -> bool:
    """Return whether a text has the form of a request id.

    Request ids cannot be guessed. If such an id is unknown, its request existed and was deleted.
    """
    return _REQUEST_ID.fullmatch(text) is not None


def get_sequence_scope(
    model_id: ModelId | None, sampling_session_id: SamplingSessionId | None, seq_id: int | None
) -> str | None:
    """Return the scope in which `seq_id` is unique: a name for the model or the sampling client.

    Returns None for requests without a sequence number.
    """
    if sampling_session_id is not None and seq_id is not None:
        return f"sample/{sampling_session_id}/{seq_id // CLONE_STRIDE}"
    return f"model/{model_id}" if model_id is not None and seq_id else None


_HIGH_WATER_MARK = select(col(PrunedRow.up_to)).where(col(PrunedRow.numbered_by) == bindparam("scope"))


def get_high_water_mark(tx: Session, scope: str) -> int:
    """Return the highest deleted sequence number of a scope, or -1 if none was deleted."""
    up_to = execute(tx, _HIGH_WATER_MARK, {"scope": scope}).scalar_one_or_none()
    return -1 if up_to is None else up_to


_DIGEST = select(col(RequestRow.digest)).where(col(RequestRow.request_id) == bindparam("request_id"))
_INSERT = insert(RequestRow)
_NOT_STARTED = {"status": "open", "attempts": 0, "is_alone": False, "crashes": 0}
_SUBMITTED_COLUMNS = (
    *("kind", "owner", "session_id", "model_id", "seq_id", "sampling_session_id", "sampler_id"),
    *("body", "is_streamed", "engine"),
)


def submit(tx: Session, new: NewRequest, now: float) -> SubmittedRequest:
    """Insert a request, unless it is a duplicate of a stored request.

    Raises:
        ConflictingRequest: The key was used with a different body. The stored request is not changed.
        RequestPruned: The key was used by a request that has been deleted.
    """
    name = make_request_id(new.key)
    digest = compute_digest(new.body) if new.digest is None else new.digest

    # Check for duplicates.
    if new.key:
        stored = execute(tx, _DIGEST, {"request_id": name}).scalar_one_or_none()
        if stored is not None:
            if stored != digest:
                raise ConflictingRequest(f"{new.kind} request {new.key!r}: these ids were used for another request")
            return SubmittedRequest(name, is_new=False)
        scope = get_sequence_scope(new.model_id, new.sampling_session_id, new.seq_id)
        if scope is not None and (new.seq_id or 0) <= get_high_water_mark(tx, scope):
            raise RequestPruned(
                f"{new.kind} request {new.key!r}: its sequence number was used by a request that has been deleted"
            )

    # Insert the row. `started_at` is not null so that the row keeps its size when it is set later:
    # only then does SQLite update the row in place without rewriting a large body.
    values = {column: getattr(new, column) for column in _SUBMITTED_COLUMNS}
    values |= {"request_id": name, "digest": digest, "body_crc": crc32(new.body), "created_at": now}
    values["started_at"] = now
    (position,) = execute(tx, _INSERT, {**values, **_NOT_STARTED}).inserted_primary_key or (None,)
    return SubmittedRequest(name, is_new=True, position=position, engine=new.engine)


def compute_digest(data: bytes) -> bytes:
    """Return the digest of a request. A duplicate must have the same digest."""
    return hashlib.blake2b(data, digest_size=20).digest()


_COLUMNS_WITHOUT_BODY = (
    col(RequestRow.position),
    *(col(RequestRow.request_id), col(RequestRow.owner), col(RequestRow.session_id), col(RequestRow.model_id)),
    *(col(RequestRow.kind), col(RequestRow.seq_id), col(RequestRow.sampling_session_id)),
    *(col(RequestRow.attempts), col(RequestRow.crashes), col(RequestRow.created_at), col(RequestRow.effect_order)),
    col(RequestRow.is_streamed),
    (col(RequestRow.status) == "failed").label("failed"),
    col(RequestRow.body_crc),
)
_COLUMNS = (*_COLUMNS_WITHOUT_BODY, col(RequestRow.body))
IS_OPEN = col(RequestRow.status) == literal_column("'open'")  # a literal, so that the partial index is used
_IS_LEFT_OUT = and_(
    col(RequestRow.kind) == "model_pass", func.length(col(RequestRow.body)) > bindparam("max_pass_bytes")
)
_IS_FOR_ENGINE = col(RequestRow.engine) == bindparam("engine")
_OPEN_AFTER = (
    select(
        *_COLUMNS_WITHOUT_BODY,
        case((_IS_LEFT_OUT, None), else_=col(RequestRow.body)).label("body"),
        case((_IS_LEFT_OUT, func.length(col(RequestRow.body))), else_=0).label("num_left_out"),
    )
    .where(IS_OPEN, _IS_FOR_ENGINE, col(RequestRow.position) > bindparam("after_position"))
    .order_by(col(RequestRow.position))
    .limit(bindparam("limit"))
)


def list_pending(
    tx: Session, after_position: int, limit: int, max_pass_bytes: int = 2**62, *, engine: int = 1
) -> list[PendingRequest]:
    """Return open requests of an engine after a position, in order of arrival.

    Bodies of passes that are larger than `max_pass_bytes` are left out, see
    `PendingRequest.num_left_out`.
    """
    parameters = {"after_position": after_position, "limit": limit, "max_pass_bytes": max_pass_bytes}
    return _decode_rows(execute(tx, _OPEN_AFTER, {**parameters, "engine": engine}))


_OPEN_BY_OWNER = _OPEN_AFTER.where(
    col(RequestRow.owner) == bindparam("owner"),
    col(RequestRow.model_id).is_not(None),
    col(RequestRow.position) <= bindparam("up_to"),
)


def list_pending_by_owner(
    tx: Session, owner: str, after_position: int, up_to: int, limit: int, max_pass_bytes: int, *, engine: int = 1
) -> list[PendingRequest]:
    """Like `list_pending`, for an owner's requests to models up to the position `up_to`."""
    positions = {"after_position": after_position, "up_to": up_to, "limit": limit}
    parameters = {"owner": owner, "max_pass_bytes": max_pass_bytes, "engine": engine, **positions}
    return _decode_rows(execute(tx, _OPEN_BY_OWNER, parameters))


def list_in_flight(tx: Session, engine: int = 1) -> list[PendingRequest]:
    """Return the open requests that an engine has started, in order of arrival."""
    is_counted = IS_OPEN, col(RequestRow.engine) == engine, col(RequestRow.attempts) > 0
    return _decode_rows(execute(tx, select(*_COLUMNS).where(*is_counted).order_by(col(RequestRow.position))))


def list_not_started(tx: Session, model_id: ModelId, seq_id: int) -> list[PendingRequest]:
    """Return the open requests of a model before `seq_id` that no engine has started."""
    statement = select(*_COLUMNS).where(
        IS_OPEN,
        col(RequestRow.model_id) == model_id,
        col(RequestRow.attempts) == 0,
        col(RequestRow.seq_id) > 0,
        col(RequestRow.seq_id) < seq_id,
    )
    return _decode_rows(execute(tx, statement.order_by(col(RequestRow.position))))


_LAST_POSITION = select(func.max(col(RequestRow.position)))


def get_last_position(tx: Session) -> int:
    """Return the position of the newest stored request, or 0 if there is none."""
    return execute(tx, _LAST_POSITION).scalar_one() or 0


_BY_ID = select(*_COLUMNS).where(is_in_batch(col(RequestRow.request_id))).order_by(col(RequestRow.position))


def list_by_id(tx: Session, request_ids: Iterable[RequestId]) -> list[PendingRequest]:
    """Return the stored requests with these ids, with their bodies, in order of arrival."""
    return _decode_rows(execute_in_batches(tx, _BY_ID, request_ids))


def _decode_rows(rows: Iterable[Any]) -> list[PendingRequest]:
    requests: list[PendingRequest] = []
    for row in rows:
        columns: dict[str, Any] = dict(row._mapping)
        crc = columns.pop("body_crc")
        if columns["body"] is None:
            columns["body"] = b""
        elif crc is not None and crc != crc32(columns["body"]):
            columns |= {"body": b"", "is_damaged": True}
        requests.append(PendingRequest(**columns))
    return requests


_LOG_SINCE = (
    select(*_COLUMNS)
    .where(col(RequestRow.model_id) == bindparam("model_id"), col(RequestRow.effect_order) > bindparam("after"))
    .order_by(col(RequestRow.effect_order))
    .limit(bindparam("limit"))
)


def read_log(tx: Session, model_id: ModelId, effect_order: int, limit: int = 2**31 - 1) -> list[PendingRequest]:
    """Return up to `limit` requests of a model's log after a log sequence number, in log order."""
    parameters = {"model_id": model_id, "after": effect_order, "limit": limit}
    return _decode_rows(execute(tx, _LOG_SINCE, parameters))


_COUNT_ATTEMPT, _COUNT_ATTEMPT_ALONE = (
    update(RequestRow)
    .where(is_in_batch(col(RequestRow.request_id)))
    .values(attempts=col(RequestRow.attempts) + 1, is_alone=is_alone, started_at=bindparam("now"))
    for is_alone in (False, True)
)


def count_delivery_attempt(tx: Session, request_ids: Iterable[RequestId], *, is_alone: bool = False) -> None:
    """Count a delivery attempt before it starts. `is_alone`: nothing else runs on the device."""
    execute_in_batches(tx, _COUNT_ATTEMPT_ALONE if is_alone else _COUNT_ATTEMPT, request_ids, now=time.time())


_IS_ALONE: ColumnElement[bool] = literal_column("is_alone", Boolean)  # a literal, so that the partial index is used
_END_ALONE = (
    update(RequestRow)
    .where(_IS_ALONE, col(RequestRow.engine) == bindparam("number"))
    .values(is_alone=False, crashes=col(RequestRow.crashes) + bindparam("num_crashes", type_=Integer))
)


def record_engine_end(tx: Session, *, is_crash: bool, engine: int = 1) -> None:
    """Record the end of an engine. A crash is counted for the request that ran alone."""
    execute(tx, _END_ALONE, {"num_crashes": int(is_crash), "number": engine})


_MAX_CRASHES = select(func.max(col(RequestRow.crashes))).where(is_in_batch(col(RequestRow.request_id)))


def get_max_crashes(tx: Session, request_ids: Iterable[RequestId]) -> int:
    """Return the highest crash count of these requests."""
    return max((crashes or 0 for (crashes,) in execute_in_batches(tx, _MAX_CRASHES, request_ids)), default=0)


_UNDO_ATTEMPT = (
    update(RequestRow)
    .where(is_in_batch(col(RequestRow.request_id)), col(RequestRow.attempts) > 0)  # completion resets the count
    .values(attempts=col(RequestRow.attempts) - 1, is_alone=False)
)


def undo_delivery_attempt(tx: Session, request_ids: Iterable[RequestId]) -> None:
    """Subtract a delivery attempt that ended without a crash and without a result."""
    execute_in_batches(tx, _UNDO_ATTEMPT, request_ids)


_LAST_ANSWERED = select(func.max(col(RequestRow.seq_id))).where(
    col(RequestRow.model_id) == bindparam("model_id"), col(RequestRow.status) != "open"
)
_LAST_ANSWERED_BY_KIND = _LAST_ANSWERED.where(col(RequestRow.kind).in_(bindparam("kinds", expanding=True)))


def get_last_answered_seq(tx: Session, model_id: ModelId, kinds: Collection[str] | None = None) -> int:
    """Return the highest `seq_id` of the completed requests of a model, or 0 if there is none.

    `kinds` selects requests of these kinds; None means any kind. Deleted requests always count,
    because their kind is unknown.
    """
    if kinds is None:
        highest = execute(tx, _LAST_ANSWERED, {"model_id": model_id})
    else:
        highest = execute(tx, _LAST_ANSWERED_BY_KIND, {"model_id": model_id, "kinds": list(kinds)})
    deleted = get_high_water_mark(tx, f"model/{model_id}")
    return max(highest.scalar_one() or 0, deleted, 0)


_COUNT_ANSWER = PreparedStatement(lambda _: update(AnswerCounterRow).values(value=col(AnswerCounterRow.value) + 1), ())
_COMPLETION = (
    update(RequestRow)
    .where(col(RequestRow.request_id) == bindparam("name"), col(RequestRow.status) == "open")
    .values(
        status=bindparam("outcome"),
        result=bindparam("data"),
        result_crc=bindparam("crc"),
        effect_order=bindparam("effect"),
        completed_at=bindparam("now"),
        attempts=0,  # a replay counts its attempts from 0
        is_alone=False,
        crashes=0,
        answer_order=select(col(AnswerCounterRow.value)).scalar_subquery(),
    )
)
_COMPLETE = PreparedStatement(lambda _: _COMPLETION, ("name", "outcome", "data", "crc", "effect", "now"))


def complete(
    tx: Session, request_id: RequestId, result: bytes, *, failed: bool, effect_order: int | None, now: float
) -> bool:
    """Store the result of an open request. Return False if it is complete or does not exist."""
    _COUNT_ANSWER.execute(tx, {})
    values = {"outcome": "failed" if failed else "done", "data": result, "crc": crc32(result), "effect": effect_order}
    return _COMPLETE.execute(tx, {"name": request_id, "now": now, **values}).rowcount == 1


_RESULT_BYTES = func.coalesce(func.length(col(RequestRow.result)), 0)
_RESULT = select(
    col(RequestRow.status),
    col(RequestRow.kind),
    case((bindparam("max_bytes") < _RESULT_BYTES, None), else_=col(RequestRow.result)).label("result"),
    col(RequestRow.result_crc),
    col(RequestRow.created_at),
    case((bindparam("max_bytes") < _RESULT_BYTES, _RESULT_BYTES), else_=0),
).where(
    col(RequestRow.request_id) == bindparam("request_id"),
    or_(bindparam("owner", type_=String).is_(None), col(RequestRow.owner) == bindparam("owner", type_=String)),
)


def get_state(tx: Session, request_id: RequestId, owner: str | None, max_result_bytes: int = 2**62) -> FutureState:
    """Return the state and result of a request.

    The status is "unknown" if the request does not exist or belongs to another owner. `owner` None
    means any owner. A result larger than `max_result_bytes` is left out.
    """
    wanted = {"request_id": request_id, "owner": owner, "max_bytes": max_result_bytes}
    row = execute(tx, _RESULT, wanted).one_or_none()
    if row is None:
        return FutureState(status="unknown")
    status, kind, data, crc, created_at, num_left_out = row
    if data is None and not num_left_out:
        return FutureState("open" if status == "open" else "pruned", kind, None, created_at)
    if crc is not None and data is not None and crc != crc32(data):
        return FutureState("damaged", kind, None, created_at)
    return FutureState("failed" if status == "failed" else "done", kind, data, created_at, num_left_out)


_OUTCOMES = select(col(RequestRow.request_id), col(RequestRow.status)).where(
    is_in_batch(col(RequestRow.request_id)), col(RequestRow.status) != "open"
)


def is_open_sample(tx: Session, request_id: RequestId) -> bool:
    """Return whether a request is an open sample request."""
    statement = select(col(RequestRow.kind)).where(col(RequestRow.request_id) == request_id, IS_OPEN)
    return execute(tx, statement).scalar() == "sample"


def get_outcomes(tx: Session, request_ids: Iterable[RequestId]) -> dict[RequestId, Literal["done", "failed"]]:
    """Return the outcomes of the requests that are complete."""
    return dict(execute_in_batches(tx, _OUTCOMES, request_ids))


_OPEN_OWNERS = select(col(RequestRow.request_id), col(RequestRow.owner)).where(
    is_in_batch(col(RequestRow.request_id)), col(RequestRow.status) == "open"
)


def get_open_owners(tx: Session, request_ids: Iterable[RequestId]) -> dict[RequestId, str]:
    """Return the owners of the requests that are open."""
    return dict(execute_in_batches(tx, _OPEN_OWNERS, request_ids))


def has_answered_since(tx: Session, since: float) -> bool:
    """Return whether any request was completed at or after a time."""
    statement = select(col(RequestRow.position)).where(col(RequestRow.completed_at) >= since).limit(1)
    return execute(tx, statement).first() is not None


_MARK_FETCHED = (
    update(RequestRow)
    .where(is_in_batch(col(RequestRow.request_id)), col(RequestRow.fetched_at).is_(None))
    .values(fetched_at=bindparam("now"))
)


def mark_fetched(tx: Session, request_ids: Iterable[RequestId], now: float) -> None:
    """Record when clients fetched these results. Later fetches do not change the time."""
    execute_in_batches(tx, _MARK_FETCHED, request_ids, now=now)
