"""The pages about the server: overview and health."""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from platform import python_version
from typing import Literal

import sqlalchemy

from skyrl_tx import __version__
from skyrl_tx.apps.console import queries
from skyrl_tx.apps.console.format import duration
from skyrl_tx.apps.console.recent import Recent
from skyrl_tx.apps.console.views.engines import engine_lines
from skyrl_tx.apps.console.views.overview import gauge_tiles, rate_tiles, user_lines
from skyrl_tx.apps.console.views.runs import request_view
from skyrl_tx.apps.console.visit import Page, PageTable, Visit
from skyrl_tx.apps.teams import usage
from skyrl_tx.apps.teams.usage import BUCKET_S
from skyrl_tx.store import engine_state, notices, placement, server_points
from skyrl_tx.store.dialect import DATABASE_NAME
from skyrl_tx.store.tables import EngineStateRow

pages = PageTable()
_OVERVIEWS: Recent[Mapping[str, object]] = Recent(lifetime_s=1.0)
_HISTORY_S = 2 * 3600
_MAX_HISTORY = 1000
_FAILURES = 8
_NOTICES = 200
_DAY_S = 86_400
_SECRET_SETTINGS = frozenset({"database_url", "store_url"})


@dataclass(frozen=True, slots=True)
class EngineView:
    """The engine in a few words."""

    level: Literal["ok", "busy", "problem"]
    word: str
    detail: str


def engine_view(visit: Visit, state: EngineStateRow | None) -> EngineView:
    """Describe the engine as `healthz` does."""
    report = visit.context.engine.report()
    if report.problem is not None:
        word = state.status if state is not None and state.status != "ready" else "not ready"
        return EngineView("problem", word, report.problem)
    activity = "" if state is None else state.activity
    if report.outage is not None or report.activity is not None:
        return EngineView("busy", "busy" if report.outage is None else "partly down", report.detail or "")
    detail = activity or "waits for requests"
    return EngineView("ok", "ready", detail if report.progress is None else f"{detail}; {report.progress}")


@pages.get("/overview")
def overview(visit: Visit) -> Page:
    """Show what the server does now, and for whom."""
    # Everyone of an owner, and all admins, see the same; many have the page open.
    key = id(visit.context), visit.caller.owner_filter
    return Page("overview.jinja", _OVERVIEWS.get(key, lambda: _overview(visit)))


def _overview(visit: Visit) -> Mapping[str, object]:
    now, owner = visit.now, visit.caller.owner_filter
    engines = visit.read(engine_state.all_engines)
    state = engine_state.main_engine(engines)
    groups = visit.read(lambda tx: queries.open_groups(tx, None))
    oldest = min((group.first_position for group in groups), default=None)
    oldest_at = None if oldest is None else visit.read(lambda tx: queries.arrived_at(tx, oldest))
    buckets = visit.read(lambda tx: queries.usage_by_bucket(tx, int(now) - _HISTORY_S - BUCKET_S))
    history = visit.read(lambda tx: server_points.since(tx, now - _HISTORY_S, _MAX_HISTORY))
    recent = visit.read(lambda tx: usage.totals(tx, owner, now - BUCKET_S, ("owner",)))
    today = visit.read(lambda tx: usage.totals(tx, owner, int(now) // _DAY_S * _DAY_S, ("owner",)))
    failed = visit.read(lambda tx: queries.failed_requests(tx, owner, _FAILURES))
    own = [group for group in groups if visit.caller.acts_for(group.owner)]
    lines, hidden = user_lines(own, recent, today)
    return {
        "engine": engine_view(visit, state),
        "tiles": [
            *rate_tiles(buckets, history, now),
            *gauge_tiles(engine_state.meters_of(engines), history),
        ],
        "waiting": sum(group.number for group in groups),
        "oldest": None if oldest_at is None else duration(max(now - oldest_at, 0.0)),
        "lines": lines,
        "hidden": hidden,
        "failures": [request_view(line) for line in failed],
        "devices": [] if state is None else state.capabilities.get("devices", []),
        "model": visit.context.settings.public_model_name,
    }


@pages.get("/health")
def health(visit: Visit) -> Page:
    """Show the state of engine, database and disk; to admins also settings and warnings."""
    state = visit.read(engine_state.get)
    settings = visit.context.settings
    is_admin = visit.caller.is_admin
    disk = shutil.disk_usage(settings.data_dir)
    database = settings.data_dir / DATABASE_NAME
    capabilities: Mapping[str, object] = {} if state is None else state.capabilities
    shown = {
        name: str(value)
        for name, value in sorted(settings.model_dump().items())
        if name not in _SECRET_SETTINGS and value is not None
    }
    return Page(
        "health.jinja",
        {
            "engine": engine_view(visit, state),
            "state": state,
            "engines": engine_lines(visit.read(placement.holdings), visit.caller.acts_for),
            "has_several_engines": len(visit.read(engine_state.all_engines)) > 1,  # also those that have ended
            "capabilities": capabilities,
            "fingerprint": capabilities.get("fingerprint") or {},
            "disk_free": disk.free,
            "disk_share": disk.used / disk.total,
            "database": "SQLite" if settings.store_url is None else settings.store_url.partition(":")[0],
            "database_bytes": database.stat().st_size if database.exists() else None,
            "write_failure": visit.context.store.write_failure,
            "versions": {"skyrl_tx": __version__, "Python": python_version(), "SQLAlchemy": sqlalchemy.__version__},
            "settings": shown if is_admin else {},
            "notices": visit.read(lambda tx: notices.newest(tx, _NOTICES)) if is_admin else [],
        },
    )
