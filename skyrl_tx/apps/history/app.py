"""The history of runs as an optional feature."""

from __future__ import annotations

from typing import TYPE_CHECKING

from skyrl_tx.launch.app import App

if TYPE_CHECKING:
    from skyrl_tx.engine.extension import EngineExtension


def _extend_engine() -> EngineExtension:
    from skyrl_tx.apps.history.observer import EXTENSION

    return EXTENSION


HISTORY = App(name="history", engine=_extend_engine)
