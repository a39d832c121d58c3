"""AdamW against torch's documented algorithm in float64 numpy."""

import jax
import numpy as np
import optax
import pytest

from skyrl_tx.backends.jax.train.optimizer import adam, adamw_step, compute_coefficients, init_state
from skyrl_tx.contract.requests import OptimizerParams
from skyrl_tx.layers.lora import LoraPair

RANK = 2
"""The rank of the adapter. Its arrays are padded to 4."""


def tree(seed: int) -> dict[str, LoraPair]:
    draw = np.random.default_rng(seed)
    a, b = np.zeros((2, 5, 4), np.float32), np.zeros((2, 4, 6), np.float32)
    a[..., :RANK], b[:, :RANK] = draw.normal(size=(2, 5, RANK)), draw.normal(size=(2, RANK, 6))
    return {"q_proj": LoraPair(a=a, b=b)}


def leaves(tree) -> list[np.ndarray]:
    return [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(tree)]


def reference_step(weights, first, second, gradient, step: int, p: OptimizerParams) -> None:
    """Apply torch.nn.utils.clip_grad_norm_ and then torch.optim.AdamW to the arrays."""
    norm = np.sqrt(sum((g**2).sum() for g in gradient))
    clip = min(1.0, p.grad_clip_norm / (norm + 1e-6)) if p.grad_clip_norm else 1.0
    for w, m, v, g in zip(weights, first, second, gradient, strict=True):
        g = g * clip
        w *= 1 - p.learning_rate * p.weight_decay
        m += (1 - p.beta1) * (g - m)
        v *= p.beta2
        v += (1 - p.beta2) * g * g
        denominator = np.sqrt(v) / np.sqrt(1 - p.beta2**step) + p.eps
        w -= p.learning_rate / (1 - p.beta1**step) * m / denominator


@pytest.mark.parametrize(
    "params",
    [
        OptimizerParams(),
        OptimizerParams(learning_rate=0.03, weight_decay=0.1, eps=1e-8),
        OptimizerParams(learning_rate=0.01, beta1=0.5, beta2=0.999, grad_clip_norm=0.5),
        OptimizerParams(learning_rate=0.01, grad_clip_norm=1e6),
        OptimizerParams(learning_rate=0.01, grad_clip_norm=1e-6),
    ],
    ids=["defaults", "decay", "clipped", "norm below the bound", "clipped to a very small norm"],
)
def test_five_steps_equal_torch(params):
    weights, state = tree(0), init_state(tree(0))
    w, m, v = leaves(weights), leaves(state.first), leaves(state.second)
    for step in range(1, 6):
        gradient = tree(step)
        reference_step(w, m, v, leaves(gradient), step, params)
        weights, state, norm = adamw_step(weights, state, gradient, compute_coefficients(params, step))
        assert float(norm) == pytest.approx(np.sqrt(sum((g**2).sum() for g in leaves(gradient))), rel=1e-6)
    assert int(state.step) == 5
    for ours, theirs in zip(leaves((weights, state.first, state.second)), [*w, *m, *v], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-7)


def test_padding_stays_zero_even_without_eps():
    weights, state = tree(0), init_state(tree(0))
    params = OptimizerParams(learning_rate=0.1, weight_decay=0.1, eps=0.0, grad_clip_norm=1.0)
    for step in (1, 2):
        weights, state, _ = adamw_step(weights, state, tree(step), compute_coefficients(params, step))
    pair = weights["q_proj"]
    assert not np.asarray(pair.a)[..., RANK:].any() and not np.asarray(pair.b)[:, RANK:].any()
    assert np.isfinite(pair.a).all() and np.isfinite(pair.b).all()


def test_new_hyperparameters_need_no_compilation():
    weights, state = tree(0), init_state(tree(0))
    weights, state, _ = adamw_step(weights, state, tree(1), compute_coefficients(OptimizerParams(), 1))
    before = adamw_step._cache_size()
    adamw_step(
        weights, state, jax.tree.map(jax.numpy.asarray, tree(2)), compute_coefficients(OptimizerParams(eps=0.1), 2)
    )
    assert adamw_step._cache_size() <= before + 1  # one for host arrays, one for device arrays
    adamw_step(
        weights, state, jax.tree.map(jax.numpy.asarray, tree(2)), compute_coefficients(OptimizerParams(beta1=0.3), 3)
    )
    assert adamw_step._cache_size() <= before + 1


def test_adam_chains_with_transformations_of_optax():
    """Each change is half as large when `optax.scale(0.5)` comes after `adam`."""
    weights, gradient, factors = tree(0), tree(1), compute_coefficients(OptimizerParams(), 1)
    whole, _ = adam(factors).update(gradient, adam(factors).init(weights))
    chained = optax.chain(adam(factors), optax.scale(0.5))
    half, (state, _) = chained.update(gradient, chained.init(weights))
    assert int(state.step) == 1
    for ours, theirs in zip(leaves(half), leaves(whole), strict=True):
        np.testing.assert_array_equal(ours, theirs / 2)
