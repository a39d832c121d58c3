"""The history of runs, for people: curves, kept samples, sums of samples, and metrics that clients log."""

from typing import TYPE_CHECKING

from skyrl_tx.launch.app import App

if TYPE_CHECKING:
    from skyrl_tx.engine.extension import EngineExtension


def _load_engine() -> "EngineExtension":
    from skyrl_tx.apps.history.observer import EXTENSION

    return EXTENSION


APP = App(name="history", engine=_load_engine)
