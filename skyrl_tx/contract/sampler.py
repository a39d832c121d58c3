"""The interface of a separate sampler, which draws the samples instead of the trainer's backend.

A sampler receives frozen weights as a `Snapshot` of the trainer. `Snapshot.write` turns it into
files, see `skyrl_tx.contract.state_files`. `skyrl_tx.backends.composed` combines a trainer and a
sampler into one backend.
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
    """Draws samples outside the trainer, for example on vLLM servers.

    If the sampler cannot draw a request as the contract says, `begin_sample` raises a UserError
    that names the field. A failure of one sample is reported in `SampleDelta.error`, and other
    requests continue. Training runs while the sampler works, so `load_sampler` and `begin_sample`
    must return soon and `step_sample` may wait only a short time.
    """

    @abstractmethod
    def __init__(self, base_model: str, config: BaseModel) -> None:
        """Store the arguments and do not connect.

        `config` is an instance of `SamplerSpec.config`.
        """

    @abstractmethod
    def start(self, trainer: Capabilities) -> Capabilities:
        """Connect, check that samples will be correct, and return the common capabilities.

        Start from the capabilities of the trainer and reduce the limits that the sampler cannot
        reach. Called once. Raises UserError that says what the operator has to change.
        """

    @abstractmethod
    def close(self) -> None:
        """Free all resources. Idempotent. May be called before `start`."""

    @property
    def is_away(self) -> bool:
        """Whether sampling is interrupted because all servers are lost.

        Its samples wait and finally fail.
        """
        return False

    def meters(self, trainer: Meters) -> Meters:
        """Return the trainer's meters with the sampler's numbers filled in.

        See `AbstractBackend.meters`.
        """
        return trainer


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerSpec:
    """The object behind an entry point of the group `skyrl_tx.samplers`.

    Importing it must be fast.
    """

    config: type[BaseModel]
    """The settings class. Its fields become command-line flags, so each needs a description."""
    load: Callable[[], type[Sampler]]
    """Imports the sampler's class and returns it."""
    flags: Mapping[str, str] = field(default_factory=dict[str, str])
    """Short flags for fields of `config`.

    For example {"vllm_url": "url"} makes `--vllm-url` set the field `url`.
    """
    with_launcher: Callable[[str, Mapping[str, Any]], Mapping[str, Any]] = lambda _, given: given
    """Completes the settings for a launcher.

    Receives the launcher's name and the fields of `config` that were given. Returns these fields,
    together with the fields whose values follow from the launcher.
    """
