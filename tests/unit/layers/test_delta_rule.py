"""The gated delta rule computed in chunks equals its token-by-token recurrence."""

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from skyrl_tx.layers.recurrence import CHUNK_POSITIONS, ChunkMasks
from skyrl_tx.layers.recurrent_rules import _invert, delta_rule, delta_step
from tests.support.fast_jit import fast_jit

K, G, D, E = 2, 2, 16, 8
LENGTHS = 70, 5, 130, 64, 1, 27
"""Restarts within a chunk and at its border, a single token, and a sequence across three chunks."""
STARTS = np.cumsum([0, *LENGTHS])
CLOSE = {"rtol": 1e-5, "atol": 1e-5}

Inputs = tuple[jax.Array, ...]
Rule = Callable[[Inputs, jax.Array], tuple[jax.Array, jax.Array]]


def draw(num_rows: int, length: int, seed: int = 0) -> Inputs:
    """Return queries, keys, values, betas and decays, as the layer makes them."""
    generator = np.random.default_rng(seed)
    q, k = (generator.standard_normal((num_rows, length, K, D)) for _ in range(2))
    q, k = (vectors / np.linalg.norm(vectors, axis=-1, keepdims=True) for vectors in (q, k))
    v = generator.standard_normal((num_rows, length, K, G, E))
    beta = generator.uniform(0.0, 1.0, (num_rows, length, K, G))
    decay = -generator.uniform(0.0, 0.3, (num_rows, length, K, G))
    return tuple(jnp.asarray(array, jnp.float32) for array in (q, k, v, beta, decay))


def draw_state(num_rows: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(9).standard_normal((num_rows, K, G, D, E)), jnp.float32)


def zeros(num_rows: int) -> jax.Array:
    return jnp.zeros((num_rows, K, G, D, E))


