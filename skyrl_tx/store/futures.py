"""Requests and their results: submitted once, taken up in order of arrival, answered once.

These functions run many times a second; they speak in columns and never load a `RequestRow` as an object.
"""

import base64
import hashlib
import re
import secrets
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any, Literal
from zlib import crc32

from sqlalchemy import RowMapping, String, and_, bindparam, case, func, insert, literal_column, or_, select, update
from sqlmodel import Session, col

from skyrl_tx.contract.ids import ModelId, RequestId, SamplingSessionId, SessionId
from skyrl_tx.store import pruning
from skyrl_tx.store.parts import in_parts, is_some
from skyrl_tx.store.tables import AnswerCounterRow, RequestRow

_NO_LIMIT = 2**62
_FORM = re.compile("req-[a-z2-7]{32}")


class ConflictingRequest(Exception):
    """The deduplication ids of a request were used before, for something else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRequest:
    """What the API submits.

    `key` holds the ids that make this request one and the same however often it is sent ("model/{model_id}/{seq_id}");
    "" is never a duplicate. `digest_body` is what a duplicate must agree in, by default `body`: what the client sent,
    without what the server added, such as seeds.
    """

    key: str
    kind: str
    owner: str
    session_id: SessionId
    body: bytes
    model_id: ModelId | None = None
    seq_id: int | None = None
    sampling_session_id: SamplingSessionId | None = None
    digest_body: bytes | None = None


@dataclass(frozen=True, slots=True)
class Submitted:
    """Where to ask for the result. `is_new` is False for a duplicate; `position` is then not looked up."""

    request_id: RequestId
    is_new: bool
    position: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingRequest:
    """A request as the engine takes it up. `position` is its order of arrival, over all models."""

    position: int
    request_id: RequestId
    kind: str
    body: bytes
    session_id: SessionId
    model_id: ModelId | None
    seq_id: int | None
    sampling_session_id: SamplingSessionId | None
    attempts: int
    created_at: float
    effect_order: int | None
    failed: bool
    is_damaged: bool = False
    """Whether the body is not as it was written; it is then left out."""
    num_left_out: int = 0
    """Bytes of the body, where it was left out for its size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FutureState:
    """How a request fares. `result` is set when done or failed.

    "pruned": it was answered, and the answer is gone; "damaged": the answer is not as it was written.
    """

    status: Literal["open", "done", "failed", "pruned", "damaged", "unknown"]
    kind: str = ""
    result: bytes | None = None
    created_at: float = 0.0


_IS_OPEN = col(RequestRow.status) == literal_column("'open'")  # spelt out, as the partial index on it must see it
_ALL_BUT_BODY = (
    col(RequestRow.position),
    col(RequestRow.request_id),
    col(RequestRow.kind),
    col(RequestRow.session_id),
    col(RequestRow.model_id),
    col(RequestRow.seq_id),
    col(RequestRow.sampling_session_id),
    col(RequestRow.attempts),
    col(RequestRow.created_at),
    col(RequestRow.effect_order),
    (col(RequestRow.status) == "failed").label("failed"),
    col(RequestRow.body_crc),
)
_PENDING = (*_ALL_BUT_BODY, col(RequestRow.body))

# Built once: these run for every request or turn, and building one takes longer than running it.
_DIGEST = select(col(RequestRow.digest)).where(col(RequestRow.request_id) == bindparam("request_id"))
_NEW = insert(RequestRow)
_RESULT = select(
    col(RequestRow.status),
    col(RequestRow.kind),
    col(RequestRow.result),
    col(RequestRow.result_crc),
    col(RequestRow.created_at),
).where(
    col(RequestRow.request_id) == bindparam("request_id"),
    or_(bindparam("owner", type_=String).is_(None), col(RequestRow.owner) == bindparam("owner", type_=String)),
)
_OWNERS_OF_OPEN = select(col(RequestRow.request_id), col(RequestRow.owner)).where(
    is_some(col(RequestRow.request_id)), col(RequestRow.status) == "open"
)
_OUTCOMES = select(col(RequestRow.request_id), col(RequestRow.status)).where(
    is_some(col(RequestRow.request_id)), col(RequestRow.status) != "open"
)
_MOST_ATTEMPTS = select(func.max(col(RequestRow.attempts))).where(is_some(col(RequestRow.request_id)))
_ATTEMPTED = update(RequestRow).where(is_some(col(RequestRow.request_id))).values(attempts=col(RequestRow.attempts) + 1)
_RELEASED = (
    update(RequestRow)
    .where(is_some(col(RequestRow.request_id)), col(RequestRow.attempts) > 0)  # an answer takes all marks away
    .values(attempts=col(RequestRow.attempts) - 1)
)
_FETCHED = (
    update(RequestRow)
    .where(is_some(col(RequestRow.request_id)), col(RequestRow.fetched_at).is_(None))
    .values(fetched_at=bindparam("now"))
)
_IS_LEFT_OUT = and_(
    col(RequestRow.kind) == "model_pass", func.length(col(RequestRow.body)) > bindparam("max_pass_bytes")
)
_OPEN_AFTER = (
    select(
        *_ALL_BUT_BODY,
        case((_IS_LEFT_OUT, None), else_=col(RequestRow.body)).label("body"),
        case((_IS_LEFT_OUT, func.length(col(RequestRow.body))), else_=0).label("num_left_out"),
    )
    .where(_IS_OPEN, col(RequestRow.position) > bindparam("after_position"))
    .order_by(col(RequestRow.position))
    .limit(bindparam("limit"))
)
_LAST = select(func.max(col(RequestRow.position)))
_SOME = select(*_PENDING).where(is_some(col(RequestRow.request_id))).order_by(col(RequestRow.position))
_COUNT_ANSWER = update(AnswerCounterRow).values(value=col(AnswerCounterRow.value) + 1)
_ANSWER = (
    update(RequestRow)
    .where(col(RequestRow.request_id) == bindparam("name"), col(RequestRow.status) == "open")
    .values(
        status=bindparam("outcome"),
        result=bindparam("data"),
        result_crc=bindparam("crc"),
        effect_order=bindparam("effect"),
        completed_at=bindparam("now"),
        attempts=0,  # counted anew where it is repeated
        answer_order=select(col(AnswerCounterRow.value)).scalar_subquery(),
    )
)


