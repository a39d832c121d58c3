"""Memory of a training step for one long example, compared with its logits [T, V] and with the backend's estimate.

The step is compiled from shapes without weights, so the model need not fit into this machine's memory. With `--run` the
step also runs, and the report includes the peak memory of the process. The backend uses the same estimate to choose the
micro-batch size.
"""

import argparse
import resource

import jax
import numpy as np

from benchmarks.common import report
from skyrl_tx import models
from skyrl_tx.backends.jax.compiler import configure_jax
from skyrl_tx.backends.jax.config import JaxConfig
from skyrl_tx.backends.jax.train import forward_backward as training
from skyrl_tx.backends.jax.train import packing
from skyrl_tx.backends.jax.train.training_state import make_zero_gradient
from skyrl_tx.backends.jax.training_costs import DEFAULT_RANK, estimate_costs
from skyrl_tx.contract.batches import PassExample
from skyrl_tx.contract.ids import ModelId, RequestId
from skyrl_tx.contract.requests import LoraSpec
from skyrl_tx.layers.parameter import Parameter
from skyrl_tx.layers.remat import RematPolicy
from skyrl_tx.models.qwen3 import QWEN3
from skyrl_tx.weights import hf

MIB = 2**20


def make_model(options: argparse.Namespace) -> models.ModelConfig:
    heads = options.hidden // 64
    return QWEN3.config_from_hf(
        {
            "vocab_size": options.vocab,
            "hidden_size": options.hidden,
            "num_hidden_layers": options.layers,
            "num_attention_heads": heads,
            "num_key_value_heads": max(1, heads // 2),
            "head_dim": 64,
            "intermediate_size": 3 * options.hidden,
            "tie_word_embeddings": True,
        }
    )


def make_micro_batch(length: int) -> training.MicroBatch:
    zeros = np.zeros(length, np.int32)
    example = PassExample(
        request_id=RequestId("r"),
        model_id=ModelId("m"),
        tokens=zeros,
        loss="cross_entropy",
        loss_inputs={"target_tokens": zeros, "weights": np.ones(length, np.float32)},
        loss_config={},
    )
    return packing.fill_micro_batch(packing.plan_micro_batches([example], length)[0], [example])


def make_shapes(config: models.ModelConfig, dtype: str) -> models.DecoderParams:
    def shape(parameter: Parameter) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(parameter.shape, dtype)

    return jax.tree.map(shape, models.describe_params(config))


def estimate_bytes(config: models.ModelConfig, dtype: str, length: int, *, remat: RematPolicy) -> int:
    """Return the temporary memory of a step, without weights, adapter and gradient."""
    adapter = models.describe_adapter(config, DEFAULT_RANK)
    params, batch = make_shapes(config, dtype), make_micro_batch(length)
    step = training.accumulate.lower(params, adapter, adapter.weights, batch, config=config, remat=remat)
    return step.compile().memory_analysis().temp_size_in_bytes


def measure_peak(config: models.ModelConfig, dtype: str, length: int, *, remat: RematPolicy) -> dict[str, float]:
    """Run the step and return the peak memory of the process before and after it."""
    params = hf.make_dummy(models.describe_params(config), dtype=dtype)
    adapter = jax.device_put(models.init_adapter(config, LoraSpec(rank=DEFAULT_RANK, seed=0)))
    total = make_zero_gradient(adapter.weights)
    jax.block_until_ready((params, total))
    before = read_peak_mib()
    jax.block_until_ready(
        training.accumulate(params, adapter, total, make_micro_batch(length), config=config, remat=remat)
    )
    return {"before_mib": before, "after_mib": read_peak_mib()}


def read_peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192, help="length of the datum")
    parser.add_argument("--vocab", type=int, default=151936, help="vocabulary size")
    parser.add_argument("--hidden", type=int, default=256, help="hidden size")
    parser.add_argument("--layers", type=int, default=2, help="number of layers")
    parser.add_argument("--dtype", default="float32", help="type of the base weights")
    parser.add_argument("--remat", action="store_true", help="recompute each layer in the backward pass")
    parser.add_argument(
        "--run", action="store_true", help="also run the step and report the peak memory of the process"
    )
    options = parser.parse_args()

    configure_jax(JaxConfig(compile_cache_dir=None))
    remat = RematPolicy.FULL if options.remat else RematPolicy.SAVE_MATMULS
    config, shape = make_model(options), {"remat": remat}

    logits = options.tokens * options.vocab * 4
    step = estimate_bytes(config, options.dtype, options.tokens, **shape)
    costs = estimate_costs(make_shapes(config, options.dtype), config, "cpu")
    estimate = costs.count_micro_batch_bytes(options.tokens, remat=remat)

    results = {
        "logits_mib": logits / MIB,
        "step_mib": step / MIB,
        "estimate_mib": estimate / MIB,
        "step / logits": step / logits,
        "estimate / step": estimate / step,
    }

    if options.run:
        results |= measure_peak(config, options.dtype, options.tokens, **shape)
    report("memory", options, {name: round(value, 3) for name, value in results.items()}, ("jax", "jaxlib"))


if __name__ == "__main__":
    main()
