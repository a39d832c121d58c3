"""The question to the probe of the devices, and its answer."""

from typing import Any

import msgspec


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """A model, which may be empty, and the settings of the backend."""

    base_model: str
    backend_config: dict[str, Any]


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """A device; its memory is None if it does not report that."""

    kind: str
    platform: str
    limit_bytes: int | None


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The plan for one device, and what it bounds."""

    num_parameters: int
    dtype: str
    weight_bytes: int
    """Base weights on each device."""
    free_bytes: int
    """Memory that is left for all else on each device, or on the host if devices do not report their memory."""
    max_context_length: int
    kv_tokens: int
    max_length: int
    """Prompt and new tokens of one sample."""
    micro_batch_tokens: int
    is_remat: bool
    max_models: int
    file_bytes: int | None
    """Size of the weight files; None if they are not here yet, or are not needed."""
    has_end: bool
    """Whether the files name a token that ends a sample."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """The devices and the plan. `problem` says why there is no plan; `setting` is the one that it concerns."""

    devices: list[Device]
    plan: Plan | None = None
    problem: str = ""
    setting: str = ""
