"""Host memory, for devices such as CPUs that do not report their memory.

The memory plan depends only on how much memory the process may use, which is the same at each
start. How much memory is available at the moment does not change the plan, because another plan
would change the last bits of results. If too little is available, the backend refuses to start or
logs a warning.
"""

import logging

import jax

from skyrl_tx import models
from skyrl_tx.backends.jax.devices import agree_on_minimum
from skyrl_tx.contract.errors import UserError
from skyrl_tx.process.memory import get_memory_limit, read_available_memory

PLANNED_SHARE = 0.5
"""Share of host memory for everything besides the weights, on devices that do not report memory.
The rest is for compiled programs, temporary memory, other processes, and the file cache."""

log = logging.getLogger(__name__)


def get_planned_bytes(params: models.DecoderParams) -> int:
    """Return how many bytes of host memory the plan may use for everything besides the weights.

    On multiple hosts this is the minimum of all hosts, so that all hosts have the same plan.
    """
    limit = get_memory_limit()
    return agree_on_minimum(max(min(int(PLANNED_SHARE * limit), limit - count_host_weight_bytes(params)), 0))


def count_host_weight_bytes(params: models.DecoderParams) -> int:
    """Return the bytes that the weights take in host memory. `params` may hold only their shapes.

    The weights of layers count twice, because decoding uses a second copy of them that is split by
    layer.
    """
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves((params, params.layers)))


def check_weights_fit(params: models.DecoderParams) -> None:
    """Raise UserError if weights of these shapes do not fit into the memory of this host now."""
    needed, available = count_host_weight_bytes(params), read_available_memory()
    if needed > available:
        raise UserError(
            f"--base-model: its weights take {format_gib(needed)}, but only {format_gib(available)} of memory are "
            f"available; this process may use at most {format_gib(get_memory_limit())}. End other programs, or choose "
            "--backend-config.dtype bfloat16 or a smaller model"
        )


def warn_if_memory_is_scarce(planned_bytes: int) -> None:
    """Log a warning if less memory is available on this host than the plan may use in time."""
    if planned_bytes > (available := read_available_memory()):
        log.warning(
            "only %s of memory are available, but KV cache and models may take %s in time. Without more "
            "memory, the kernel may end this process. End other programs, or lower --backend-config.max-sample-tokens "
            "and --backend-config.max-lora-adapters",
            format_gib(available),
            format_gib(planned_bytes),
        )


def format_gib(num_bytes: int) -> str:
    """Return a number of bytes for messages, for example 1.5 GiB."""
    return f"{num_bytes / 2**30:.1f} GiB"
