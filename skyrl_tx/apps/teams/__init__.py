"""The optional feature for teams: usage, billing, quotas and the audit log."""

from __future__ import annotations

from typing import TYPE_CHECKING

from skyrl_tx.apps.teams.prices import TeamsSettings
from skyrl_tx.launch.command import App, Command

if TYPE_CHECKING:
    from skyrl_tx.engine.extension import EngineExtension
    from skyrl_tx.server.context import ServerExtension


def _extend_server() -> ServerExtension:
    from skyrl_tx.apps.teams.quotas import check_checkpoint
    from skyrl_tx.apps.teams.routes import router
    from skyrl_tx.server.context import ServerExtension

    return ServerExtension(routers=(router,), admission=check_checkpoint)


def _extend_engine() -> EngineExtension:
    from skyrl_tx.apps.teams.admission import QuotaAdmission
    from skyrl_tx.apps.teams.usage_observer import RETENTION, UsageObserver
    from skyrl_tx.engine.extension import EngineExtension

    return EngineExtension(observer=UsageObserver, retention=RETENTION, admission=QuotaAdmission)


_COMMANDS = {
    "usage": "show tokens, device seconds and storage by owner, project, key, session, run or day",
    "projects": "list projects, and add or remove their members",
    "quotas": "list, set and remove quotas and fair-share weights of owners",
    "audit": "show the audit log of checkpoints, keys, quotas and projects",
}

TEAMS = App(
    name="teams",
    settings=TeamsSettings,
    server=_extend_server,
    engine=_extend_engine,
    commands=tuple(
        Command(name=name, help=text, group="administration", entry_point=f"skyrl_tx.apps.teams.commands:add_{name}")
        for name, text in _COMMANDS.items()
    ),
)
