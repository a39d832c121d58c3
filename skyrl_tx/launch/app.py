"""An optional feature as one object: its parts in the server, in the engine and on the command line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import BaseModel

    from skyrl_tx.engine.extension import EngineExtension
    from skyrl_tx.launch.command import Command
    from skyrl_tx.server.extension import ServerExtension


@dataclass(frozen=True, slots=True, kw_only=True)
class App:
    """An optional feature. Each part is loaded only in the process that uses it.

    For example, `server` is called in the API process, so that an engine never imports FastAPI.
    """

    name: str
    settings: type[BaseModel] | None = None
    """Its fields are settings of the server. `ApiSettings.get_app_settings` returns an instance."""
    server: Callable[[], ServerExtension] | None = None
    """Returns routers, pages and error forms for the API process."""
    engine: Callable[[], EngineExtension] | None = None
    """Returns result observers, retention rules and admission for the engine process."""
    commands: Sequence[Command] = ()
    """Commands for the command line; their code is imported when they are used."""


def load_server_extensions(apps: Sequence[App]) -> dict[str, ServerExtension]:
    """Load the parts of optional features for the API process, by the name of each feature."""
    return {app.name: app.server() for app in apps if app.server is not None}


def load_engine_extensions(apps: Sequence[App]) -> list[EngineExtension]:
    """Return what these features add to an engine process."""
    return [app.engine() for app in apps if app.engine is not None]
