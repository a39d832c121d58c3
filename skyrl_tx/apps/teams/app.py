"""Usage, billing and the audit log as an optional feature."""

from __future__ import annotations

from typing import TYPE_CHECKING

from skyrl_tx.launch.app import App

if TYPE_CHECKING:
    from skyrl_tx.engine.extension import EngineExtension


def _extend_engine() -> EngineExtension:
    from skyrl_tx.apps.teams.usage_observer import EXTENSION

    return EXTENSION


TEAMS = App(name="teams", engine=_extend_engine)
