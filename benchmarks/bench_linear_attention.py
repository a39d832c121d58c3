"""Compare a model with linear attention with one of the same size without: Qwen3.5 and Qwen3, random weights.

    python -m benchmarks.bench_linear_attention [--repeats 5]

Prints medians of the ratios of Qwen3.5 to Qwen3, from neighbouring runs, by CPU seconds:
  compile   the first call of each, less the median of later ones
  train     forward and backward pass of 2,048 tokens in rows of 512
  decode    steps of 8 samples after 256 and after 2,048 tokens
"""

import argparse
import functools
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from skyrl_tx import models
from skyrl_tx.backends.jax import mesh
from skyrl_tx.backends.jax.config import MeshConfig
from skyrl_tx.backends.jax.sample import programs
from skyrl_tx.backends.jax.sample.draw import DrawParams
from skyrl_tx.contract.requests import LoraSpec
from skyrl_tx.layers.cache_state import Table
from skyrl_tx.layers.kv_cache import PAGE
from skyrl_tx.layers.lora import RowSlots
from skyrl_tx.testing.tiny_models import write_model
from skyrl_tx.weights import hf

SIZES: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 512,
    "num_layers": 8,
    "num_heads": 8,
    "num_kv_heads": 4,
    "head_dim": 64,
    "mlp_size": 1536,
    "max_context_length": 8192,
    "tied_embeddings": False,
    "std": 0.02,
}
DELTA_NET: dict[str, Any] = {
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
ROWS, LENGTH, SLOTS, STEPS, RANK = 4, 512, 8, 16, 32


@dataclass
class Model:
    """A model on the device, with an adapter."""

    config: models.ModelConfig
    params: models.DecoderParams
    adapter: Any

    @classmethod
    def write(cls, directory: Path, architecture: str, keys: dict[str, Any]) -> "Model":
        """Write and load a random model."""
        write_model(directory, architecture, **SIZES, keys=keys)
        content = hf.read_json(directory, "config.json")
        family = models.find_family(content)
        config = family.config_from_hf(content)
        layout = mesh.make_layout(MeshConfig())
        placement = functools.partial(mesh.parameter_sharding, layout)
        params = hf.load(directory, models.describe_params(config), family.weights, placement=placement)
        adapter = jax.tree.map(jnp.asarray, models.init_adapter(config, LoraSpec(rank=RANK, seed=0), RANK))
        return cls(config, replace(params, layout=layout), adapter)


def trainer(model: Model) -> Callable[[], None]:
    """Return a function that runs one pass."""
    tokens = np.random.default_rng(0).integers(0, SIZES["vocab_size"], (ROWS, LENGTH))
    start = np.zeros_like(tokens, np.int32)

    def loss(weights: Any, params: models.DecoderParams, tokens: jax.Array, start: jax.Array) -> jax.Array:
        own = model.adapter.replace(weights=weights)
        hidden = models.forward(params, model.config, tokens, own, start_BT=start)
        return -models.target_logprobs(params, hidden, tokens, own).sum()

    gradient = jax.jit(jax.grad(loss))
    return lambda: jax.block_until_ready(gradient(model.adapter.weights, model.params, tokens, start))


def decoder(model: Model, position: int) -> Callable[[], None]:
    """Return a function that decodes a slice of all rows, each of which has `position` tokens."""
    length = 1 << (position + STEPS).bit_length()
    params = models.by_layer(model.params, model.config)
    zeros = jnp.zeros(SLOTS, jnp.int32)
    batch = programs.RowBatch(
        token_S=zeros,
        source_S=zeros - 1,
        num_left_S=zeros + STEPS,
        stop_SX=zeros[:, None] - 1,
        position_S=jnp.full(SLOTS, position, jnp.int32),
        num_drawn_S=zeros,
        given_SN=jnp.full((SLOTS, STEPS), -1, jnp.int32),
        slots=RowSlots(zeros),
        draws=DrawParams(
            seed_S2=jnp.zeros((SLOTS, 2), jnp.uint32),
            index_S=zeros.astype(jnp.uint32),
            temperature_S=jnp.zeros(SLOTS),
            top_k_S=zeros,
            top_p_S=jnp.ones(SLOTS),
        ),
        wants_topk=jnp.asarray(False),
    )
    num_pages, row_S = length // PAGE, jnp.arange(SLOTS, dtype=jnp.int32)
    table = Table(1 + row_S[:, None] * num_pages + jnp.arange(num_pages, dtype=jnp.int32), 1 + row_S)
    cache = [models.empty_cache(model.params, model.config, 1 + SLOTS * num_pages, 1 + SLOTS)]

    def run() -> None:
        opened = programs.open_rows(cache[0], table, batch.position_S, read_length=length, max_tokens=STEPS)
        past, steps = replace(opened, live=()), np.int32(STEPS)
        live, _, drawn = programs.run_rows(params, model.config, None, past, opened.live, batch, steps, max_topk=0)
        cache[0] = programs.close_rows(cache[0], live, batch.position_S, steps, table)
        jax.block_until_ready(drawn)

    return run


def cpu_seconds(run: Callable[[], None]) -> float:
    """Return the CPU time of a call."""
    started = time.process_time()
    run()
    return time.process_time() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="neighbouring pairs of runs (default: 5)")
    repeats = parser.parse_args().repeats
    with tempfile.TemporaryDirectory() as folder:
        linear = Model.write(Path(folder) / "linear", "Qwen3_5ForCausalLM", DELTA_NET)
        plain = Model.write(Path(folder) / "plain", "Qwen3ForCausalLM", {})
    for name, make in (
        ("train", trainer),
        ("decode after 256 tokens", lambda model: decoder(model, 256)),
        ("decode after 2,048 tokens", lambda model: decoder(model, 2048)),
    ):
        first, second = make(linear), make(plain)
        starting = cpu_seconds(first), cpu_seconds(second)
        pairs = [(cpu_seconds(first), cpu_seconds(second)) for _ in range(repeats)]
        ratios = [one / other for one, other in pairs]
        low, middle, high = min(ratios), statistics.median(ratios), max(ratios)
        print(f"{name}: {middle:.2f} times Qwen3 ({low:.2f} to {high:.2f})", flush=True)
        own, other = (
            whole - statistics.median(runs) for whole, runs in zip(starting, zip(*pairs, strict=True), strict=True)
        )
        print(f"  compile: {own:.1f} and {other:.1f} CPU s, {own / other:.2f} times", flush=True)


if __name__ == "__main__":
    main()
