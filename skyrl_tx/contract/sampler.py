"""The interface of a sampler that stands next to a trainer and draws the samples in its place.

A sampler gets frozen weights as a `Snapshot` of the trainer, which `Snapshot.write` turns into files of
`skyrl_tx.contract.state_files`. `skyrl_tx.backends.composed` makes one backend of both.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from skyrl_tx.contract.backend import SamplingBackend
from skyrl_tx.contract.capabilities import Capabilities
from skyrl_tx.contract.meters import Meters


class Sampler(SamplingBackend):
    """Draws samples elsewhere, such as on servers of an inference engine.

    A request that it cannot draw as the contract says is refused by `begin_sample`, with a UserError that names the
    field. A failure of one sample is its `SampleDelta.error`; others continue. `load_sampler` and `begin_sample` return
    soon, and `step_sample` waits a short time only: training goes on meanwhile.
    """

    @abstractmethod
    def __init__(self, base_model: str, config: BaseModel) -> None:
        """Store the arguments; connect to nothing. `config` is an instance of `SamplerSpec.config`."""

    @abstractmethod
    def start(self, trainer: Capabilities) -> Capabilities:
        """Connect, check that sampling will be right, and return the capabilities of both together.

        These are the trainer's with what sampling limits. Called once. Raises UserError that says what to change.
        """

    @abstractmethod
    def close(self) -> None:
        """Free all resources. Idempotent; also called before `start`."""

    @property
    def is_away(self) -> bool:
        """Whether nothing can be drawn now, because every server is lost. Its samples wait, and fail in the end."""
        return False

    def meters(self, trainer: Meters) -> Meters:
        """Return the trainer's meters with what this sampler holds. See `AbstractBackend.meters`."""
        return trainer


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerSpec:
    """The object that an entry point of the group `skyrl_tx.samplers` refers to; importing it must be fast."""

    config: type[BaseModel]
    """Its fields become flags, each with a description."""
    load: Callable[[], type[Sampler]]
    """Imports and returns the sampler's class."""
    flags: Mapping[str, str] = field(default_factory=dict[str, str])
    """Short names of fields of `config`. For example {"vllm_url": "url"} makes `--vllm-url` set the field `url`."""
    with_launcher: Callable[[str, Mapping[str, Any]], Mapping[str, Any]] = lambda _, given: given
    """Receives the name of the launcher and the given fields of `config`, and returns them with those that follow."""
