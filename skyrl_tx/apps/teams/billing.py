"""The usage of a time window as billing events, one for each hour, session and kind of work.

The SDK defines the format of the response in `types/billing_usage_response.py`.
"""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta

from sqlmodel import Session

from skyrl_tx.apps.teams import schemas, storage_hours, usage
from skyrl_tx.apps.teams.prices import GIGABYTE, Prices, compute_storage_cost, compute_token_cost, get_price_per_million
from skyrl_tx.apps.teams.storage_hours import StorageHour
from skyrl_tx.apps.teams.usage import HOUR_S, GroupColumn, Total
from skyrl_tx.contract.ids import SessionId
from skyrl_tx.server.errors import bad_request
from skyrl_tx.server.identity.authentication import USER_URN
from skyrl_tx.store import sessions

MAX_DAYS = 14
"""The longest time window of a request."""
_MAX_EVENTS = 50_000
_EVENT_COLUMNS: tuple[GroupColumn, ...] = ("hour", "session_id", "owner", "project_id", "base_model")
"""There is one event for each combination of these columns and kind of work."""


def check_window(starting_on: datetime, ending_before: datetime, now: datetime) -> tuple[int, int]:
    """Return the start and end of a time window in seconds since the epoch.

    Both must be the start of an hour. Raises ApiError 400, which names the parameter that is wrong.
    """
    start, end = _parse_hour("starting_on", starting_on), _parse_hour("ending_before", ending_before)
    if start > now:
        raise bad_request(f"starting_on: {start.isoformat()} is in the future")
    if end <= start:
        raise bad_request(f"ending_before: {end.isoformat()} is not after starting_on, {start.isoformat()}")
    if end - start > timedelta(days=MAX_DAYS):
        raise bad_request(f"ending_before: {end.isoformat()} is more than {MAX_DAYS} days after starting_on")
    return int(start.timestamp()), int(end.timestamp())


def _parse_hour(name: str, at: datetime) -> datetime:
    try:
        at = at.replace(tzinfo=UTC) if at.tzinfo is None else at.astimezone(UTC)
    except OverflowError:
        raise bad_request(f"{name}: {at.isoformat()} is outside the range of dates in UTC") from None
    if at.minute or at.second or at.microsecond:
        raise bad_request(
            f"{name}: {at.isoformat()} is not the start of an hour in UTC, for example 2025-11-28T14:00:00Z"
        )
    return at


def read_usage(
    tx: Session, owner: str | None, start: int, end: int, *, prices: Prices, base_model: str
) -> schemas.UsageResponse:
    """Return the events from `start` until `end`.

    `owner` None means all owners. If the usage does not name a base model, because it is for base
    weights or for a run that was removed, its events get `base_model`. Raises ApiError 400 if there
    are too many events.
    """
    # Read the usage
    totals = usage.read_totals(tx, owner, start, _EVENT_COLUMNS, until=end, limit=_MAX_EVENTS)
    stored = storage_hours.read_hours(tx, owner, start, end, limit=_MAX_EVENTS)
    if max(len(totals), len(stored)) >= _MAX_EVENTS:
        raise bad_request(f"ending_before: the window has more than {_MAX_EVENTS:,} events; ask for a shorter one")

    # Make the events, and add the metadata of their sessions
    events = [*_make_work_events(totals, prices, base_model), *_make_storage_events(stored, prices)]
    events.sort(key=lambda event: (event.bucket_start, -event.num_tokens))
    names = {SessionId(event.session_id) for event in events if event.session_id}
    raw_metadata = sessions.get_metadata(tx, names)
    metadata = {name: {key: str(value) for key, value in raw_metadata.get(name, {}).items()} for name in sorted(names)}
    return schemas.UsageResponse(
        data=events, sessions={name: schemas.UsageSession(user_metadata=metadata[name] or None) for name in metadata}
    )


def _make_work_events(totals: Sequence[Total], prices: Prices, base_model: str) -> Iterator[schemas.UsageEvent]:
    # Add up the tokens, or the number of checkpoints, by group and kind. Forward passes count as
    # training.
    merged: dict[tuple[object, ...], int] = {}
    for total in totals:
        kind = "training" if total.kind == "forward" else total.kind
        key = (*total.group, kind)
        amount = total.requests if kind == "checkpoint" else total.tokens
        if amount:  # an optimizer step has no tokens
            merged[key] = merged.get(key, 0) + amount

    for (hour, session_id, owner, project_id, model, kind), amount in merged.items():
        yield _make_event(
            int(str(hour)),
            str(session_id),
            str(owner),
            None if project_id is None else str(project_id),
            base_model=base_model if model is None else str(model),
            event_info=_make_info(str(kind), amount),
            estimated_cost_usd=compute_token_cost(prices, str(kind), amount),
            effective_rate_usd_per_million_tokens=get_price_per_million(prices, str(kind)),
        )


def _make_info(kind: str, amount: int) -> schemas.EventInfo:
    match kind:
        case "training":
            return schemas.TrainingEvent(token_count=amount)
        case "sampled":
            return schemas.SampledEvent(token_count=amount)
        case "checkpoint":
            return schemas.CheckpointEvent(count=amount)
        case _:
            return schemas.PrefillEvent(cached=kind == "prefill_cached", token_count=amount)


def _make_storage_events(hours: Sequence[StorageHour], prices: Prices) -> Iterator[schemas.UsageEvent]:
    for hour in hours:
        gigabyte_hours = hour.num_bytes / GIGABYTE
        yield _make_event(
            hour.hour_at,
            hour.session_id,
            hour.owner,
            hour.project_id,
            event_info=schemas.StorageEvent(gigabyte_hours=gigabyte_hours),
            estimated_cost_usd=compute_storage_cost(prices, gigabyte_hours),
            effective_rate_usd_per_gigabyte_month=prices.storage,
        )


def _make_event(hour: int, session_id: str, owner: str, project_id: str | None, **values: object) -> schemas.UsageEvent:
    return schemas.UsageEvent.model_validate(
        {
            "bucket_start": datetime.fromtimestamp(hour, UTC),
            "bucket_end": datetime.fromtimestamp(hour + HOUR_S, UTC),
            "user_id": f"{USER_URN}{owner}",
            "user_name": owner,
            "session_id": session_id,
            "project_id": project_id,
            **values,
        }
    )
