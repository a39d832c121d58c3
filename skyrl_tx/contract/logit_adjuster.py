"""Compute on the host how the next logits of a sample change, see `SamplingControls`.

Legend: V vocab, W words of 32 tokens.
"""

from collections.abc import Iterable

import numpy as np

from skyrl_tx.contract.arrays import NumberArray, Uint16Array, Uint32Array
from skyrl_tx.contract.batches import SampleRequest

MAX_COUNT = 2**16 - 1
"""The largest count of a token; the frequency penalty does not grow further."""
_ALL = np.uint32(2**32 - 1)


class LogitAdjuster:
    """Changes the next logits of one sample. It records the tokens that the changes depend on."""

    def __init__(self, request: SampleRequest, stops: frozenset[int], vocab_size: int) -> None:
        """Start after the prompt. The tokens of `stops` end the sample."""
        self.controls = controls = request.params.active_controls
        self._vocab_size = vocab_size
        self._num_drawn = 0
        self._stop_W = pack_tokens(stops, vocab_size)
        self._constraint = None if request.make_constraint is None else request.make_constraint()

        # Rows of the device's arrays
        has_counts = controls.frequency_penalty != 0 or controls.presence_penalty != 0
        self.count_V: Uint16Array | None = np.zeros(vocab_size, np.uint16) if has_counts else None
        """How often the sample has each token; None without a penalty that depends on it."""
        prompt = set(request.prompt.tolist())
        self.seen_W = None if controls.repetition_penalty == 1 else pack_tokens(prompt, vocab_size)
        """A bit for each token of the prompt and the sample; None without a repetition penalty."""

        # `min_p` alone changes no logits
        is_changed = bool({*controls.list_used()} - {"min_p", "min_tokens"})
        self._is_endless = is_changed or self._constraint is not None

    @classmethod
    def make(cls, request: SampleRequest, stops: frozenset[int], vocab_size: int) -> "LogitAdjuster | None":
        """Return the adjuster of a sample, or None if its parameters never change the logits."""
        if not request.params.controls and request.make_constraint is None:
            return None
        adjuster = cls(request, stops, vocab_size)
        return adjuster if adjuster.adjusts(0) else None

    def adjusts(self, index: int) -> bool:
        """Return whether the logits of token number `index` of the sample change."""
        return self._is_endless or index < self.controls.min_tokens

    def accept(self, tokens: Iterable[int]) -> None:
        """Continue after the next tokens of the sample."""
        for token in tokens:
            self._num_drawn += 1
            if self.count_V is not None:
                self.count_V[token] += self.count_V[token] < MAX_COUNT
            if self.seen_W is not None:
                self.seen_W[token // 32] |= np.uint32(1 << token % 32)
            if self._constraint is not None:
                self._constraint.accept(token)

    def is_ready(self, timeout_s: float = 0.0) -> bool:
        """Wait up to `timeout_s` seconds, and return whether the changes of the next logits are known."""
        return self._constraint is None or self._constraint.is_ready(timeout_s)

    def fill_allowed(self, allowed_W: Uint32Array) -> None:
        """Write a bit for each token that may be next into `allowed_W`, which is zero."""
        if self._constraint is None:
            allowed_W[:] = _ALL
        else:
            self._constraint.fill_mask(allowed_W)
        if self._num_drawn < self.controls.min_tokens:
            rest_W = allowed_W & ~self._stop_W
            if rest_W.any():  # otherwise the constraint leaves nothing but the end
                allowed_W[:] = rest_W

    def adjust(self, logits_V: NumberArray) -> NumberArray:
        """Return the next logits with all changes. JAX does the same in `adjust_logits`."""
        controls, logits_V = self.controls, np.array(logits_V)
        for token, bias in controls.logit_bias:
            logits_V[token] += bias

        # Penalties
        if self.seen_W is not None:
            seen_V, penalty = self._unpack(self.seen_W), controls.repetition_penalty
            logits_V[seen_V] = np.where(logits_V > 0, logits_V / penalty, logits_V * penalty)[seen_V]
        if self.count_V is not None:
            logits_V -= controls.frequency_penalty * self.count_V + controls.presence_penalty * (self.count_V > 0)

        # Allowed tokens
        allowed_W = np.zeros_like(self._stop_W)
        self.fill_allowed(allowed_W)
        return np.where(self._unpack(allowed_W), logits_V, -np.inf)

    def _unpack(self, words_W: Uint32Array) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        bits = np.unpackbits(words_W.view(np.uint8), count=self._vocab_size, bitorder="little")
        return bits.astype(np.bool_)


def count_words(vocab_size: int) -> int:
    """Return the number of words W that hold a bit per token."""
    return -(-vocab_size // 32)


def pack_tokens(tokens: Iterable[int], vocab_size: int) -> Uint32Array:
    """Return uint32 [W] with the bits of these tokens set."""
    is_set_V = np.zeros(count_words(vocab_size) * 32, np.bool_)
    is_set_V[list(tokens)] = True
    return np.packbits(is_set_V, bitorder="little").view(np.uint32)
