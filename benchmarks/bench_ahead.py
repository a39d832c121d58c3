"""The gradient of one micro-batch, compiled for a device that is not here: memory, loops and kernels by its compiler.

Needs the device's compiler and no device: libtpu for TPUs; for GPUs jax-cuda12-plugin, jax-cuda12-pjrt and XLA's
description of the GPU, a GpuTargetConfigProto as text (target_config/specs in the sources of XLA). The compiler tells
no times. It counts the bytes of a loop's body once, however many steps the loop has: `attention_steps` is the number of
tiles that attention computes one after another in loops, over all layers and both directions.
"""

import argparse
import time
from pathlib import Path

import jax
import numpy as np

from benchmarks.common import report
from skyrl_tx import models
from skyrl_tx.backends.jax.ahead import compile_programs, gpu_layout, tpu_layout
from skyrl_tx.backends.jax.config import JaxConfig
from skyrl_tx.backends.jax.start_plan import plan_start
from skyrl_tx.layers.flash_attention import BLOCK
from skyrl_tx.weights import hf

MIB = 2**20
LIMIT_BYTES = 80 * 2**30
"""Memory of the planned device; sizes that it would choose are given."""


def attention_steps(model: models.ModelConfig, num_tokens: int) -> int:
    """Return the number of pairs of blocks in the loops of all layers, in both directions."""
    blocks = -(-num_tokens // BLOCK)
    return 2 * sum(block.mixer.heads is not None for block in model.blocks) * blocks * (blocks + 1) // 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-model", default="Qwen/Qwen3-0.6B", help="whose config.json is read")
    parser.add_argument("--device", default="v5p:2x2x1", help="a TPU topology, of which the first device is used")
    parser.add_argument("--gpu-target", type=Path, help="the description of a GPU, in place of --device")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of the micro-batch")
    parser.add_argument("--attention-kernel", default="auto", help="the setting of the backend")
    parser.add_argument("--remat", action="store_true", help="recompute each layer in the backward pass")
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    config = JaxConfig(
        micro_batch_tokens=options.tokens,
        remat=options.remat,
        attention_kernel=options.attention_kernel,
        compile_cache_dir=None,
    )
    content = hf.read_json(hf.resolve(options.base_model, with_weights=False), "config.json")
    model = models.find_family(content).config_from_hf(content)
    if options.gpu_target is None:
        layout, platform = tpu_layout(options.device, config.mesh), "tpu"
    else:
        layout, platform = gpu_layout(options.gpu_target.read_text(), config.mesh), "gpu"
    plan = plan_start(config, layout, model, np.dtype("bfloat16"), platform=platform, limit_bytes=LIMIT_BYTES)
    started = time.process_time()
    found = next(compile_programs(config, layout, model, plan))  # the first is the gradient
    kernel = plan.kernels.attention_name
    results = {
        "attention": kernel,
        "attention_steps": attention_steps(model, options.tokens) if kernel == "loops" else 0,
        "loops": found.num_loops,
        "kernels": found.num_kernels,
        "temporary_mib": round(found.temporary_bytes / MIB, 1),
        "total_mib": round(found.total_bytes / MIB, 1),
        "planned_mib": round(found.planned_bytes / MIB, 1),
        "accessed_mib": round(found.accessed_bytes / MIB, 1),
        "compile_s": round(found.compile_s, 1),
        "compile_cpu_s": round(time.process_time() - started, 1),
        "problem": found.problem[:200],
    }
    options.gpu_target = options.gpu_target and options.gpu_target.name
    report("ahead", options, results, ("jax", "jaxlib"))


if __name__ == "__main__":
    main()
