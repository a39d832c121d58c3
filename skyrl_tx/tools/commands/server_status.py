"""The state of a server as its database describes it, so that a dead server is described too."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlmodel import Session

from skyrl_tx.contract import codec
from skyrl_tx.contract.results import Failure
from skyrl_tx.store import engine_state, server_points, totals
from skyrl_tx.store.pauses import pauses_of
from skyrl_tx.store.tables import EngineStateRow

SILENCE_S = 10.0
"""Time without a published status after which an engine counts as not running."""
HISTORY_S = 900.0
"""Time for which the server's gauges are read."""
_MEAN_OVER_S = 300.0
_RATES = (
    *("training_tokens_per_s", "sampled_tokens_per_s", "prompt_tokens_per_s"),
    *("requests_completed_per_s", "requests_failed_per_s"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerStatus:
    """One look at the database; all times are seconds ago."""

    engine: str
    """The engine's state in one word: its published status, `not running` or `never started`."""
    engine_silent_s: float | None
    activity: str
    activity_s: float | None
    detail: str
    devices: tuple[str, ...]
    num_open: int
    oldest_s: float | None
    num_active_sessions: int
    work: Sequence[Mapping[str, Any]]
    failures: Sequence[Mapping[str, Any]]
    meters: Mapping[str, Any]
    """The engine's last `totals`, `queues`, `places` and `backend`; empty if it published nothing."""
    sampled_s: float | None
    """Age of the newest row that an API process wrote; they write one each ten seconds."""
    rates: Mapping[str, float]
    """Means of the last five minutes."""
    history: Mapping[str, Sequence[float]]
    """The rates of the last 15 minutes, in order."""


def read(tx: Session, host: str | None = None) -> ServerStatus:
    """Read the state of the server; with `host`, of the engines of that machine alone."""
    now, shared_now = time.time(), engine_state.shared_time(tx)
    rows = [row for row in engine_state.all_engines(tx) if host in (None, row.host)]
    row = engine_state.main_engine(rows)
    found = totals.read(tx, now, pauses_of(*rows))
    points = server_points.since(tx, now - HISTORY_S)
    recent = [values for at, values in points if at > now - _MEAN_OVER_S]
    return ServerStatus(
        engine=_engine(row, shared_now),
        engine_silent_s=None if row is None else round(max(shared_now - row.updated_at, 0.0), 1),
        activity="" if row is None else row.activity,
        activity_s=None if row is None or row.activity_since is None else round(shared_now - row.activity_since, 1),
        detail="" if row is None else row.detail,
        devices=() if row is None else tuple(map(str, _list(row.capabilities.get("devices")))),
        num_open=found.num_open,
        oldest_s=None if found.oldest_at is None else round(now - found.oldest_at, 1),
        num_active_sessions=found.num_active_sessions,
        work=[
            {
                "owner": each.owner,
                "model": each.model_id,
                "kind": each.kind,
                "waiting": each.num_waiting,
                "running": each.num_running,
                "oldest_s": round(now - each.oldest_at, 1),
            }
            for each in totals.open_work(tx)
        ],
        failures=[
            {"ago_s": round(now - each.at), "owner": each.owner, "kind": each.kind, "message": _message(each.result)}
            for each in totals.failed(tx)
        ],
        meters=engine_state.meters_of(rows) or {},
        sampled_s=round(now - points[-1][0], 1) if points else None,
        rates={name: round(sum(v.get(name, 0.0) for v in recent) / len(recent), 1) for name in _RATES if recent},
        history={name: [values.get(name, 0.0) for _, values in points] for name in _RATES},
    )


def _engine(row: EngineStateRow | None, shared_now: float) -> str:
    if row is None:
        return "never started"
    return "not running" if shared_now - row.updated_at > SILENCE_S else row.status


def _list(value: object) -> Sequence[object]:
    return value if isinstance(value, list) else ()


def _message(result: bytes) -> str:
    try:
        failure = codec.decode(result)
    except codec.CodecError:
        return "the stored result is damaged"
    return failure.message if isinstance(failure, Failure) else ""
