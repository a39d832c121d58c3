"""The interface of loss functions, and their evaluation on a batch.

Every loss is a plain sum over positions, without a mean or a division by tokens, rows or weights. A
loss function returns the loss of each position. `Loss.evaluate` multiplies it by the weights, and
the caller adds it up. `skyrl_tx.contract.loss_reference` has the same losses in numpy, and a test
compares them.

A row has one sequence or multiple sequences one after another. A sequence is one datum. In the
docstrings of the loss functions, l is the trained model's log-probability, q the sampler's, A the
advantage, and r = exp(l - q).

Legend: B rows, T positions, K targets per position, C config columns.

To add a loss, see docs/internals/adding_a_loss.md. A new input array also needs a field of
`LossArrays`, and a neutral value in `Loss.evaluate`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from flax import struct

from skyrl_tx.contract.loss_reference import MAX_DIFFERENCE, MAX_LOG_RATIO
from skyrl_tx.contract.losses import LossSpec


def clip(x: jax.Array, low: jax.Array | float, high: jax.Array | float) -> jax.Array:
    """Clip `x` to bounds.

    The gradient is 0 outside, and 1 inside, at the bounds (as in torch) and at NaN.

    `jnp.clip` is slower on CPU: its gradient divides by the number of equal operands, and each
    division is a separate kernel.
    """
    return jnp.where(x < low, low, jnp.where(x > high, high, x))


def minimum(x: jax.Array, y: jax.Array) -> jax.Array:
    """Return the smaller value, or NaN if either is NaN. Equal values get the gradient of `x`."""
    return jnp.where((x <= y) | jnp.isnan(x), x, y)


@struct.dataclass
class LossArrays:
    """The arrays of one batch, float32 [B, T], or [B, T, K] for cross_entropy.

    `start_BT[b, t]` is the index in row b at which the sequence of position t begins. None means
    that each row is one sequence. At padding, weights, advantages and masks are 0. Arrays that a
    loss does not read have neutral values.
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
        """Whether a position counts: its advantage and its weight are not 0.

        At other positions the policy gradient is 0, and metrics skip them.
        """
        return (self.advantages != 0) & (self.weights != 0)

    def log_ratio(self, where: jax.Array | None = None) -> jax.Array:
        """Return l - q, limited to ±`MAX_LOG_RATIO`, and 0 where `where` is False.

        `where` defaults to `counts`. Prompt positions have q = 0 and A = 0, so r could overflow
        there and inf * 0 would be NaN. They are masked before the exponential, because otherwise
        the gradient would be NaN.
        """
        return self.difference(self.counts if where is None else where, MAX_LOG_RATIO)

    def difference(self, where: jax.Array, bound: float = MAX_DIFFERENCE) -> jax.Array:
        """Return l - q, limited to ±`bound`, and 0 where `where` is False."""
        difference = jnp.where(where, self.target_logprobs, 0.0) - jnp.where(where, self.sampling_logprobs, 0.0)
        return clip(difference, -bound, bound)

    def sum_sequences(self, x_BT: jax.Array) -> jax.Array:
        """Return the sum of `x_BT` over the sequence of each position.

        The result is [B, T], or [B, 1] if each row is one sequence.
        """
        if (start_BT := self.start_BT) is None:
            return x_BT.sum(axis=1, keepdims=True)
        # Prefix sums by doubling: each position adds the sum that ends 1, then 2, then 4 positions
        # before it. This needs no [T, T] mask. It adds in a fixed order, unlike a scatter on a GPU.
        # And it adds nothing from another sequence, so a NaN stays in its sequence.
        position_T = jnp.arange(x_BT.shape[1])

        def double(power: jax.Array, sum_BT: jax.Array) -> jax.Array:
            earlier_T = position_T - (1 << power)
            return sum_BT + jnp.where(earlier_T >= start_BT, sum_BT[:, jnp.maximum(earlier_T, 0)], 0.0)

        prefix_BT = jax.lax.fori_loop(0, (x_BT.shape[1] - 1).bit_length(), double, x_BT)
        last_BT = jax.vmap(lambda start_T: jnp.searchsorted(start_T, start_T, side="right") - 1)(start_BT)
        return jnp.take_along_axis(prefix_BT, last_BT, axis=1)


