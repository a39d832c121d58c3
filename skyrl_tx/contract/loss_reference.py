"""Every loss of `LOSS_SPECS` in float64 numpy: value, derivative and reported means of one example.

A backend may compute its losses with these functions. Or it implements the losses itself, and
`BackendSuite` compares them with these. The device then only has to multiply `slope` by the
derivatives of the model, which is what torch's `logprobs.backward(slope)` does.

Arrays of one example have the shape [T], or [T, K] for cross_entropy: T positions, K targets per
position. In the docstrings below, l is the model's log-probability, q the sampler's, A the
advantage, and r = exp(l - q). A position counts if its advantage and its weight are not 0.
Positions that do not count are masked before they could overflow: a prompt token has A = 0 and q =
0, but l may have any value.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from skyrl_tx.contract.arrays import Float32Array, NumberArray
from skyrl_tx.contract.losses import LOSS_SPECS, TARGET_TOKENS
from skyrl_tx.contract.requests import LossConfigValue
from skyrl_tx.contract.results import MeanTerm

Floats = NDArray[np.float64]
Config = Mapping[str, float]

MAX_LOG_RATIO = 60.0
"""Bound of a log-ratio before exp. exp(60) is 1e26, so products with it stay finite in float32."""
MAX_DIFFERENCE = 1e18
"""Bound of l - q before it is squared. Its square, 1e36, is finite in float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossValue:
    """The loss of one example at each position, and its derivative by the log-probability.

    `PassResult.sums["loss"]` is the sum of `loss`. `PassResult.means` is `means`, which is empty if
    the loss is not a policy gradient.
    """

    loss: Floats
    slope: Floats
    means: Mapping[str, MeanTerm] = field(default_factory=dict[str, MeanTerm])


def evaluate(
    name: str,
    logprobs: Float32Array | Floats,
    inputs: Mapping[str, NumberArray],
    config: Mapping[str, LossConfigValue],
) -> LossValue:
    """Evaluate the loss `name` on one example.

    Args:
        name: a key of `LOSS_SPECS`.
        logprobs: the model's log-probabilities, in the shape of the targets.
        inputs: `PassExample.loss_inputs`. The arrays are not changed.
        config: `PassExample.loss_config`.
    """
    given = {key: np.asarray(array, np.float64) for key, array in inputs.items() if key != TARGET_TOKENS}
    with np.errstate(all="ignore"):  # no warnings for a model that has diverged
        x = LossInputs(np.asarray(logprobs, np.float64), given)
        numbers = {key: float(value) for key, value in config.items()}
        value, clipped_ratio = LOSS_FUNCTIONS[name](x, numbers)
        if not LOSS_SPECS[name].is_policy_gradient:
            return value
        return replace(
            value, means=_compute_means(x, numbers, x.ratio(x.counts) if clipped_ratio is None else clipped_ratio)
        )


class LossInputs:
    """The arrays of one example.

    Where the weight is 0 the advantage is set to 0, so that no product is NaN.
    """

    def __init__(self, logprobs: Floats, inputs: Mapping[str, Floats]) -> None:
        self.l, self.w = logprobs, inputs["weights"]
        zeros = np.zeros_like(logprobs)
        self.q = inputs.get("logprobs", zeros)
        self.a = np.where(self.w != 0, inputs.get("advantages", zeros), 0.0)
        self.mask = inputs.get("sequence_ratio_mask", zeros)
        self.sampled = inputs.get("sampled", zeros) != 0
        self.counts = (self.a != 0) & (self.w != 0)

    def difference(self, where: NDArray[np.bool_], bound: float = MAX_DIFFERENCE) -> Floats:
        """Return l - q, limited to ±`bound`, and 0 where `where` is False."""
        return np.clip(np.where(where, self.l - self.q, 0.0), -bound, bound)

    def ratio(self, where: NDArray[np.bool_]) -> Floats:
        """Return r with l - q limited to ±`MAX_LOG_RATIO`, and 1 where `where` is False."""
        return np.exp(self.difference(where, MAX_LOG_RATIO))


LossFunction = Callable[[LossInputs, Config], tuple[LossValue, Floats | None]]
"""A loss function.

It also returns the ratio that the thresholds bound, if this is not the ratio of each token.
"""


def cross_entropy(x: LossInputs, config: Config) -> tuple[LossValue, None]:
    """-l: weighted negative log-likelihood."""
    return LossValue(loss=-x.w * np.where(x.w != 0, x.l, 0.0), slope=-x.w), None


def importance_sampling(x: LossInputs, config: Config) -> tuple[LossValue, None]:
    """-r * A: policy gradient with importance weights."""
    gain = x.w * x.a * x.ratio(x.counts)
    return LossValue(loss=-gain, slope=np.where(_has_derivative(x), -gain, 0.0)), None


