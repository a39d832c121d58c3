"""A program, compiled for a device that is not here: memory, loops and kernels by its compiler.

The program is the gradient of one micro-batch, or with `--program` a decode slice or a chunk of a prompt.

Needs the device's compiler and no device: libtpu for TPUs, jax-cuda12-plugin and jax-cuda12-pjrt for GPUs. The compiler
tells no times. It counts the bytes of a loop's body once, however many steps the loop has: `attention_steps` is the
number of tiles that attention computes one after another in loops, over all layers and both directions.
"""

import argparse
import time

import jax
import numpy as np

from benchmarks.ahead.programs import compile_programs
from benchmarks.ahead.topology import describe_layout
from benchmarks.common import report
from skyrl_tx import models
from skyrl_tx.backends.jax.config import JaxConfig, MeshConfig
from skyrl_tx.backends.jax.start_plan import plan_start
from skyrl_tx.layers.attention import BLOCK
from skyrl_tx.tools.plan.hardware import parse_devices
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
    parser.add_argument("--device", default="v5p:2x2x1", help="as in `skyrl-tx plan`; the first devices are used")
    parser.add_argument("--mesh", default="fsdp=1", help="the mesh of the devices, such as tp=2,cp=2")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of the micro-batch")
    parser.add_argument("--program", default="gradient", choices=["gradient", "decode", "prefill"])
    parser.add_argument("--kernels", default="auto", choices=["auto", "loops"], help="the setting of the backend")
    parser.add_argument("--slots", type=int, default=64, help="samples of a decode slice")
    parser.add_argument("--context", type=int, default=1000, help="tokens of each of these samples")
    parser.add_argument("--remat", action="store_true", help="recompute each layer in the backward pass")
    parser.add_argument("--offload", action="store_true", help="keep the inputs of layers in the host's memory")
    options = parser.parse_args()

    jax.config.update("jax_platforms", "cpu")
    sizes = {name: int(size) for name, size in (part.split("=") for part in options.mesh.split(","))}
    sampling = {"max_context_length": options.context, "max_sample_tokens": options.slots * options.context}
    config = JaxConfig(
        mesh=MeshConfig(**sizes),
        micro_batch_tokens=options.tokens,
        remat=options.remat or options.offload,
        offload=options.offload,
        kernels=options.kernels,
        sample_slots=options.slots,
        **({} if options.program == "gradient" else sampling),
        compile_cache_dir=None,
    )

    content = hf.read_json(hf.resolve_model(options.base_model, with_weights=False), "config.json")
    model = models.find_family(content).config_from_hf(content)
    devices = parse_devices(options.device)
    platform = devices.kind.family
    layout = describe_layout(platform, str(devices), config.mesh)
    plan = plan_start(config, layout, model, np.dtype("bfloat16"), platform=platform, limit_bytes=LIMIT_BYTES)

    started = time.process_time()
    [found] = compile_programs(config, layout, model, plan, [options.program])

    is_gradient = options.program == "gradient"
    kernel = plan.kernels.attention_name if is_gradient else plan.kernels.pages_name
    results = {
        "attention": kernel,
        "attention_steps": attention_steps(model, options.tokens) if is_gradient and kernel == "loops" else 0,
        "loops": found.text and found.text.num_loops,
        "steps": found.text and found.text.num_steps,
        "open_loops": found.text and found.text.num_open_loops,
        "kernels": found.text and dict(found.text.kernels),
        # Memory, then the cost of compiling.
        "temporary_mib": round(found.temporary_bytes / MIB, 1),
        "host_mib": round(found.host_bytes / MIB, 1),
        "total_mib": round(found.total_bytes / MIB, 1),
        "planned_mib": round(found.planned_bytes / MIB, 1),
        "accessed_mib": round(found.accessed_bytes / MIB, 1),
        "compile_s": round(found.compile_s, 1),
        "compile_cpu_s": round(time.process_time() - started, 1),
        "problem": found.problem[:200],
    }

    report("ahead", options, results, ("jax", "jaxlib"))


if __name__ == "__main__":
    main()
