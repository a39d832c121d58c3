"""Abilities and limits that a started backend reports.

The engine also serves a part of them to clients.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from skyrl_tx.contract.losses import LossSpec
from skyrl_tx.contract.requests import SampledLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """Abilities and limits of a started backend. The engine refuses requests that exceed them."""

    max_context_length: int
    """Maximum length of a sequence in tokens, prompt and new tokens together."""
    max_training_length: int | None = None
    """Maximum length of a training example, which needs no KV cache.

    None means `max_context_length`.
    """
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    num_parameters: int
    devices: tuple[str, ...]
    """One name per device, shown in the log and to operators."""
    max_models: int
    """Maximum number of models in training at once.

    The engine evicts idle models to stay below it.
    """
    max_samplers: int
    """Maximum number of loaded samplers, in addition to the base model."""
    max_sample_tokens: int
    """Maximum number of tokens of all running samples, including their prompts.

    A request that needs more than this is refused. Without `sample_slots`, the engine passes on
    requests until their prompts and `max_tokens` reach this number, so the last request may exceed
    it. With `sample_slots`, the engine counts samples instead, because few samples reach their
    `max_tokens`. The backend then queues samples that do not fit yet.
    """
    max_pass_tokens: int
    """Requests are combined into one batch up to this number of tokens.

    A single request may exceed it.
    """
    micro_batch_tokens: int = 0
    """Usual number of tokens in one micro-batch of a pass.

    The engine then makes batches of a few micro-batches, so that passes of other models do not wait
    long. 0 means unknown: the engine fills batches up to `max_pass_tokens`.
    """
    sample_slots: int = 0
    """Maximum number of samples that decode at once. 0 means unknown.

    The engine passes on an eighth more samples than this, so that a free slot is filled at once and
    sessions can take turns. The backend queues the samples that have no slot yet.
    """
    max_lora_rank: int
    lora_targets: frozenset[str]
    """Layers that can have adapters: a subset of {"attn", "mlp", "unembed"}."""
    losses: Mapping[str, LossSpec]
    """Losses by name, usually `skyrl_tx.contract.losses.LOSS_SPECS`."""
    optimizers: frozenset[str] = frozenset({"adamw"})
    max_topk_logprobs: int = 0
    """Largest k of top-k log-probabilities, for prompts and samples. 0 means not supported."""
    max_alt_tokens: int = 0
    """Largest `prompt_alt_tokens_k`. 0 means not supported."""
    offers_custom_losses: bool = False
    """Whether a pass may use a loss that the client defined, see `contract.custom_loss`."""
    offers_target_logprobs: bool = False
    """Whether requests may ask for `target_prompt_logprobs`."""
    sampling_controls: frozenset[str] = frozenset()
    """Names of the fields of `SamplingControls` that the backend supports."""
    sampled_logprobs: frozenset[SampledLogprobs] = frozenset({"tempered"})
    """Kinds of log-probabilities that samples can report, see `SamplingParams.raw_logprobs`.

    Both are equal at the temperatures 0 and 1 without `SamplingControls`. The engine refuses other
    samples that ask for a kind that is not in this set.
    """
    chunk_types: frozenset[str] = frozenset({"text"})
    """Kinds of prompt chunks that the backend accepts. Only text is used so far."""
    fingerprint: Mapping[str, str] = field(default_factory=dict[str, str])
    """Everything besides the request that influences numbers, for example dtype, versions and mesh.

    Two backends with equal fingerprints give bit-identical results. The engine stores the
    fingerprint with weights. Values are converted to plain `str`, because some libraries use a
    subclass, for example `torch.__version__`.
    """
    base_model_hash: str = ""
    """Hash of the base weights, see `state_files.hash_of_base_model`. "" means unknown.

    The engine refuses adapters that were trained on another base model.

    If a setting changes the form of adapters, the setting follows a `+`, for example
    `0123abcd+expert_lora=shared`. Without it, adapters have the form FIRST_FORM. The engine also
    refuses adapters of another form.
    """

    def __post_init__(self) -> None:
        object.__setattr__(self, "fingerprint", plain_text(self.fingerprint))


def plain_text(fingerprint: Mapping[str, str]) -> dict[str, str]:
    """Return a fingerprint with plain `str` values, which our encoders need.

    Asserts that all values are text.
    """
    assert all(isinstance(text, str) for pair in fingerprint.items() for text in pair), fingerprint
    return {str(name): str(value) for name, value in fingerprint.items()}


FIRST_FORM = "expert_lora=own"
"""The form of all adapters up to version 0.2."""


def split_hash(base_model_hash: str) -> tuple[str, str]:
    """Split a `base_model_hash` into the hash of the weights and the form of adapters."""
    weights, _, form = base_model_hash.partition("+")
    return weights, form or FIRST_FORM
