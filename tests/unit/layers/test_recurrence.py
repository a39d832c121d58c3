"""The short convolution, compared with sums in numpy."""

from itertools import pairwise

import jax.numpy as jnp
import numpy as np
import pytest

from skyrl_tx.layers.recurrence import get_last_inputs, make_conv_masks, short_conv, short_conv_step

B, T, CHANNELS, W = 2, 19, 6, 4
CLOSE = {"rtol": 1e-6, "atol": 1e-6}


def draw() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return inputs, weights, and the inputs before them."""
    generator = np.random.default_rng(0)
    return tuple(
        generator.standard_normal(shape).astype(np.float32)
        for shape in ((B, T, CHANNELS), (W, CHANNELS), (B, W - 1, CHANNELS))
    )


def sum_inputs(x: np.ndarray, weight: np.ndarray, tail: np.ndarray) -> np.ndarray:
    """Return the weighted sums of one row, [T, I]."""
    padded = np.concatenate([tail, x]).astype(np.float64)
    return np.stack([(padded[index : index + W] * weight).sum(0) for index in range(len(x))])


def test_outputs_are_the_weighted_sums_of_the_last_inputs() -> None:
    x, weight, tail = draw()
    wanted = np.stack([sum_inputs(x[row], weight, tail[row]) for row in range(B)])
    np.testing.assert_allclose(short_conv(*map(jnp.asarray, (x, weight, tail))), wanted, **CLOSE)


@pytest.mark.parametrize("lengths", [(7, 12), (1, 1, 17), (2, 3, 1, 13), (19,)])
def test_a_packed_sequence_reads_no_input_of_another(lengths: tuple[int, ...]) -> None:
    x, weight, _ = draw()
    starts = np.cumsum([0, *lengths])
    start_BT = np.broadcast_to(np.repeat(starts[:-1], lengths), (B, T))
    empty = np.zeros((B, W - 1, CHANNELS), np.float32)
    found = short_conv(*map(jnp.asarray, (x, weight, empty)), make_conv_masks(jnp.asarray(start_BT), W))
    for row in range(B):
        alone = [sum_inputs(x[row, a:b], weight, empty[row]) for a, b in pairwise(starts)]
        np.testing.assert_allclose(found[row], np.concatenate(alone), **CLOSE)


@pytest.mark.parametrize("size", [0, 1, 2, 3, 10, T])
def test_the_tail_is_of_the_tokens_and_not_of_padding(size: int) -> None:
    x, _, tail = draw()
    wanted = np.concatenate([tail, x[:, :size]], axis=1)[:, size:]
    np.testing.assert_array_equal(get_last_inputs(jnp.asarray(x), jnp.asarray(tail), size), wanted)


def test_steps_continue_a_row() -> None:
    x, weight, tail = map(jnp.asarray, draw())
    whole = short_conv(x, weight, tail)
    cut = 11
    kept = get_last_inputs(x[:, :cut], tail, cut)
    for index in range(cut, T):
        y, kept = short_conv_step(x[:, index], weight, kept)
        np.testing.assert_allclose(y, whole[:, index], **CLOSE)
    np.testing.assert_array_equal(kept, get_last_inputs(x, tail, T))
