"""Settings of the server and of the quickstart.

`make_settings_class` combines the settings of the API, the engine, the chosen backend and sampler,
launchers and apps. Values come from flags, environment variables and a YAML file.
"""

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, cast

import yaml
from pydantic import BaseModel, Field, ValidationError, create_model, field_validator, model_validator
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, CliSuppress, InitSettingsSource, SettingsConfigDict
from pydantic_settings import PydanticBaseSettingsSource as Source

from skyrl_tx.artifacts import normalize_url
from skyrl_tx.backends.hosts.settings import HostsFlags, HostsSettings, from_leader_worker_set
from skyrl_tx.backends.registry import BACKEND_GROUP as BACKEND_GROUP
from skyrl_tx.backends.registry import SAMPLER_GROUP, list_specs
from skyrl_tx.contract.backend import BackendSpec
from skyrl_tx.contract.errors import UserError
from skyrl_tx.contract.sampler import SamplerSpec
from skyrl_tx.engine.settings import EngineFlags, EngineSettings
from skyrl_tx.launch.command import CommandError, suggest
from skyrl_tx.launch.launcher import BUILT_IN, find_launcher, list_launchers
from skyrl_tx.launch.removed_settings import drop_values, is_removed
from skyrl_tx.process import failpoints
from skyrl_tx.process.paths import get_home
from skyrl_tx.process.setup import LogFormat, LogLevel
from skyrl_tx.process.text import parse_bytes, parse_seconds
from skyrl_tx.server.settings import ApiFlags, ApiSettings

DEFAULT_BACKEND = "jax"
ENVIRONMENT_PREFIX = "SKYRL_TX_"
_WITH_SAMPLER = ("sampler_check_share", "sampler_fallback")
"""Settings that apply to all samplers."""
_TEST_VARIABLES = frozenset({"SKYRL_TX_REQUIRE_ENVIRONMENTS", failpoints.VARIABLE})


class SettingsError(CommandError):
    """A setting is invalid. The message names it."""

    def __init__(self, message: str) -> None:
        super().__init__(message, status=2)


def get_default_data_dir() -> Path:
    """Return the default data directory, by the XDG base directory specification."""
    home = os.environ.get("XDG_DATA_HOME")
    return (Path(home) if home else get_home() / ".local" / "share") / "skyrl_tx"


