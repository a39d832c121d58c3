"""The losses of the protocol as data: names, inputs and config. Backends attach the functions.

A backend lists the losses it offers in `Capabilities.losses`: a subset of `LOSS_SPECS`, or
additional losses. To add a loss, see docs/internals/adding_a_loss.md.

Every loss is a plain sum over positions, without a mean or a division.
`skyrl_tx.contract.loss_reference` computes the value, the derivative and the reported means of each
loss in numpy, and docs/reference/losses.md describes them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInput:
    """An array that a loss reads in addition to the tokens.

    Its shape is [T], or [T, K] where `max_ndim` is 2.

    If the client does not send the array, the engine creates one filled with `fill`. With
    `fill=None` the array is required. An integer array holds token ids, which the engine checks
    against the vocabulary.
    """

    fill: float | None = None
    max_ndim: int = 1
    is_integer: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSpec:
    """The name of a loss, its inputs, and its numeric config with default values.

    If `needs_provenance` is set, the client sends provenance spans instead of `logprobs` and
    `sampled`. The API fills in these two inputs from the log-probabilities that it recorded when
    the tokens were sampled.
    """

    name: str
    inputs: Mapping[str, LossInput]
    config: Mapping[str, float] = field(default_factory=dict[str, float])
    needs_provenance: bool = False

    @property
    def is_policy_gradient(self) -> bool:
        """Whether results report the means of policy gradients, see `PassResult`."""
        return "advantages" in self.inputs


TARGET_TOKENS = "target_tokens"
"""The input that every loss has: at each position, the token whose log-probability counts."""

_POLICY_INPUTS: Mapping[str, LossInput] = {
    TARGET_TOKENS: LossInput(is_integer=True),
    "logprobs": LossInput(),
    "advantages": LossInput(),
    "weights": LossInput(fill=1.0),
}
_PPO_THRESHOLDS: Mapping[str, float] = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}

LOSS_SPECS: Mapping[str, LossSpec] = {
    spec.name: spec
    for spec in (
        LossSpec(
            name="cross_entropy",
            inputs={
                TARGET_TOKENS: LossInput(is_integer=True, max_ndim=2),
                "weights": LossInput(fill=1.0, max_ndim=2),
            },
        ),
        LossSpec(name="importance_sampling", inputs=_POLICY_INPUTS),
        LossSpec(name="ppo", inputs=_POLICY_INPUTS, config=_PPO_THRESHOLDS),
        LossSpec(
            name="cispo",
            inputs=_POLICY_INPUTS,
            config={"clip_low_threshold": 0.0, "clip_high_threshold": 4.0},
        ),
        LossSpec(name="dro", inputs=_POLICY_INPUTS, config={"beta": 0.05}),
        LossSpec(
            name="gspo",
            inputs={**_POLICY_INPUTS, "sequence_ratio_mask": LossInput()},
            config=_PPO_THRESHOLDS,
        ),
        LossSpec(
            name="stable_reinforce",
            inputs={**_POLICY_INPUTS, "sampled": LossInput()},
            config={"clip_high_threshold": 2.0, "kl_coeff": 0.0},
            needs_provenance=True,
        ),
    )
}
"""Every loss by its name in requests."""