def request_id(key: str) -> RequestId:
    """The id of the request with these deduplication ids; a new random one for ""."""
    raw = hashlib.blake2b(key.encode(), digest_size=20).digest() if key else secrets.token_bytes(20)
    return RequestId(f"req-{base64.b32encode(raw).decode().lower()}")


def may_have_been(text: str) -> bool:
    """Whether `request_id` gives such ids: nobody comes upon one by chance, so it was somebody's request once."""
    return _FORM.fullmatch(text) is not None


def submit(tx: Session, new: NewRequest, now: float) -> Submitted:
    """Put a request on disk, or recognise it as one that is there already.

    Raises ConflictingRequest if its ids were used before for another body, the first stays as it is; and
    RequestForgotten if they were used for one that is forgotten by now.
    """
    name = request_id(new.key)
    digest = _digest(new)
    connection = tx.connection()
    if new.key:
        before = connection.execute(_DIGEST, {"request_id": name}).scalar_one_or_none()
        if before is not None:
            if before != digest:
                raise ConflictingRequest(f"{new.kind} request {new.key!r}: these ids were used for another request")
            return Submitted(name, is_new=False)
        numbered_by = pruning.numbered_by(new.model_id, new.sampling_session_id, new.seq_id)
        if numbered_by is not None and (new.seq_id or 0) <= pruning.mark(tx, numbered_by):
            raise pruning.RequestForgotten(
                f"{new.kind} request {new.key!r}: its number is used up: what had it was answered long ago and is gone"
            )
    inserted = connection.execute(
        _NEW,
        {
            "request_id": name,
            "kind": new.kind,
            "owner": new.owner,
            "session_id": new.session_id,
            "model_id": new.model_id,
            "seq_id": new.seq_id,
            "sampling_session_id": new.sampling_session_id,
            "body": new.body,
            "body_crc": crc32(new.body),
            "digest": digest,
            "status": "open",
            "attempts": 0,
            "created_at": now,
        },
    )
    (position,) = inserted.inserted_primary_key or (None,)
    return Submitted(name, is_new=True, position=position)


def _digest(new: NewRequest) -> bytes:
    return hashlib.blake2b(new.body if new.digest_body is None else new.digest_body, digest_size=20).digest()


def pending(tx: Session, after_position: int, limit: int, max_pass_bytes: int = _NO_LIMIT) -> list[PendingRequest]:
    """Open requests that arrived after a position, in order of arrival; larger bodies of passes are left out."""
    where = {"after_position": after_position, "limit": limit, "max_pass_bytes": max_pass_bytes}
    return [_checked(row) for row in tx.connection().execute(_OPEN_AFTER, where).mappings()]


def last_position(tx: Session) -> int:
    """The position of the request that arrived last, of those that are not forgotten; 0 if there is none."""
    return tx.connection().execute(_LAST).scalar_one() or 0


def some(tx: Session, request_ids: Iterable[RequestId]) -> list[PendingRequest]:
    """Those of the requests that are there, whole, in order of arrival."""
    rows = [row for part in in_parts(request_ids) for row in tx.connection().execute(_SOME, {"some": part}).mappings()]
    return [_checked(row) for row in rows]


