"""Settings of the quickstart, and of the server: composed of those of the API, the engine and the backend."""

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model, field_validator, model_validator
from pydantic_settings import BaseSettings, CliSuppress, InitSettingsSource, SettingsConfigDict
from pydantic_settings import PydanticBaseSettingsSource as Source

from skyrl_tx.artifacts import checked_url
from skyrl_tx.backends.hosts.settings import HostsSettings, from_leader_worker_set, split_address
from skyrl_tx.contract.backend import BackendSpec
from skyrl_tx.contract.sampler import SamplerSpec
from skyrl_tx.engine.settings import EngineSettings
from skyrl_tx.launch.command import CommandError
from skyrl_tx.process import failpoints
from skyrl_tx.process.setup import LogFormat, LogLevel
from skyrl_tx.server.settings import ApiSettings

DEFAULT_BACKEND = "jax"
ENVIRONMENT_PREFIX = "SKYRL_TX_"
_OF_SAMPLERS = ("sampler_check_share", "sampler_fallback")
_SAMPLER_FLAGS: Mapping[str, str] = {"vllm_url": "url", "vllm_command": "command"}
"""Flags that set a field of `sampler_config`."""
_ON_RAY = "ray_resources"
"""Field of a `sampler_config` with what a server of the sampler takes of a node of a Ray cluster."""
_TEST_VARIABLES = frozenset({"SKYRL_TX_REQUIRE_ENVIRONMENTS", failpoints.VARIABLE})


class SettingsError(CommandError):
    """A setting is invalid; the message names it."""

    def __init__(self, message: str) -> None:
        super().__init__(message, status=2)


def default_data_dir() -> Path:
    """Return the data directory by the XDG base directory specification."""
    home = os.environ.get("XDG_DATA_HOME")
    return (Path(home) if home else Path.home() / ".local" / "share") / "skyrl_tx"


class RaySettings(BaseModel):
    """The Ray cluster that runs the engines, with `--launcher ray`."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    address: str = "auto"
    """Address of the cluster, such as head:6379. This machine is one of its nodes; 'auto' finds its cluster."""
    resources: dict[str, float] = Field(default={"CPU": 1.0}, min_length=1)
    """Resources that an engine takes of each host, by Ray's names: {"GPU": 8}, or {"TPU": 4}."""

    @field_validator("address")
    @classmethod
    def _is_no_client(cls, address: str) -> str:
        if address.startswith("ray://"):
            raise ValueError("Ray Client is not supported: run the command on a node of the cluster, with HOST:PORT")
        if address != "auto":
            split_address(address)
        return address

    @field_validator("resources")
    @classmethod
    def _are_positive(cls, resources: dict[str, float]) -> dict[str, float]:
        for name, amount in resources.items():
            if not 0 < amount < math.inf:
                raise ValueError(f"{name}: {amount:g} must be above 0")
        return resources


