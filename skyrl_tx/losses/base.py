"""What a loss is: a function of log-probabilities and inputs, a row of data about it, and one way to evaluate it.

Legend: B rows, T positions, K targets per position, C config columns. A row is one sequence, or several that lie one
behind the other; a sequence is one datum.

Every loss is a plain sum over positions: no mean, no division by tokens, rows or weights. A function gives the loss
of each position, `Loss.evaluate` multiplies it by the weights, and whoever reads it adds up. In the functions the
trained model's log-probability is l, the sampler's q, the advantage A, and r = exp(l - q).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import struct

from skyrl_tx.contract.capabilities import LossInput, LossSpec

MAX_LOG_RATIO = 60.0  # exp(60) = 1e26: far beyond any sane ratio, far below where float32 products overflow

MAX_DISTANCE = 1e18  # its square is what float32 still holds

TARGETS = LossInput(is_integer=True)
REQUIRED = LossInput()
ONES = LossInput(fill=1.0)
POLICY_INPUTS: Mapping[str, LossInput] = {
    "target_tokens": TARGETS,
    "logprobs": REQUIRED,
    "advantages": REQUIRED,
    "weights": ONES,
}
"""The inputs that all policy-gradient losses share."""


@struct.dataclass
class LossInputs:
    """The arrays of one batch, float32 [B, T]; those of cross_entropy may be [B, T, K].

    `start_BT` says where the sequence of each position begins in its row; None: a row is one sequence.

    Padding has weight 0, advantage 0 and mask 0. What a loss does not read is filled with neutral values.
    """

    target_logprobs: jax.Array
    sampling_logprobs: jax.Array
    advantages: jax.Array
    weights: jax.Array
    sequence_ratio_mask: jax.Array
    sampled: jax.Array
    start_BT: jax.Array | None = None

    @property
    def counts(self) -> jax.Array:
        """Where a policy-gradient loss can be other than zero."""
        return (self.advantages != 0) & (self.weights != 0)

    def log_ratio(self, where: jax.Array) -> jax.Array:
        """Return l - q bounded by ±`MAX_LOG_RATIO`, and 0 elsewhere.

        Prompt positions carry q = 0 and A = 0: there r may overflow, and inf * 0 be NaN, in the value or, were the
        choice made after the exponential, in the gradient.
        """
        return jnp.clip(self._difference(where), -MAX_LOG_RATIO, MAX_LOG_RATIO)

    def distance(self, where: jax.Array) -> jax.Array:
        """Return l - q as it is, and 0 elsewhere: bounded only where its square would be infinite."""
        return jnp.clip(self._difference(where), -MAX_DISTANCE, MAX_DISTANCE)

    def _difference(self, where: jax.Array) -> jax.Array:
        return jnp.where(where, self.target_logprobs, 0.0) - jnp.where(where, self.sampling_logprobs, 0.0)

    def counted_log_ratio(self) -> jax.Array:
        """Return l - q where the position counts, and 0 elsewhere."""
        return self.log_ratio(self.counts)

    def sum_sequences(self, x_BT: jax.Array) -> jax.Array:
        """Return, at each position, the sum of `x_BT` over the sequence there: [B, T], or [B, 1] of whole rows."""
        if (start_BT := self.start_BT) is None:
            return x_BT.sum(axis=1, keepdims=True)
        # Each position adds what the one before it has, then the one two before, four before: [T, T] is never held. A
        # scatter would add in any order on a GPU. Nothing crosses into another sequence: a NaN stays in its own.
        position_T = jnp.arange(x_BT.shape[1])

        def reach_twice_as_far(distance: jax.Array, sum_BT: jax.Array) -> jax.Array:
            earlier_T = position_T - (1 << distance)
            return sum_BT + jnp.where(earlier_T >= start_BT, sum_BT[:, jnp.maximum(earlier_T, 0)], 0.0)

        until_BT = jax.lax.fori_loop(0, (x_BT.shape[1] - 1).bit_length(), reach_twice_as_far, x_BT)
        last_BT = jax.vmap(lambda start_T: jnp.searchsorted(start_T, start_T, side="right") - 1)(start_BT)
        return jnp.take_along_axis(until_BT, last_BT, axis=1)


@struct.dataclass
class LossConfig:
    """One row of numbers per datum; names of the columns are static, so other numbers compile nothing anew."""

    columns: tuple[str, ...] = struct.field(pytree_node=False)
    values_BC: jax.Array

    def __getitem__(self, name: str) -> jax.Array:
        """Return one number per row, [B, 1]."""
        return self.values_BC[:, self.columns.index(name), None]


@struct.dataclass
class Mean:
    """Each position's share of a mean: add up totals and counts of any positions, then divide."""

    total_BT: jax.Array
    count_BT: jax.Array


