"""A loss chosen by number equals the loss itself in value, means and gradient."""

from functools import partial

import jax
import numpy as np
import pytest

from skyrl_tx.backends.jax.train import forward_backward as training
from skyrl_tx.contract.losses import TARGET_TOKENS
from skyrl_tx.losses import LOSSES
from tests.support.fast_jit import fast_jit

CASES = [(name, 2) for name in LOSSES] + [("cross_entropy", 3)]
LENGTH = 6


@partial(jax.jit, static_argnames="is_local")
def evaluate_by_number(number, logprobs, inputs, config_BC, is_local):
    """Return gradients and outputs of the whole and its halves, and the output alone."""
    evaluate = partial(training.evaluate_loss, number, config_BC=config_BC, is_local=is_local)
    differentiate = partial(training.differentiate_loss, number, config_BC=config_BC, is_local=is_local)
    halves = [
        differentiate(*jax.tree.map(lambda leaf, part=part: leaf[:, part], (logprobs, inputs)))
        for part in (slice(LENGTH // 2), slice(LENGTH // 2, LENGTH))
    ]
    return differentiate(logprobs, inputs), halves, evaluate(logprobs, inputs)


@partial(fast_jit, static_argnames="name")
def evaluate_by_name(name, logprobs, inputs, config_BC):
    """Return the output and the gradient of a loss."""
    loss = LOSSES[name]
    own = {key: inputs[key] for key in loss.spec.inputs if key != TARGET_TOKENS}

    def total(logprobs):
        output = loss.evaluate(logprobs, own, config_BC[:, : len(loss.columns)])
        return output.loss_BT.sum(), output

    (_, output), gradient = jax.value_and_grad(total, has_aux=True)(logprobs)
    return output, gradient


def draw_arguments(name: str, ndim: int, seed: int, low: float):
    """Return log-probabilities, loss inputs of at least `low`, and loss configs of two rows."""
    draw = np.random.default_rng(seed)
    shape = (2, LENGTH, 3)[:ndim]
    logprobs = -draw.random(shape, np.float32)
    inputs = {key: draw.random(shape, np.float32) + np.float32(low) for key in training.LOSS_INPUTS}
    columns = [LOSSES[name].spec.config[column] for column in LOSSES[name].columns]
    config_BC = np.tile(np.float32([*columns, 7.0, 7.0, 7.0]), (2, 1))[:, : training.NUM_COLUMNS]
    return logprobs, inputs, config_BC


@pytest.mark.parametrize(("name", "ndim"), CASES)
def test_a_loss_by_number_equals_the_loss_itself(name, ndim):
    arguments = draw_arguments(name, ndim, seed=0, low=-0.5)
    expected, wanted = evaluate_by_name(name, *arguments)
    (gradient, *got), _, by_itself = evaluate_by_number(
        training.get_loss_number(name, ndim), *arguments, is_local=LOSSES[name].is_local
    )
    np.testing.assert_allclose(gradient, wanted, rtol=1e-6)
    for output in (*got, by_itself):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), output, expected)


@pytest.mark.parametrize(("name", "ndim"), CASES)
def test_a_local_loss_depends_on_each_position_alone(name, ndim):
    number, is_local = training.get_loss_number(name, ndim), LOSSES[name].is_local
    whole, halves, _ = evaluate_by_number(number, *draw_arguments(name, ndim, seed=1, low=0), is_local=is_local)
    joined = jax.tree.map(lambda *parts: np.concatenate(parts, axis=1), *halves)
    assert np.array_equal(whole[0], joined[0]) == is_local
    if is_local:
        jax.tree.map(np.testing.assert_array_equal, whole, joined)


def test_only_cross_entropy_accepts_several_targets():
    assert [loss.spec.name for loss in training.list_losses(3, is_local=True)] == ["cross_entropy"]
    assert training.list_losses(3, is_local=False) == ()