MEANS = ("ratio", "kl_to_sampler", "clip_fraction")
"""The means that a policy-gradient loss reports."""


@struct.dataclass
class LossOutput:
    """The loss of each position, float32 [B, T], and the means that policy gradients report.

    The sum of the loss is minimised. A mean is the sum of its totals [B, T] divided by the sum of
    `count_BT`, which is 1 at positions that count. Totals and counts are 0 at all other positions,
    and for losses that are not policy gradients.
    """

    loss_BT: jax.Array
    totals: dict[str, jax.Array]  # by name in MEANS
    count_BT: jax.Array


LossConfig = Mapping[str, jax.Array]
"""Config values [B, 1] by name. The values are not static, so new values need no compilation."""
LossFunction = Callable[[LossArrays, LossConfig], jax.Array]
LogRatio = Callable[[LossArrays], jax.Array]


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """A loss: its specification and its function."""

    spec: LossSpec
    function: LossFunction
    is_local: bool = True
    """Whether the loss of a position depends only on the arrays at that position."""
    clipped_log_ratio: LogRatio = LossArrays.log_ratio
    """Computes the logarithm of the ratio that the thresholds bound, per token or per sequence."""

    columns: tuple[str, ...] = field(init=False)
    """The names of `config_BC`'s columns, in order."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "columns", tuple(sorted(self.spec.config)))

    def evaluate(
        self,
        target_logprobs: jax.Array,
        inputs: Mapping[str, jax.Array],
        config_BC: jax.Array,
        start_BT: jax.Array | None = None,
    ) -> LossOutput:
        """Return the loss and the reported means of each position.

        Args:
            target_logprobs: [B, T] or [B, T, K], the array that gradients flow through.
            inputs: the arrays of `spec.inputs`, in the shape of `target_logprobs`. `target_tokens`
                is not read.
            config_BC: the values of `columns`. Additional columns are not read.
            start_BT: see LossArrays.
        """

        def read(name: str, neutral: float = 0.0) -> jax.Array:
            return inputs[name] if name in self.spec.inputs else jnp.full_like(target_logprobs, neutral)

        weights = read("weights")
        x = LossArrays(
            target_logprobs=target_logprobs,
            sampling_logprobs=read("logprobs"),
            # Zero where the weight is 0. Otherwise the product with a ratio or a threshold could be
            # infinite, and inf * 0 is NaN.
            advantages=jnp.where(weights != 0, read("advantages", 1.0), 0.0),
            weights=weights,
            sequence_ratio_mask=read("sequence_ratio_mask"),
            sampled=read("sampled"),
            start_BT=start_BT,
        )

        config = {name: config_BC[:, column, None] for column, name in enumerate(self.columns)}
        loss = self.function(x, config) * weights
        loss_BT = loss if loss.ndim == 2 else loss.sum(axis=2)
        if self.spec.is_policy_gradient:
            return LossOutput(loss_BT, self._compute_totals(x, config), x.counts.astype(jnp.float32))
        zeros_BT = jnp.zeros(loss_BT.shape)
        return LossOutput(loss_BT, dict.fromkeys(MEANS, zeros_BT), zeros_BT)

    def _compute_totals(self, x: LossArrays, config: LossConfig) -> dict[str, jax.Array]:
        """Return the totals of MEANS: ratio, distance to the sampler, whether it is clipped."""
        x = jax.lax.stop_gradient(x)
        bounded = jnp.exp(self.clipped_log_ratio(x))
        is_clipped = (bounded < config.get("clip_low_threshold", 0.0)) | (
            bounded > config.get("clip_high_threshold", jnp.inf)
        )
        values = {
            "ratio": jnp.exp(x.log_ratio()),
            "kl_to_sampler": -x.difference(x.counts),  # q - l on samples of q estimates KL(sampler || model)
            "clip_fraction": is_clipped.astype(jnp.float32),
        }
        return {name: jnp.where(x.counts, values[name], 0.0) for name in MEANS}
