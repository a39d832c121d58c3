"""Store metrics that only the client knows, for example rewards, and find the model they belong to.

Clients can log metrics in three ways: through an HTTP endpoint, with trackio, or through the SDK's
telemetry, for example `client.get_telemetry().log("metrics", {"step": 3, "reward": 0.4})`.
"""

import math
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import cast

from sqlmodel import Session

from skyrl_tx.apps.history import logged_metrics
from skyrl_tx.apps.history.logged_metrics import CLIENT_RUN, LoggedRun, NewLoggedPoint
from skyrl_tx.contract.errors import UserError
from skyrl_tx.contract.ids import ModelId, SessionId
from skyrl_tx.server.context import ApiCall
from skyrl_tx.server.errors import ApiError
from skyrl_tx.server.identity import access
from skyrl_tx.server.identity.access import decode_spec
from skyrl_tx.server.submission.validation import is_storable
from skyrl_tx.store import models, sessions
from skyrl_tx.store.database import Store, get_existing
from skyrl_tx.store.tables import ModelRow, SessionRow

Values = dict[str, float | None]
MAX_METRICS = 256
"""Limit on the metrics in one point."""
MAX_NAME_LENGTH = 200
"""Limit on the characters in the name of a metric, run or project."""
MAX_STEP = 2**53
"""Limit on steps. Larger integers are rounded by JSON readers that use floats."""
ACTIVE_S = 600.0
"""A model counts as active for this time after its last request.

New metrics can be matched to active models only.
"""
_MAX_POINTS = 500
"""Limit on the points in a transaction. Keeps write transactions short, so that other writes do not wait long."""
_MAX_CONFIG_NAMES = 256
_MAX_CONFIG_CHARS = 2**15
_NON_FINITE = frozenset({"NaN", "Infinity", "-Infinity"})
"""Strings that loggers send for numbers that JSON cannot express."""
_EVENT = "metrics"
"""Name of telemetry events that contain metrics."""
_NOT_METRICS = frozenset({"step", "model_id"})
_MODEL_NAMES = "model_id", "training_run_id"


def make_client_run(owner: str, model_id: ModelId) -> LoggedRun:
    """Return the logged run for metrics of a model that the client named."""
    return LoggedRun(owner=owner, project="", key=model_id, name=CLIENT_RUN, model_id=model_id)


def store_metrics(
    store: Store,
    run: LoggedRun,
    points: Sequence[NewLoggedPoint],
    now: float,
    config: Mapping[str, object] | None = None,
) -> int:
    """Store the points of a logged run and return how many are new.

    Raises UserError if the owner has too many logged runs.
    """

    def work(tx: Session, points: Sequence[NewLoggedPoint]) -> int:
        row = logged_metrics.open_run(tx, run, now, config)
        if row.seeks_model:
            candidates = find_candidate_models(tx, run, row.config, now)
            if candidates:
                logged_metrics.set_model(tx, row, candidates[0].model_id if len(candidates) == 1 else None)
        return logged_metrics.add_points(tx, row, points, now)

    parts = (points[start : start + _MAX_POINTS] for start in range(0, len(points), _MAX_POINTS))
    return sum(store.write(lambda tx, part=part: work(tx, part)) for part in parts)


def find_candidate_models(tx: Session, run: LoggedRun, config: Mapping[str, object], now: float) -> list[ModelRow]:
    """Return the models that a logged run may belong to.

    If the config names a model of the owner, the result is this model. Otherwise the candidates are
    the owner's active models with the LoRA rank in the config. If the sessions of some candidates
    have the same name as the logged run, only these candidates are returned.
    """
    # A model that the config names
    for name in _MODEL_NAMES:
        value = config.get(name)
        if isinstance(value, str) and models.get_owner(tx, ModelId(value)) == run.owner:
            row = models.get(tx, ModelId(value))
            return [] if row is None else [row]

    # Active models with the same LoRA rank
    rank = config.get("lora_rank")
    candidates = [
        row for row in models.list_active(tx, run.owner, now - ACTIVE_S) if rank in (None, decode_spec(row).lora.rank)
    ]

    # With `wandb_name`, the cookbook gives the session and the logged run the same name
    same_name = [row for row in candidates if get_existing(tx, SessionRow, row.session_id).display_name == run.name]
    return same_name or candidates


def to_object(value: object) -> Mapping[str, object]:
    """Return `value` if it is a JSON object, else an empty object."""
    return cast(Mapping[str, object], value) if isinstance(value, dict) else {}


