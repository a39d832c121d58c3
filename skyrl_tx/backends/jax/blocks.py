"""Logits by blocks of the vocabulary: a token is drawn, and the best are found, by way of what each block has in all.

Legend: S rows, V vocab, N blocks of the vocabulary, J tokens of a block, K best tokens.

A token is the inverse of the cumulative distribution at one uniform number, found in two levels: nothing sorts the
vocabulary or draws a number for each of its tokens. On CPU that was measured 13 times as fast as Gumbel noise. The
logits are read twice, for the peak and for the sum of each block, and nothing of their size is written.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

NO_TOKEN = np.int32(2**31 - 1)  # the id of no token, after all others
BLOCK = 128  # tokens whose weights are summed first; about the root of a large vocabulary


@struct.dataclass
class Mark:
    """A place in the order of tokens: the larger logit comes first, of equal ones the lower id."""

    logit_S: jax.Array
    token_S: jax.Array  # int32

    def is_after(self, logits: jax.Array, tokens: jax.Array) -> jax.Array:
        """Say which of the tokens [S, ...] come before this place."""
        shape = (-1, *[1] * (logits.ndim - 1))
        logit, token = self.logit_S.reshape(shape), self.token_S.reshape(shape)
        return (logits > logit) | ((logits == logit) & (tokens < token))


@struct.dataclass
class Blocks:
    """Some rows of logits, read in place, with the largest of each block and the sum of its weights, by temperature."""

    logits_RNJ: jax.Array  # of these rows, and of others
    row_S: jax.Array  # where each lies
    temperature_S: jax.Array
    highest_SN: jax.Array  # of the logits
    weight_SN: jax.Array  # where the likeliest token of the row weighs 1

    @classmethod
    def of(cls, logits_SV: jax.Array, temperature_S: jax.Array) -> "Blocks":
        """Read the logits twice."""
        logits_SNJ = by_block(logits_SV)
        highest_SN = logits_SNJ.max(axis=-1)
        weight_SNJ = jnp.exp(scale(logits_SNJ, highest_SN.max(axis=-1), temperature_S))
        # Else XLA makes the sum of these sums one more of all weights, and keeps those in memory to read them twice.
        weight_SN = jax.lax.optimization_barrier(weight_SNJ.sum(axis=-1))
        return cls(logits_SNJ, jnp.arange(logits_SV.shape[0]), temperature_S, highest_SN, weight_SN)

    def rows(self, row_Z: jax.Array) -> "Blocks":
        """Return some of these rows."""
        return Blocks(
            self.logits_RNJ, self.row_S[row_Z], self.temperature_S[row_Z], self.highest_SN[row_Z], self.weight_SN[row_Z]
        )

    @property
    def total_S(self) -> jax.Array:
        """The weight of all tokens."""
        return self.weight_SN.sum(axis=-1)

    @property
    def log_total_S(self) -> jax.Array:
        """The log of the sum of exp of what `scale` returns."""
        return jnp.log(self.total_S)

    @property
    def highest_S(self) -> jax.Array:
        """The largest logit of each row."""
        return self.highest_SN.max(axis=-1)

    @property
    def token_NJ(self) -> jax.Array:
        """The id of each token."""
        return jnp.arange(self.logits_RNJ.shape[1] * BLOCK, dtype=jnp.int32).reshape(-1, BLOCK)

    def mark(self, token_S: jax.Array) -> Mark:
        """Return each row's token as a place in the order."""
        return Mark(self.logits_RNJ[self.row_S, token_S // BLOCK, token_S % BLOCK], token_S)

    def logprob(self, token_S: jax.Array) -> jax.Array:
        """Return the log-probability of each row's token."""
        return scale(self.mark(token_S).logit_S, self.highest_S, self.temperature_S) - self.log_total_S

    def before(self, mark: Mark) -> jax.Array:
        """Return what those tokens of each block weigh that come before the mark [S, N]; read the logits once."""
        logits_SNJ = self.logits_RNJ[self.row_S]
        weight_SNJ = jnp.exp(scale(logits_SNJ, self.highest_S, self.temperature_S))
        return jnp.where(mark.is_after(logits_SNJ, self.token_NJ), weight_SNJ, 0.0).sum(axis=-1)

    def likeliest(self) -> jax.Array:
        """Return each row's likeliest token, of equal ones the first."""
        block_S = jnp.argmax(self.highest_SN, axis=-1)
        return (block_S * BLOCK + jnp.argmax(self._logits_SJ(block_S), axis=-1)).astype(jnp.int32)

    def best(self, K: int) -> tuple[jax.Array, jax.Array]:
        """Return logits and ids of the K first tokens in the order [S, K].

        Any other block than the K of the largest maxima has K tokens before its first: no other is looked at.
        """
        S, N = self.highest_SN.shape
        block_SK = jnp.sort(jax.lax.top_k(self.highest_SN, min(K, N))[1], axis=-1)  # equal tokens lie by their ids
        near_SI = self.logits_RNJ[self.row_S[:, None], block_SK].reshape(S, -1)
        logit_SK, place_SK = jax.lax.top_k(near_SI, K)
        token_SK = jnp.take_along_axis(block_SK, place_SK // BLOCK, axis=-1) * BLOCK + place_SK % BLOCK
        return logit_SK, token_SK.astype(jnp.int32)

    def pick(self, uniform_S: jax.Array) -> jax.Array:
        """Return the token at which the cumulative weight passes `uniform_S` of the total; never one of weight 0."""
        return _pick(self.weight_SN, self._weight_SJ, uniform_S)

    def pick_before(self, mark: Mark, before_SN: jax.Array, uniform_S: jax.Array) -> jax.Array:
        """Return the same of those tokens that come before the mark, given what `before` returned."""

        def weight_SJ(block_S: jax.Array) -> jax.Array:
            token_SJ = block_S[:, None] * BLOCK + jnp.arange(BLOCK)
            return jnp.where(mark.is_after(self._logits_SJ(block_S), token_SJ), self._weight_SJ(block_S), 0.0)

        return _pick(before_SN, weight_SJ, uniform_S)

    def nth_equal(self, logit_S: jax.Array, n_S: jax.Array) -> jax.Array:
        """Return the id of the token that has `n_S` before it among those of just this logit, or that of no token."""

        def equals(logits: jax.Array) -> jax.Array:
            return (logits == logit_S.reshape(-1, *[1] * (logits.ndim - 1))).astype(jnp.float32)

        count_SN = equals(self.logits_RNJ[self.row_S]).sum(axis=-1)
        until_SN = jnp.cumsum(count_SN, axis=-1)
        token_S = _reach(count_SN, until_SN, lambda block_S: equals(self._logits_SJ(block_S)), n_S.astype(jnp.float32))
        return jnp.where(n_S < until_SN[:, -1], token_S, NO_TOKEN)

    def _weight_SJ(self, block_S: jax.Array) -> jax.Array:
        return jnp.exp(scale(self._logits_SJ(block_S), self.highest_S, self.temperature_S))

    def _logits_SJ(self, block_S: jax.Array) -> jax.Array:
        return self.logits_RNJ[self.row_S, block_S]


def by_block(values_SV: jax.Array) -> jax.Array:
    """Return [S, N, J], filled up with -inf."""
    S, V = values_SV.shape
    return jnp.pad(values_SV, ((0, 0), (0, -V % BLOCK)), constant_values=-jnp.inf).reshape(S, -1, BLOCK)


def scale(logits: jax.Array, highest_S: jax.Array, temperature_S: jax.Array) -> jax.Array:
    """Return the logits [S, ...] whose softmax is reported: less the row's highest, by temperature unless it is greedy.

    Divided first, what differs between them would be lost in rounding, the more the lower the temperature.
    """
    shape = (-1, *[1] * (logits.ndim - 1))
    divisor_S = jnp.where(temperature_S > 0, temperature_S, 1.0)
    return (logits - highest_S.reshape(shape)) / divisor_S.reshape(shape)


def _pick(block_SN: jax.Array, weights_of: Callable[[jax.Array], jax.Array], uniform_S: jax.Array) -> jax.Array:
    until_SN = jnp.cumsum(block_SN, axis=-1)
    return _reach(block_SN, until_SN, weights_of, uniform_S * until_SN[:, -1])


def _reach(
    block_SN: jax.Array, until_SN: jax.Array, weights_of: Callable[[jax.Array], jax.Array], target_S: jax.Array
) -> jax.Array:
    """Find the block in which the target is passed, then the token by `weights_of` the block [S, J]."""
    block_S = first_past(block_SN, until_SN, target_S)
    before_S = jnp.where(block_S > 0, _at(until_SN, block_S - 1), 0.0)
    weight_SJ = weights_of(block_S)
    inside_S = first_past(weight_SJ, jnp.cumsum(weight_SJ, axis=-1), target_S - before_S)
    return (block_S * BLOCK + inside_S).astype(jnp.int32)


def first_past(weight: jax.Array, until: jax.Array, target_S: jax.Array) -> jax.Array:
    """Return the first index of weight above 0 whose running sum is past the target.

    Sums of parts and of the whole may differ in the last bit, so that none is past: then the heaviest.
    """
    past = (until > target_S[:, None]) & (weight > 0)
    return jnp.where(past.any(axis=-1), jnp.argmax(past, axis=-1), jnp.argmax(weight, axis=-1))


def _at(values: jax.Array, index_S: jax.Array) -> jax.Array:
    return jnp.take_along_axis(values, index_S[:, None], axis=-1)[:, 0]
