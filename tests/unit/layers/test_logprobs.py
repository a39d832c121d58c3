"""Chunked log-probabilities equal log-probabilities of whole logits, which are never in memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from skyrl_tx.layers.logprobs import logits, loss_and_gradient, target_logprobs
from skyrl_tx.layers.lora import LoraPair, RowAdapter
from tests.support.fast_jit import fast_jit

B, T, D, V, R = 3, 11, 8, 40, 2


def draw(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def make(kind):
    hidden, unembed = draw(B, T, D), draw(V, D, seed=1)
    if kind == "none":
        return hidden, unembed, None
    rows = () if kind == "shared" else (B,)
    pair = LoraPair(a=draw(*rows, D, R, seed=2), b=draw(*rows, R, V, seed=3))
    return hidden, unembed, RowAdapter(pair=pair, scale=np.full(rows, 0.5, np.float32))


@pytest.mark.parametrize(
    ("kind", "shape", "chunk"),
    [("none", (B, T), 9), ("shared", (B, T), 9), ("rows", (B, T), 9), ("shared", (B, T, 4), 9), ("none", (B, T), 1000)],
)
def test_equals_whole_logits(kind, shape, chunk):
    hidden, unembed, adapter = make(kind)
    targets = np.random.default_rng(4).integers(0, V, shape)
    weights = draw(*shape, seed=5)

    def naive(hidden, adapter):
        logprobs = jax.nn.log_softmax(logits(hidden, unembed, adapter))
        return jnp.take_along_axis(logprobs, targets.reshape(B, T, -1), -1).reshape(shape)

    def compute_chunked(hidden, adapter):
        return target_logprobs(hidden, unembed, targets, adapter, chunk=chunk)

    @fast_jit
    def values_and_gradients(hidden, adapter):
        found = []
        for function in (naive, compute_chunked):
            logprobs, pull = jax.vjp(function, hidden, adapter)
            found.append((logprobs, pull(jnp.asarray(weights))))
        return found

    (whole, expected), (logprobs, got) = values_and_gradients(hidden, adapter)
    np.testing.assert_allclose(logprobs, whole, atol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-5), expected, got)


@pytest.mark.parametrize(("shape", "chunk"), [((B, T), 9), ((B, T, 4), 9), ((B, T), 1000)])
def test_gradient_of_one_pass_equals_that_of_whole_logits(shape, chunk):
    hidden, unembed, adapter = make("shared")
    targets = np.random.default_rng(4).integers(0, V, shape)
    weights = draw(*shape, seed=5)

    def loss(hidden, pair):
        logprobs = target_logprobs(hidden, unembed, targets, RowAdapter(pair=pair, scale=adapter.scale))
        return (weights * logprobs**2).sum(), logprobs

    @fast_jit
    def values_and_gradients(hidden, adapter):
        gradient, logprobs = jax.grad(loss, argnums=(0, 1), has_aux=True)(hidden, adapter.pair)
        one_pass = loss_and_gradient(
            hidden,
            unembed,
            targets,
            adapter,
            lambda found, weights: (2 * weights * found, (found, weights)),
            weights,
            jax.tree.map(jnp.ones_like, adapter.pair),
            chunk=chunk,
        )
        return logprobs, gradient, one_pass

    whole, (d_hidden, d_pair), ((logprobs, outputs), *got) = values_and_gradients(hidden, adapter)
    expected = d_hidden, jax.tree.map(lambda leaf: 1 + leaf, d_pair)  # the gradient is added to a sum of ones
    np.testing.assert_allclose(logprobs, whole, atol=1e-5)
    np.testing.assert_array_equal(outputs, weights)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), expected, tuple(got))


def test_memory_is_that_of_a_chunk():
    shapes = (jax.ShapeDtypeStruct((8, 512, 64), jnp.float32), jax.ShapeDtypeStruct((32000, 64), jnp.float32))
    targets = jax.ShapeDtypeStruct((8, 512), jnp.int32)
    adapter = RowAdapter(
        pair=LoraPair(a=np.zeros((64, R), np.float32), b=np.zeros((R, 32000), np.float32)),
        scale=np.float32(1),
    )

    def two_pass(hidden, unembed, targets):
        return jax.grad(lambda h: target_logprobs(h, unembed, targets, adapter).sum())(hidden)

    def one_pass(hidden, unembed, targets):
        total = adapter.pair
        return loss_and_gradient(hidden, unembed, targets, adapter, lambda x, _: (jnp.ones_like(x), x), (), total)

    whole = 8 * 512 * 32000 * 4
    for gradient in (two_pass, one_pass):
        memory = jax.jit(gradient).lower(*shapes, targets).compile().memory_analysis()
        assert memory.temp_size_in_bytes < whole / 4


@pytest.mark.parametrize(("num_tokens", "size", "vocab_size"), [(512, 32, 256), (512, 64, 512)])
def test_the_bits_are_the_same_with_and_without_a_gradient(num_tokens, size, vocab_size):
    """One log-probability differed when XLA computed exponentials together with their sum."""
    generator = np.random.default_rng(0)
    shapes = (1, num_tokens, size), (vocab_size, size), (size, 8), (8, vocab_size)
    hidden, unembed, a, b = (0.3 * generator.standard_normal(shape, np.float32) for shape in shapes)
    targets = generator.integers(0, vocab_size, (1, num_tokens)).astype(np.int32)
    adapter = RowAdapter(pair=LoraPair(a=jnp.asarray(a), b=jnp.asarray(b)), scale=jnp.float32(2.0))

    def with_gradient(weights):
        return loss_and_gradient(
            hidden, unembed, targets, adapter, lambda found, weights: (weights, found), weights, adapter.pair
        )

    expected, *_ = jax.jit(with_gradient)(np.ones((1, num_tokens), np.float32))
    found = jax.jit(lambda hidden: target_logprobs(hidden, unembed, targets, adapter))(hidden)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("shape", [(B, T), (B, T, 4)])
def test_gpus_compute_the_same_with_the_factor_next_to_the_unembedding(monkeypatch, shape):
    hidden, unembed, adapter = make("shared")
    targets = np.random.default_rng(4).integers(0, V, shape)
    found = []
    for name in ("default", "cuda"):

        def choose_platform(*arguments, name=name, default, **others):
            return others.get(name, default)(*arguments)

        monkeypatch.setattr(jax.lax, "platform_dependent", choose_platform)

        @fast_jit
        def evaluate(hidden, unembed):
            one_pass = loss_and_gradient(
                hidden,
                unembed,
                targets,
                adapter,
                lambda found, weights: (weights, found),
                draw(*shape, seed=5),
                adapter.pair,
                chunk=4,
            )
            return *one_pass, target_logprobs(hidden, unembed, targets, adapter, chunk=4)

        found.append(evaluate(hidden, unembed.astype(jnp.bfloat16)))

    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0.01, atol=0.01), *found)
    np.testing.assert_array_equal(found[1][0], found[1][-1])