def to_list(value: object) -> Sequence[object]:
    """Return `value` if it is a JSON list, else an empty list."""
    return cast(list[object], value) if isinstance(value, list) else ()


def clean_values(metrics: Mapping[str, object]) -> Values:
    """Return the numbers among logged values, with None for NaN and infinity.

    Other values are left out, and so are all values after the first `MAX_METRICS`.
    """
    values: Values = {}
    for name, value in metrics.items():
        if len(values) == MAX_METRICS:
            break
        if clean_name(name) is None:
            continue
        if isinstance(value, bool | int | float):
            values[name] = _clean_number(value)
        elif isinstance(value, str) and value in _NON_FINITE:
            values[name] = None
    return values


def clean_name(value: object) -> str | None:
    """Return a logged name, or None if it is not a valid name.

    A name is a text of 1 to `MAX_NAME_LENGTH` characters that every database can store.
    """
    if isinstance(value, str) and 0 < len(value) <= MAX_NAME_LENGTH and is_storable(value):
        return value
    return None


def clean_step(value: object) -> int | None:
    """Return a logged step, or None if it is not an integer or is beyond `MAX_STEP`."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) <= MAX_STEP:
        return value
    return None


def clean_config(value: object) -> dict[str, object]:
    """Return the scalars of a logged config.

    Other values are left out, and so is everything beyond the size limits.
    """
    config: dict[str, object] = {}
    num_chars = 0
    for name, part in to_object(value).items():
        if isinstance(part, int | float) and _clean_number(part) is None:
            continue
        if not is_storable(name) or (isinstance(part, str) and not is_storable(part)):
            continue
        if isinstance(part, str | int | float):
            num_chars += len(name) + (len(part) if isinstance(part, str) else 20)
            if len(config) == _MAX_CONFIG_NAMES or num_chars > _MAX_CONFIG_CHARS:
                break
            config[name] = part
    return config


def _clean_number(value: float) -> float | None:
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def keep_telemetry(call: ApiCall) -> None:
    """Store the `metrics` events in a telemetry request of a session of the caller.

    All other events and malformed events are ignored. Raises StoreError if the database fails.
    """
    # Most telemetry has no metrics. Do not parse it.
    if f'"{_EVENT}"'.encode() not in call.body.raw or not call.caller.has_full_scope:
        return

    try:
        call.add_stored(len(call.body.raw))
        body = call.body.parse_request().value
        session_id = SessionId(clean_name(body.get("session_id")) or "")
        points: defaultdict[str | None, list[NewLoggedPoint]] = defaultdict(list)
        for model_name, point in _read_metrics(body):
            points[model_name].append(point)
        for model_name, model_points in points.items():
            run = call.store.read(lambda tx, name=model_name: _find_destination(tx, call, session_id, name))
            store_metrics(call.store, run, model_points, time.time())
    except (ApiError, UserError):
        return


def _read_metrics(body: Mapping[str, object]) -> Iterator[tuple[str | None, NewLoggedPoint]]:
    """Yield the metrics in a batch of telemetry events, with the model id in the event, if any."""
    for event in map(to_object, to_list(body.get("events"))):
        if event.get("event") != "GENERIC_EVENT" or event.get("event_name") != _EVENT:
            continue
        data = to_object(event.get("event_data"))
        step, log_id = clean_step(data.get("step")), clean_name(event.get("event_id"))
        values = clean_values({name: value for name, value in data.items() if name not in _NOT_METRICS})
        if step is not None and log_id is not None and values:
            yield clean_name(data.get("model_id")), NewLoggedPoint(log_id=log_id, step=step, values=values)


def _find_destination(tx: Session, call: ApiCall, session_id: SessionId, model_name: str | None) -> LoggedRun:
    """Find where to store metrics of a session.

    The metrics belong to the model that the event names, or else to the only model of the session.
    If the session has no model or multiple models, the metrics belong to a logged run with the name
    of the session. Raises ApiError 404 if the caller may not see the session or the model.
    """
    session = access.find_session(tx, call.caller, session_id)

    # The model that the event names, or the only model of the session
    if model_name is not None:
        model_id = access.find_model(tx, call.caller, ModelId(model_name)).model_id
        return make_client_run(models.get_owner(tx, model_id) or session.owner, model_id)
    trained = models.list_by_session(tx, session_id)
    if len(trained) == 1:
        return make_client_run(session.owner, trained[0].model_id)

    # A logged run for the session
    row = sessions.get(tx, session_id)
    name, project = (None, None) if row is None else (row.display_name, row.project_id)
    return LoggedRun(owner=session.owner, project=project or "", key=session_id, name=(name or session_id)[:200])
