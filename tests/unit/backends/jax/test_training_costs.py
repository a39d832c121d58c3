"""Estimated memory of a micro-batch, compared with compiled programs."""

import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from skyrl_tx import models
from skyrl_tx.backends.jax import mesh, training_costs
from skyrl_tx.backends.jax.config import MeshConfig
from skyrl_tx.backends.jax.start_plan import make_abstract_layout
from skyrl_tx.backends.jax.train import forward_backward as training
from skyrl_tx.backends.jax.train import packing
from skyrl_tx.backends.jax.training_costs import DEFAULT_RANK, count_residual_bytes, estimate_costs
from skyrl_tx.contract.ids import ModelId
from skyrl_tx.layers.kernels.registry import SPLASH, TRITON, Kernels
from skyrl_tx.layers.lora import Adapter
from skyrl_tx.layers.remat import RematPolicy
from skyrl_tx.models.parts.feed_forward import Mixture
from skyrl_tx.testing.backend_driver import drawn_examples
from skyrl_tx.testing.tiny_models import write_model
from skyrl_tx.weights import hf
from tests.support.model_configs import QWEN3_8B, QWEN3_30B_A3B, QWEN3_600M

EXHAUSTIVE = (pytest.mark.slow, pytest.mark.exhaustive)
GIB = 2**30
HUB_CONFIGS = Path(__file__).parents[2] / "models" / "hub_configs"


def test_remat_keeps_less(tiny):
    found = estimate_costs(tiny.params, tiny.config, "cpu")
    hidden = 4 * tiny.config.num_layers * tiny.config.hidden_size
    assert hidden < found.token_bytes_with_remat < found.token_bytes


def test_all_inputs_of_layers_are_offloaded_and_nothing_else(tiny):
    found, (rows, length) = estimate_costs(tiny.params, tiny.config, "cpu"), (2, 64)
    in_flight = 2 * 4 * tiny.config.hidden_size
    assert found.token_bytes_with_remat - found.token_bytes_offloaded == found.host_token_bytes - in_flight

    def on_host(remat: RematPolicy) -> int:
        def run(weights, scale, tokens_BT):
            def compute_hidden(weights):
                return models.forward(tiny.params, tiny.config, tokens_BT, Adapter(weights, scale), remat=remat)

            return jax.vjp(compute_hidden, weights)

        adapter = models.describe_adapter(tiny.config, DEFAULT_RANK)
        traced = jax.make_jaxpr(run)(adapter.weights, adapter.scale, jax.ShapeDtypeStruct((rows, length), jnp.int32))
        arrays = [array for array in traced.out_avals if array.memory_space.name == "Host"]
        return sum(array.size * array.dtype.itemsize for array in arrays)

    assert on_host(RematPolicy.OFFLOAD) == found.host_token_bytes * rows * length
    assert on_host(RematPolicy.FULL) == 0


def test_keeping_products_takes_less_than_half_of_keeping_all(tiny):
    def count_token_bytes(policy: RematPolicy) -> float:
        short, long = (count_residual_bytes(tiny.params, tiny.config, length, policy) for length in (512, 1024))
        return (long - short) / 512

    assert (
        count_token_bytes(RematPolicy.FULL)
        < count_token_bytes(RematPolicy.SAVE_MATMULS)
        < 0.5 * count_token_bytes(RematPolicy.NONE)
    )


