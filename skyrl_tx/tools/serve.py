"""The commands `serve`, `api`, `engine` and `quickstart`, whose flags are generated from settings classes.

`serve` starts a server, `api` and `engine` start one part of it, and `quickstart` runs a demo. The
flags of a server depend on its backend and sampler. So `add_settings` first finds out which backend
and sampler the operator chose, and then adds the other flags.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_settings import BaseSettings, CliSettingsSource

from skyrl_tx import DISTRIBUTION
from skyrl_tx.backends.registry import find_backend, find_sampler
from skyrl_tx.compose import APP_SETTINGS, APPS
from skyrl_tx.contract.errors import UserError
from skyrl_tx.launch.command import CommandError, CommandParser
from skyrl_tx.launch.removed_settings import accept_removed_flags, describe_removed
from skyrl_tx.launch.settings import (
    DEFAULT_BACKEND,
    ENVIRONMENT_PREFIX,
    QuickstartSettings,
    ServerSettings,
    SettingsError,
    check_environment,
    check_file,
    describe_validation_error,
    has_setting,
    make_settings_class,
    read_config_file,
)
from skyrl_tx.process.paths import explain_os_error
from skyrl_tx.process.setup import CannotServe, configure_logging, raise_file_limit, restart_with_huge_pages
from skyrl_tx.process.signals import enable_stack_dumps, end_process_on_failure
from skyrl_tx.tools.quickstart.model import TINY_MODELS, write_tiny_model

S = TypeVar("S", bound=BaseSettings)

_QUICKSTART_PACKAGES = frozenset({"httpx", "matplotlib", "tinker"})
HELP_GROUPS = {
    "common options": (
        *("-h", "--base-model", "--served-model-name", "--host", "--port", "--no-auth", "--data-dir", "--config"),
        *("--backend", "--load-format", "--sampler", "--log-level"),
    ),
    "clients": (
        *("--served-model-aliases", "--tokenizer-id", "--chat-template", "--tool-parser", "--max-request-bytes"),
        *("--sampled-logprobs", "--share-prefix-cache", "--no-shared-prefixes", "--no-custom-losses"),
        *("--no-console", "--keep-samples"),
    ),
    "network": (
        *("--public-url", "--ssl-certfile", "--ssl-keyfile", "--allowed-hosts", "--trusted-proxies"),
        "--redirect-downloads",
    ),
    "storage": (
        *("--database-url", "--artifacts", "--max-artifact-cache-bytes", "--session-retention-s"),
        *("--trash-retention-s", "--keep-last", "--fresh"),
    ),
    "monitoring": (
        *("--metrics-open", "--metrics-owners", "--metrics-port", "--metrics-host", "--log-format"),
        *("--step-timeout-s", "--compile-timeout-s"),
    ),
    "multiple engines and hosts": (
        *("--engines", "--launcher", "--hosts.size", "--hosts.rank", "--hosts.address", "--hosts.key"),
        *("--ray.address", "--ray.resources"),
    ),
    "vLLM": ("--vllm-url", "--vllm-command", "--sampler-check-share", "--sampler-fallback"),
}
"""The groups of flags in the help of `serve`. Flags that are not listed come after these groups."""
_EPILOG = (
    "Sizes and times may have a unit, for example 64M, 64MiB, 90m or 30d. "
    "Every flag can also be set by an environment variable or in the YAML file that --config names. For example, "
    "--data-dir is SKYRL_TX_DATA_DIR or `data_dir: …`, and --backend-config.dtype is SKYRL_TX_BACKEND_CONFIG__DTYPE. "
    "Flags override environment variables, and environment variables override the file."
)


def add_serve_arguments(parser: CommandParser) -> None:
    """Add the arguments of `serve`."""
    _add_server_arguments(parser, "serve")


def add_api_arguments(parser: CommandParser) -> None:
    """Add the arguments of `api`."""
    _add_server_arguments(parser, "api")


def add_engine_arguments(parser: CommandParser) -> None:
    """Add the arguments of `engine`."""
    _add_server_arguments(parser, "engine")


def _add_server_arguments(parser: CommandParser, command: str) -> None:
    parser.usage, parser.epilog = f"skyrl-tx {command} MODEL [flags]", _EPILOG
    parser.add_argument("model", nargs="?", metavar="MODEL", help="the same as --base-model MODEL")
    make_settings = add_settings(parser)
    parser.set_defaults(run=lambda arguments: _run_server(command, make_settings(arguments)))


def add_quickstart_arguments(parser: CommandParser) -> None:
    """Add the arguments of `quickstart`."""
    parser.usage = "skyrl-tx quickstart [flags]"
    make_settings = _add_fields(parser, QuickstartSettings)
    parser.set_defaults(run=lambda arguments: _run_quickstart(make_settings(arguments)))


def read_settings(command: str, arguments: Sequence[str], defaults: Mapping[str, Any] | None = None) -> ServerSettings:
    """Merge flags, environment variables and the settings file, including the settings of the backend.

    `defaults` apply where none of these sets a value.

    Raises:
        SettingsError: names each invalid setting.
        SystemExit: for --help and unknown flags.
    """
    parser = CommandParser(arguments, prog=f"skyrl-tx {command}")
    make_settings = add_settings(parser, defaults)
    return make_settings(parser.parse_args(arguments))


def add_settings(
    parser: CommandParser, defaults: Mapping[str, Any] | None = None
) -> Callable[[argparse.Namespace], ServerSettings]:
    """Add the flags of a server to a parser.

    Returns a function that makes the settings: it merges the parsed flags with environment
    variables and the settings file. `defaults` apply where none of these sets a value. Which flags
    exist depends on the chosen backend and sampler.

    Both this function and the returned function raise SettingsError, which names each invalid setting.
    """
    # Find out which backend and sampler were chosen.
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--config", default=os.environ.get(f"{ENVIRONMENT_PREFIX}CONFIG"))
    first.add_argument("--backend", default=os.environ.get(f"{ENVIRONMENT_PREFIX}BACKEND"))
    first.add_argument("--sampler", default=os.environ.get(f"{ENVIRONMENT_PREFIX}SAMPLER"))
    chosen, _ = first.parse_known_args(parser.argv)
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

    # Add the flags of the server, the backend, the sampler and the apps.
    removed_names: list[str] = []
    composed = make_settings_class(
        spec,
        file_values,
        sampler,
        apps=APP_SETTINGS,
        on_removed=removed_names.extend,
        on_broken=lambda error: print(f"{parser.prog}: warning: {error}", file=sys.stderr),
    )
    removed_names += check_environment(composed, os.environ)
    check_file(composed, file_values, f"--config {chosen.config}")
    merge_fields = _add_fields(parser, composed)
    accept_removed_flags(parser, partial(has_setting, composed))
    parser.group_flags(HELP_GROUPS)

    def make_settings(arguments: argparse.Namespace) -> ServerSettings:
        settings = merge_fields(arguments)
        for warning in describe_removed([*arguments.removed_settings, *removed_names]):
            print(f"{parser.prog}: warning: {warning}", file=sys.stderr)
        return settings

    return make_settings


def _add_fields(parser: CommandParser, settings: type[S]) -> Callable[[argparse.Namespace], S]:
    """Add a flag for each field of a settings class.

    Returns a function that makes the settings from the parsed flags and the other sources.
    """
    source = CliSettingsSource[argparse.ArgumentParser](settings, root_parser=parser)

    def make_settings(arguments: argparse.Namespace) -> S:
        given = {
            name: value for name, value in vars(arguments).items() if name.partition(".")[0] in settings.model_fields
        }
        model = getattr(arguments, "model", None)
        if model is not None:
            if given.get("base_model", model) != model:
                raise SettingsError(f"MODEL {model}: --base-model {given['base_model']} names another model")
            given["base_model"] = model
        try:
            # The type stubs of pydantic-settings declare no arguments here, but the source accepts them.
            return settings(_cli_settings_source=source(parsed_args=given))  # type: ignore[call-arg]
        except ValidationError as error:
            raise SettingsError(describe_validation_error(error)) from error

    return make_settings


def _run_server(command: str, settings: ServerSettings) -> None:
    from skyrl_tx.launch import serving  # imported here because it would slow down --help

    configure_logging(command, settings.log_level, settings.log_format)
    enable_stack_dumps()
    end_process_on_failure()
    raise_file_limit()

    try:
        settings = resolve_tiny_model(settings)
        match command:
            case "api":
                serving.serve_api(settings, APPS)
            case "engine":
                # Execute this process again, once: glibc reads its setting for huge pages only at the start.
                restart_with_huge_pages()
                serving.serve_engine(settings, APPS)
            case _:
                serving.serve(settings, APPS)
    except CannotServe as error:
        raise CommandError(str(error)) from error


def resolve_tiny_model(settings: ServerSettings) -> ServerSettings:
    """Replace the name of a built-in tiny model, for example `tiny`, by the path of its files.

    Clients still use the name, unless `served_model_name` is set. The first call writes the files
    into `<data_dir>/models/<name>`. Other base models are left as they are.
    """
    name = settings.base_model
    if name not in TINY_MODELS:
        return settings
    directory = settings.data_dir / "models" / name
    try:
        if not directory.is_dir():
            settings.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            directory.parent.mkdir(exist_ok=True)
            # Write to a temporary directory and rename it, so that no half-written model is ever visible.
            with tempfile.TemporaryDirectory(dir=directory.parent) as temporary:
                write_tiny_model(Path(temporary) / name, TINY_MODELS[name]).rename(directory)
    except OSError as error:
        raise CannotServe(f"--data-dir {explain_os_error(error, settings.data_dir)}") from error
    return settings.model_copy(
        update={"base_model": str(directory), "served_model_name": settings.served_model_name or name}
    )


def _run_quickstart(settings: QuickstartSettings) -> int:
    raise_file_limit()
    try:
        from skyrl_tx.tools.quickstart.run import run
    except ImportError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _QUICKSTART_PACKAGES:
            raise
        raise CommandError(f"{package} is not installed: pip install '{DISTRIBUTION}[quickstart]'") from error
    return run(settings)
