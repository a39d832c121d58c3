"""`skyrl-tx` with other constants than the product's, because a test cannot wait for a snapshot every minute.

    python -m tests.support.with_constants serve --constant engine.max_attempts=1 --base-model ...

A constant is a field of the settings of a part (`api`, `engine`, `backend` or `sampler`) that is no flag.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from pydantic import BaseModel

from skyrl_tx.backends.jax.config import JaxConfig, JaxFlags
from skyrl_tx.integrations.vllm import VllmConfig, VllmFlags
from skyrl_tx.launch import serving
from skyrl_tx.launch.command import App
from skyrl_tx.launch.settings import ServerSettings
from skyrl_tx.server.settings import ApiSettings
from skyrl_tx.tools import cli

FLAG = "--constant"
M = TypeVar("M", bound=BaseModel)


def constants(part: str, **values: object) -> tuple[str, ...]:
    """Return the arguments that set constants of a part."""
    return tuple(word for name, value in values.items() for word in (FLAG, f"{part}.{name}={value}"))


def main(arguments: Sequence[str]) -> int:
    """Run a command with the constants among its arguments."""
    parts: dict[str, dict[str, str]] = {"api": {}, "engine": {}, "backend": {}, "sampler": {}}
    kept: list[str] = []
    rest = iter(arguments)
    for word in rest:
        if word != FLAG:
            kept.append(word)
            continue
        name, _, value = next(rest).partition("=")
        part, _, field = name.partition(".")
        parts[part][field] = value
    _install(parts)
    return cli.main(kept)


def _install(parts: Mapping[str, Mapping[str, str]]) -> None:
    launch_of, for_api = serving.make_engine_launch, ServerSettings.make_api_settings

    def launch_with_constants(settings: ServerSettings, apps: Sequence[App] = ()) -> Any:
        launch = launch_of(settings, apps)
        return replace(
            launch,
            settings=_replace_values(launch.settings, parts["engine"]),
            backend_config=_replace_values(launch.backend_config, parts["backend"]),
            sampler_config=None
            if launch.sampler_config is None
            else _replace_values(launch.sampler_config, parts["sampler"]),
        )

    def api_with_constants(settings: ServerSettings) -> ApiSettings:
        return _replace_values(for_api(settings), parts["api"])

    serving.make_engine_launch = launch_with_constants
    ServerSettings.make_api_settings = api_with_constants  # type: ignore[method-assign]


def _replace_values(settings: M, values: Mapping[str, str]) -> M:
    if not values:
        return settings
    complete: Any = settings
    if isinstance(settings, JaxFlags):
        complete = JaxConfig.from_flags(settings)
    elif isinstance(settings, VllmFlags):
        complete = VllmConfig.complete(settings)
    return type(complete).model_validate({**complete.model_dump(exclude_unset=True), **values})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
