"""Layers of the weights as views into the memory of their stacks, and sampling with them."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from skyrl_tx import models
from skyrl_tx.backends.jax.config import MeshConfig
from skyrl_tx.backends.jax.sample.layer_views import separate_layers
from skyrl_tx.backends.jax.sample.scheduler import SampleScheduler
from skyrl_tx.backends.jax.start_plan import make_abstract_layout
from skyrl_tx.backends.jax.train.training_programs import make_param_shapes
from skyrl_tx.layers.kernels.registry import NO_KERNELS
from skyrl_tx.models import DecoderParams
from tests.support.sample_requests import RED, make_prompt, make_request, run
from tests.support.tiny import HYBRID, MOE, TINY_CONFIG, TinyModel, load_model, make_model_runner, tiny_directory


def address(x: jax.Array) -> int:
    return x.addressable_data(0).unsafe_buffer_pointer()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_layers_lie_in_their_stack_and_keep_it(dtype):
    """The layers of the second array begin at addresses that XLA does not accept."""
    stack = jax.random.normal(jax.random.key(0), (3, 16, 64), dtype)
    small = jnp.arange(9, dtype=dtype).reshape(3, 3)
    params = separate_layers(DecoderParams(embed=stack[0], layers=({"up": stack, "bias": small},), final_norm=None))
    (layers,) = params.layers
    assert params.has_separate_layers and len(layers) == 3

    first, values = address(stack), [np.asarray(matrix) for matrix in stack]
    assert [address(layer["up"]) - first for layer in layers] == [n * stack.nbytes // 3 for n in range(3)]

    del stack
    gc.collect()
    others = [jnp.full((3, 16, 64), n, dtype) for n in range(8)]  # would reuse the memory of the stack if it were free

    for n, layer in enumerate(layers):
        np.testing.assert_array_equal(layer["up"], values[n])
        np.testing.assert_array_equal(layer["bias"], small[n])
    assert len(others) == 8


def test_shapes_of_layers_are_sharded_like_stacks(tiny):
    layout = make_abstract_layout(MeshConfig(fsdp=2, tp=2))
    stacks = make_param_shapes(models.describe_params(tiny.config), layout, NO_KERNELS, np.dtype(jnp.bfloat16))
    separate = separate_layers(stacks)
    for stack, layers in zip(stacks.layers, separate.layers, strict=True):
        assert isinstance(layers, tuple) and not isinstance(stack, tuple)
        for name, leaf in stack.items():
            assert len(layers) == leaf.shape[0]
            assert (layers[0][name].shape, layers[0][name].dtype) == (leaf.shape[1:], leaf.dtype)
            assert layers[0][name].sharding.spec == jax.P(*tuple(leaf.sharding.spec)[1:])
    q_proj = separate.layers[0][0]["q_proj"]  # type: ignore[index]
    assert q_proj.sharding.spec == jax.P("fsdp", "tp")


@pytest.mark.parametrize(
    "model",
    [  # test_decoder.py decodes with separate layers of each family
        "tiny",
        *(pytest.param(family, marks=[pytest.mark.slow, pytest.mark.exhaustive]) for family in (MOE, HYBRID)),
    ],
)
def test_samples_of_separate_layers_are_those_of_stacks(model, tiny):
    found = [
        draw_samples(tiny if model == "tiny" else load_model(tiny_directory(model)), is_separate=is_separate)
        for is_separate in (False, True)
    ]
    for key, tokens in found[0].tokens.items():
        assert found[1].tokens[key] == tokens


def draw_samples(model: TinyModel, *, is_separate: bool):
    """Sample with and without adapters, in slices as on accelerators."""
    device = make_model_runner(model.params, model.config, TINY_CONFIG)
    device._is_single_cpu = False
    device._counts = device._make_row_counts()
    device._params = separate_layers(model.params) if is_separate else model.params
    scheduler = SampleScheduler(device, TINY_CONFIG, device.memory, ())
    scheduler.load(RED, model.adapter(1))
    base = make_request("base", make_prompt(40), samples=2, max_tokens=30)
    return run(scheduler, base, make_request("red", make_prompt(9), sampler=RED, max_tokens=30))