def by_steps(inputs: Inputs, state: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return outputs and state of the recurrence."""

    def one(state: jax.Array, token: Inputs) -> tuple[jax.Array, jax.Array]:
        o, state = delta_step(*token, state)
        return state, o

    state, o_TB = jax.lax.scan(one, state, tuple(jnp.moveaxis(array, 1, 0) for array in inputs))
    return jnp.moveaxis(o_TB, 0, 1), state


run_chunks, run_steps = fast_jit(delta_rule, static_argnames="together"), fast_jit(by_steps)
BOTH_WAYS = pytest.mark.parametrize("together", [False, True], ids=["in-turn", "together"])


def assert_close(found: object, wanted: object) -> None:
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, **CLOSE)


def test_a_step_is_the_formula() -> None:
    inputs, state = draw(1, 1), draw_state(1)
    q, k, v, beta, decay = (np.asarray(array[0, 0], np.float64) for array in inputs)
    o, new = delta_step(*(array[:, 0] for array in inputs), state)
    for head, group in np.ndindex(K, G):
        wanted = np.exp(decay[head, group]) * np.asarray(state[0, head, group], np.float64)
        learned = beta[head, group] * (v[head, group] - wanted.T @ k[head])
        wanted = wanted + np.outer(k[head], learned)
        np.testing.assert_allclose(new[0, head, group], wanted, **CLOSE)
        np.testing.assert_allclose(o[0, head, group], wanted.T @ q[head], **CLOSE)


@BOTH_WAYS
@pytest.mark.parametrize(
    "length",
    [
        *(1, CHUNK_POSITIONS, 2 * CHUNK_POSITIONS + 22),
        *(
            pytest.param(length, marks=pytest.mark.slow)
            for length in (5, CHUNK_POSITIONS - 1, CHUNK_POSITIONS + 1, 33 * CHUNK_POSITIONS - 9)
        ),
    ],
)
def test_chunks_equal_steps(length: int, together: bool) -> None:
    inputs, state = draw(2, length), draw_state(2)
    assert_close(run_chunks(*inputs, state, together=together), run_steps(inputs, state))


@BOTH_WAYS
def test_gradients_by_chunks_equal_those_by_steps(together: bool) -> None:
    inputs, state = draw(2, CHUNK_POSITIONS + 30), draw_state(2)
    generator = np.random.default_rng(1)
    o_weight = generator.standard_normal(inputs[2].shape).astype(np.float32)
    state_weight = generator.standard_normal(state.shape).astype(np.float32)

    def gradients(rule: Rule) -> object:
        def loss(inputs: Inputs, state: jax.Array) -> jax.Array:
            o, state = rule(inputs, state)
            return jnp.sum(o * o_weight) + jnp.sum(state * state_weight)

        return fast_jit(jax.grad(loss, argnums=(0, 1)))(inputs, state)

    assert_close(gradients(lambda inputs, state: delta_rule(*inputs, state, together=together)), gradients(by_steps))


def make_packed_start() -> jax.Array:
    return jnp.asarray(np.repeat(STARTS[:-1], LENGTHS))[None]


def split_sequences(inputs: Inputs) -> list[Inputs]:
    """Return the inputs of each sequence of the packed row."""
    return [tuple(array[:, start:stop] for array in inputs) for start, stop in pairwise(STARTS)]


def run_packed(inputs: Inputs, *, together: bool = False) -> jax.Array:
    return delta_rule(*inputs, zeros(1), ChunkMasks.from_starts(make_packed_start()), together=together)[0]


def run_apart(inputs: Inputs) -> jax.Array:
    return jnp.concatenate([by_steps(sequence, zeros(1))[0] for sequence in split_sequences(inputs)], axis=1)


@BOTH_WAYS
def test_packed_sequences_equal_the_sequences_apart(together: bool) -> None:
    inputs = draw(1, int(STARTS[-1]))
    assert_close(fast_jit(partial(run_packed, together=together))(inputs), fast_jit(run_apart)(inputs))


@BOTH_WAYS
def test_gradients_of_packed_sequences_equal_those_apart(together: bool) -> None:
    inputs = draw(1, int(STARTS[-1]))
    weight = np.random.default_rng(1).standard_normal(inputs[2].shape).astype(np.float32)
    packed, alone = (
        fast_jit(jax.grad(lambda inputs, run=run: jnp.sum(run(inputs) * weight)))(inputs)
        for run in (partial(run_packed, together=together), run_apart)
    )
    assert_close(packed, alone)


@BOTH_WAYS
def test_a_packed_sequence_reads_nothing_of_another(together: bool) -> None:
    inputs = draw(1, int(STARTS[-1]))
    start, stop = STARTS[2], STARTS[3]
    other = draw(1, int(STARTS[-1]), seed=1)
    index = np.arange(STARTS[-1])
    is_own = (index >= start) & (index < stop)
    mixed = tuple(jnp.where(is_own.reshape(-1, *[1] * (a.ndim - 2)), a, b) for a, b in zip(inputs, other, strict=True))
    run = fast_jit(partial(run_packed, together=together))
    assert_close(run(mixed)[:, start:stop], run(inputs)[:, start:stop])


@pytest.mark.parametrize("size", [1, 40, CHUNK_POSITIONS, CHUNK_POSITIONS + 20])
def test_padding_leaves_the_state(size: int) -> None:
    *qkv, beta, decay = draw(2, 2 * CHUNK_POSITIONS)
    is_token = (jnp.arange(2 * CHUNK_POSITIONS) < size)[:, None, None]
    padded = *qkv, jnp.where(is_token, beta, 0.0), jnp.where(is_token, decay, 0.0)
    o, state = run_chunks(*padded, draw_state(2))
    assert_close((o[:, :size], state), run_chunks(*(array[:, :size] for array in padded), draw_state(2)))


@pytest.mark.parametrize("cut", [1, 30, CHUNK_POSITIONS, CHUNK_POSITIONS + 1])
def test_continuing_from_a_state_equals_one_call(cut: int) -> None:
    inputs, state = draw(2, 2 * CHUNK_POSITIONS), draw_state(2)
    first, between = run_chunks(*(array[:, :cut] for array in inputs), state)
    second, last = run_chunks(*(array[:, cut:] for array in inputs), between)
    assert_close((jnp.concatenate([first, second], axis=1), last), run_chunks(*inputs, state))


@pytest.mark.parametrize("beta", [0.5, 0.99])
def test_the_inverse_for_equal_keys_is_exact(beta: float) -> None:
    below = np.tril(np.full((CHUNK_POSITIONS, CHUNK_POSITIONS), beta), -1)
    found = fast_jit(_invert)(jnp.asarray(below, jnp.float32))
    np.testing.assert_allclose(found, np.linalg.inv(np.eye(CHUNK_POSITIONS) + below), rtol=0, atol=1e-6)


@pytest.mark.parametrize("beta", [0.5, 0.99])
def test_equal_keys_are_exact(beta: float) -> None:
    q, k, v, _, _ = draw(1, 2 * CHUNK_POSITIONS)
    k = jnp.broadcast_to(k[:, :1], k.shape)
    rates = jnp.full(v.shape[:-1], beta), jnp.zeros(v.shape[:-1])
    o, state = run_chunks(q, k, v, *rates, zeros(1))
    wanted = np.zeros((K, G, D, E))

    for index in range(v.shape[1]):
        key = np.asarray(k[0, index], np.float64)[:, None]
        learned = beta * (
            np.asarray(v[0, index], np.float64) - np.einsum("kgde,kgd->kge", wanted, key + np.zeros((K, G, D)))
        )
        wanted = wanted + np.einsum("kgd,kge->kgde", key + np.zeros((K, G, D)), learned)
        read = np.einsum("kgde,kd->kge", wanted, np.asarray(q[0, index], np.float64))
        np.testing.assert_allclose(o[0, index], read, **CLOSE)

    np.testing.assert_allclose(state[0], wanted, **CLOSE)


def test_gradients_are_finite_where_all_is_forgotten() -> None:
    *others, decay = draw(1, CHUNK_POSITIONS)
    gradient = fast_jit(jax.grad(lambda decay: jnp.sum(delta_rule(*others, decay, draw_state(1))[0])))(decay - 200.0)
    assert np.isfinite(gradient).all()
