"""Choosing the loss by number gives what the loss itself gives: value, means and gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from skyrl_tx.backends.jax import any_loss
from skyrl_tx.losses import LOSSES

CASES = [(name, 2) for name in LOSSES] + [("cross_entropy", 3)]
evaluate = jax.jit(any_loss.evaluate)
slope = jax.jit(any_loss.slope)


@pytest.mark.parametrize(("name", "ndim"), CASES)
def test_the_number_chooses_the_loss(name, ndim):
    draw = np.random.default_rng(0)
    shape = (2, 5, 3)[:ndim]
    loss = LOSSES[name]
    logprobs = -draw.random(shape, np.float32)
    inputs = {each: draw.random(shape, np.float32) - 0.5 for each in any_loss.INPUTS}
    config_BC = np.tile([*(loss.spec.config[c] for c in loss.columns), 7.0, 7.0, 7.0], (2, 1))
    config_BC = config_BC[:, : any_loss.NUM_COLUMNS].astype(np.float32)
    number = any_loss.number_of(name, ndim)

    def theirs(x):
        own = {each: inputs[each] for each in loss.spec.inputs if each != any_loss.TARGETS}
        return loss.evaluate(x, own, config_BC[:, : len(loss.columns)])

    expected = theirs(logprobs)
    got = evaluate(number, logprobs, inputs, config_BC)
    np.testing.assert_allclose(got.loss_BT, expected.loss_BT, rtol=1e-6)
    assert any_loss.mean_names(name) == set(expected.means)
    for each, mean in expected.means.items():
        np.testing.assert_allclose(got.means[each].total_BT, mean.total_BT, rtol=1e-6)
    gradient = slope(number, logprobs, inputs, config_BC)
    wanted = jax.grad(lambda x: theirs(x).loss_BT.sum())(jnp.asarray(logprobs))
    np.testing.assert_allclose(gradient, wanted, rtol=1e-6)


@pytest.mark.parametrize(("name", "ndim"), CASES)
def test_a_local_loss_has_the_same_slope_alone_as_in_its_row(name, ndim):
    draw = np.random.default_rng(1)
    shape = (2, 6, 3)[:ndim]
    logprobs = -draw.random(shape, np.float32)
    inputs = {each: draw.random(shape, np.float32) for each in any_loss.INPUTS}
    columns = [LOSSES[name].spec.config[c] for c in LOSSES[name].columns]
    config_BC = np.tile(np.float32([*columns, 7.0, 7.0, 7.0]), (2, 1))[:, : any_loss.NUM_COLUMNS]
    number = any_loss.number_of(name, ndim)
    whole = slope(number, logprobs, inputs, config_BC)
    halves = [
        slope(number, logprobs[:, part], {each: x[:, part] for each, x in inputs.items()}, config_BC)
        for part in (slice(3), slice(3, 6))
    ]
    is_same = np.array_equal(whole, np.concatenate(halves, axis=1))
    assert is_same == any_loss.is_local(number, ndim) == LOSSES[name].is_local


def test_only_losses_of_several_targets_take_them():
    assert [loss.spec.name for loss in any_loss.losses_for(3)] == ["cross_entropy"]