class ServerSettings(BaseSettings, ApiFlags, EngineFlags):  # pyright: ignore[reportIncompatibleVariableOverride]
    """All settings of a server.

    Flags override environment variables, which override the YAML file.
    """

    model_config = SettingsConfigDict(
        env_prefix=ENVIRONMENT_PREFIX,
        env_nested_delimiter="__",
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        cli_kebab_case=True,
        cli_avoid_json=True,
        cli_hide_none_type=True,
        cli_implicit_flags="toggle",
    )

    config: Path | None = None
    """YAML file with any of these settings."""
    base_model: str
    """Model to serve: a hub id, a local directory, or built in: 'tiny', 'tiny-qwen3_5'."""
    data_dir: Path = Field(default_factory=get_default_data_dir)
    """Directory of the database and all weights, mode 0700.
    Default: $XDG_DATA_HOME/skyrl_tx, or ~/.local/share/skyrl_tx."""
    backend: str = DEFAULT_BACKEND
    """Name of an installed backend, such as 'jax' or 'fake'."""
    sampler: str | None = None
    """Name of an installed sampler that draws the samples instead of the backend, such as 'vllm'."""
    sampler_check_share: float = Field(default=0.01, ge=0, le=1)
    """Share of a sampler's samples whose log-probabilities the backend also computes, to measure the difference."""
    sampler_fallback: Literal["wait", "trainer"] = "wait"
    """Behavior while all servers of a sampler are lost: samples wait, or the backend draws them.
    The backend draws different tokens from the same seed."""
    fresh: bool = False
    """Abandon the models of earlier starts; their named checkpoints can still be loaded."""
    log_level: LogLevel = "info"
    """Minimum severity of log messages."""
    log_format: LogFormat = "text"
    """Format of log lines: text, or one JSON object per line for log collectors."""
    launcher: str = "flags"
    """Source of size, rank and address of multiple hosts.
    'flags': --hosts.*; 'lws': the variables of a Kubernetes LeaderWorkerSet. Any other installed launcher, such as
    'ray', starts the engines of all hosts."""
    hosts: HostsFlags = Field(default_factory=HostsFlags)
    """Multiple hosts that hold one model together."""
    backend_config: BaseModel
    sampler_config: BaseModel | None = None
    app_settings: ClassVar[tuple[type[BaseModel], ...]] = ()
    """The settings classes of apps. This class has their fields too."""

    @field_validator("data_dir", "config", "ssl_certfile", "ssl_keyfile", "chat_template")
    @classmethod
    def _make_absolute(cls, path: Path | None) -> Path | None:
        return path.expanduser().absolute() if path else None

    @field_validator("artifacts")
    @classmethod
    def _check_artifacts_url(cls, url: str | None) -> str | None:
        return normalize_url(url) if url else None

    @model_validator(mode="after")
    def _check_sampler_settings(self) -> Self:
        """Without a sampler, reject values other than the defaults for settings of samplers."""
        for name in _WITH_SAMPLER:
            if self.sampler is None and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{_format_flag(name)}: --sampler is not set")
        return self

    @field_validator("launcher")
    @classmethod
    def _check_launcher(cls, name: str) -> str:
        if name not in BUILT_IN:
            try:
                find_launcher(name)
            except UserError as error:
                raise ValueError(str(error)) from error
        return name

    @property
    def has_remote_engines(self) -> bool:
        """Whether a launcher starts the engines on other machines."""
        return self.launcher not in BUILT_IN

    @property
    def host_settings(self) -> HostsSettings:
        """The hosts that hold the model.

        Raises SettingsError if the settings of hosts are incomplete.

        A launcher that starts engines chooses their address and key at each start, so they are
        not set here.
        """
        if self.has_remote_engines:
            for name in "rank", "address":
                if getattr(self.hosts, name):
                    raise SettingsError(f"--hosts.{name}: --launcher {self.launcher} sets it on each host")
            return self._complete_hosts(self.hosts)
        try:
            hosts = from_leader_worker_set(self.hosts, os.environ) if self.launcher == "lws" else self.hosts
            hosts.check_joinable()
        except ValueError as error:
            raise SettingsError(f"--{error}") from error
        return self._complete_hosts(hosts)

    def _complete_hosts(self, hosts: HostsFlags) -> HostsSettings:
        """Add the time limit of one call. It is the same as on one host: `--step-timeout-s`."""
        return HostsSettings.model_validate({**hosts.model_dump(), "silence_s": self.step_timeout_s or math.inf})

    def make_api_settings(self) -> ApiSettings:
        """Return the settings of the API, including the settings of apps."""
        apps = [kind.model_validate(self.model_dump(include=set(kind.model_fields))) for kind in self.app_settings]
        return ApiSettings.model_validate({**self.model_dump(include=set(ApiFlags.model_fields)), "apps": apps})

    def make_engine_settings(self) -> EngineSettings:
        """Return the settings of the engine."""
        return EngineSettings.model_validate(self.model_dump(include=set(EngineFlags.model_fields)))


Architecture = Literal["qwen3", "qwen3_5"]
"""The architecture of a tiny model with random weights."""