def _checked(row: RowMapping) -> PendingRequest:
    columns: dict[str, Any] = dict(row)
    crc = columns.pop("body_crc")
    if columns["body"] is None:
        columns["body"] = b""
    elif crc is not None and crc != crc32(columns["body"]):
        columns |= {"body": b"", "is_damaged": True}
    return PendingRequest(**columns)


def effects_since(tx: Session, model_id: ModelId, effect_order: int) -> list[PendingRequest]:
    """Answered requests of a model whose effect came after the given one, in the order of their effects."""
    order = col(RequestRow.effect_order)
    wanted = select(*_PENDING).where(col(RequestRow.model_id) == model_id, order > effect_order).order_by(order)
    return [_checked(row) for row in tx.connection().execute(wanted).mappings()]


def mark_attempt(tx: Session, request_ids: Iterable[RequestId]) -> None:
    """Note, before it is tried, that a request is tried once more."""
    for some in in_parts(request_ids):
        tx.connection().execute(_ATTEMPTED, {"some": some})


def attempts(tx: Session, request_ids: Iterable[RequestId]) -> int:
    """How often the one of these that was tried most was tried."""
    found = [
        tx.connection().execute(_MOST_ATTEMPTS, {"some": some}).scalar_one_or_none() or 0
        for some in in_parts(request_ids)
    ]
    return max(found, default=0)


def release_attempt(tx: Session, request_ids: Iterable[RequestId]) -> None:
    """Take an attempt back: it was given up in good order, and the request is not to blame."""
    for some in in_parts(request_ids):
        tx.connection().execute(_RELEASED, {"some": some})


def last_answered_seq(tx: Session, model_id: ModelId, kinds: Collection[str] | None = None) -> int:
    """The highest `seq_id` of a model's answered requests, of certain kinds or of any; 0 if there is none.

    Of those that are forgotten the kind is not known: they count as any.
    """
    wanted = select(func.max(col(RequestRow.seq_id))).where(
        col(RequestRow.model_id) == model_id, col(RequestRow.status) != "open"
    )
    if kinds is not None:
        wanted = wanted.where(col(RequestRow.kind).in_(kinds))
    forgotten = pruning.mark(tx, f"model/{model_id}")
    return max(tx.connection().execute(wanted).scalar_one() or 0, forgotten, 0)


def complete(
    tx: Session, request_id: RequestId, result: bytes, *, failed: bool, effect_order: int | None, now: float
) -> bool:
    """Answer a request, for ever; False if it was answered before or does not exist."""
    connection = tx.connection()
    connection.execute(_COUNT_ANSWER)
    outcome = "failed" if failed else "done"
    values = {"name": request_id, "outcome": outcome, "data": result, "effect": effect_order, "now": now}
    answered = connection.execute(_ANSWER, {**values, "crc": crc32(result)})
    return answered.rowcount == 1


def result(tx: Session, request_id: RequestId, owner: str | None) -> FutureState:
    """How a request fares, and its result; "unknown" also for one of another owner than that, if one is given."""
    row = tx.connection().execute(_RESULT, {"request_id": request_id, "owner": owner}).one_or_none()
    if row is None:
        return FutureState(status="unknown")
    status, kind, data, crc, created_at = row
    if status == "open":
        return FutureState(status="open", kind=kind, created_at=created_at)
    if data is None:
        return FutureState(status="pruned", kind=kind, created_at=created_at)
    if crc is not None and crc != crc32(data):
        return FutureState(status="damaged", kind=kind, created_at=created_at)
    outcome = "failed" if status == "failed" else "done"
    return FutureState(status=outcome, kind=kind, result=data, created_at=created_at)


def statuses(tx: Session, request_ids: Iterable[RequestId]) -> dict[RequestId, Literal["done", "failed"]]:
    """Those of the requests that are answered, and how."""
    answered: dict[RequestId, Literal["done", "failed"]] = {}
    for some in in_parts(request_ids):
        for name, status in tx.connection().execute(_OUTCOMES, {"some": some}):
            answered[name] = "failed" if status == "failed" else "done"
    return answered


def owners_of_open(tx: Session, request_ids: Iterable[RequestId]) -> dict[RequestId, str]:
    """Those of the requests that are still to be answered, and whose they are."""
    owners: dict[RequestId, str] = {}
    for some in in_parts(request_ids):
        owners.update((name, owner) for name, owner in tx.connection().execute(_OWNERS_OF_OPEN, {"some": some}))
    return owners


def any_answered_since(tx: Session, since: float) -> bool:
    """Whether any request was answered at that time or later."""
    wanted = select(col(RequestRow.position)).where(col(RequestRow.completed_at) >= since).limit(1)
    return tx.connection().execute(wanted).first() is not None


def mark_fetched(tx: Session, request_ids: Iterable[RequestId], now: float) -> None:
    """Note that clients have their results; the first time counts."""
    for some in in_parts(request_ids):
        tx.connection().execute(_FETCHED, {"some": some, "now": now})
