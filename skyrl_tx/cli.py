"""The command `skyrl-tx`: read settings, then serve, run one half, or show a first run."""

import argparse
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError
from pydantic_settings import BaseSettings, CliSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from skyrl_tx import __version__
from skyrl_tx.backends.registry import find_backend
from skyrl_tx.contract.errors import UserError
from skyrl_tx.huge_pages import restart_with_huge_pages
from skyrl_tx.listening import CannotServe, raise_file_limit
from skyrl_tx.logs import configure_logging
from skyrl_tx.quickstart.settings import QuickstartSettings
from skyrl_tx.settings import (
    DEFAULT_BACKEND,
    ENVIRONMENT_PREFIX,
    ServerSettings,
    SettingsError,
    check_environment,
    describe,
    read_config_file,
    settings_class,
)

_NO_DEFAULT = re.compile(r" \(default: None\)| \(default factory: [^)]*\)")
TINY = "tiny"
_COMMANDS = {
    "serve": "serve a model: the API here, the engine in a process of its own",
    "api": "run the API alone, on the data directory that an engine shares",
    "engine": "run the engine alone, on the data directory that an API shares",
    "quickstart": "train and sample a tiny model through the Tinker SDK, to see it work",
    "keys": "make, list and revoke the keys that a server asks for",
    "runs": "list and delete training runs",
    "checkpoints": "list and delete checkpoints, and say how long they last",
    "export": "write a checkpoint as a PEFT adapter, or merged into its base model",
    "import": "make a checkpoint of a PEFT adapter from elsewhere",
}
_ON_DATA = frozenset({"keys", "runs", "checkpoints", "export", "import"})
_FIRST_FLAGS = (
    *("-h", "--base-model", "--served-model-name", "--host", "--port", "--no-auth", "--data-dir"),
    *("--backend", "--load-format", "--config", "--log-level"),
)
_HELP = f"""\
usage: skyrl-tx COMMAND [flags]

Train and sample language models with the Tinker API on hardware you own.

commands:
{chr(10).join(f"  {name:<13}{text}" for name, text in _COMMANDS.items())}

`skyrl-tx COMMAND --help` lists the flags of a command; `--version` prints the version.

A first run, then a server:
  skyrl-tx quickstart
  skyrl-tx serve --base-model Qwen/Qwen3-0.6B
"""
S = TypeVar("S", bound=BaseSettings)
_EPILOG = """\
Every flag may also come from the environment (--data-dir is SKYRL_TX_DATA_DIR, --backend-config.x is
SKYRL_TX_BACKEND_CONFIG__X) or from a YAML file named by --config (data_dir: …); flags win, then the environment.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return its exit status (2: the command line is wrong, 1: it could not go on)."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_HELP, end="")
        return 0 if arguments else 2
    if arguments[0] == "--version":
        print(f"skyrl-tx {__version__}")
        return 0
    command, rest = arguments[0], arguments[1:]
    if command not in _COMMANDS:
        return _refuse("skyrl-tx", f"there is no command {command!r}; commands are {', '.join(_COMMANDS)}")
    try:
        if command == "quickstart":
            return _quickstart(rest)
        if command in _ON_DATA:
            return _on_data(command, rest)
        settings = read_settings(command, rest)
    except SettingsError as error:
        return _refuse(f"skyrl-tx {command}", str(error))
    return _run(command, settings)


def read_settings(command: str, arguments: Sequence[str]) -> ServerSettings:
    """Join flags, environment and file, the backend's own settings among them.

    Raises SettingsError naming each wrong setting; SystemExit for --help and for flags that do not exist.
    """
    check_environment(os.environ)
    first = argparse.ArgumentParser(prog=f"skyrl-tx {command}", add_help=False, allow_abbrev=False)
    first.add_argument("--config", default=os.environ.get(f"{ENVIRONMENT_PREFIX}CONFIG"))
    first.add_argument("--backend", default=os.environ.get(f"{ENVIRONMENT_PREFIX}BACKEND"))
    chosen, _ = first.parse_known_args(arguments)
    file_values = read_config_file(Path(chosen.config).expanduser()) if chosen.config else {}
    try:
        spec = find_backend(chosen.backend or file_values.get("backend") or DEFAULT_BACKEND)
    except UserError as error:
        raise SettingsError(f"--backend: {error}") from error
    parser = _parser(command, usage="--base-model MODEL [flags]", epilog=_EPILOG)
    return _read(settings_class(spec, file_values), parser, arguments)


def _read(settings: type[S], parser: argparse.ArgumentParser, arguments: Sequence[str]) -> S:
    """Read flags, and what else the type of the settings reads; raises SettingsError."""
    try:
        # The source's own type says it wants no arguments yet; it takes them all the same.
        flags = CliSettingsSource[argparse.ArgumentParser](settings, root_parser=parser, cli_parse_args=list(arguments))
        return settings(_cli_settings_source=flags)  # type: ignore[call-arg]
    except ValidationError as error:
        raise SettingsError(describe(error)) from error


def _parser(command: str, *, usage: str | None, epilog: str | None = None) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        prog=f"skyrl-tx {command}",
        usage=None if usage is None else f"skyrl-tx {command} {usage}",
        description=f"{_COMMANDS[command][0].upper()}{_COMMANDS[command][1:]}.",
        epilog=epilog,
        allow_abbrev=False,
        formatter_class=_HelpFormatter,
    )


def _quickstart(arguments: Sequence[str]) -> int:
    flags = _read(_QuickstartFlags, _parser("quickstart", usage="[flags]"), arguments)
    raise_file_limit()
    from skyrl_tx.quickstart.run import run  # brings the SDK

    return run(QuickstartSettings.model_validate(flags.model_dump()))


def _on_data(command: str, arguments: Sequence[str]) -> int:
    from skyrl_tx import commands  # bring the database

    return commands.run(_parser(command, usage=None), command, arguments)


def with_tiny_model(settings: ServerSettings) -> ServerSettings:
    """Where --base-model is `tiny`, make that model in the data directory and serve it under this name."""
    if settings.base_model != TINY:
        return settings
    from skyrl_tx.quickstart.tiny_model import write_tiny_model  # brings a tokenizer library

    directory = settings.data_dir / "models" / TINY
    if not directory.is_dir():
        try:
            settings.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            directory.parent.mkdir(exist_ok=True)
            # Written apart and renamed, so that nobody ever sees half of it.
            with tempfile.TemporaryDirectory(dir=directory.parent) as apart:
                write_tiny_model(Path(apart) / TINY).rename(directory)
        except OSError as error:
            raise CannotServe(f"cannot make the tiny model in {directory}: {error.strerror}") from error
    return settings.model_copy(
        update={"base_model": str(directory), "served_model_name": settings.served_model_name or TINY}
    )


class _QuickstartFlags(BaseSettings, QuickstartSettings):  # pyright: ignore[reportIncompatibleVariableOverride]
    """The quickstart's settings as flags; it reads no environment, so that a first run is always the same."""

    model_config = SettingsConfigDict(
        extra="forbid", frozen=True, cli_kebab_case=True, cli_avoid_json=True, cli_hide_none_type=True
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Read nothing but flags."""
        return (init_settings,)


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """One flag a line, its description beside it."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=42, width=120)

    def add_arguments(self, actions: Iterable[argparse.Action]) -> None:
        """What everyone needs comes first, the rest as the components declare it."""
        place = {flag: index for index, flag in enumerate(_FIRST_FLAGS)}
        super().add_arguments(
            sorted(actions, key=lambda action: place.get(next(iter(action.option_strings), ""), len(place)))
        )

    def _get_help_string(self, action: argparse.Action) -> str | None:
        # Where there is no value to show, the description says what happens.
        return _NO_DEFAULT.sub("", action.help) if action.help else action.help


def _run(command: str, settings: ServerSettings) -> int:
    from skyrl_tx import supervisor  # what it needs (database, HTTP server) would only slow --help down

    configure_logging(command, settings.log_level)
    raise_file_limit()
    try:
        settings = with_tiny_model(settings)
        match command:
            case "api":
                return supervisor.run_api(settings)
            case "engine":
                restart_with_huge_pages()
                return supervisor.run_engine(settings)
            case _:
                return supervisor.serve(settings)
    except CannotServe as error:
        return _refuse(f"skyrl-tx {command}", str(error), status=1)


def _refuse(who: str, message: str, status: int = 2) -> int:
    for line in message.splitlines():
        print(f"{who}: {line}", file=sys.stderr)
    return status
