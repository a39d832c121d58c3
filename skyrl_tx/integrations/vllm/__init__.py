"""The entry point of `--sampler vllm`, which samples on vLLM servers. Importing it does not import httpx."""

import math
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator, model_validator

from skyrl_tx import DISTRIBUTION
from skyrl_tx.contract.errors import UserError
from skyrl_tx.contract.sampler import Sampler, SamplerSpec


class VllmFlags(BaseModel):
    """The settings that an operator can change."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    url: str | None = None
    """URL of a vLLM server that serves the same base model, or multiple URLs separated by commas.
    Unset: the engine starts a server."""
    command: str | None = None
    """The command that starts a vLLM server, for example 'vllm', '/opt/vllm/bin/vllm' or 'env A=1 vllm'.
    Unset: `vllm` of this Python environment, or else in PATH."""
    serve_flags: str = ""
    """More flags of `vllm serve` for the server that the engine starts, for example '--gpu-memory-utilization 0.5'."""
    ray_resources: dict[str, float] | None = Field(default=None, min_length=1)
    """Ray resources of the node on which the engine starts its vLLM server, for example {"GPU": 1}.
    Unset: the server runs on the machine of the engine; with --launcher ray on a node with one GPU."""
    api_key: SecretStr | None = None
    """The --api-key of the vLLM servers."""
    adapter_dir: Path | None = None
    """Directory for the adapters of samplers. The vLLM servers must see it under the same path.
    Unset: a temporary directory of this machine."""
    max_samples: int = Field(default=128, gt=0)
    """How many samples may be open at once on all servers together; at most the sum of their --max-num-seqs."""
    max_adapters: int = Field(default=16, gt=0)
    """How many samplers may be loaded at the same time; at most --max-cpu-loras of each server."""
    filtered_logprobs: Literal["refuse", "renormalized"] = "refuse"
    """Treatment of requests with top_k or top_p. vLLM computes log-probabilities after these filters.
    'refuse': the requests fail. 'renormalized': log-probabilities are among the tokens that passed the filter."""

    @field_validator("url")
    @classmethod
    def _check_url(cls, value: str | None) -> str | None:
        if value is None:
            return None
        urls = [part.strip().rstrip("/") for part in value.split(",")]
        for url in urls:
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.username:
                raise ValueError(f"{url[:200]!r} must have the form http://host:port")
        if len(set(urls)) < len(urls):
            raise ValueError(f"{value[:200]!r} names a server twice")
        return ",".join(urls)

    @field_validator("adapter_dir")
    @classmethod
    def _make_absolute(cls, value: Path | None) -> Path | None:
        return None if value is None else value.expanduser().absolute()

    @field_validator("ray_resources")
    @classmethod
    def _check_positive(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        for name, amount in (value or {}).items():
            if not 0 < amount < math.inf:
                raise ValueError(f"{name}: {amount:g} must be above 0")
        return value

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        managed = ("command", "serve_flags", "ray_resources")
        if self.url is not None and (given := [name for name in managed if getattr(self, name) not in (None, "")]):
            raise ValueError(f"{given[0].replace('_', '-')} has no effect with url, because that server already runs")
        for name in ("command", "serve_flags"):
            try:
                words = shlex.split(getattr(self, name) or "")
            except ValueError as error:
                raise ValueError(f"{name.replace('_', '-')}: {error}") from error
            if name == "command" and self.command is not None and not words:
                raise ValueError("command: it is empty")
        return self

    @property
    def urls(self) -> list[str]:
        """The URLs of the servers. Empty until the engine has started its server."""
        return [] if self.url is None else self.url.split(",")


class VllmConfig(VllmFlags):
    """All settings of the sampler. The fields here are constants that only tests change."""

    stream_tokens: int = Field(default=16, gt=0)
    """How many tokens a server sends at a time.
    With fewer tokens the server does more work. With more tokens a stop string is found later."""
    start_timeout_s: float = Field(default_factory=lambda data: 600.0 if data.get("url") else 3600.0, gt=0)
    """How long the engine waits at start until the servers respond.

    The limit for a server that the engine starts is longer, because the server may have to download weights. The engine
    notices at once if that server ends.
    """
    connect_timeout_s: float = Field(default=10.0, gt=0)
    """How long connecting to a server may take, and how long a server may take to answer a health check."""
    load_timeout_s: float = Field(default=120.0, gt=0)
    """How long a server may take to load an adapter, which can be a file of a few gigabytes in a shared directory."""
    silence_timeout_s: float = Field(default=300.0, gt=0)
    """A sample starts again if its server sends nothing for this long.
    A server also sends nothing while it computes a long prompt, or the prompts of other samples before it."""
    lost_after_s: float = Field(default=10.0, gt=0)
    """A server that has not responded for this long is reported as lost."""
    outage_timeout_s: float = Field(default=600.0, gt=0)
    """A sample fails if no server could draw it for this long. Restarting a server takes minutes."""
    max_restarts: int = Field(default=3, ge=0)
    """How often a sample may start again after it had tokens."""

    @classmethod
    def complete(cls, flags: VllmFlags) -> "VllmConfig":
        """Add the constants to the settings of the operator."""
        return flags if isinstance(flags, cls) else cls.model_validate(flags.model_dump(exclude_unset=True))


def _load() -> type[Sampler]:
    try:
        from skyrl_tx.integrations.vllm.sampler import VllmSampler
    except ModuleNotFoundError as error:
        if error.name != "httpx":
            raise
        raise UserError(f"--sampler vllm: httpx is not installed: pip install '{DISTRIBUTION}[vllm]'") from error
    return VllmSampler


def _add_launcher(launcher: str, given: Mapping[str, Any]) -> Mapping[str, Any]:
    """With `--launcher ray`, start the vLLM server on a GPU of the cluster, unless `--vllm-url` names a server."""
    if launcher != "ray" or given.get("url") is not None:
        return given
    return {"ray_resources": {"GPU": 1.0}, **given}


SAMPLER = SamplerSpec(
    config=VllmFlags,
    load=_load,
    flags={"vllm_url": "url", "vllm_command": "command"},
    with_launcher=_add_launcher,
)
