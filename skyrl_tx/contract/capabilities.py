"""The properties of a started backend: all that the engine knows about it. Part of them is served to clients."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from skyrl_tx.contract.losses import LossSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """The abilities and limits of a started backend. The engine refuses requests that exceed them."""

    max_context_length: int
    """The most tokens of one sequence, prompt and new tokens together."""
    max_training_length: int | None = None
    """The most tokens of one example in training, which needs no cache. None: `max_context_length`."""
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    num_parameters: int
    devices: tuple[str, ...]
    """A name per device, for the log and for operators."""
    max_models: int
    """The most models in training at once. The engine evicts others."""
    max_samplers: int
    """The most samplers loaded at once, in addition to the base model."""
    max_sample_tokens: int
    """The most tokens of all running samples together, prompts and new tokens. No request may need more by itself.

    Without `sample_slots`, the engine hands over requests until their prompts and `max_tokens` reach this number, so
    that the last one may exceed it. With `sample_slots`, it counts samples instead, and the backend queues those that
    do not fit yet: few samples reach their `max_tokens`.
    """
    max_pass_tokens: int
    """The number of tokens up to which requests are put into one batch of a pass. One request may exceed it."""
    micro_batch_tokens: int = 0
    """The usual number of tokens of one step of a pass. 0: unknown; the engine then fills batches to `max_pass_tokens`.

    Otherwise it makes batches of a few steps, so that passes of other models need not wait long.
    """
    sample_slots: int = 0
    """The most samples that decode at once. 0: unknown.

    Otherwise the engine hands over an eighth more samples than this number, so that freed slots are filled at once and
    sessions take turns. The backend queues those that find no slot.
    """
    max_lora_rank: int
    lora_targets: frozenset[str]
    """The layers that can have adapters, a subset of {"attn", "mlp", "unembed"}."""
    losses: Mapping[str, LossSpec]
    """The losses by name, usually from `skyrl_tx.contract.losses.LOSS_SPECS`."""
    optimizers: frozenset[str] = frozenset({"adamw"})
    max_topk_logprobs: int = 0
    """The largest k of top-k log-probabilities, of prompts and of samples. 0: not supported."""
    max_alt_tokens: int = 0
    """The largest `prompt_alt_tokens_k`. 0: not supported."""
    offers_custom_losses: bool = False
    """Whether passes may have a loss of the client, see `contract.custom_loss`."""
    offers_target_logprobs: bool = False
    """Whether `target_prompt_logprobs` is supported."""
    chunk_types: frozenset[str] = frozenset({"text"})
    fingerprint: Mapping[str, str] = field(default_factory=dict[str, str])
    """Everything but the inputs that numbers depend on: dtype, versions, mesh. Equal fingerprints give equal bits.

    The engine stores it with weights. Values become plain `str`: `torch.__version__`, for one, is a subclass.
    """
    base_model_hash: str = ""
    """A hash of the base weights, see `state_files.hash_of_base_model`. "": unknown.

    The engine refuses adapters of another base model.

    Where a setting changes the form of adapters, it follows a `+`, as in `0123abcd+expert_lora=shared`; without it the
    form is FIRST_FORM. Adapters of another form are refused too.
    """

    def __post_init__(self) -> None:
        object.__setattr__(self, "fingerprint", plain_text(self.fingerprint))


def plain_text(fingerprint: Mapping[str, str]) -> dict[str, str]:
    """Return a fingerprint without subclasses of str, which no encoder of ours knows. Asserts that all is text."""
    assert all(isinstance(text, str) for pair in fingerprint.items() for text in pair), fingerprint
    return {str(name): str(value) for name, value in fingerprint.items()}


FIRST_FORM = "expert_lora=own"
"""The form of all adapters up to version 0.2."""


def split_hash(base_model_hash: str) -> tuple[str, str]:
    """Return the hash of the base weights alone, and the setting that makes adapters of this form."""
    weights, _, form = base_model_hash.partition("+")
    return weights, form or FIRST_FORM
