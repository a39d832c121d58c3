"""The shapes and the initial values of adapters."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from skyrl_tx.contract.requests import LoraSpec
from skyrl_tx.layers.rope import Rope
from skyrl_tx.models import ModelConfig, describe_adapter, init_adapter
from skyrl_tx.models.config import Block, group_blocks
from skyrl_tx.models.parts.attention import Attention
from skyrl_tx.models.parts.feed_forward import Dense


def make_config(hidden_size: int) -> ModelConfig:
    attention = Attention(hidden_size=hidden_size, num_heads=4, num_kv_heads=2, head_dim=6, rope=Rope(theta=1e4))
    return ModelConfig(
        architecture="Qwen3ForCausalLM",
        vocab_size=50,
        hidden_size=hidden_size,
        norm_epsilon=1e-6,
        max_context_length=64,
        tied_embeddings=True,
        groups=group_blocks([Block(attention, Dense(hidden_size=hidden_size, mlp_size=20))] * 3),
    )


CONFIG = make_config(16)
SPEC = LoraSpec(rank=4, seed=7)


def test_shapes_of_the_arrays():
    weights = describe_adapter(CONFIG, 5).weights
    assert weights["k_proj"].a.shape == (3, 16, 5) and weights["k_proj"].b.shape == (3, 5, 12)
    assert weights["down_proj"].a.shape == (3, 20, 5) and weights["down_proj"].b.shape == (3, 5, 16)
    assert weights["unembed"].a.shape == (16, 5) and weights["unembed"].b.shape == (5, 50)
    made = init_adapter(CONFIG, SPEC, 5)
    assert jax.tree.map(lambda leaf: leaf.shape, made) == jax.tree.map(lambda s: s.shape, describe_adapter(CONFIG, 5))


def test_a_is_uniform_as_in_peft_and_b_is_zero():
    made = init_adapter(make_config(256), SPEC)
    a = np.asarray(made.weights["q_proj"].a)
    bound = 256**-0.5
    assert np.abs(a).max() <= bound and np.abs(a).max() > 0.98 * bound
    assert a.std() == pytest.approx(bound / 3**0.5, rel=0.05) and a.mean() == pytest.approx(0, abs=0.05 * bound)
    assert not any(np.any(pair.b) for pair in made.weights.values())
    assert float(made.scale) == 8.0  # alpha 32 over rank 4


def test_values_depend_on_seed_and_rank_only():
    made = init_adapter(CONFIG, SPEC)
    padded = init_adapter(CONFIG, SPEC, 9)
    partial = init_adapter(CONFIG, replace(SPEC, train_attn=False), 9)
    for name, pair in made.weights.items():
        np.testing.assert_array_equal(pair.a, padded.weights[name].a[..., :4])
        assert not np.any(padded.weights[name].a[..., 4:])
        expected = np.zeros_like(pair.a) if name in ("q_proj", "k_proj", "v_proj", "o_proj") else pair.a
        np.testing.assert_array_equal(expected, partial.weights[name].a[..., :4])
    assert padded.scale == made.scale
    other = init_adapter(CONFIG, replace(SPEC, seed=8))
    assert not np.array_equal(other.weights["q_proj"].a, made.weights["q_proj"].a)


def test_the_values_of_a_seed_never_change():
    """A replay draws the initial values again, so different values would give a different model."""
    a = np.asarray(init_adapter(CONFIG, SPEC).weights["up_proj"].a)
    np.testing.assert_allclose(a[0, 0], [0.0787616149, 0.0552073792, 0.2142037153, -0.0011583711], rtol=1e-6)


@pytest.mark.parametrize("rank", [0, -1, 10])
def test_a_rank_out_of_bounds_is_an_assertion(rank):
    with pytest.raises(AssertionError, match=str(rank)):
        init_adapter(CONFIG, replace(SPEC, rank=rank), 9)
