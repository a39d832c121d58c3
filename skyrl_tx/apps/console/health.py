"""The health page: the state of engines, database and disk.

Admins also see settings and warnings.
"""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from platform import python_version
from typing import Literal

import sqlalchemy
from starlette.responses import JSONResponse, Response

from skyrl_tx import __version__
from skyrl_tx.apps.console.visit import Page, PageTable, Visit
from skyrl_tx.contract.ids import ModelId
from skyrl_tx.store import engine_state, notices, placement
from skyrl_tx.store.dialect import DATABASE_NAME
from skyrl_tx.store.placement import EngineWork
from skyrl_tx.store.tables import EngineStateRow

pages = PageTable()
_MAX_LINKS = 20
_NOTICES = 200
_COMPILING = "(compiling)"
"""The end of the engine's activity while a request waits for the compiler."""
_SECRET_SETTINGS = frozenset({"database_url", "store_url"})


@pages.get("/health", menu="Health")
def show_health(visit: Visit) -> Page:
    """Show the state of engines, database and disk.

    Admins also see the settings and recent warnings.
    """
    # Engine and disk
    state = visit.read(engine_state.get)
    settings = visit.context.settings
    is_admin = visit.caller.is_admin
    disk = shutil.disk_usage(settings.data_dir)
    database = settings.data_dir / DATABASE_NAME
    capabilities: Mapping[str, object] = {} if state is None else state.capabilities

    # Settings without secrets
    shown_settings = {
        name: str(value)
        for name, value in sorted(settings.model_dump().items())
        if name not in _SECRET_SETTINGS and value is not None
    }

    return Page(
        "health.jinja",
        {
            "engine": describe_engine(visit, state),
            "state": state,
            "engines": [(work, _list_visible_models(visit, work)) for work in visit.read(placement.list_engine_work)],
            # Counts stopped engines too
            "has_several_engines": len(visit.read(engine_state.list_engines)) > 1,
            "capabilities": capabilities,
            "fingerprint": capabilities.get("fingerprint") or {},
            # Store
            "disk_free": disk.free,
            "disk_share": disk.used / disk.total,
            "database": "SQLite" if settings.store_url is None else settings.store_url.partition(":")[0],
            "database_bytes": database.stat().st_size if database.exists() else None,
            "write_failure": visit.context.store.write_failure,
            "versions": {"skyrl_tx": __version__, "Python": python_version(), "SQLAlchemy": sqlalchemy.__version__},
            "settings": shown_settings if is_admin else {},
            "notices": visit.read(lambda tx: notices.list_newest(tx, _NOTICES)) if is_admin else [],
        },
    )


def _list_visible_models(visit: Visit, work: EngineWork) -> list[ModelId]:
    """Return the models of an engine whose owner the visitor acts for, at most `_MAX_LINKS`."""
    return [name for name, owner in work.models if visit.caller.can_act_for(owner)][:_MAX_LINKS]


@dataclass(frozen=True, slots=True)
class EngineView:
    """A short description of the engine's state."""

    level: Literal["ok", "busy", "problem"]
    word: str
    detail: str


def describe_engine(visit: Visit, state: EngineStateRow | None) -> EngineView:
    """Describe the engine. The state is the same as in `healthz`."""
    report = visit.context.engine.read_report()
    if report.problem is not None:
        word = state.status if state is not None and state.status != "ready" else "not ready"
        return EngineView("problem", word, report.problem)
    activity = "" if state is None else state.activity
    if report.outage is not None or report.activity is not None:
        return EngineView("busy", "busy" if report.outage is None else "partly down", report.detail or "")
    detail = activity or "waiting for requests"
    return EngineView("ok", "ready", detail if report.progress is None else f"{detail}; {report.progress}")


@pages.get("/console/data/engine")
def send_engine(visit: Visit) -> Response:
    """Send what the engine is doing, for the playground while it waits for a reply."""
    state = visit.read(engine_state.get)
    activity = "" if state is None else state.activity
    return JSONResponse({"detail": describe_wait(activity) or describe_engine(visit, state).detail})


def describe_wait(activity: str) -> str:
    """Return what a request waits for if the engine compiles a program, else an empty text."""
    if not activity.endswith(_COMPILING):
        return ""
    return "the engine compiles a program, which takes up to a minute; later requests of this size do not wait"
