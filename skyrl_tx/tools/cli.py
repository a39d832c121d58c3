"""The command `skyrl-tx`: reads settings and runs a server, the quickstart, or a command on a data directory."""

import argparse
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_settings import BaseSettings, CliSettingsSource

from skyrl_tx import DISTRIBUTION, __version__
from skyrl_tx.backends.registry import find_backend, find_sampler
from skyrl_tx.compose import APP_SETTINGS
from skyrl_tx.contract.errors import UserError
from skyrl_tx.launch.removed_settings import describe_removed, drop_flags
from skyrl_tx.launch.settings import (
    DEFAULT_BACKEND,
    ENVIRONMENT_PREFIX,
    QuickstartSettings,
    ServerSettings,
    SettingsError,
    check_environment,
    describe,
    has_setting,
    read_config_file,
    settings_class,
)
from skyrl_tx.process.setup import (
    CannotServe,
    configure_logging,
    raise_file_limit,
    restart_with_huge_pages,
)
from skyrl_tx.process.signals import enable_stack_dumps
from skyrl_tx.process.threads import end_process_on_failure
from skyrl_tx.tools import completion
from skyrl_tx.tools.quickstart.model import TINY_MODELS, write_tiny_model

_NO_DEFAULT = re.compile(r" \(default: None\)| \(default factory: [^)]*\)")
_COMMANDS = {
    "serve": "serve a model: the API in this process, the engine in a child process",
    "api": "run only the API, on the data directory of an engine",
    "engine": "run only the engine, on the data directory of an API",
    "quickstart": "train and sample a tiny model through the Tinker SDK",
    "keys": "create, list, rotate and revoke API keys",
    "runs": "list, delete and restore training runs",
    "checkpoints": "list, delete and restore checkpoints, and set their expiry",
    "export": "write a checkpoint as a PEFT adapter, or merged into its base model",
    "import": "create a checkpoint from a PEFT adapter",
    "doctor": "examine machine, settings, model and data, and say what to do",
    "plan": "say whether a model fits devices that are not here, and how fast it can be",
    "recover": "restore checkpoints that the database lost, or that are in the trash",
    "backup": "copy the database and the weights, also while a server runs",
    "restore": "create a data directory from a backup",
    "status": "show what a server does, also one that is dead",
    "top": "show the status of a server continuously",
    "usage": "show the tokens, device seconds and storage of owners, projects, keys, runs or days",
    "projects": "list projects; set and remove their members",
    "quotas": "list, set and remove quotas and the weights of owners",
    "audit": "show who did what to checkpoints, keys, quotas and projects",
    "stacks": "write the stacks of a running server's threads to its log",
    "completion": "print the script that completes commands and flags in a shell",
}
_DATA_COMMANDS = frozenset(
    {
        *("keys", "runs", "checkpoints", "export", "import", "recover", "backup", "restore"),
        *("status", "top", "usage", "projects", "quotas", "audit", "stacks"),
    }
)
_QUICKSTART_PACKAGES = frozenset({"httpx", "matplotlib", "tinker"})
_FIRST_FLAGS = (
    *("-h", "--base-model", "--served-model-name", "--host", "--port", "--no-auth", "--data-dir"),
    *("--backend", "--load-format", "--sampler", "--vllm-url", "--vllm-command", "--config", "--log-level"),
)
_HELP = f"""\
usage: skyrl-tx COMMAND [flags]

Train and sample language models with the Tinker API on hardware you own.

commands:
{chr(10).join(f"  {name:<13}{text}" for name, text in _COMMANDS.items())}

`skyrl-tx COMMAND --help` lists the flags of a command; `--version` prints the version.

Run the quickstart, then a server:
  skyrl-tx quickstart
  skyrl-tx serve --base-model Qwen/Qwen3-0.6B
"""
S = TypeVar("S", bound=BaseSettings)
_EPILOG = """\
Every flag may also be set by an environment variable (--data-dir is SKYRL_TX_DATA_DIR, --backend-config.x is
SKYRL_TX_BACKEND_CONFIG__X) or in the YAML file given by --config (data_dir: …). Flags override environment variables,
which override the file.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return its exit status: 2 for a wrong command line, 1 for other failures."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_HELP, end="")
        return 0 if arguments else 2
    if arguments[0] == "--version":
        print(f"skyrl-tx {__version__}")
        return 0
    command, rest = arguments[0], arguments[1:]
    if command not in _COMMANDS:
        return _fail("skyrl-tx", f"there is no command {command!r}; commands are {', '.join(_COMMANDS)}")
    try:
        if command == "quickstart":
            return _run_quickstart(rest)
        if command == "doctor":
            return _run_doctor(rest)
        if command == "plan":
            return _run_plan(rest)
        if command == "completion":
            return _run_completion(rest)
        if command in _DATA_COMMANDS:
            from skyrl_tx.tools import commands  # late, because it imports the database

            return commands.run(_parser(command, usage=None), command, rest)
        settings = read_settings(command, rest)
    except SettingsError as error:
        return _fail(f"skyrl-tx {command}", str(error))
    return _run_server(command, settings)


def read_settings(command: str, arguments: Sequence[str], defaults: Mapping[str, Any] | None = None) -> ServerSettings:
    """Merge flags, environment and file, including the backend's settings; `defaults` rank below the file.

    Raises SettingsError naming each invalid setting; SystemExit for --help and for unknown flags.
    """
    removed = check_environment(os.environ, APP_SETTINGS)
    first = argparse.ArgumentParser(prog=f"skyrl-tx {command}", add_help=False, allow_abbrev=False)
    first.add_argument("--config", default=os.environ.get(f"{ENVIRONMENT_PREFIX}CONFIG"))
    first.add_argument("--backend", default=os.environ.get(f"{ENVIRONMENT_PREFIX}BACKEND"))
    first.add_argument("--sampler", default=os.environ.get(f"{ENVIRONMENT_PREFIX}SAMPLER"))
    chosen, _ = first.parse_known_args(arguments)
    file_values = {**(defaults or {}), **(read_config_file(Path(chosen.config).expanduser()) if chosen.config else {})}
    try:
        spec = find_backend(chosen.backend or file_values.get("backend") or DEFAULT_BACKEND)
    except UserError as error:
        raise SettingsError(f"--backend: {error}") from error
    try:
        sampler_name = chosen.sampler or file_values.get("sampler")
        sampler = find_sampler(sampler_name) if sampler_name else None
    except UserError as error:
        raise SettingsError(f"--sampler: {error}") from error
    parser = _parser(command, usage="--base-model MODEL [flags]", epilog=_EPILOG)
    composed = settings_class(spec, file_values, sampler, apps=APP_SETTINGS, on_removed=removed.extend)
    arguments, removed_flags = drop_flags(arguments, partial(has_setting, composed))
    settings = _read(composed, parser, arguments)
    for warning in describe_removed([*removed_flags, *removed]):
        print(f"skyrl-tx {command}: warning: {warning}", file=sys.stderr)
    return settings


def _read(settings: type[S], parser: argparse.ArgumentParser, arguments: Sequence[str]) -> S:
    """Read flags and the other sources of a settings class; raises SettingsError."""
    try:
        # The source's type declares no arguments here, but it accepts them.
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


def _run_quickstart(arguments: Sequence[str]) -> int:
    settings = _read(QuickstartSettings, _parser("quickstart", usage="[flags]"), arguments)
    raise_file_limit()
    try:
        from skyrl_tx.tools.quickstart.run import run
    except ImportError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _QUICKSTART_PACKAGES:
            raise
        message = f"{package} is not installed: pip install '{DISTRIBUTION}[quickstart]'"
        return _fail("skyrl-tx quickstart", message, status=1)
    return run(settings)


def _run_doctor(arguments: Sequence[str]) -> int:
    from skyrl_tx.tools.doctor import command  # late, because it imports the API and the database

    parser = _parser("doctor", usage="[--base-model MODEL] [flags]")
    command.add_arguments(parser)
    chosen, flags = parser.parse_known_args(arguments)
    return command.run(chosen, read_settings("doctor", flags, {"base_model": ""}))


def _run_plan(arguments: Sequence[str]) -> int:
    from skyrl_tx.tools.plan import command

    parser = _parser("plan", usage="--base-model MODEL --device DEVICE [flags]")
    command.add_arguments(parser)
    chosen, flags = parser.parse_known_args(arguments)
    return command.run(chosen, read_settings("plan", flags))


def _run_completion(arguments: Sequence[str]) -> int:
    parser = _parser("completion", usage=None)
    parser.add_argument("shell", choices=completion.SHELLS, help="the shell")
    chosen = parser.parse_args(arguments)
    parsers = {name: (text, _full_parser(name)) for name, text in _COMMANDS.items()} | {
        "completion": (_COMMANDS["completion"], parser)
    }
    print(completion.script(chosen.shell, completion.commands_of(parsers)), end="")
    return 0


def _full_parser(command: str) -> argparse.ArgumentParser:
    """Return the parser of a command with all its flags."""
    from skyrl_tx.tools import commands
    from skyrl_tx.tools.doctor import command as doctor
    from skyrl_tx.tools.plan import command as plan

    parser = _parser(command, usage=None)
    if command in _DATA_COMMANDS:
        commands.add_arguments(parser, command)
        return parser
    if command == "doctor":
        doctor.add_arguments(parser)
    if command == "plan":
        plan.add_arguments(parser)
    if command != "completion":
        settings = (
            QuickstartSettings
            if command == "quickstart"
            else settings_class(find_backend(DEFAULT_BACKEND), {}, apps=APP_SETTINGS)
        )
        CliSettingsSource[argparse.ArgumentParser](settings, root_parser=parser)
    return parser


def with_tiny_model(settings: ServerSettings) -> ServerSettings:
    """Resolve a built-in --base-model, `tiny`: write the model into the data directory and serve it under this name."""
    name = settings.base_model
    if name not in TINY_MODELS:
        return settings
    directory = settings.data_dir / "models" / name
    if not directory.is_dir():
        try:
            settings.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            directory.parent.mkdir(exist_ok=True)
            # Written to a temporary directory and renamed, so that it is never visible half written.
            with tempfile.TemporaryDirectory(dir=directory.parent) as temporary:
                write_tiny_model(Path(temporary) / name, TINY_MODELS[name]).rename(directory)
        except OSError as error:
            raise CannotServe(f"cannot write the tiny model to {directory}: {error.strerror}") from error
    return settings.model_copy(
        update={"base_model": str(directory), "served_model_name": settings.served_model_name or name}
    )


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Prints one flag per line with its description."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=42, width=120)

    def add_arguments(self, actions: Iterable[argparse.Action]) -> None:
        """Put the most used flags first, the others in the order of their declaration."""
        rank = {flag: index for index, flag in enumerate(_FIRST_FLAGS)}
        super().add_arguments(
            sorted(actions, key=lambda action: rank.get(next(iter(action.option_strings), ""), len(rank)))
        )

    def _get_help_string(self, action: argparse.Action) -> str | None:
        # Without a default value to print, the description states what happens.
        return _NO_DEFAULT.sub("", action.help) if action.help else action.help


def _run_server(command: str, settings: ServerSettings) -> int:
    from skyrl_tx.launch import supervisor  # late, because its imports would slow down --help

    configure_logging(command, settings.log_level, settings.log_format)
    enable_stack_dumps()
    end_process_on_failure()
    raise_file_limit()
    try:
        settings = with_tiny_model(settings)
        match command:
            case "api":
                return supervisor.serve_api(settings)
            case "engine":
                restart_with_huge_pages()
                return supervisor.serve_engine(settings)
            case _:
                return supervisor.serve(settings)
    except CannotServe as error:
        return _fail(f"skyrl-tx {command}", str(error), status=1)


def _fail(command: str, message: str, status: int = 2) -> int:
    for line in message.splitlines():
        print(f"{command}: {line}", file=sys.stderr)
    return status
