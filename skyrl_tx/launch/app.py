"""What an optional feature gives to the server, to the engine and to the command line."""

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
    """Its fields are settings of the server. `ApiSettings.for_app` returns an instance."""
    server: Callable[[], ServerExtension] | None = None
    """Returns routers, pages and error forms for the API process."""
    engine: Callable[[], EngineExtension] | None = None
    """Returns result observers, retention rules and admission for the engine process."""
    commands: Callable[[], Sequence[Command]] | None = None
    """Returns commands for the command line."""
