"""The entry point of `--launcher ray`, which runs engines on a Ray cluster. Importing it does not import Ray."""

import math
from collections.abc import Callable
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from skyrl_tx.backends.hosts.settings import split_address
from skyrl_tx.launch.launcher import LauncherSpec


class RaySettings(BaseModel):
    """The Ray cluster that runs the engines, with `--launcher ray`."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    address: str = "auto"
    """Address of the cluster, for example head:6379. 'auto' finds the cluster of this machine.
    This machine must be a node of the cluster."""
    resources: dict[str, float] = Field(default={"CPU": 1.0}, min_length=1)
    """Ray resources that an engine takes on each host, for example {"GPU": 8} or {"TPU": 4}."""

    @field_validator("address")
    @classmethod
    def _check_address(cls, address: str) -> str:
        if address.startswith("ray://"):
            raise ValueError("Ray Client is not supported: run the command on a node of the cluster, with HOST:PORT")
        if address != "auto":
            split_address(address)
        return address

    @field_validator("resources")
    @classmethod
    def _check_positive(cls, resources: dict[str, float]) -> dict[str, float]:
        for name, amount in resources.items():
            if not 0 < amount < math.inf:
                raise ValueError(f"{name}: {amount:g} must be above 0")
        return resources


def _load() -> Callable[..., Any]:
    from skyrl_tx.integrations.ray.engine import start_engines

    return start_engines


LAUNCHER = LauncherSpec(config=RaySettings, load=_load)
