"""Read where the time of a run went, from rows that the server stores anyway.

Training requests are read from the points of the run, which are kept with it. Sample requests are
kept for about an hour, so older iterations of a run that samples are left out.
"""

import math
from collections.abc import Callable, Mapping, Sequence

from sqlalchemy import select
from sqlmodel import Session, col

from skyrl_tx.apps.history import kept_samples, points
from skyrl_tx.apps.history.advice import find_advice
from skyrl_tx.apps.history.breakdown import Breakdown, Compiling, drop_pauses, split_iterations
from skyrl_tx.apps.history.hints import find_device_users
from skyrl_tx.apps.history.timeline import make_model_group, make_request_span, read_requests_of_session
from skyrl_tx.apps.teams import usage
from skyrl_tx.contract.ids import ModelId, SessionId
from skyrl_tx.store import engine_state, models, sessions
from skyrl_tx.store.database import execute
from skyrl_tx.store.tables import ModelRow, SamplingSessionRow

_MAX_ITERATIONS = 50
_MAX_POINTS = 2000
_MAX_REQUESTS = 4000
_MAX_GAUGES = 3000
_SAMPLING = ("sampled", "prefill", "prefill_cached")
"""Kinds of usage of sample requests."""


def read_breakdown(tx: Session, run: ModelRow, may_see: Callable[[str], bool]) -> Breakdown:
    """Read the newest iterations of a run.

    `may_see` tells whether the reader may see the name of an owner.
    """
    # Requests
    model_id, session_id, owner = run.model_id, run.session_id, models.get_owner(tx, run.model_id) or ""
    newest = points.read_newest(tx, model_id, _MAX_POINTS)
    ends = [point.at for point in newest if point.kind == "step"]
    if not ends:
        return Breakdown(iterations=[])
    now = newest[-1].at
    rows = read_requests_of_session(tx, session_id, _MAX_REQUESTS)
    training = make_model_group("", model_id, [row for row in rows if row.model_id == model_id], newest, (), now).spans
    foreign = _list_samplers_of_other_runs(tx, session_id, model_id)
    sampling = [
        make_request_span(row, now) for row in rows if row.kind == "sample" and row.sampling_session_id not in foreign
    ]

    # All requests since this time are known
    sampled = points.read_sampled(tx, model_id, owner, limit=2)
    since = min(span.created_at for span in training) if len(newest) < _MAX_POINTS else ends[0]
    if len(ends) > _MAX_ITERATIONS:
        since = max(since, ends[-_MAX_ITERATIONS - 1])
    if sampling:
        since = max(since, min(span.created_at for span in sampling))
    elif sampled or any(total.kind in _SAMPLING for total in usage.read_totals(tx, None, 0, session_ids={session_id})):
        return Breakdown(iterations=[])

    # The server in this time
    gauges = [(at, values) for at, values in engine_state.list_gauges(tx, since, _MAX_GAUGES) if at <= ends[-1]]
    compiling = [
        Compiling(at - engine_state.PERIOD_S, at, engine_state.PERIOD_S * values["compile_share"])
        for at, values in gauges
        if values.get("compile_share")
    ]
    users = find_device_users(tx, since, model_id, owner, may_see, until=ends[-1])
    others_share = sum(user.device_s for user in users) / max(ends[-1] - since, 1.0)
    iterations = split_iterations([*training, *sampling], compiling, min(others_share, 1.0), since)

    return Breakdown(
        iterations=drop_pauses(iterations),
        decode_fill=_compute_decode_fill([values for _, values in gauges]),
        batch_fill=_compute_batch_fill([values for _, values in gauges]),
        has_single_samples=any(kept_samples.has_repeated_prompts(tx, model_id, row.step, owner) for row in sampled),
        other_users=users,
    )


def describe_last_run(tx: Session, owner: str, session_id: SessionId) -> str | None:
    """Return what slowed down the last run of an owner, or None.

    Only the session before the given session counts, so each run is described at most once.
    """
    newest = sessions.list_ids(tx, owner, 2, 0)
    runs = models.list_by_session(tx, newest[1]) if len(newest) == 2 and newest[0] == session_id else []
    if not runs:
        return None
    run = max(runs, key=lambda run: run.last_request_at)
    advice = find_advice(read_breakdown(tx, run, lambda name: name == owner))
    return f"last run {run.model_id}: {advice[0].text} {advice[0].advice}" if advice else None


def _list_samplers_of_other_runs(tx: Session, session_id: SessionId, model_id: ModelId) -> set[str]:
    """Return the samplers of a session with weights of another run of this session.

    Other samplers, for example of base weights, may be the teacher or the reference of the run.
    """
    others = {row.model_id for row in models.list_by_session(tx, session_id)} - {model_id}
    paths = tuple(f"tinker://{other}/" for other in others)
    columns = col(SamplingSessionRow.sampling_session_id), col(SamplingSessionRow.model_id)
    statement = select(*columns, col(SamplingSessionRow.model_path))
    rows = execute(tx, statement.where(col(SamplingSessionRow.session_id) == session_id)) if others else ()
    return {name for name, model, path in rows if model in others or (path or "").startswith(paths)}


def _compute_decode_fill(gauges: Sequence[Mapping[str, float]]) -> float | None:
    """Return the mean share of the decode rows that were in use while any of them was, or None."""
    fills = [
        values["decode_slots_used"] / values["decode_slots"] for values in gauges if values.get("decode_slots_used")
    ]
    return math.fsum(fills) / len(fills) if fills else None


def _compute_batch_fill(gauges: Sequence[Mapping[str, float]]) -> float | None:
    """Return the share of the positions of micro-batches that held a token, or None."""
    rows = [values for values in gauges if "padding_tokens_per_s" in values]
    tokens = math.fsum(values.get("training_tokens_per_s", 0.0) for values in rows)
    padding = math.fsum(values["padding_tokens_per_s"] for values in rows)
    return tokens / (tokens + padding) if tokens else None
