"""The settings of the sampler on vLLM servers."""

import math
import shlex
from pathlib import Path
from typing import Literal, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator, model_validator


class VllmFlags(BaseModel):
    """The operator's settings."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    url: str | None = None
    """URL of a vLLM server with the same base model, or several with commas between them.
    Unset: the engine starts one."""
    command: str | None = None
    """Command with which the engine starts a server: 'vllm', '/opt/vllm/bin/vllm', 'env A=1 vllm'.
    Unset: that of this environment, or in PATH."""
    serve_flags: str = ""
    """Further flags of `vllm serve` for a server that the engine starts, such as '--gpu-memory-utilization 0.5'."""
    ray_resources: dict[str, float] | None = Field(default=None, min_length=1)
    """Resources of the node of a Ray cluster on which the engine starts its server, by Ray's names: {"GPU": 1}.
    Unset: the engine's own machine; with --launcher ray a node with one GPU."""
    api_key: SecretStr | None = None
    """The servers' --api-key."""
    adapter_dir: Path | None = None
    """Directory for the adapters of samplers, which the servers see under the same path.
    Unset: a temporary one of this machine."""
    max_samples: int = Field(default=128, gt=0)
    """Samples open at once on all servers, at most their --max-num-seqs together."""
    max_adapters: int = Field(default=16, gt=0)
    """Samplers loaded at once, at most the servers' --max-cpu-loras."""
    filtered_logprobs: Literal["refuse", "renormalized"] = "refuse"
    """Treatment of samples with top_k or top_p, whose log-probabilities vLLM computes after these filters.
    'refuse': they fail by name; 'renormalized': they return the log-probabilities among the tokens that are kept."""

    @field_validator("url")
    @classmethod
    def _check_url(cls, value: str | None) -> str | None:
        if value is None:
            return None
        urls = [part.strip().rstrip("/") for part in value.split(",")]
        for url in urls:
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.username:
                raise ValueError(f"{url[:200]!r} is not of the form http://host:port")
        if len(set(urls)) < len(urls):
            raise ValueError(f"{value[:200]!r} has one server twice")
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
        of_own = ("command", "serve_flags", "ray_resources")
        if self.url is not None and (given := [name for name in of_own if getattr(self, name) not in (None, "")]):
            raise ValueError(f"{given[0].replace('_', '-')}: not with url, whose server runs already")
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
        """The servers' URLs; none before the engine has started its server."""
        return [] if self.url is None else self.url.split(",")


class VllmConfig(VllmFlags):
    """The settings of the sampler: what an operator sets, and constants. Only tests use other values for constants."""

    stream_tokens: int = Field(default=16, gt=0)
    """Tokens that a server sends at a time. Each time costs the server some work; a stop string is found as late."""
    start_timeout_s: float = Field(default_factory=lambda data: 600.0 if data.get("url") else 3600.0, gt=0)
    """How long the start waits until the servers respond.

    A server that the engine starts may download its weights first, and the engine notices at once when it ends.
    """
    connect_timeout_s: float = Field(default=10.0, gt=0)
    """How long one connection may take, and the response of a server that is asked for its health."""
    load_timeout_s: float = Field(default=120.0, gt=0)
    """How long a server may take to load one adapter: a file of up to some gigabytes from a shared directory."""
    silence_timeout_s: float = Field(default=300.0, gt=0)
    """How long a server may send nothing for a sample, before the sample begins again.
    The server computes a long prompt meanwhile, after those of other samples."""
    lost_after_s: float = Field(default=10.0, gt=0)
    """How long a server does not respond, before it is reported as lost."""
    outage_timeout_s: float = Field(default=600.0, gt=0)
    """How long a sample waits for a server that is lost, before it fails: a server starts again within minutes."""
    max_restarts: int = Field(default=3, ge=0)
    """How often one sample begins again after it had its first tokens."""

    @classmethod
    def complete(cls, flags: VllmFlags) -> "VllmConfig":
        """Return what an operator set, with constants."""
        return flags if isinstance(flags, cls) else cls.model_validate(flags.model_dump(exclude_unset=True))
