"""A JAX device that is out of memory: micro-batches of training above a size raise its error."""

from pathlib import Path
from typing import Any

import jax

from skyrl_tx.backends.jax.train import forward_backward

MESSAGE = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1 byte."


def exhaust_while(file: Path) -> None:
    """Let micro-batches of more tokens than the number in a file fail from now on, while there is such a file."""
    accumulate = forward_backward.accumulate

    def call(*given: Any, **settings: Any) -> Any:
        if file.exists() and given[3].tokens_BT.size > int(file.read_text()):
            raise jax.errors.JaxRuntimeError(MESSAGE)
        return accumulate(*given, **settings)

    forward_backward.accumulate = call  # type: ignore[assignment]
