"""The losses of `contract.losses` in float64 numpy, each with its derivative by hand.

Shapes: T positions, K targets per position. Arrays of one example are [T], those of cross_entropy may be [T, K].
In the docstrings of the functions, l is the model's log-probability, q the sampler's, A the advantage, r = exp(l - q).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from skyrl_tx.contract.losses import LOSS_SPECS
from skyrl_tx.contract.results import MeanTerm

Floats = NDArray[np.float64]
Inputs = Mapping[str, Floats]
Config = Mapping[str, float]

_MAX_LOG_RATIO = 60.0
"""The bound of a log-ratio: products of its exponential with an advantage of 0 stay 0, not NaN."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossValue:
    """The loss of one example at each position, and its derivative by each log-probability, in the same shape.

    `clipped_ratio` is the ratio that the thresholds bound where it is not that of the token. `means` are totals and
    counts over the positions.
    """

    loss: Floats
    d_logprobs: Floats
    clipped_ratio: Floats | None = None
    means: Mapping[str, MeanTerm] = field(default_factory=dict[str, MeanTerm])


def evaluate(name: str, logprobs: Floats, inputs: Inputs, config: Config) -> LossValue:
    """Return the loss `name` of one example, and the means of a policy-gradient loss."""
    value = FUNCTIONS[name](logprobs, inputs, config)
    if not LOSS_SPECS[name].is_policy_gradient:
        return value
    counts = (inputs["advantages"] != 0) & (inputs["weights"] != 0)
    ratio = _ratio(logprobs, inputs)
    clipped = ratio if value.clipped_ratio is None else value.clipped_ratio
    low, high = config.get("clip_low_threshold", 0.0), config.get("clip_high_threshold", np.inf)
    positions = {
        "ratio": ratio,
        "kl_to_sampler": inputs["logprobs"] - logprobs,
        "clip_fraction": (clipped < low) | (clipped > high),
    }
    means = {key: MeanTerm(float(array[counts].sum()), float(counts.sum())) for key, array in positions.items()}
    return replace(value, means=means)


def cross_entropy(logprobs: Floats, inputs: Inputs, config: Config) -> LossValue:
    """-l: weighted negative log-likelihood."""
    return LossValue(loss=-inputs["weights"] * logprobs, d_logprobs=-inputs["weights"])


def importance_sampling(logprobs: Floats, inputs: Inputs, config: Config) -> LossValue:
    """-r * A: policy gradient with importance weights."""
    gain = _ratio(logprobs, inputs) * _advantage(inputs)
    return LossValue(loss=-gain, d_logprobs=-gain)


def ppo(logprobs: Floats, inputs: Inputs, config: Config) -> LossValue:
    """-min(r * A, clip(r) * A): Schulman et al. 2017, arXiv:1707.06347, eq. 7."""
    return _clipped(_ratio(logprobs, inputs), inputs, config)


def cispo(logprobs: Floats, inputs: Inputs, config: Config) -> LossValue:
    """-stopgrad(clip(r)) * l * A: MiniMax 2025, arXiv:2506.13585, eq. 4."""
    gain = _clip(_ratio(logprobs, inputs), config) * _advantage(inputs)
    return LossValue(loss=-gain * logprobs, d_logprobs=-gain)


def dro(logprobs: Floats, inputs: Inputs, config: Config) -> LossValue:
    """-(l * A - beta / 2 * (l - q)^2): Richemond et al. 2024, arXiv:2405.19107."""
    difference, beta = logprobs - inputs["logprobs"], config["beta"]
    weights, advantages = inputs["weights"], inputs["advantages"]
    loss = -(logprobs * advantages - 0.5 * beta * difference**2)
    return LossValue(loss=weights * loss, d_logprobs=-weights * (advantages - beta * difference))


def gspo(logprobs: Floats, inputs: Inputs, config: Config) -> LossValue:
    """-min(s * A, clip(s) * A) with the ratio s of the whole sequence: Zheng et al. 2025, arXiv:2507.18071, eq. 14."""
    mask = inputs["sequence_ratio_mask"]
    difference = np.where(mask == 0, 0.0, logprobs - inputs["logprobs"])
    ratio = np.full_like(logprobs, _exp((mask * difference).sum() / max(mask.sum(), 1e-30)))
    return replace(_clipped(ratio, inputs, config), clipped_ratio=ratio)


def stable_reinforce(logprobs: Floats, inputs: Inputs, config: Config) -> LossValue:
    """-stopgrad(min(r, threshold)) * l * A + kl_coeff / 2 * (l - q)^2 at sampled positions: our own definition."""
    sampled = inputs["sampled"] != 0
    ratio = np.minimum(_ratio(logprobs, inputs), config["clip_high_threshold"])
    gain = np.where(sampled, ratio * _advantage(inputs), 0.0)
    difference = np.where(sampled, logprobs - inputs["logprobs"], 0.0)
    coefficient = config["kl_coeff"] * inputs["weights"]
    return LossValue(
        loss=-gain * logprobs + 0.5 * coefficient * difference**2, d_logprobs=-gain + coefficient * difference
    )


FUNCTIONS: Mapping[str, Callable[[Floats, Inputs, Config], LossValue]] = {
    function.__name__: function
    for function in (cross_entropy, importance_sampling, ppo, cispo, dro, gspo, stable_reinforce)
}
"""The losses of this backend, by name in `LOSS_SPECS`."""


def _advantage(inputs: Inputs) -> Floats:
    return inputs["weights"] * inputs["advantages"]


def _ratio(logprobs: Floats, inputs: Inputs) -> Floats:
    # Prompt positions have advantage 0 and q = 0: their ratio may overflow, and inf * 0 is NaN.
    return _exp(np.where(_advantage(inputs) == 0, 0.0, logprobs - inputs["logprobs"]))


def _exp(log_ratio: Floats) -> Floats:
    return np.exp(np.clip(log_ratio, -_MAX_LOG_RATIO, _MAX_LOG_RATIO))


def _clip(ratio: Floats, config: Config) -> Floats:
    return np.clip(ratio, config["clip_low_threshold"], config["clip_high_threshold"])


def _clipped(ratio: Floats, inputs: Inputs, config: Config) -> LossValue:
    weights, gain = inputs["weights"], ratio * inputs["advantages"]
    bound = _clip(ratio, config) * inputs["advantages"]
    return LossValue(loss=-weights * np.minimum(gain, bound), d_logprobs=np.where(bound < gain, 0.0, -weights * gain))