class ServerSettings(BaseSettings, ApiSettings, EngineSettings):  # pyright: ignore[reportIncompatibleVariableOverride]
    """All settings of a server. Flags override environment variables, which override the YAML file."""

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
    data_dir: Path = Field(default_factory=default_data_dir)
    """Directory of the database and all weights, mode 0700.
    Default: $XDG_DATA_HOME/skyrl_tx, or ~/.local/share/skyrl_tx."""
    backend: str = DEFAULT_BACKEND
    """Name of an installed backend, such as 'jax' or 'fake'."""
    load_format: Literal["auto", "dummy"] | None = None
    """'dummy' creates random weights of the model's shapes; same as --backend-config.load-format."""
    sampler: str | None = None
    """Name of an installed sampler that draws the samples in place of the backend: 'vllm'."""
    vllm_url: str | None = None
    """URL of a vLLM server, or several with commas between them; same as --sampler-config.url.
    Unset, --sampler vllm starts one."""
    vllm_command: str | None = None
    """Command with which --sampler vllm starts a vLLM server: 'vllm', '/opt/vllm/bin/vllm', 'env A=1 vllm'.
    Same as --sampler-config.command."""
    sampler_check_share: float = Field(default=0.01, ge=0, le=1)
    """Share of a sampler's samples whose log-probabilities the backend computes too, to measure how far they differ."""
    sampler_fallback: Literal["wait", "trainer"] = "wait"
    """Treatment of samples while all servers of a sampler are lost: they wait, or the backend itself draws them.
    It draws other tokens from the same seed."""
    max_engine_starts: int = Field(default=5, ge=1)
    """Exit after this many consecutive starts of the engine without progress."""
    fresh: bool = False
    """Abandon the models of earlier starts; their named checkpoints can still be loaded."""
    log_level: LogLevel = "info"
    """Least severity of log messages."""
    log_format: LogFormat = "text"
    """Form of log lines: text, or one JSON object a line for log collectors."""
    launcher: Literal["flags", "lws", "ray"] = "flags"
    """Source of size, rank and address of several hosts: --hosts.*, or a Kubernetes LeaderWorkerSet's variables.
    With 'ray', this command starts the engines of all hosts, as actors of a Ray cluster."""
    hosts: HostsSettings = Field(default_factory=HostsSettings)
    """Several hosts that hold one model together."""
    ray: RaySettings = Field(default_factory=RaySettings)
    """The Ray cluster that runs the engines, with --launcher ray."""
    backend_config: BaseModel
    sampler_config: BaseModel | None = None

    @field_validator("data_dir", "config", "ssl_certfile", "ssl_keyfile", "chat_template")
    @classmethod
    def _absolute(cls, path: Path | None) -> Path | None:
        return path.expanduser().absolute() if path else None

    @field_validator("artifacts")
    @classmethod
    def _known_place(cls, url: str | None) -> str | None:
        return checked_url(url) if url else None

    @model_validator(mode="after")
    def _has_sampler(self) -> Self:
        """Refuse settings that only a sampler has, unless they are the defaults."""
        for name in _OF_SAMPLERS:
            if self.sampler is None and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{_flag(name)}: --sampler is not set")
        return self

    @property
    def joined_hosts(self) -> HostsSettings:
        """The hosts, as the launcher says. Raises SettingsError if it does not.

        With Ray, each start of an engine draws address and key: here are none.
        """
        if self.launcher == "ray":
            for name in "rank", "address":
                if getattr(self.hosts, name):
                    raise SettingsError(f"--hosts.{name}: --launcher ray sets it on each host")
            return self.hosts
        try:
            found = from_leader_worker_set(self.hosts, os.environ) if self.launcher == "lws" else self.hosts
            found.check_joinable()
        except ValueError as error:
            raise SettingsError(f"--{error}") from error
        return found

    def for_api(self) -> ApiSettings:
        """Return the API's settings."""
        return ApiSettings.model_validate(self.model_dump(include=set(ApiSettings.model_fields)))

    def for_engine(self) -> EngineSettings:
        """Return the engine's settings."""
        return EngineSettings.model_validate(self.model_dump(include=set(EngineSettings.model_fields)))


Architecture = Literal["qwen3", "qwen3_5"]
"""The architecture of a tiny model with random weights."""


class QuickstartSettings(BaseSettings):
    """The flags of `skyrl-tx quickstart`; environment variables do not change them."""

    model_config = SettingsConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        cli_kebab_case=True,
        cli_avoid_json=True,
        cli_hide_none_type=True,
    )

    architecture: Architecture = "qwen3"
    """Architecture of the tiny model; that of Qwen3.5 has linear attention in three of four layers."""
    data: Path | None = None
    """JSON lines with 'question' and 'answer', for example all of GSM8K; default: the built-in excerpt."""
    output: Path = Path("skyrl-tx-quickstart")
    """Directory for the model, checkpoints, curves and the server's log."""
    steps: int = Field(default=160, ge=1)
    """Supervised steps, of 16 questions each."""
    rl_steps: int = Field(default=24, ge=1)
    """Reinforcement learning steps, of 8 questions with 8 answers each."""
    seed: int = Field(default=0, ge=0)
    """Seed of the adapter's weights, the order of questions and the samples."""

    @classmethod
    def settings_customise_sources(  # pyright: ignore[reportIncompatibleMethodOverride]
        cls, settings_cls: type[BaseSettings], init_settings: Source, **_: Source
    ) -> tuple[Source, ...]:
        """Return no sources other than flags."""
        return (init_settings,)


