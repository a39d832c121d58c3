"""In a row with shared prefixes, a sequence continues the state of its prefix as if it came directly after it."""

from collections.abc import Callable, Sequence
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from skyrl_tx.layers.attention import KeyRange
from skyrl_tx.layers.recurrence import ChunkMasks, make_conv_masks, make_prefix_conv_masks, short_conv
from skyrl_tx.layers.recurrent_rules import delta_rule
from tests.support.fast_jit import fast_jit
from tests.unit.layers.test_delta_rule import Inputs, by_steps, draw, zeros

CLOSE = {"rtol": 1e-5, "atol": 1e-5}
Group = tuple[int, Sequence[int]]
"""The length of a prefix, and the lengths of the sequences that continue it."""
LAYOUTS: list[list[Group]] = [
    [(70, (20, 30, 9, 64, 1)), (0, (33,)), (128, (64, 64))],
    # In one chunk: the end of a prefix, its sequences, a whole prefix, and the beginning of its sequences
    [(65, (1, 2)), (32, (3, 1, 40)), (0, (5, 7)), (33, (1, 1, 90))],
    # Prefixes that end with a chunk
    [(64, (64, 10)), (54, (64, 70))],
    [(1, (1, 1)), (200, (1, 1, 1, 130)), (40, (2, 3))],
]
W = 4


def lay_out(groups: list[Group]) -> tuple[jax.Array, KeyRange, list[tuple[slice, slice]]]:
    """Return starts and prefixes of a row, and the positions of prefix and rest of each sequence."""
    spans: list[tuple[slice, slice]] = []
    start, begin, end = list[int](), list[int](), list[int]()
    size = sum(prefix + sum(lengths) for prefix, lengths in groups)

    # A prefix, then the sequences that continue it
    for length, others in groups:
        prefix = slice(len(start), len(start) + length)
        start += [prefix.start] * length
        begin, end = begin + [size] * length, end + [0] * length
        for other in others:
            spans.append((prefix, slice(len(start), len(start) + other)))
            start += [len(start)] * other
            begin, end = (
                begin + [prefix.start if length else size] * other,
                end + [prefix.stop if length else 0] * other,
            )

    start_BT, begin_BT, end_BT = (jnp.asarray(x, jnp.int32)[None] for x in (start, begin, end))
    return start_BT, KeyRange(begin_BT, end_BT), spans


def join(x: jax.Array, spans: tuple[slice, slice]) -> jax.Array:
    return jnp.concatenate([x[:, span] for span in spans], axis=1)


def run_apart(run: Callable[..., jax.Array], inputs: Sequence[jax.Array], groups: list[Group]) -> jax.Array:
    """Return the outputs of a row, from its sequences with their prefixes, one after another."""
    start_BT, _, spans = lay_out(groups)
    parts: dict[int, jax.Array] = {}
    for prefix, own in spans:
        joined = run(*(join(x, (prefix, own)) for x in inputs))
        length = prefix.stop - prefix.start
        if length:
            parts[prefix.start] = joined[:, :length]
        parts[own.start] = joined[:, length:]
    assert sum(part.shape[1] for part in parts.values()) == start_BT.shape[1]
    return jnp.concatenate([parts[start] for start in sorted(parts)], axis=1)


def run_in_row(inputs: Inputs, groups: list[Group]) -> jax.Array:
    start_BT, prefix, _ = lay_out(groups)
    return delta_rule(*inputs, zeros(1), ChunkMasks.from_starts(start_BT, prefix))[0]


@pytest.mark.parametrize(
    "groups", [LAYOUTS[1], *(pytest.param(groups, marks=pytest.mark.slow) for groups in (LAYOUTS[0], *LAYOUTS[2:]))]
)
def test_a_delta_net_continues_the_state_of_the_prefix(groups: list[Group]) -> None:
    inputs = draw(1, lay_out(groups)[0].shape[1])
    weight = np.random.default_rng(1).standard_normal(inputs[2].shape).astype(np.float32)

    def differentiate(run: Callable[[Inputs], jax.Array]) -> tuple[jax.Array, object]:
        def loss(inputs: Inputs) -> tuple[jax.Array, jax.Array]:
            o = run(inputs)
            return jnp.sum(o * weight), o

        gradient, o = fast_jit(jax.grad(loss, has_aux=True))(inputs)
        return o, gradient

    found = differentiate(lambda inputs: run_in_row(inputs, groups))
    wanted = differentiate(lambda inputs: run_apart(lambda *own: by_steps(own, zeros(1))[0], inputs, groups))
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, **CLOSE)


@pytest.mark.parametrize("groups", LAYOUTS)
def test_a_convolution_continues_the_inputs_of_the_prefix(groups: list[Group]) -> None:
    start_BT, prefix, _ = lay_out(groups)
    generator, length = np.random.default_rng(0), start_BT.shape[1]
    x_BTI = jnp.asarray(generator.standard_normal((1, length, 5)), jnp.float32)
    weight_WI, tail = jnp.asarray(generator.standard_normal((W, 5)), jnp.float32), jnp.zeros((1, W - 1, 5))
    found = short_conv(x_BTI, weight_WI, tail, *make_prefix_conv_masks(start_BT, prefix, W))
    wanted = run_apart(lambda x: short_conv(x, weight_WI, tail), [x_BTI], groups)
    np.testing.assert_allclose(found, wanted, **CLOSE)


def test_rows_without_a_prefix_have_the_same_bits() -> None:
    lengths = (70, 5, 130, 64, 1, 27)
    start_BT = jnp.asarray(np.repeat(np.cumsum([0, *lengths])[:-1], lengths))[None]
    none = KeyRange(jnp.full_like(start_BT, start_BT.shape[1]), jnp.zeros_like(start_BT))
    masks, sources = make_prefix_conv_masks(start_BT, none, W)
    np.testing.assert_array_equal(masks, make_conv_masks(start_BT, W))
    assert all(later >= 0 for _, later in pairwise((0, int(sources.min()))))
    inputs = draw(1, start_BT.shape[1])
    found = delta_rule(*inputs, zeros(1), ChunkMasks.from_starts(start_BT, none))[0]
    np.testing.assert_allclose(found, delta_rule(*inputs, zeros(1), ChunkMasks.from_starts(start_BT))[0], **CLOSE)
