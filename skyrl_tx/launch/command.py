"""How a tool declares a command, and how an optional feature (an app) declares its parts."""

from __future__ import annotations

import argparse
import difflib
import pkgutil
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from skyrl_tx.process.text import format_bytes, format_seconds

if TYPE_CHECKING:
    from pydantic import BaseModel

    from skyrl_tx.engine.extension import EngineExtension
    from skyrl_tx.server.context import ServerExtension
    from skyrl_tx.server.settings import ApiSettings

Group = Literal["run", "weights", "administration", "diagnosis"]
"""The heading of a command in `skyrl-tx --help`."""

_NO_DEFAULT = re.compile(r" \(default: (None|False|\[\])\)| \(default factory: [^)]*\)")
_NUMBER_DEFAULT = re.compile(r"(?<=\(default: )\d+(?:\.0)?(?=\))")
_METAVARS = {
    **{"str": "TEXT", "SecretStr": "TEXT", "Path": "PATH", "int": "N", "float": "NUMBER"},
    **{"list[str]": "A,B,…", "dict[str,float]": "NAME=NUMBER,…"},
}
"""The placeholder of a flag's value in the help, by the type of the setting."""


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
    entry_point: str
    """The function that sets up the command's parser, as `package.module:function`.

    The function takes a `CommandParser`. It adds the arguments, and sets the default `run`: a
    second function, which takes the parsed arguments and returns the exit status, or None for 0.
    The module is imported when the command is used, so that `skyrl-tx --help` stays fast.
    """

    def add_arguments(self, parser: CommandParser) -> None:
        """Import the code of the command, and add its arguments and `run` to a parser."""
        pkgutil.resolve_name(self.entry_point)(parser)

    def make_parser(self, argv: Sequence[str]) -> CommandParser:
        """Make the parser for a command line."""
        description = f"{self.help[0].upper()}{self.help[1:]}."
        parser = CommandParser(argv, prog=f"skyrl-tx {self.name}", description=description)
        self.add_arguments(parser)
        return parser


class CommandParser(argparse.ArgumentParser):
    """A parser that accepts no abbreviated flags, and suggests a flag for a misspelt one.

    `argv` is the command line that the parser will parse. The flags of a command may depend on the
    command line: for example `--backend fake` has other flags than `--backend jax`.
    """

    def __init__(self, argv: Sequence[str] = (), **options: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=_HelpFormatter, **options)
        self.argv = argv

    def error(self, message: str) -> NoReturn:
        """End the process with a message about the command line."""
        start, _, unknown = message.partition("unrecognized arguments: ")
        if unknown and not start:
            message += suggest(unknown.split()[0].partition("=")[0], _list_flags(self))
        super().error(message)

    def group_flags(self, groups: Mapping[str, Sequence[str]]) -> None:
        """Show flags under titles in the help, before all other flags. Flags that do not exist are skipped."""
        by_flag = {flag: action for action in self._actions for flag in action.option_strings}
        titled = [self.add_argument_group(title) for title in groups]
        for group, flags in zip(titled, groups.values(), strict=True):
            group._group_actions = [by_flag[flag] for flag in flags if flag in by_flag]

        # The other groups keep the flags without a title.
        moved = {id(action) for group in titled for action in group._group_actions}
        remaining = [group for group in self._action_groups if group not in titled]
        for group in remaining:
            group._group_actions = [action for action in group._group_actions if id(action) not in moved]
        self._action_groups = [*titled, *remaining]


def suggest(name: str, known: Iterable[str]) -> str:
    """Return "; did you mean …?" for a misspelt name, empty if no known name is similar."""
    similar = difflib.get_close_matches(name, list(known), n=1, cutoff=0.7)
    return f"; did you mean {similar[0]}?" if similar else ""


def _list_flags(parser: argparse.ArgumentParser) -> list[str]:
    """Return the flags of a parser and of its actions, for example of `keys create`."""
    flags: list[str] = []
    for action in parser._actions:
        if action.help != argparse.SUPPRESS:
            flags += action.option_strings
        if isinstance(action.choices, Mapping):  # the actions of a command
            parsers: Mapping[str, argparse.ArgumentParser] = action.choices
            flags += [flag for inner in parsers.values() for flag in _list_flags(inner)]
    return flags


class _HelpFormatter(argparse.HelpFormatter):
    """Prints one flag per line with its description."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=42, width=120)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if not action.help:
            return action.help
        # Remove "(default: None)": the description of such a flag says what happens without it.
        text = _NO_DEFAULT.sub("", action.help)
        flag = next(iter(action.option_strings), "")
        if flag.endswith("-bytes"):
            return _NUMBER_DEFAULT.sub(lambda match: format_bytes(int(match[0])), text)
        if flag.endswith("-s"):
            return _NUMBER_DEFAULT.sub(lambda match: format_seconds(float(match[0])), text)
        return text

    def _metavar_formatter(self, action: argparse.Action, default_metavar: str) -> Callable[[int], tuple[str, ...]]:
        flag, metavar = next(iter(action.option_strings), ""), action.metavar
        if isinstance(metavar, str) and metavar in _METAVARS:
            unit = "SIZE" if flag.endswith("-bytes") else "TIME" if flag.endswith("-s") else _METAVARS[metavar]
            return lambda size: (unit,) * size
        return super()._metavar_formatter(action, default_metavar)


@dataclass(frozen=True, slots=True, kw_only=True)
class App:
    """An optional feature. Each part is loaded only in the process that uses it.

    For example, `server` is called only in the API process, so an engine never imports FastAPI.
    """

    name: str
    settings: type[BaseModel] | None = None
    """A model whose fields become settings of the server.

    The API process gets an instance from `ApiSettings.get_app_settings`.
    """
    check_settings: Callable[[ApiSettings], None] | None = None
    """Checks the settings before the API starts, for example that a file can be read.

    Raises CannotServe with the flag.
    """
    server: Callable[[], ServerExtension] | None = None
    """Returns routers, pages and error forms (formats of error responses) for the API process."""
    engine: Callable[[], EngineExtension] | None = None
    """Returns result observers, retention rules and admission for the engine process."""
    commands: Sequence[Command] = ()
    """Commands of the command line."""


def check_app_settings(apps: Sequence[App], settings: ApiSettings) -> None:
    """Check the settings of the API that features use. Raises CannotServe with the flag."""
    for app in apps:
        if app.check_settings is not None:
            app.check_settings(settings)


def load_server_extensions(apps: Sequence[App]) -> dict[str, ServerExtension]:
    """Load the parts of features for the API process, by the name of the feature."""
    return {app.name: app.server() for app in apps if app.server is not None}


def load_engine_extensions(apps: Sequence[App]) -> list[EngineExtension]:
    """Load the parts of features for an engine process."""
    return [app.engine() for app in apps if app.engine is not None]