ONE_PART_A_LAYER = {
    "architecture": "NemotronHForCausalLM",
    "experts": {"moe_intermediate_size": 128, "moe_latent_size": 64, "moe_shared_expert_intermediate_size": 256},
    "keys": {
        **{"mamba_num_heads": 16, "mamba_head_dim": 32, "ssm_state_size": 64},
        **{"hybrid_override_pattern": "MEMEME*E", "num_hidden_layers": 8},
    },
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("remat", "more"),
    [
        (True, {"num_layers": 4}),
        (False, ONE_PART_A_LAYER),
        pytest.param(False, {"num_layers": 4}, marks=pytest.mark.exhaustive),
        pytest.param(True, ONE_PART_A_LAYER, marks=pytest.mark.exhaustive),
    ],
    ids=["remat-two-parts", "kept-one-part", "kept-two-parts", "remat-one-part"],
)
def test_the_estimate_matches_the_compiled_program(tmp_path, remat, more):
    directory = write_model(tmp_path, vocab_size=1024, hidden_size=256, head_dim=64, mlp_size=768, **more)
    content = hf.read_json(directory, "config.json")
    family = models.find_family(content)
    config = family.config_from_hf(content)
    params = hf.load(directory, models.describe_params(config), family.weights)
    adapter: Adapter = models.describe_adapter(config, DEFAULT_RANK)
    [example] = drawn_examples(ModelId("m"), (1024,), seed=1, request="r")
    batch = packing.fill_micro_batch(packing.plan_micro_batches([example], 1024)[0], [example])
    policy = RematPolicy.FULL if remat else RematPolicy.SAVE_MATMULS
    lowered = training.accumulate.lower(params, adapter, adapter.weights, batch, config=config, remat=policy)
    taken = lowered.compile().memory_analysis().temp_size_in_bytes
    estimate = estimate_costs(params, config, "cpu").count_micro_batch_bytes(1024, remat=policy)
    assert taken <= 1.1 * estimate <= 2.5 * taken


@pytest.mark.parametrize(
    ("platform", "content", "num_layers", "rank", "sizes", "num_tokens", "compiled_gib"),
    [
        pytest.param("tpu", QWEN3_8B, 36, 32, {"tp": 8}, 2048, 1.530, marks=pytest.mark.slow),  # v5e
        pytest.param("tpu", QWEN3_8B, 36, 32, {"fsdp": 8}, 2048, 2.668, marks=EXHAUSTIVE),  # v5e
        pytest.param("tpu", QWEN3_600M, 28, 32, {"fsdp": 1}, 8192, 1.744, marks=EXHAUSTIVE),  # v5e
        ("gpu", QWEN3_8B, 36, 32, {"fsdp": 8}, 2048, 3.933),  # H200
        pytest.param("gpu", QWEN3_8B, 36, 32, {"tp": 8}, 16384, 11.208, marks=EXHAUSTIVE),  # H200
        pytest.param("tpu", QWEN3_30B_A3B, 2, 8, {"ep": 8}, 2048, 3.038, marks=pytest.mark.slow),  # v5e
        pytest.param("gpu", QWEN3_30B_A3B, 48, 32, {"cp": 8}, 12800, 12.840, marks=pytest.mark.slow),  # H200
        pytest.param("gpu", QWEN3_30B_A3B, 48, 8, {"ep": 8}, 2048, 4.115, marks=pytest.mark.slow),  # H200
        pytest.param("gpu", QWEN3_30B_A3B, 48, 8, {"ep": 8}, 4096, 6.625, marks=EXHAUSTIVE),  # H200
    ],
)
def test_the_estimate_is_near_the_account_of_the_devices_compiler(
    platform, content, num_layers, rank, sizes, num_tokens, compiled_gib, monkeypatch
) -> None:
    """Temporary memory of `accumulate` with remat, by libtpu 0.0.52 and jaxlib 0.10.2."""
    monkeypatch.setattr(training_costs, "DEFAULT_RANK", rank)
    params, model = make_published_model({**content, "num_hidden_layers": num_layers}, platform, MeshConfig(**sizes))
    estimate = estimate_costs(params, model, platform).count_micro_batch_bytes(num_tokens, remat=RematPolicy.FULL)
    assert estimate == pytest.approx(compiled_gib * GIB, rel=0.15)


@pytest.mark.parametrize(
    ("platform", "sizes", "num_tokens", "compiled_gib"),
    [
        ("gpu", {"tp": 8}, 16384, 20.418),
        pytest.param("tpu", {"tp": 8}, 4096, 5.167, marks=EXHAUSTIVE),
        pytest.param("gpu", {"fsdp": 1}, 4096, 15.638, marks=EXHAUSTIVE),
    ],
    ids=["h200-8", "v6e-8", "h200-1"],
)
def test_what_mixers_return_is_kept_whole_on_each_device(platform, sizes, num_tokens, compiled_gib) -> None:
    """Temporary memory of `accumulate` for Qwen3-8B, with the results of products kept."""
    params, model = make_published_model(QWEN3_8B, platform, MeshConfig(**sizes))
    estimate = estimate_costs(params, model, platform).count_micro_batch_bytes(
        num_tokens, remat=RematPolicy.SAVE_MATMULS
    )
    assert estimate == pytest.approx(compiled_gib * GIB, rel=0.1)


