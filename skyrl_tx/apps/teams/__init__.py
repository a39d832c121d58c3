"""Records for several people on one server: usage, storage and bills of owners, keys and projects."""

from typing import TYPE_CHECKING

from skyrl_tx.launch.app import App

if TYPE_CHECKING:
    from skyrl_tx.engine.extension import EngineExtension


def _load_engine() -> "EngineExtension":
    from skyrl_tx.apps.teams.usage_observer import EXTENSION

    return EXTENSION


APP = App(name="teams", engine=_load_engine)