class QuickstartSettings(BaseSettings):
    """The flags of `skyrl-tx quickstart`. Environment variables do not change them."""

    model_config = SettingsConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        cli_kebab_case=True,
        cli_avoid_json=True,
        cli_hide_none_type=True,
    )

    architecture: Architecture = "qwen3"
    """Architecture of the tiny model. Qwen3.5 has linear attention in three of four layers."""
    data: Path | None = None
    """JSON lines with 'question' and 'answer', for example all of GSM8K; default: the built-in excerpt."""
    output: Path = Path("skyrl-tx-quickstart")
    """Directory for the model, checkpoints, curves and the server's log."""
    steps: int = Field(default=160, ge=1)
    """Supervised steps, of 16 questions each.

    Then come 3 steps of reinforcement learning for each 20 of them, of 8 questions with 8 answers each.
    """

    @property
    def rl_steps(self) -> int:
        """The number of reinforcement learning steps."""
        return max(1, 3 * self.steps // 20)

    @classmethod
    def settings_customise_sources(  # pyright: ignore[reportIncompatibleMethodOverride]
        cls, settings_cls: type[BaseSettings], init_settings: Source, **_: Source
    ) -> tuple[Source, ...]:
        """Read flags only."""
        return (init_settings,)


@dataclass(frozen=True, slots=True)
class ShortFlag:
    """A short flag that a backend or sampler declares for a field of its settings."""

    kind: Literal["backend", "sampler"]
    field: str
    info: FieldInfo


def list_short_flags(on_broken: Callable[[UserError], object] = lambda _: None) -> dict[str, ShortFlag]:
    """Return the short flags of all installed backends and samplers by name, see `list_specs`."""
    specs: list[tuple[Literal["backend", "sampler"], BackendSpec | SamplerSpec]] = [
        *(("backend", spec) for spec in list_specs(BACKEND_GROUP, "backend", BackendSpec, on_broken).values()),
        *(("sampler", spec) for spec in list_specs(SAMPLER_GROUP, "sampler", SamplerSpec, on_broken).values()),
    ]
    shorts: dict[str, ShortFlag] = {}
    for kind, spec in specs:
        for flag, field in spec.flags.items():
            if field in spec.config.model_fields:
                shorts[flag] = ShortFlag(kind, field, spec.config.model_fields[field])
            else:
                on_broken(UserError(f"flags[{flag!r}]: {spec.config.__name__} has no field {field!r}"))
    return shorts


def make_settings_class(
    spec: BackendSpec,
    file_values: Mapping[str, Any],
    sampler: SamplerSpec | None = None,
    *,
    apps: Sequence[type[BaseModel]] = (),
    on_removed: Callable[[Sequence[str]], object] = lambda _: None,
    on_broken: Callable[[UserError], object] = lambda _: None,
) -> type[ServerSettings]:
    """Make a ServerSettings class with settings of a backend, a sampler, launchers and apps.

    Args:
        spec: The backend.
        file_values: Values of the configuration file. Flags and environment variables
            override them.
        sampler: The sampler, if one is chosen.
        apps: The settings classes of apps.
        on_removed: Called with the names of removed settings that were given.
        on_broken: Called with the reason for each installed backend, sampler or launcher that
            cannot be loaded. The class has no settings of these.
    """
    shorts = list_short_flags(on_broken)

    class WithParts(ServerSettings):
        app_settings = tuple(apps)

        @classmethod
        def settings_customise_sources(  # pyright: ignore[reportIncompatibleMethodOverride]
            cls, settings_cls: type[BaseSettings], init_settings: Source, env_settings: Source, **_: Source
        ) -> tuple[Source, ...]:
            return init_settings, env_settings, InitSettingsSource(settings_cls, dict(file_values))

        @model_validator(mode="before")
        @classmethod
        def _complete_parts(cls, values: dict[str, Any]) -> dict[str, Any]:
            values, removed = drop_values(convert_units(values), partial(has_setting, cls))
            on_removed(removed)
            return values | {
                "backend_config": _merge_values("backend", spec, values, shorts),
                "sampler_config": _merge_values("sampler", sampler, values, shorts),
            }

    # Fields of the sampler and of launchers.
    about = "settings of the sampler"
    sampler_field: tuple[Any, Any] = (
        (CliSuppress[None], Field(default=None, description=about))
        if sampler is None
        else (sampler.config, Field(description=about))
    )
    launchers = {
        name: (launcher.config, Field(default_factory=launcher.config, description=f"with --launcher {name}"))
        for name, launcher in list_launchers(on_broken).items()
    }

    # Fields of short flags. The help hides the flags of other backends, and a value for them is an error.
    aliases: dict[str, Any] = {}
    for name, short in shorts.items():
        kind: Any = cast(Any, short.info.annotation) | None
        same = _format_flag(f"{short.kind}_config.{short.field}")
        aliases[name] = (
            CliSuppress[kind] if short.kind == "backend" and name not in spec.flags else kind,
            Field(default=None, description=f"{short.info.description} Same as {same}."),
        )

    bases: Any = (WithParts, *apps)
    composed: Any = create_model(
        "ServerSettings",
        __base__=bases,
        __doc__=ServerSettings.__doc__,
        backend_config=(spec.config, Field(default_factory=spec.config, description="settings of the backend")),
        sampler_config=sampler_field,
        **launchers,
        **aliases,
    )
    return composed


def convert_units(values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert sizes and durations with a unit, for example `64M` of `max_request_bytes`.

    The names of sizes end with `_bytes`, and the names of durations with `_s`. Other text is left
    as it is, and pydantic reports it.
    """
    converted: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            converted[name] = convert_units(cast(Mapping[str, Any], value))
            continue
        parse = parse_bytes if name.endswith("_bytes") else parse_seconds if name.endswith("_s") else None
        number = parse(value) if parse is not None and isinstance(value, str) else None
        converted[name] = value if number is None else number
    return converted


def has_setting(settings: type[BaseModel], name: str) -> bool:
    """Whether a class has a setting.

    The name may have dots, for example `backend_config.mesh.tp`.
    """
    first, _, rest = name.partition(".")
    field = settings.model_fields.get(first)
    if field is None or not rest:
        return field is not None
    inner = field.annotation
    return isinstance(inner, type) and issubclass(inner, BaseModel) and has_setting(inner, rest)


def _merge_values(
    kind: Literal["backend", "sampler"],
    spec: BackendSpec | SamplerSpec | None,
    values: Mapping[str, Any],
    shorts: Mapping[str, ShortFlag],
) -> dict[str, Any] | None:
    """Return the settings of the backend or sampler, including short flags. None if no sampler is chosen.

    Raises ValueError for names that it does not have.
    """
    given = dict(values.get(f"{kind}_config") or {})
    set_shorts = [name for name, short in shorts.items() if short.kind == kind and values.get(name) is not None]
    if spec is None:
        for name in (*([f"{kind}_config"] if given else []), *set_shorts):
            raise ValueError(f"{_format_flag(name)}: --{kind} is not set")
        return None

    for name in set_shorts:
        if name not in spec.flags:
            raise ValueError(f"{_format_flag(name)}: {kind} {values.get(kind, DEFAULT_BACKEND)!r} has no such setting")
        given[spec.flags[name]] = values[name]
    if isinstance(spec, SamplerSpec):
        given = dict(spec.with_launcher(str(values.get("launcher")), given))
    for name in given:
        if name not in spec.config.model_fields:
            raise ValueError(f"--{kind}-config.{name.replace('_', '-')}: the {kind} has no such setting")
    return given


def _format_flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def read_config_file(path: Path) -> dict[str, Any]:
    """Read a YAML file of settings. Raises SettingsError with the path if that fails."""
    try:
        values = yaml.safe_load(path.read_text())
    except OSError as error:
        raise SettingsError(f"--config {path}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise SettingsError(f"--config {path}: not YAML: {' '.join(str(error).split())}") from error
    if values is None:
        return {}
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise SettingsError(f"--config {path}: must be a mapping of setting names to values")
    return values


def check_environment(settings: type[ServerSettings], environment: Mapping[str, str]) -> list[str]:
    """Return the names of removed settings in the environment.

    Raises SettingsError if a variable has our prefix, but is neither a setting nor a removed one.
    """
    removed: list[str] = []
    for name in sorted(environment):
        if not name.startswith(ENVIRONMENT_PREFIX) or name in _TEST_VARIABLES:
            continue
        path = name.removeprefix(ENVIRONMENT_PREFIX).lower().split("__")
        if not _check_path(settings, path, f"environment variable {name}"):
            removed.append(".".join(path))
    return removed


def check_file(settings: type[BaseModel], values: Mapping[str, Any], where: str) -> None:
    """Raise SettingsError if a value of the file is neither a setting nor a removed one.

    `where` names the file in the message.
    """
    for path in _list_paths(values):
        _check_path(settings, path, where)


def _list_paths(values: Mapping[str, Any]) -> Iterator[list[str]]:
    """Yield the names of nested values, for example ["backend_config", "seed"]."""
    for name, value in values.items():
        inner = list(_list_paths(cast(Mapping[str, Any], value))) if isinstance(value, Mapping) else []
        yield from ([str(name), *path] for path in inner or [[]])


def _check_path(settings: type[BaseModel], path: Sequence[str], where: str) -> bool:
    """Return whether a nested setting exists, or False for a removed one. Raises SettingsError for other names."""
    kind: Any = settings
    for depth, part in enumerate(path, start=1):
        if not (isinstance(kind, type) and issubclass(kind, BaseModel)):
            return True  # pydantic checks the value, for example the keys of a dict
        if part not in kind.model_fields:
            name = ".".join(path[:depth])
            if is_removed(name):
                return False
            raise SettingsError(f"{where}: there is no setting {name!r}{suggest(part, kind.model_fields)}")
        kind = kind.model_fields[part].annotation
    return True


def describe_validation_error(error: ValidationError) -> str:
    """Return one line per invalid setting. Each line starts with the flag."""
    lines: list[str] = []
    for detail in error.errors():
        flag = "--" + ".".join(str(part) for part in detail["loc"]).replace("_", "-")
        match detail["type"]:
            case "missing":
                lines.append(f"{flag} is required")
            case "extra_forbidden":
                lines.append(f"{flag}: there is no such setting")
            case "value_error":
                reason = detail["msg"].removeprefix("Value error, ")
                lines.append(f"{flag}: {reason}" if detail["loc"] else reason)

            # Text that is neither a number nor a number with a unit.
            case "int_parsing" | "float_parsing" if flag.endswith("-bytes"):
                lines.append(f"{flag} {detail['input']!r}: must be a size, for example 2000000, 64M or 64MiB")
            case "int_parsing" | "float_parsing" if flag.endswith("-s"):
                lines.append(f"{flag} {detail['input']!r}: must be seconds, or have a unit: 45s, 90m, 12h, 30d")
            case _:
                lines.append(f"{flag} {detail['input']!r}: {detail['msg']}")
    return "\n".join(lines)
