"""How a tool declares a command, and how an optional feature (an app) declares its parts."""

from __future__ import annotations

import argparse
import pkgutil
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from pydantic import BaseModel

    from skyrl_tx.engine.extension import EngineExtension
    from skyrl_tx.server.extension import ServerExtension

Group = Literal["run", "weights", "administration", "diagnosis"]
"""The heading of a command in `skyrl-tx --help`."""

_FIRST_FLAGS = (
    *("-h", "--base-model", "--served-model-name", "--host", "--port", "--no-auth", "--data-dir"),
    *("--backend", "--load-format", "--sampler", "--vllm-url", "--vllm-command", "--config", "--log-level"),
)
_NO_DEFAULT = re.compile(r" \(default: None\)| \(default factory: [^)]*\)")


class CommandError(Exception):
    """A command fails. The message states the reason."""

    def __init__(self, message: str, status: int = 1) -> None:
        super().__init__(message)
        self.status = status
        """Exit status: 2 for a wrong command line, 1 for other failures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """The command `skyrl-tx NAME`."""

    name: str
    help: str
    """One line for the list of commands."""
    group: Group
    code: str
    """A function as `package.module:function`.

    It is imported when the command is used, so `--help` stays fast.

    The function takes a `CommandParser`. It adds the arguments and sets the default `run`: a
    function that takes the parsed arguments and returns the exit status, or None for 0.
    """

    def add_arguments(self, parser: CommandParser) -> None:
        """Import the code of the command, and add its arguments and `run` to a parser."""
        pkgutil.resolve_name(self.code)(parser)

    def make_parser(self, given: Sequence[str]) -> CommandParser:
        """Make the parser for a command line."""
        description = f"{self.help[0].upper()}{self.help[1:]}."
        parser = CommandParser(given, prog=f"skyrl-tx {self.name}", description=description)
        self.add_arguments(parser)
        return parser


class CommandParser(argparse.ArgumentParser):
    """A parser that accepts no abbreviated flags.

    `given` is the command line that it will parse. The flags of a command may depend on it: for
    example `--backend fake` has other flags than `--backend jax`.
    """

    def __init__(self, given: Sequence[str] = (), **options: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=_HelpFormatter, **options)
        self.given = given


class _HelpFormatter(argparse.HelpFormatter):
    """Prints one flag per line with its description."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=42, width=120)

    def add_arguments(self, actions: Iterable[argparse.Action]) -> None:
        """Put the most used flags first. All other flags keep the order of their declaration."""
        rank = {flag: index for index, flag in enumerate(_FIRST_FLAGS)}
        super().add_arguments(
            sorted(actions, key=lambda action: rank.get(next(iter(action.option_strings), ""), len(rank)))
        )

    def _get_help_string(self, action: argparse.Action) -> str | None:
        # Remove "(default: None)": the description of such a flag says what happens without it.
        return _NO_DEFAULT.sub("", action.help) if action.help else action.help


@dataclass(frozen=True, slots=True, kw_only=True)
class App:
    """An optional feature. Each part is loaded only in the process that uses it.

    For example, `server` is called only in the API process, so an engine never imports FastAPI.
    """

    name: str
    settings: type[BaseModel] | None = None
    """Its fields become settings of the server.

    `ApiSettings.get_app_settings` returns an instance.
    """
    server: Callable[[], ServerExtension] | None = None
    """Returns routers, pages and error forms for the API process."""
    engine: Callable[[], EngineExtension] | None = None
    """Returns result observers, retention rules and admission for the engine process."""
    commands: Sequence[Command] = ()
    """Commands of the command line."""


def load_server_extensions(apps: Sequence[App]) -> dict[str, ServerExtension]:
    """Load the parts of features for the API process, by the name of the feature."""
    return {app.name: app.server() for app in apps if app.server is not None}


def load_engine_extensions(apps: Sequence[App]) -> list[EngineExtension]:
    """Load the parts of features for an engine process."""
    return [app.engine() for app in apps if app.engine is not None]
