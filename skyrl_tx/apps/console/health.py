"""The page about the state of the server: engines, database and disk."""

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from platform import python_version
from typing import Literal, cast

import sqlalchemy

from skyrl_tx import __version__
from skyrl_tx.apps.console.rendering import shorten_id
from skyrl_tx.apps.console.visit import Page, PageTable, Visit
from skyrl_tx.store import engine_state, notices, placement
from skyrl_tx.store.dialect import DATABASE_NAME
from skyrl_tx.store.placement import EngineWork
from skyrl_tx.store.tables import EngineStateRow

pages = PageTable()
_MAX_LINKS = 20
_NOTICES = 200
_SECRET_SETTINGS = frozenset({"database_url", "store_url"})


@pages.get("/health", menu="Health")
def show_health(visit: Visit) -> Page:
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
            "engine": describe_engine(visit, state),
            "state": state,
            "engines": describe_engines(visit.read(placement.list_engine_work), visit.caller.can_act_for),
            "has_several_engines": len(visit.read(engine_state.list_engines)) > 1,  # also those that have ended
            "capabilities": capabilities,
            "fingerprint": capabilities.get("fingerprint") or {},
            "disk_free": disk.free,
            "disk_share": disk.used / disk.total,
            "database": "SQLite" if settings.store_url is None else settings.store_url.partition(":")[0],
            "database_bytes": database.stat().st_size if database.exists() else None,
            "write_failure": visit.context.store.write_failure,
            "versions": {"skyrl_tx": __version__, "Python": python_version(), "SQLAlchemy": sqlalchemy.__version__},
            "settings": shown if is_admin else {},
            "notices": visit.read(lambda tx: notices.list_newest(tx, _NOTICES)) if is_admin else [],
        },
    )


@dataclass(frozen=True, slots=True)
class EngineView:
    """The engine in a few words."""

    level: Literal["ok", "busy", "problem"]
    word: str
    detail: str


def describe_engine(visit: Visit, state: EngineStateRow | None) -> EngineView:
    """Describe the engine as `healthz` does."""
    report = visit.context.engine.read_report()
    if report.problem is not None:
        word = state.status if state is not None and state.status != "ready" else "not ready"
        return EngineView("problem", word, report.problem)
    activity = "" if state is None else state.activity
    if report.outage is not None or report.activity is not None:
        return EngineView("busy", "busy" if report.outage is None else "partly down", report.detail or "")
    detail = activity or "waits for requests"
    return EngineView("ok", "ready", detail if report.progress is None else f"{detail}; {report.progress}")


@dataclass(frozen=True, slots=True)
class EngineLine:
    """One engine."""

    number: int
    where: str
    state: str
    devices: str
    num_models: int
    models: Sequence[tuple[str, str]]
    """Id and short name of the first models that the viewer may see."""
    num_waiting: int
    num_started: int
    activity: str


def describe_engines(holdings: Sequence[EngineWork], acts_for: Callable[[str], bool]) -> list[EngineLine]:
    """Describe engines; models of owners for whom the viewer does not act are only counted."""
    return [
        EngineLine(
            number=holding.engine.number,
            where=f"{holding.engine.host or 'this machine'}, process {holding.engine.pid}",
            state=holding.engine.status if holding.is_running else "has ended",
            devices=", ".join(map(str, cast(list[object], holding.engine.capabilities.get("devices", [])))),
            num_models=len(holding.models),
            models=[(name, shorten_id(name)) for name, owner in holding.models if acts_for(owner)][:_MAX_LINKS],
            num_waiting=holding.num_waiting,
            num_started=holding.num_started,
            activity=holding.engine.activity if holding.is_running else "",
        )
        for holding in holdings
    ]
