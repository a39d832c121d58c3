"""All that the engine ever learns about a backend; part of it is served to clients."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInput:
    """One array a loss reads beside the tokens. `fill` stands in for an absent one; None: it is required.

    `max_ndim` 2 allows [T, K] beside [T]. `is_integer`: token ids, checked against the vocabulary.
    """

    fill: float | None = None
    max_ndim: int = 1
    is_integer: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSpec:
    """A loss by name: its inputs, and its numeric config with defaults."""

    name: str
    inputs: Mapping[str, LossInput]
    config: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a started backend can do. Lengths count tokens."""

    max_context_length: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    num_parameters: int
    devices: tuple[str, ...]
    """For people: what the log and the operator see."""
    max_models: int
    """Resident for training at once."""
    max_samplers: int
    """Resident for sampling at once, the base model not counted."""
    max_sample_tokens: int
    """Prompt and new tokens resident at once, over all samples; no request is for one that may come to more.

    Without `sample_slots` as many are handed over as fit whatever they come to, and one request more. With them those
    wait in the backend that it finds no room for yet: few samples come to what they may.
    """
    max_pass_tokens: int
    """A target per batch; one example may exceed it."""
    micro_batch_tokens: int = 0
    """What a step of a pass computes, about, but for one long example. 0: not told, and batches are larger for it."""
    sample_slots: int = 0
    """Samples decoded side by side at most; more are held back, for their sessions to take turns. 0: not told."""
    max_lora_rank: int
    lora_targets: frozenset[str]
    """Of {"attn", "mlp", "unembed"}."""
    losses: Mapping[str, LossSpec]
    optimizers: frozenset[str] = frozenset({"adamw"})
    max_topk_logprobs: int = 0
    """0: not offered. Prompt and sample."""
    max_alt_tokens: int = 0
    """0: `prompt_alt_tokens_k` is not offered."""
    offers_target_logprobs: bool = False
    chunk_types: frozenset[str] = frozenset({"text"})
    fingerprint: Mapping[str, str] = field(default_factory=dict[str, str])
    """What the numbers depend on beside the inputs: dtype, versions, mesh. Equal fingerprints, equal bits."""
    base_model_hash: str = ""
    """Of the base weights: adapters of one are nothing on another, and are refused there. "": not told."""
