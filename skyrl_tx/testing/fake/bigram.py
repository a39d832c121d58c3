"""The fake model: a table of next-token logits with a low-rank adapter.

The base model counts: token i is followed by token i + 1 (the last token by 0) with probability
1/2, and by each of the other V - 1 tokens with probability 1 / (2 (V - 1)). The adapter adds
`(alpha / r) B A[:, i]` to the logits after token i, so that losses have real gradients.

Shapes: T tokens, V vocabulary, R rank, K targets of one position.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from skyrl_tx.contract.requests import LoraSpec
from skyrl_tx.contract.state_files import ALPHA

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Pair:
    """One array per matrix of an adapter: its weights, gradients or moments."""

    a_RV: Floats
    b_VR: Floats

    @classmethod
    def zeros_like(cls, other: "Pair") -> "Pair":
        """Return zeros in the shape of another pair."""
        return cls(np.zeros_like(other.a_RV), np.zeros_like(other.b_VR))

    def __add__(self, other: "Pair") -> "Pair":
        return Pair(self.a_RV + other.a_RV, self.b_VR + other.b_VR)

    @property
    def norm(self) -> float:
        """The global L2 norm."""
        return float(np.sqrt((self.a_RV**2).sum() + (self.b_VR**2).sum()))


def fresh_adapter(spec: LoraSpec, vocab_size: int) -> Pair:
    """Return a new adapter: A is drawn from the seed and B is zero, so it changes nothing yet."""
    draw = np.random.default_rng(spec.seed % 2**64)
    return Pair(draw.standard_normal((spec.rank, vocab_size)), np.zeros((vocab_size, spec.rank)))


def logits(tokens: NDArray[np.int32], adapter: Pair | None, vocab_size: int) -> Floats:
    """Return the logits of the next token after each token, [T, V]."""
    logits_TV = np.zeros((len(tokens), vocab_size))
    logits_TV[np.arange(len(tokens)), (tokens + 1) % vocab_size] = np.log(vocab_size - 1)
    if adapter is not None:
        # One row at a time, because a matrix product may round a row differently in another batch,
        # and the trainer and the sampler must agree.
        for row_V, hidden_R in zip(logits_TV, np.ascontiguousarray(adapter.a_RV.T[tokens]), strict=True):
            row_V += (ALPHA / len(hidden_R)) * (adapter.b_VR @ hidden_R)
    return logits_TV


def log_softmax(logits_TV: Floats) -> Floats:
    """Return log-probabilities over the last axis."""
    shifted_TV = logits_TV - logits_TV.max(axis=-1, keepdims=True)
    return shifted_TV - np.log(np.exp(shifted_TV).sum(axis=-1, keepdims=True))


def gradient(
    tokens: NDArray[np.int32], targets_TK: NDArray[np.int32], d_logprobs_TK: Floats, logprobs_TV: Floats, adapter: Pair
) -> Pair:
    """Return the adapter's gradient, given d loss / d log-probability of each target."""
    d_logits_TV = -np.exp(logprobs_TV) * d_logprobs_TK.sum(axis=1, keepdims=True)
    np.add.at(d_logits_TV, (np.arange(len(tokens))[:, None], targets_TK), d_logprobs_TK)
    d_logits_TV *= ALPHA / len(adapter.a_RV)
    d_a_VR = np.zeros_like(adapter.a_RV.T)
    np.add.at(d_a_VR, tokens, d_logits_TV @ adapter.b_VR)
    return Pair(np.ascontiguousarray(d_a_VR.T), d_logits_TV.T @ adapter.a_RV.T[tokens])
