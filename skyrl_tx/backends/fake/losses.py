"""The losses of the protocol in numpy: value and slope in the target's logprob, position by position."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from skyrl_tx.contract.capabilities import LossInput, LossSpec
from skyrl_tx.contract.results import MeanTerm

Floats = NDArray[np.float64]
Inputs = Mapping[str, Floats]
Config = Mapping[str, float]

_MAX_LOG_RATIO = 60.0  # so that a ratio that counts for nothing stays finite


@dataclass(frozen=True, slots=True)
class LossValue:
    """`loss` and its derivative by logprob, each in the shape of the targets."""

    loss: Floats
    slope: Floats
    means: Mapping[str, MeanTerm] = field(default_factory=dict[str, MeanTerm])


def cross_entropy(logprobs: Floats, inputs: Inputs, config: Config) -> LossValue:
    """Weighted negative log-likelihood."""
    return LossValue(-inputs["weights"] * logprobs, -inputs["weights"])


def importance_sampling(logprobs: Floats, inputs: Inputs, config: Config) -> LossValue:
    """Policy gradient weighted by the ratio to the sampling policy."""
    gain = _ratio(logprobs, inputs) * _advantage(inputs)
    return LossValue(-gain, -gain)


def ppo(logprobs: Floats, inputs: Inputs, config: Config) -> LossValue:
    """Clipped policy gradient: Schulman et al. 2017, arXiv:1707.06347, eq. 7."""
    return _clipped(_ratio(logprobs, inputs), inputs, config)


def cispo(logprobs: Floats, inputs: Inputs, config: Config) -> LossValue:
    """Policy gradient with a clipped, detached ratio: MiniMax 2025, arXiv:2506.13585, eq. 4."""
    gain = _clip(_ratio(logprobs, inputs), config) * _advantage(inputs)
    return LossValue(-gain * logprobs, -gain)


def dro(logprobs: Floats, inputs: Inputs, config: Config) -> LossValue:
    """Direct reward optimisation: a quadratic pull towards the sampling policy, arXiv:2405.19107."""
    gap, beta = logprobs - inputs["logprobs"], config["beta"]
    weights, advantages = inputs["weights"], inputs["advantages"]
    loss = -(logprobs * advantages - 0.5 * beta * gap**2)
    return LossValue(weights * loss, -weights * (advantages - beta * gap))


def gspo(logprobs: Floats, inputs: Inputs, config: Config) -> LossValue:
    """Clipped policy gradient on the sequence's ratio: Zheng et al. 2025, arXiv:2507.18071, eq. 14."""
    mask = inputs["sequence_ratio_mask"]
    gap = np.where(mask == 0, 0.0, logprobs - inputs["logprobs"])
    ratio = _exp((mask * gap).sum() / max(mask.sum(), 1e-30))
    return _clipped(np.full_like(logprobs, ratio), inputs, config)


def stable_reinforce(logprobs: Floats, inputs: Inputs, config: Config) -> LossValue:
    """Truncated, detached ratios (IMPALA, arXiv:1802.01561) and the quadratic estimate of KL; our own definition."""
    ratio, sampled = _ratio(logprobs, inputs), inputs["sampled"] != 0
    gain = np.where(sampled, np.minimum(ratio, config["clip_high_threshold"]) * _advantage(inputs), 0.0)
    gap = np.where(sampled, logprobs - inputs["logprobs"], 0.0)
    pull = config["kl_coeff"] * inputs["weights"]
    is_clipped = sampled & (ratio > config["clip_high_threshold"])
    means = {"clip_fraction": MeanTerm(float(is_clipped.sum()), float(sampled.sum()))}
    return LossValue(-gain * logprobs + 0.5 * pull * gap**2, -gain + pull * gap, means)


def _advantage(inputs: Inputs) -> Floats:
    return inputs["weights"] * inputs["advantages"]


def _ratio(logprobs: Floats, inputs: Inputs) -> Floats:
    # Prompt positions come with advantage 0 and logprob 0: their ratio may overflow, and inf * 0 is NaN.
    return _exp(np.where(_advantage(inputs) == 0, 0.0, logprobs - inputs["logprobs"]))


def _exp(log_ratio: Floats) -> Floats:
    return np.exp(np.clip(log_ratio, -_MAX_LOG_RATIO, _MAX_LOG_RATIO))


def _clip(ratio: Floats, config: Config) -> Floats:
    return np.clip(ratio, config["clip_low_threshold"], config["clip_high_threshold"])


def _clipped(ratio: Floats, inputs: Inputs, config: Config) -> LossValue:
    weights, gain = inputs["weights"], ratio * inputs["advantages"]
    bound = _clip(ratio, config) * inputs["advantages"]
    is_clipped = bound < gain
    means = {"clip_fraction": MeanTerm(float(is_clipped.sum()), float(is_clipped.size))}
    return LossValue(-weights * np.minimum(gain, bound), np.where(is_clipped, 0.0, -weights * gain), means)


@dataclass(frozen=True, slots=True)
class Loss:
    """A function and what the engine is told of it."""

    compute: Callable[[Floats, Inputs, Config], LossValue]
    spec: LossSpec


_CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
_POLICY = {
    "target_tokens": LossInput(is_integer=True),
    "logprobs": LossInput(),
    "advantages": LossInput(),
    "weights": LossInput(fill=1.0),
}
_LOSSES = (
    Loss(
        cross_entropy,
        LossSpec(
            name="cross_entropy",
            inputs={
                "target_tokens": LossInput(is_integer=True, max_ndim=2),
                "weights": LossInput(fill=1.0, max_ndim=2),
            },
        ),
    ),
    Loss(importance_sampling, LossSpec(name="importance_sampling", inputs=_POLICY)),
    Loss(ppo, LossSpec(name="ppo", inputs=_POLICY, config=_CLIP)),
    Loss(
        cispo,
        LossSpec(name="cispo", inputs=_POLICY, config={"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}),
    ),
    Loss(dro, LossSpec(name="dro", inputs=_POLICY, config={"beta": 0.05})),
    Loss(
        gspo,
        LossSpec(name="gspo", inputs=_POLICY | {"sequence_ratio_mask": LossInput()}, config=_CLIP),
    ),
    Loss(
        stable_reinforce,
        LossSpec(
            name="stable_reinforce",
            inputs=_POLICY | {"sampled": LossInput()},
            config={"clip_high_threshold": 2.0, "kl_coeff": 0.0},
        ),
    ),
)
LOSSES: Mapping[str, Loss] = MappingProxyType({loss.spec.name: loss for loss in _LOSSES})
