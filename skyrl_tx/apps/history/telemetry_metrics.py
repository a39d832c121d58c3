"""Metrics that programs log through the SDK: `client.get_telemetry().log("metrics", {"step": 3, "reward": 0.4})`."""

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace

from sqlmodel import Session

from skyrl_tx.apps.history.client_metrics import (
    RunMetrics,
    as_list,
    as_object,
    metrics_of_model,
    readable_name,
    readable_step,
    readable_values,
    store_metrics,
)
from skyrl_tx.apps.history.logged import Logged, LoggedRun
from skyrl_tx.contract.errors import UserError
from skyrl_tx.contract.ids import ModelId, SessionId
from skyrl_tx.server.context import Call
from skyrl_tx.server.errors import ApiError
from skyrl_tx.server.identity import access
from skyrl_tx.store import models, sessions

EVENT = "metrics"
_NOT_METRICS = frozenset({"step", "model_id"})


def keep(call: Call) -> None:
    """Store the events named `metrics` of one of the caller's sessions; others, and what is malformed, are dropped.

    Raises StoreError.
    """
    if f'"{EVENT}"'.encode() not in call.body.raw or not call.caller.has_full_scope:
        return  # without parsing the body
    try:
        body = call.body.mapping()
        session_id = SessionId(readable_name(body.get("session_id")) or "")
        points: defaultdict[str | None, list[Logged]] = defaultdict(list)
        for model_name, point in _logged(body):
            points[model_name].append(point)
        for model_name, of_model in points.items():
            found = call.store.read(lambda tx, name=model_name: _destination(tx, call, session_id, name))
            store_metrics(call.store, replace(found, points=of_model), time.time())
    except (ApiError, UserError):
        return


def _logged(body: Mapping[str, object]) -> Iterator[tuple[str | None, Logged]]:
    """Yield the metrics among the events of a batch, each with the model that it names."""
    for event in map(as_object, as_list(body.get("events"))):
        if event.get("event") != "GENERIC_EVENT" or event.get("event_name") != EVENT:
            continue
        data = as_object(event.get("event_data"))
        step, log_id = readable_step(data.get("step")), readable_name(event.get("event_id"))
        values = readable_values({name: value for name, value in data.items() if name not in _NOT_METRICS})
        if step is not None and log_id is not None and values:
            yield readable_name(data.get("model_id")), Logged(log_id=log_id, step=step, values=values)


def _destination(tx: Session, call: Call, session_id: SessionId, model_name: str | None) -> RunMetrics:
    """Return the model that an event names, or the session's only one; with several or none the session itself.

    Raises ApiError 404 for a session or a model that the caller may not see.
    """
    session = access.session(tx, call.caller, session_id)
    if model_name is not None:
        model_id = access.model(tx, call.caller, ModelId(model_name)).model_id
        return metrics_of_model(models.owner(tx, model_id) or session.owner, model_id)
    trained = models.of_session(tx, session_id)
    if len(trained) == 1:
        return metrics_of_model(session.owner, trained[0].model_id)
    row = sessions.get(tx, session_id)
    name, project = (None, None) if row is None else (row.display_name, row.project_id)
    run = LoggedRun(owner=session.owner, project=project or "", key=session_id, name=(name or session_id)[:200])
    return RunMetrics(run=run, points=[])
