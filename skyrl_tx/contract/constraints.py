"""The interface of a constraint, which limits the next token of a sample."""

from typing import Protocol

from skyrl_tx.contract.arrays import Uint32Array


class TokenConstraint(Protocol):
    """Decides which tokens may come next in one sample."""

    def is_ready(self, timeout_s: float = 0.0) -> bool:
        """Wait up to `timeout_s` seconds, and return whether `fill_mask` returns at once.

        A backend can decode other samples while a mask is being computed.
        """
        ...

    def fill_mask(self, mask: Uint32Array) -> None:
        """Write the allowed tokens into `mask`, uint32 [ceil(vocab_size / 32)].

        Bit `t % 32` of word `t // 32` is 1 if token t is allowed. The mask has only zeros before the
        call. At least one token must be allowed; when the text is complete, these are the stop
        tokens.
        """
        ...

    def accept(self, token: int) -> None:
        """Continue after the next token of the sample."""
        ...


class MakeConstraint(Protocol):
    """Makes a constraint for a new sample. The backend calls it once per sample."""

    def __call__(self) -> TokenConstraint:
        """Return a constraint at the start of a sample."""
        ...