@struct.dataclass
class LossOutput:
    """What evaluating a loss gives, position by position: the value to minimise is the sum of `loss_BT`."""

    loss_BT: jax.Array
    means: dict[str, Mean]


LossFunction = Callable[[LossInputs, LossConfig], jax.Array]
LogRatio = Callable[[LossInputs], jax.Array]


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """A loss: its public description and its function."""

    spec: LossSpec
    function: LossFunction
    is_policy_gradient: bool = True
    is_local: bool = True
    """Whether a position's loss follows from that position's log-probability and inputs alone."""
    clipped_log_ratio: LogRatio = LossInputs.counted_log_ratio
    """The logarithm of what the thresholds bound, if it has any: the ratio of tokens, or one of whole sequences."""

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of `config_BC`'s columns, in order."""
        return tuple(sorted(self.spec.config))

    def evaluate(
        self,
        target_logprobs: jax.Array,
        inputs: Mapping[str, jax.Array],
        config_BC: jax.Array,
        start_BT: jax.Array | None = None,
    ) -> LossOutput:
        """Return each position's loss and metrics.

        `target_logprobs` [B, T] (or [B, T, K]) is what gradients flow through; `inputs` are the arrays of
        `spec.inputs` in its shape (`target_tokens` is not read); `config_BC` has the columns `columns`;
        `start_BT` is that of LossInputs.
        """
        assert config_BC.shape[1] == len(self.columns), f"{self.spec.name} has config columns {self.columns}"
        weights, ones = inputs["weights"], jnp.ones_like(target_logprobs)
        x = LossInputs(
            target_logprobs=target_logprobs,
            sampling_logprobs=inputs.get("logprobs", jnp.zeros_like(target_logprobs)),
            # None where the weight is 0: times a ratio, or a threshold, it may be infinite, and inf * 0 is NaN.
            advantages=jnp.where(weights != 0, inputs.get("advantages", ones), 0.0),
            weights=weights,
            sequence_ratio_mask=inputs.get("sequence_ratio_mask", jnp.zeros_like(target_logprobs)),
            sampled=inputs.get("sampled", jnp.zeros_like(target_logprobs)),
            start_BT=start_BT,
        )
        config = LossConfig(columns=self.columns, values_BC=config_BC)
        loss = self.function(x, config) * x.weights
        means = self._policy_means(x, config) if self.is_policy_gradient else {}
        return LossOutput(loss_BT=loss if loss.ndim == 2 else loss.sum(axis=2), means=means)

    def _policy_means(self, x: LossInputs, config: LossConfig) -> dict[str, Mean]:
        """Return mean ratio, share of clipped ratios and distance to the sampler, over the positions that count."""
        x = jax.lax.stop_gradient(x)
        log_ratio = x.counted_log_ratio()
        low = config["clip_low_threshold"] if "clip_low_threshold" in self.columns else 0.0
        high = config["clip_high_threshold"] if "clip_high_threshold" in self.columns else jnp.inf
        bounded = jnp.exp(self.clipped_log_ratio(x))
        values = {
            "ratio": jnp.exp(log_ratio),
            "kl_to_sampler": -x.distance(x.counts),  # q - l on samples of q estimates KL(sampler || model)
            "clip_fraction": ((bounded < low) | (bounded > high)).astype(jnp.float32),
        }
        count_BT = x.counts.astype(jnp.float32)
        return {
            name: Mean(total_BT=jnp.where(x.counts, value, 0.0), count_BT=count_BT) for name, value in values.items()
        }
