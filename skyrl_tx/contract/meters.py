"""State and work of a backend, for people: metrics, the status screen and the console. Nothing depends on it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """The memory of one device in bytes."""

    used_bytes: int
    limit_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Meters:
    """The state of a backend at one time. None: the backend does not tell.

    The second half counts since the start of the backend and never decreases.
    """

    device_memory: tuple[DeviceMemory, ...] = ()
    """One entry per device, in the order of `Capabilities.devices`; empty if devices do not report their memory."""
    decode_slots: int | None = None
    """Samples that can decode at once."""
    decode_slots_used: int | None = None
    kv_cache_tokens: int | None = None
    """Positions of the KV cache."""
    kv_cache_tokens_used: int | None = None
    outage: str | None = None
    """Which part does not work while the others do, as a sentence that everybody may read. None: all work."""
    progress: str | None = None
    """Progress of work in the background, such as compilation, as text that everybody may read. None: nothing runs."""
    sampler_servers: int | None = None
    """Servers that draw samples for the backend."""
    sampler_servers_lost: int | None = None
    """Those of them that do not respond."""
    prefix_cache_tokens: int | None = None
    """Positions of the pages of cached prompts, and of their states at their size."""

    fallback_samples: int | None = None
    """Samples that the trainer drew because all these servers were lost."""
    compilations: int | None = None
    """Programs that were compiled, or read from a compilation cache."""
    compile_seconds: float | None = None
    out_of_memory_retries: int | None = None
    """Passes that started again with smaller micro-batches because a device was out of memory."""
    micro_batches: int | None = None
    padding_tokens: int | None = None
    """Positions of micro-batches that hold no token of a request."""
    compared_samples: int | None = None
    """Samples whose log-probabilities were compared with the trainer's, see `TrainerGap`."""
    compared_tokens: int | None = None
    """The tokens of these samples that were compared."""
    trainer_gap_nats: float | None = None
    """The sum of the absolute differences of these tokens: divided by their number it is the mean."""
    trainer_gap_max_nats: float | None = None
    """The largest of these differences."""

    def __post_init__(self) -> None:
        assert self.decode_slots_used is None or 0 <= self.decode_slots_used <= (self.decode_slots or 0)
        assert self.kv_cache_tokens_used is None or 0 <= self.kv_cache_tokens_used <= (self.kv_cache_tokens or 0)
