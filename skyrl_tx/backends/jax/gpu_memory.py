"""How much memory JAX takes of each GPU.

JAX takes a fixed share of a GPU's memory when it starts, and three quarters by default. A server
usually has the GPU to itself, so the backend takes 0.92 instead. The rest is for the driver and for
libraries. The share, and with it the memory plan, does not depend on how much memory is free at the
moment: if less is free, the backend refuses to start.
"""

import logging
import os
import time

from skyrl_tx.backends.jax.config import JaxConfig
from skyrl_tx.contract.errors import UserError
from skyrl_tx.process.memory import Gpu, list_gpus, select_visible
from skyrl_tx.process.text import format_bytes

GPU_SHARE = 0.92
"""The share of an empty GPU that the backend takes by default."""
SHARE_VARIABLE = "XLA_PYTHON_CLIENT_MEM_FRACTION"
_WAIT_S = 20.0
"""How long the backend waits for memory of an earlier process, which the driver frees after its end."""

log = logging.getLogger(__name__)


def read_gpu_share(configured: float | None) -> float:
    """Return the share of a GPU's memory that JAX takes: the setting, the variable, or GPU_SHARE.

    Raises UserError if the variable is not a share.
    """
    if configured is not None:
        return configured
    text = os.environ.get(SHARE_VARIABLE) or str(GPU_SHARE)
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise UserError(f"{SHARE_VARIABLE} is {text!r} but must be a number above 0 and at most 1")
    return share


def reserve_gpu_memory(config: JaxConfig) -> None:
    """Set the share of the GPUs' memory that JAX takes. Call this before JAX looks for devices.

    Raises UserError if other programs use too much memory of a GPU for the default share.
    """
    platforms = (os.environ.get("JAX_PLATFORMS") or "cuda").split(",")
    if not {"cuda", "gpu"} & {*platforms} or not (gpus := _list_used_gpus(config)):
        return

    # Set the share.
    share = read_gpu_share(config.gpu_memory_share)
    is_default = config.gpu_memory_share is None and not os.environ.get(SHARE_VARIABLE)
    if is_default:
        gpus = _wait_for_memory(config, gpus)
    os.environ[SHARE_VARIABLE] = str(share)

    for gpu in gpus:
        log.info(
            "JAX takes %s of the %s of GPU %s (%s), a share of %g%s",
            format_bytes(int(share * gpu.total_bytes)),
            format_bytes(gpu.total_bytes),
            gpu.index,
            gpu.name,
            share,
            "" if is_default else " (configured)",
        )


def _list_used_gpus(config: JaxConfig) -> list[Gpu]:
    """Return the GPUs of the mesh. Other programs, for example vLLM, may use further visible GPUs."""
    return select_visible(list_gpus())[: config.mesh.num_devices]


def _wait_for_memory(config: JaxConfig, gpus: list[Gpu]) -> list[Gpu]:
    """Return the GPUs when GPU_SHARE of each is free. Raises UserError if it stays in use."""
    deadline = time.monotonic() + _WAIT_S
    while busy := [gpu for gpu in gpus if gpu.free_bytes < GPU_SHARE * gpu.total_bytes]:
        if time.monotonic() >= deadline:
            gpu = busy[0]
            raise UserError(
                f"other programs use {format_bytes(gpu.used_bytes)} of the {format_bytes(gpu.total_bytes)} of GPU "
                f"{gpu.index} ({gpu.name}), but the server takes {GPU_SHARE:g} of each GPU. End the programs that "
                f"`nvidia-smi` shows, or set --backend-config.gpu-memory-share to at most "
                f"{int(100 * gpu.free_bytes / gpu.total_bytes) / 100:g}"
            )
        time.sleep(1.0)
        gpus = _list_used_gpus(config)
    return gpus
