"""Reads what a session did, by model and by sampler: for its trace, and for its page."""

from collections import defaultdict
from dataclasses import replace

from sqlmodel import Session

from skyrl_tx.apps.history import logged, points, session_trace, timeline
from skyrl_tx.apps.history.session_trace import Group, Span
from skyrl_tx.apps.history.timeline import RequestTimes
from skyrl_tx.contract.ids import ModelId, SessionId
from skyrl_tx.store import models

_MAX_GROUPS = 200
"""Models, and samplers, of a session; the oldest are left out."""


def session_groups(
    tx: Session, session_id: SessionId, now: float, limit: int, *, after: int = 0, with_logged: bool = True
) -> list[Group]:
    """Return the newest requests of a session, at most `limit` of each source, by model and by sampler.

    `after` leaves out those up to a position. `with_logged` adds the metrics that the client logged.
    """
    by_model: defaultdict[ModelId, list[RequestTimes]] = defaultdict(list)
    by_sampler: defaultdict[str | None, list[Span]] = defaultdict(list)
    for row in timeline.requests_of_session(tx, session_id, limit, after):
        if row.model_id is not None:
            by_model[row.model_id].append(row)
        else:
            by_sampler[row.sampling_session_id].append(session_trace.request_span(row, now))
    groups: list[Group] = []
    left = limit
    for model in reversed(models.of_session(tx, session_id)[-_MAX_GROUPS:]):  # the oldest models get what is left
        found = points.series(tx, model.model_id, after, left) if after else points.newest(tx, model.model_id, left)
        logged_points = logged.read_points_of_model(tx, model.model_id, limit=left) if with_logged else []
        title = f"model {model.model_id.partition(':')[2] or model.model_id}"
        requests = by_model[model.model_id]
        groups.append(session_trace.model_group(title, model.model_id, requests, found, logged_points, now))
        left = max(0, left - len(found) - len(logged_points))
    groups.reverse()
    for name, spans in list(by_sampler.items())[-_MAX_GROUPS:]:
        title = "other requests" if name is None else f"sampler {name}"
        groups.append(Group(title=title, spans=spans, sampling_session_id=name))
    return groups


def newest_spans(groups: list[Group], limit: int) -> list[Group]:
    """Return the groups with their newest spans alone, at most `limit` together."""
    positions = sorted((span.position for group in groups for span in group.spans), reverse=True)
    if len(positions) <= limit:
        return groups
    first = positions[limit - 1] if limit else positions[0] + 1
    return [replace(group, spans=[span for span in group.spans if span.position >= first]) for group in groups]
