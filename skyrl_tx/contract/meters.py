"""State and work counters of a backend, for metrics, the status screen and the console.

No decision of the server depends on these numbers.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """The memory of one device, in bytes."""

    used_bytes: int
    limit_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Meters:
    """The state of a backend at one time. None means that the backend does not report the number.

    From `fallback_samples` on, the numbers count since the start of the backend and never decrease.
    """

    device_memory: tuple[DeviceMemory, ...] = ()
    """One entry per device, in the order of `Capabilities.devices`.

    Empty if devices do not report their memory.
    """
    decode_slots: int | None = None
    """Number of samples that can decode at the same time."""
    decode_slots_used: int | None = None
    kv_cache_tokens: int | None = None
    """Capacity of the KV cache in token positions."""
    kv_cache_tokens_used: int | None = None
    outage: str | None = None
    """A sentence about the part of the backend that is down, for example the sampler servers.

    The sentence is shown to all users. None means that everything works.
    """
    progress: str | None = None
    """Progress of background work, for example of compilation, shown to all users.

    None means that nothing runs.
    """
    sampler_servers: int | None = None
    """Number of servers that draw samples for the backend."""
    sampler_servers_lost: int | None = None
    """Number of these servers that do not respond."""
    prefix_cache_tokens: int | None = None
    """Token positions that cached prompts occupy.

    Recurrent states count as positions of the same size in bytes.
    """

    fallback_samples: int | None = None
    """Samples that the trainer drew because all sampler servers were lost."""
    compilations: int | None = None
    """Programs that were compiled or read from the compilation cache."""
    compile_seconds: float | None = None
    out_of_memory_retries: int | None = None
    """Passes that restarted with smaller micro-batches because a device ran out of memory."""
    micro_batches: int | None = None
    padding_tokens: int | None = None
    """Positions of micro-batches without a token of a request."""
    shared_tokens: int | None = None
    """Tokens of passes that were not computed, because another example begins with them."""
    compared_samples: int | None = None
    """Samples whose log-probabilities were compared with the trainer's, see `TrainerGap`."""
    compared_tokens: int | None = None
    """Number of tokens of these samples that were compared."""
    trainer_gap_nats: float | None = None
    """Sum of the absolute differences over these tokens.

    Divide it by `compared_tokens` to get the mean.
    """
    trainer_gap_max_nats: float | None = None
    """Largest absolute difference of a token."""

    def __post_init__(self) -> None:
        assert self.decode_slots_used is None or 0 <= self.decode_slots_used <= (self.decode_slots or 0)
        assert self.kv_cache_tokens_used is None or 0 <= self.kv_cache_tokens_used <= (self.kv_cache_tokens or 0)