def ppo(x: LossInputs, config: Config) -> tuple[LossValue, None]:
    """-min(r * A, clip(r) * A): Schulman et al. 2017, arXiv:1707.06347, eq. 7."""
    value = _evaluate_clipped(x, x.ratio(x.counts), config)
    return replace(value, slope=np.where(_has_derivative(x), value.slope, 0.0)), None


def cispo(x: LossInputs, config: Config) -> tuple[LossValue, None]:
    """-stopgrad(clip(r)) * l * A: MiniMax 2025, arXiv:2506.13585, eq. 4."""
    gain = x.w * x.a * _clip_ratio(x.ratio(x.counts), config)
    return LossValue(loss=-gain * np.where(x.counts, x.l, 0.0), slope=-gain), None


def dro(x: LossInputs, config: Config) -> tuple[LossValue, None]:
    """-(l * A - beta / 2 * (l - q)^2): Richemond et al. 2024, arXiv:2405.19107."""
    difference, beta = x.difference(x.w != 0), config["beta"]
    loss = -(np.where(x.counts, x.l, 0.0) * x.a - 0.5 * beta * difference**2)
    return LossValue(loss=x.w * loss, slope=-x.w * (x.a - beta * _differentiate_square(difference))), None


def gspo(x: LossInputs, config: Config) -> tuple[LossValue, Floats]:
    """-min(s * A, clip(s) * A) with the ratio s of the sequence: GSPO-token, arXiv:2507.18071, eq.

    14.

    Source: Zheng et al. 2025. log s is the mean of l - q over `sequence_ratio_mask`, or 0 if the
    mask is empty. Every token has a derivative, as if s were its ratio.
    """
    total, count = (x.difference(x.mask != 0) * x.mask).sum(), x.mask.sum()
    mean = np.clip(total / count if count != 0 else 0.0, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = np.full_like(x.l, np.exp(mean))
    return _evaluate_clipped(x, ratio, config), ratio


def stable_reinforce(x: LossInputs, config: Config) -> tuple[LossValue, None]:
    """-stopgrad(min(r, threshold)) * l * A + kl_coeff / 2 * (l - q)^2 at sampled positions.

    Defined by this project.
    """
    has_gain = x.sampled & x.counts
    gain = np.where(has_gain, x.w * x.a * np.minimum(x.ratio(has_gain), config["clip_high_threshold"]), 0.0)
    coefficient = config["kl_coeff"] * x.w
    difference = x.difference(x.sampled & (coefficient != 0))
    loss = -gain * np.where(has_gain, x.l, 0.0) + 0.5 * coefficient * difference**2
    return LossValue(loss=loss, slope=-gain + coefficient * _differentiate_square(difference)), None


LOSS_FUNCTIONS: Mapping[str, LossFunction] = {
    function.__name__: function
    for function in (cross_entropy, importance_sampling, ppo, cispo, dro, gspo, stable_reinforce)
}
"""Every loss by its name in `LOSS_SPECS`."""


def _compute_means(x: LossInputs, config: Config, clipped_ratio: Floats) -> Mapping[str, MeanTerm]:
    """Return the means that a policy gradient reports, see `PassResult`."""
    low, high = config.get("clip_low_threshold", 0.0), config.get("clip_high_threshold", np.inf)
    positions = {
        "ratio": x.ratio(x.counts),
        "kl_to_sampler": -x.difference(x.counts),
        "clip_fraction": (clipped_ratio < low) | (clipped_ratio > high),
    }
    return {key: MeanTerm(float(array[x.counts].sum()), float(x.counts.sum())) for key, array in positions.items()}


def _clip_ratio(ratio: Floats, config: Config) -> Floats:
    return np.clip(ratio, config["clip_low_threshold"], config["clip_high_threshold"])


def _evaluate_clipped(x: LossInputs, ratio: Floats, config: Config) -> LossValue:
    gain, bound = ratio * x.a, _clip_ratio(ratio, config) * x.a
    return LossValue(loss=-x.w * np.minimum(gain, bound), slope=np.where(bound < gain, 0.0, -x.w * gain))


def _has_derivative(x: LossInputs) -> NDArray[np.bool_]:
    """Return where the ratio is within its bound and therefore has a derivative."""
    return np.abs(x.difference(x.counts)) <= MAX_LOG_RATIO


def _differentiate_square(difference: Floats) -> Floats:
    """Return half the derivative of the squared difference, which is 0 at the bound."""
    return np.where(np.abs(difference) < MAX_DIFFERENCE, difference, 0.0)