def settings_class(
    spec: BackendSpec, file_values: Mapping[str, Any], sampler: SamplerSpec | None = None
) -> type[ServerSettings]:
    """Return ServerSettings extended by the settings of a backend, and of a sampler if one is chosen.

    `file_values` rank below flags and environment.
    """

    class WithBackend(ServerSettings):
        @classmethod
        def settings_customise_sources(  # pyright: ignore[reportIncompatibleMethodOverride]
            cls, settings_cls: type[BaseSettings], init_settings: Source, env_settings: Source, **_: Source
        ) -> tuple[Source, ...]:
            return init_settings, env_settings, InitSettingsSource(settings_cls, dict(file_values))

        @model_validator(mode="before")
        @classmethod
        def _complete_backend_config(cls, values: dict[str, Any]) -> dict[str, Any]:
            return values | {
                "backend_config": _backend_values(spec, values),
                "sampler_config": _sampler_values(sampler, values),
            }

    about = "settings of the sampler"
    sampler_field: tuple[Any, Any] = (
        (CliSuppress[None], Field(default=None, description=about))
        if sampler is None
        else (sampler.config, Field(description=about))
    )
    return create_model(
        "ServerSettings",
        __base__=WithBackend,
        __doc__=ServerSettings.__doc__,
        backend_config=(spec.config, Field(default_factory=spec.config, description="settings of the backend")),
        sampler_config=sampler_field,
    )


def _backend_values(spec: BackendSpec, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the backend's settings with --load-format merged in; raises ValueError for unknown names."""
    given = dict(values.get("backend_config") or {})
    if values.get("load_format") is not None:
        if "load_format" not in spec.config.model_fields:
            raise ValueError(f"--load-format: backend {values.get('backend', 'jax')!r} has no load formats")
        given["load_format"] = values["load_format"]
    for name in given:
        if name not in spec.config.model_fields:
            raise ValueError(f"--backend-config.{name.replace('_', '-')}: the backend has no such setting")
    return given


def _sampler_values(sampler: SamplerSpec | None, values: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the sampler's settings with those of `_SAMPLER_FLAGS` merged in; raises ValueError for unknown names."""
    given = dict(values.get("sampler_config") or {})
    merged = {name: field for name, field in _SAMPLER_FLAGS.items() if values.get(name) is not None}
    if sampler is None:
        for name in ("sampler_config", *_SAMPLER_FLAGS):
            if given if name == "sampler_config" else name in merged:
                raise ValueError(f"{_flag(name)}: --sampler is not set")
        return None
    for name, field in merged.items():
        if field not in sampler.config.model_fields:
            raise ValueError(f"{_flag(name)}: sampler {values.get('sampler')!r} has no {field}")
        given[field] = values[name]
    if values.get("launcher") == "ray" and _ON_RAY in sampler.config.model_fields and given.get("url") is None:
        given.setdefault(_ON_RAY, {"GPU": 1.0})
    for name in given:
        if name not in sampler.config.model_fields:
            raise ValueError(f"--sampler-config.{name.replace('_', '-')}: the sampler has no such setting")
    return given


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def read_config_file(path: Path) -> dict[str, Any]:
    """Read a YAML file of settings; raises SettingsError with its path."""
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


def check_environment(environment: Mapping[str, str]) -> None:
    """Raise SettingsError for an environment variable with our prefix that is no setting."""
    for name in sorted(environment):
        key = name.removeprefix(ENVIRONMENT_PREFIX).lower().split("__")[0]
        if (
            name.startswith(ENVIRONMENT_PREFIX)
            and name not in _TEST_VARIABLES
            and key not in ServerSettings.model_fields
        ):
            raise SettingsError(f"environment variable {name}: there is no setting {key!r}")


def describe(error: ValidationError) -> str:
    """Return one line per invalid setting, each starting with its flag."""
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
            case _:
                lines.append(f"{flag} {detail['input']!r}: {detail['msg']}")
    return "\n".join(lines)
