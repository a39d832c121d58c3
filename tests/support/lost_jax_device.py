"""A JAX device that is lost: every compiled program of the backend raises the error of a broken driver."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, NoReturn
from unittest.mock import patch

import jax

from skyrl_tx.backends.jax import devices
from skyrl_tx.backends.jax.sample import programs
from skyrl_tx.backends.jax.train import forward_backward, training_state

PROGRAMS = (
    (forward_backward, "forward"),
    (forward_backward, "accumulate"),
    (training_state, "adamw_step"),
    (programs, "prefill"),
    (programs, "compute_first_logits"),
    (programs, "decode_slice"),
    (programs, "run_rows"),
    (devices, "_sum"),
)


def fail(*_: Any, **__: Any) -> NoReturn:
    """Raise the error of a broken driver."""
    raise jax.errors.JaxRuntimeError("INTERNAL: CUDA error: CUDA_ERROR_ILLEGAL_ADDRESS")


@contextmanager
def lost_jax_device() -> Generator[None]:
    """Make the programs of training, sampling and `check_devices` raise inside the context."""
    patches = [patch.object(module, name, fail) for module, name in PROGRAMS]
    for program_patch in patches:
        program_patch.start()
    try:
        yield
    finally:
        for program_patch in patches:
            program_patch.stop()
