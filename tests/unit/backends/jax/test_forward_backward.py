"""The gradient of a micro-batch, compared with plain differentiation."""

from functools import partial

import jax
import numpy as np
import pytest

from skyrl_tx import models
from skyrl_tx.backends.jax.train import forward_backward, packing
from skyrl_tx.contract.ids import ModelId
from skyrl_tx.contract.requests import LoraSpec
from skyrl_tx.layers.lora import Adapter
from skyrl_tx.layers.remat import RematPolicy
from skyrl_tx.testing.backend_driver import drawn_examples
from skyrl_tx.testing.tiny_models import write_model
from skyrl_tx.weights import hf
from tests.support.fast_jit import fast_jit

LENGTH = 48
accumulate = fast_jit(forward_backward.accumulate.__wrapped__, static_argnames=("config", "remat"))


TWO_LOOPS = ("DeepseekV3ForCausalLM", 3)
"""One loop over dense layers, and one over sparse layers."""
CYCLES = ("Qwen3_5ForCausalLM", 8)
"""One loop over cycles of four layers."""
EXHAUSTIVE = (pytest.mark.slow, pytest.mark.exhaustive)


@pytest.mark.parametrize(
    ("architecture", "num_layers", "remat"),
    [
        *(("Qwen3ForCausalLM", 2, remat) for remat in (RematPolicy.SAVE_MATMULS, RematPolicy.FULL)),
        *(pytest.param(*model, RematPolicy.SAVE_MATMULS, marks=pytest.mark.slow) for model in (TWO_LOOPS, CYCLES)),
        *(pytest.param(*model, RematPolicy.FULL, marks=EXHAUSTIVE) for model in (TWO_LOOPS, CYCLES)),
    ],
)
def test_a_gradient_is_added_to_the_sum(tmp_path, architecture, num_layers, remat):
    directory = write_model(tmp_path, architecture, num_layers=num_layers, std=0.1)
    content = hf.read_json(directory, "config.json")
    family = models.find_family(content)
    config = family.config_from_hf(content)
    params = hf.load(directory, models.describe_params(config), family.weights)
    generator = np.random.default_rng(0)
    adapter = models.init_adapter(config, LoraSpec(rank=4, seed=1))
    weights = jax.tree.map(lambda leaf: 0.05 * generator.standard_normal(leaf.shape, np.float32), adapter.weights)
    adapter = Adapter(weights, adapter.scale)
    [example] = drawn_examples(ModelId("m"), (LENGTH,), seed=1, request="r")
    batch = packing.fill_micro_batch(packing.plan_micro_batches([example], LENGTH)[0], [example])

    def loss(weights):
        hidden_BTD = models.forward(params, config, batch.tokens_BT, Adapter(weights, adapter.scale))
        logprobs = models.target_logprobs(params, hidden_BTD, batch.targets, Adapter(weights, adapter.scale))
        return -(batch.inputs["weights"] * logprobs).sum(), logprobs

    gradient, logprobs = fast_jit(jax.grad(loss, has_aux=True))(weights)
    before = jax.tree.map(lambda leaf: generator.standard_normal(leaf.shape, np.float32), weights)
    expected = jax.tree.map(lambda total, own: total + own, before, gradient)
    total, outputs = accumulate(params, adapter, before, batch, config=config, remat=remat)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), total, expected)
    assert all(np.abs(leaf).max() > 1e-3 for leaf in jax.tree.leaves(gradient))
    np.testing.assert_allclose(outputs.logprobs[..., 0], logprobs, atol=1e-5)
    np.testing.assert_allclose(outputs.loss.loss_BT, -batch.inputs["weights"] * logprobs, atol=1e-5)
