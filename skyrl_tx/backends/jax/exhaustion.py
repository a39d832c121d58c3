"""Exhausted memory of a device: on one host the error of a request, on several an end that all hosts share.

A host that ran out of memory did not start the program that the others may be in, and they wait for it. So with several
hosts nothing is tried again here: rank 0 decides, when it knows the ends of the call on all hosts.
"""

import logging
from collections.abc import Generator
from contextlib import contextmanager

import jax

from skyrl_tx.backends.jax.distributed import is_distributed
from skyrl_tx.contract.errors import BackendLost, CapacityError

log = logging.getLogger(__name__)


def is_exhausted(error: Exception) -> bool:
    """Return whether a device, or the host on its behalf, ran out of memory."""
    return "RESOURCE_EXHAUSTED" in str(error)


def no_memory(purpose: str, error: Exception) -> CapacityError:
    """Return the client's error for an exhausted device, and log the device's own message."""
    log.error("no memory left for %s: %s", purpose, error)
    return CapacityError(
        f"the device has no memory left for {purpose}. State is unchanged. Restart with a lower "
        "--backend-config.max-lora-adapters, --backend-config.max-lora-rank or --backend-config.max-sample-tokens "
        "to free memory"
    )


@contextmanager
def capacity_errors(purpose: str) -> Generator[None]:
    """Raise the error of `no_memory` when the device runs out of memory inside the context.

    With several hosts that is BackendLost: the others may have had enough memory, and wait for this one.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if not is_exhausted(error):
            raise
        capacity = no_memory(purpose, error)
        check_alone(error)
        raise capacity from error


def check_alone(error: Exception) -> None:
    """Raise BackendLost for an error of a device if there are several hosts.

    The others may not have it. Then they wait for this host in the same program, and it must start no other one.
    """
    if is_distributed() and isinstance(error, jax.errors.JaxRuntimeError):
        advice = (
            ". Restart with a lower --backend-config.micro-batch-tokens, --backend-config.max-lora-adapters or "
            "--backend-config.max-sample-tokens if this happens again"
        )
        raise BackendLost(
            f"a device of this host failed, and other hosts may wait for it: {error}"
            + (advice if is_exhausted(error) else "")
        ) from error


def drain() -> None:
    """Wait until the devices of this host have computed all that was dispatched.

    That never returns if another host has not dispatched the same, which a watchdog of the hosts ends. Memory that was
    exhausted is no error here: the call that needs what could not be computed gets it.
    """
    for array in jax.live_arrays():
        try:
            array.block_until_ready()
        except jax.errors.JaxRuntimeError as error:
            if not is_exhausted(error):
                raise
