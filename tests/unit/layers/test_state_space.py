"""The state space model computed in chunks equals its token-by-token recurrence."""

from collections.abc import Callable
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from skyrl_tx.layers.recurrence import CHUNK_POSITIONS, ChunkMasks
from skyrl_tx.layers.recurrent_rules import state_space, state_space_step
from tests.support.fast_jit import fast_jit

G, H, N, P = 2, 3, 16, 8
LENGTHS = 70, 5, 130, 64, 1, 27
"""Restarts within a chunk and at its border, a single token, and a sequence across three chunks."""
STARTS = np.cumsum([0, *LENGTHS])
CLOSE = {"rtol": 1e-5, "atol": 1e-5}

Inputs = tuple[jax.Array, ...]
Rule = Callable[[Inputs, jax.Array], tuple[jax.Array, jax.Array]]


def draw(num_rows: int, length: int, seed: int = 0) -> Inputs:
    """Return read and write vectors, inputs and decays, at the scale of the layer."""
    generator = np.random.default_rng(seed)
    c, b = (generator.standard_normal((num_rows, length, G, N)) / N**0.5 for _ in range(2))
    x = generator.standard_normal((num_rows, length, G, H, P))
    decay = -generator.uniform(0.0, 0.3, (num_rows, length, G, H))
    return tuple(jnp.asarray(array, jnp.float32) for array in (c, b, x, decay))


def draw_state(num_rows: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(9).standard_normal((num_rows, G, H, N, P)), jnp.float32)


def zeros(num_rows: int) -> jax.Array:
    return jnp.zeros((num_rows, G, H, N, P))