@pytest.mark.parametrize(
    ("platform", "sizes", "num_tokens", "compiled_gib"),
    [
        pytest.param("gpu", {}, 16384, 22.1, marks=pytest.mark.slow),
        *(
            pytest.param(*case, marks=EXHAUSTIVE)
            for case in (("gpu", {}, 4096, 7.0), ("gpu", {"tp": 4}, 8192, 5.5), ("tpu", {}, 8192, 12.2))
        ),
    ],
    ids=["h200-16k", "h200-4k", "h200-4", "v5p"],
)
def test_the_estimate_counts_the_delta_rule(platform, sizes, num_tokens, compiled_gib) -> None:
    """Temporary memory of `accumulate` for eight layers of Qwen3.5-9B.

    The numbers are by jaxlib 0.10.2 and libtpu 0.0.52.
    """
    content = json.loads((HUB_CONFIGS / "Qwen3.5-9B.json").read_text())
    layers = {"num_hidden_layers": 8, "layer_types": content["text_config"]["layer_types"][:8]}
    content["text_config"] = content["text_config"] | layers
    params, model = make_published_model(content, platform, MeshConfig(**sizes))
    params = replace(params, kernels=replace(params.kernels, chunks_together=True))
    estimate = estimate_costs(params, model, platform).count_micro_batch_bytes(
        num_tokens, remat=RematPolicy.SAVE_MATMULS
    )
    assert estimate == pytest.approx(compiled_gib * GIB, rel=0.15)


def make_published_model(content, platform: str, config: MeshConfig) -> tuple[models.DecoderParams, models.ModelConfig]:
    """Return the shapes of a published model in the training layout, with the device's kernel."""
    model = models.find_family(content).config_from_hf(content)
    shapes = jax.tree.map(
        lambda parameter: jax.ShapeDtypeStruct(parameter.shape, jnp.bfloat16), models.describe_params(model)
    )
    layout = mesh.make_training_layout(make_abstract_layout(config))
    return replace(shapes, layout=layout, kernels=Kernels(SPLASH if platform == "tpu" else TRITON)), model


@pytest.mark.parametrize(
    ("kernel", "compiled_gib"),
    [
        pytest.param(SPLASH, 3.726, marks=pytest.mark.slow),  # v5p, by libtpu 0.0.52
        (TRITON, 4.162),  # H200, by jaxlib 0.10.2
    ],
)
def test_the_estimate_counts_what_kernels_keep(kernel, compiled_gib) -> None:
    """Temporary memory of `accumulate` for Qwen3-0.6B and 4,096 tokens.

    With the loops, the estimate is larger.
    """
    model = models.find_family(QWEN3_600M).config_from_hf(QWEN3_600M)
    shapes = jax.tree.map(
        lambda parameter: jax.ShapeDtypeStruct(parameter.shape, jnp.bfloat16), models.describe_params(model)
    )
    layout = make_abstract_layout(MeshConfig())
    with_kernel = estimate_costs(replace(shapes, layout=layout, kernels=Kernels(kernel)), model, "tpu")
    assert with_kernel.count_micro_batch_bytes(4096, remat=RematPolicy.SAVE_MATMULS) == pytest.approx(
        compiled_gib * GIB, rel=0.15
    )
    assert with_kernel.token_bytes < estimate_costs(replace(shapes, layout=layout), model, "tpu").token_bytes


def test_all_tokens_of_an_ep_group_pass_through_each_of_its_devices() -> None:
    model = models.find_family(QWEN3_30B_A3B).config_from_hf(QWEN3_30B_A3B)
    mixture = model.blocks[0].feed_forward
    assert isinstance(mixture, Mixture)
    tiles, places = (131072 + 16 * 127) // 128, 128  # 16 experts, each with at most one partly filled tile
    rows = (3 * tiles * places + 131072) * 2048
    factors, weights = tiles * 8 * 3 * (2048 + 768), 32 * 3 * 2048 * 768
    assert (
        mixture.estimate_backward_bytes(8 * 2048, rank=8, ep=8, tp=1, itemsize=2) == 2 * (rows + weights) + 4 * factors
    )
