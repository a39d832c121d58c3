"""All that a server can be told, joined from its components' own settings; the only place they meet."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, Field, ValidationError, create_model, field_validator, model_validator
from pydantic_settings import BaseSettings, InitSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from skyrl_tx import failpoints
from skyrl_tx.api.settings import ApiSettings
from skyrl_tx.contract.backend import BackendSpec
from skyrl_tx.engine.settings import EngineSettings
from skyrl_tx.logs import LogLevel

DEFAULT_BACKEND = "jax"
ENVIRONMENT_PREFIX = "SKYRL_TX_"
_NOT_SETTINGS = frozenset({"SKYRL_TX_REQUIRE_ENVIRONMENTS", failpoints.VARIABLE})  # for tests; servers inherit them


class SettingsError(Exception):
    """A setting that cannot be; the message names it."""


def default_data_dir() -> Path:
    """Where the platform keeps a user's data (XDG base directory specification)."""
    home = os.environ.get("XDG_DATA_HOME")
    return (Path(home) if home else Path.home() / ".local" / "share") / "skyrl_tx"


class ServerSettings(BaseSettings, ApiSettings, EngineSettings):  # pyright: ignore[reportIncompatibleVariableOverride]
    """Flags, then environment, then the YAML file, then these defaults."""

    model_config = SettingsConfigDict(
        env_prefix=ENVIRONMENT_PREFIX,
        env_nested_delimiter="__",
        extra="forbid",
        frozen=True,
        cli_kebab_case=True,
        cli_avoid_json=True,
        cli_hide_none_type=True,
        cli_implicit_flags="toggle",
    )

    config: Path | None = Field(None, description="YAML file with any of these settings")
    base_model: str = Field(description="model to serve: a hub id, a local directory, or 'tiny' (built in)")
    data_dir: Path = Field(
        default_factory=default_data_dir,
        description="directory of the database and all weights, mode 0700; default: $XDG_DATA_HOME/skyrl_tx, "
        "or ~/.local/share/skyrl_tx",
    )
    backend: str = Field(DEFAULT_BACKEND, description="name of an installed backend")
    load_format: Literal["auto", "dummy"] | None = Field(
        None, description="'dummy': random weights of the real shapes; short for --backend-config.load-format"
    )
    max_engine_starts: int = Field(
        5, ge=1, description="give up after this many starts of the engine in a row without progress"
    )
    fresh: bool = Field(
        False,
        description="serve alone: leave earlier models behind; what was saved by name can still be loaded",
    )
    log_level: LogLevel = Field("info", description="how much the log says")
    backend_config: BaseModel

    @field_validator("data_dir", "config")
    @classmethod
    def _absolute(cls, path: Path | None) -> Path | None:
        return path.expanduser().absolute() if path else None

    def for_api(self) -> ApiSettings:
        """Return the API's part."""
        return ApiSettings.model_validate(self.model_dump(include=set(ApiSettings.model_fields)))

    def for_engine(self) -> EngineSettings:
        """Return the engine's part."""
        return EngineSettings.model_validate(self.model_dump(include=set(EngineSettings.model_fields)))


def settings_class(spec: BackendSpec, file_values: Mapping[str, Any]) -> type[ServerSettings]:
    """Return ServerSettings with the backend's config in it; `file_values` rank below flags and environment."""

    class WithBackend(ServerSettings):
        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,
            file_secret_settings: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            return init_settings, env_settings, InitSettingsSource(settings_cls, dict(file_values))

        @model_validator(mode="before")
        @classmethod
        def _complete_backend_config(cls, values: dict[str, Any]) -> dict[str, Any]:
            return values | {"backend_config": _backend_values(spec, values)}

    return create_model(
        "ServerSettings",
        __base__=WithBackend,
        __doc__=ServerSettings.__doc__,
        backend_config=(spec.config, Field(default_factory=spec.config, description="settings of the backend")),
    )


def _backend_values(spec: BackendSpec, values: Mapping[str, Any]) -> dict[str, Any]:
    """Give what was said of the backend, unknown names refused, with --load-format in its place."""
    told = dict(values.get("backend_config") or {})
    if values.get("load_format") is not None:
        if "load_format" not in spec.config.model_fields:
            raise ValueError(f"--load-format: backend {values.get('backend', 'jax')!r} has no load formats")
        told["load_format"] = values["load_format"]
    for name in told:
        if name not in spec.config.model_fields:
            raise ValueError(f"--backend-config.{name.replace('_', '-')}: backend has no such setting")
    return told


def read_config_file(path: Path) -> dict[str, Any]:
    """Read a YAML file of settings; raises SettingsError naming the file."""
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
    """Refuse variables that look like settings and are none; raises SettingsError naming one."""
    for name in sorted(environment):
        key = name.removeprefix(ENVIRONMENT_PREFIX).lower().split("__")[0]
        if name.startswith(ENVIRONMENT_PREFIX) and name not in _NOT_SETTINGS and key not in ServerSettings.model_fields:
            raise SettingsError(f"environment variable {name}: there is no setting {key!r}")


def describe(error: ValidationError) -> str:
    """Say what is wrong in one line a mistake, each led by the flag."""
    lines: list[str] = []
    for mistake in error.errors():
        flag = "--" + ".".join(str(part) for part in mistake["loc"]).replace("_", "-")
        match mistake["type"]:
            case "missing":
                lines.append(f"{flag} is needed")
            case "extra_forbidden":
                lines.append(f"{flag}: there is no such setting")
            case "value_error":
                reason = mistake["msg"].removeprefix("Value error, ")
                lines.append(f"{flag}: {reason}" if mistake["loc"] else reason)
            case _:
                lines.append(f"{flag} {mistake['input']!r}: {mistake['msg']}")
    return "\n".join(lines)