def by_steps(inputs: Inputs, state: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return outputs and state of the recurrence."""

    def one(state: jax.Array, token: Inputs) -> tuple[jax.Array, jax.Array]:
        y, state = state_space_step(*token, state)
        return state, y

    state, y_TB = jax.lax.scan(one, state, tuple(jnp.moveaxis(array, 1, 0) for array in inputs))
    return jnp.moveaxis(y_TB, 0, 1), state


run_chunks, run_steps = fast_jit(state_space), fast_jit(by_steps)


def assert_close(found: object, wanted: object) -> None:
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, **CLOSE)


def test_a_step_is_the_formula() -> None:
    inputs, state = draw(1, 1), draw_state(1)
    c, b, x, decay = (np.asarray(array[0, 0], np.float64) for array in inputs)
    y, new = state_space_step(*(array[:, 0] for array in inputs), state)
    for group, head in np.ndindex(G, H):
        wanted = np.exp(decay[group, head]) * np.asarray(state[0, group, head], np.float64)
        wanted = wanted + np.outer(b[group], x[group, head])
        np.testing.assert_allclose(new[0, group, head], wanted, **CLOSE)
        np.testing.assert_allclose(y[0, group, head], wanted.T @ c[group], **CLOSE)


@pytest.mark.parametrize(
    "length",
    [
        *(1, CHUNK_POSITIONS, 2 * CHUNK_POSITIONS + 22),
        *(pytest.param(length, marks=pytest.mark.slow) for length in (5, CHUNK_POSITIONS - 1, CHUNK_POSITIONS + 1)),
    ],
)
def test_chunks_equal_steps(length: int) -> None:
    inputs, state = draw(2, length), draw_state(2)
    assert_close(run_chunks(*inputs, state), run_steps(inputs, state))


def test_gradients_by_chunks_equal_those_by_steps() -> None:
    inputs, state = draw(2, CHUNK_POSITIONS + 30), draw_state(2)
    generator = np.random.default_rng(1)
    y_weight = generator.standard_normal(inputs[2].shape).astype(np.float32)
    state_weight = generator.standard_normal(state.shape).astype(np.float32)

    def gradients(rule: Rule) -> object:
        def loss(inputs: Inputs, state: jax.Array) -> jax.Array:
            y, state = rule(inputs, state)
            return jnp.sum(y * y_weight) + jnp.sum(state * state_weight)

        return fast_jit(jax.grad(loss, argnums=(0, 1)))(inputs, state)

    # These are sums of hundreds of terms, so the tolerance is relative to the largest.
    chunks, steps = gradients(lambda inputs, state: state_space(*inputs, state)), gradients(by_steps)
    for one, other in zip(jax.tree.leaves(chunks), jax.tree.leaves(steps), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5 * float(np.abs(other).max()))


def make_packed_start() -> jax.Array:
    return jnp.asarray(np.repeat(STARTS[:-1], LENGTHS))[None]


def run_packed(inputs: Inputs) -> jax.Array:
    return state_space(*inputs, zeros(1), ChunkMasks.from_starts(make_packed_start()))[0]


def run_apart(inputs: Inputs) -> jax.Array:
    apart = [tuple(array[:, start:stop] for array in inputs) for start, stop in pairwise(STARTS)]
    return jnp.concatenate([by_steps(sequence, zeros(1))[0] for sequence in apart], axis=1)


def test_packed_sequences_equal_the_sequences_apart() -> None:
    inputs = draw(1, int(STARTS[-1]))
    assert_close(fast_jit(run_packed)(inputs), fast_jit(run_apart)(inputs))


def test_gradients_of_packed_sequences_equal_those_apart() -> None:
    inputs = draw(1, int(STARTS[-1]))
    weight = np.random.default_rng(1).standard_normal(inputs[2].shape).astype(np.float32)
    packed, alone = (
        fast_jit(jax.grad(lambda inputs, run=run: jnp.sum(run(inputs) * weight)))(inputs)
        for run in (run_packed, run_apart)
    )
    for one, other in zip(packed, alone, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5 * float(np.abs(other).max()))


def test_a_packed_sequence_reads_nothing_of_another() -> None:
    inputs = draw(1, int(STARTS[-1]))
    start, stop = STARTS[2], STARTS[3]
    index = np.arange(STARTS[-1])
    is_own = (index >= start) & (index < stop)
    x = jnp.where(is_own[:, None, None, None], inputs[2], 1e6)
    run = fast_jit(run_packed)
    mixed = run((*inputs[:2], x, inputs[3]))
    np.testing.assert_array_equal(mixed[:, start:stop], run(inputs)[:, start:stop])


@pytest.mark.parametrize("size", [1, 40, CHUNK_POSITIONS, CHUNK_POSITIONS + 20])
def test_padding_leaves_the_state(size: int) -> None:
    c, b, x, decay = draw(2, 2 * CHUNK_POSITIONS)
    is_token = (jnp.arange(2 * CHUNK_POSITIONS) < size)[:, None, None]
    padded = c, b, jnp.where(is_token[..., None], x, 0.0), jnp.where(is_token, decay, 0.0)
    y, state = run_chunks(*padded, draw_state(2))
    assert_close((y[:, :size], state), run_chunks(*(array[:, :size] for array in padded), draw_state(2)))


@pytest.mark.parametrize("cut", [1, 30, CHUNK_POSITIONS, CHUNK_POSITIONS + 1])
def test_continuing_from_a_state_equals_one_call(cut: int) -> None:
    inputs, state = draw(2, 2 * CHUNK_POSITIONS), draw_state(2)
    first, between = run_chunks(*(array[:, :cut] for array in inputs), state)
    second, last = run_chunks(*(array[:, cut:] for array in inputs), between)
    assert_close((jnp.concatenate([first, second], axis=1), last), run_chunks(*inputs, state))


def test_gradients_are_finite_where_all_is_forgotten() -> None:
    *others, decay = draw(1, CHUNK_POSITIONS)
    gradient = fast_jit(jax.grad(lambda decay: jnp.sum(state_space(*others, decay, draw_state(1))[0])))(decay - 200.0)
    assert np.isfinite(gradient).all()
