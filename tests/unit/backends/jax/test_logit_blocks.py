"""Blocks of the vocabulary: drawing, the best tokens, and the order of tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from skyrl_tx.backends.jax.sample.logit_blocks import BLOCK, LogitBlocks, cumsum, search_cumsum
from tests.support.fast_jit import fast_jit

VOCAB = 300  # three blocks, the last one padded


def make_blocks(*logits: np.ndarray) -> LogitBlocks:
    return fast_jit(LogitBlocks.from_logits)(np.stack(logits).astype(np.float32), np.ones(len(logits), np.float32))


def sort_by_logit(logits: np.ndarray) -> np.ndarray:
    return np.argsort(-logits, kind="stable")


@pytest.mark.parametrize("number", [0.0, 0.5, float(np.nextafter(np.float32(1), np.float32(0)))])
def test_a_token_of_weight_zero_is_never_picked(number):
    logits = np.full(VOCAB, -np.inf, np.float32)
    logits[[129, 131]] = [np.log(1e-30), 0.0]
    assert fast_jit(LogitBlocks.pick)(make_blocks(logits), np.array([number], np.float32))[0] in (129, 131)


def test_tokens_of_many_blocks_are_picked_by_their_weights():
    """Blocks are in groups, and the last group is padded.

    Each quantile gives the token of a plain prefix sum.
    """
    vocab = 130 * BLOCK + 5
    weight = np.random.default_rng(3).integers(0, 4, vocab)  # integers, so their sums are exact
    until, number = np.cumsum(weight), np.linspace(0, 1, 500, endpoint=False, dtype=np.float32)
    blocks = make_blocks(*[np.log2(np.maximum(weight, 1e-30)).astype(np.float32) * np.float32(np.log(2))] * number.size)
    picked = fast_jit(LogitBlocks.pick)(blocks, number)
    exact = np.searchsorted(until, number.astype(np.float64) * until[-1], side="right")
    assert (np.abs(until[picked] - until[exact]) <= 1e-4 * until[-1]).all()
    assert (weight[picked] > 0).all()


@pytest.mark.parametrize("number", [0.0, 0.25, 1.0])
def test_the_place_of_a_target_has_a_weight(number):
    weight = np.array([[0, 0, 3, 0, 5, 0, 0], [0, 0, 0, 0, 0, 0, 2]], np.float32)
    until = fast_jit(cumsum)(weight)
    assert until.tolist() == np.cumsum(weight, axis=1).tolist()
    index, before = fast_jit(search_cumsum)(until, number * until[:, -1])
    assert index.tolist() == ([2, 6] if number < 3 / 8 else [4, 6])
    assert before.tolist() == ([0, 0] if number < 3 / 8 else [3, 0])


@pytest.mark.parametrize("vocab", [VOCAB, 40 * BLOCK])
@pytest.mark.parametrize("K", [1, 24, VOCAB])
def test_the_best_tokens_are_ordered_by_logit_then_id(K, vocab):
    draw = np.random.default_rng(0)
    some = [draw.standard_normal(vocab), draw.integers(0, 3, vocab), np.zeros(vocab), -np.arange(vocab)]
    some.append(np.where(np.arange(vocab) % BLOCK == 5, 1.0, 0.0))  # every block has the same maximum
    rows = [np.where(np.arange(vocab) % 7 == 3, -np.inf, row).astype(np.float32) for row in some]
    logits_SK, token_SK = fast_jit(LogitBlocks.find_top_k, static_argnums=1)(make_blocks(*rows), K)
    for row, token_K, logit_K in zip(rows, token_SK, logits_SK, strict=True):
        assert token_K.tolist() == sort_by_logit(row)[:K].tolist()
        assert logit_K.tolist() == row[sort_by_logit(row)[:K]].tolist()


def test_the_tokens_before_a_mark_are_weighed_by_block_and_drawn_from():
    draw = np.random.default_rng(1)
    rows = [draw.standard_normal(VOCAB).astype(np.float32), draw.integers(0, 4, VOCAB).astype(np.float32)]
    blocks, marked = make_blocks(*rows), np.array([7, 290], np.int32)

    @fast_jit
    def look(number: jax.Array) -> tuple[jax.Array, jax.Array]:
        mark = blocks.get_sort_position(jnp.asarray(marked))
        before_SN = blocks.sum_before(mark)
        return before_SN, blocks.pick_before(mark, before_SN, jnp.full(2, number))

    for number in (0.0, 0.3, 0.7, 0.999):
        before_SN, picked_S = look(np.float32(number))
        for logits, token, weight_N, picked in zip(rows, marked, before_SN, picked_S, strict=True):
            first = sort_by_logit(logits)[: sort_by_logit(logits).tolist().index(token)]
            weight = np.zeros(3 * BLOCK)
            weight[first] = np.exp(logits[first].astype(np.float64) - logits.max())
            np.testing.assert_allclose(weight_N, weight.reshape(3, BLOCK).sum(axis=1), rtol=1e-5)
            assert picked == np.searchsorted(np.cumsum(weight), number * weight.sum(), side="right")


def test_selected_rows_equal_the_rows_of_the_whole():
    draw = np.random.default_rng(2)
    blocks = make_blocks(*draw.standard_normal((4, VOCAB)).astype(np.float32))
    token = np.array([9, 8, 7, 6], np.int32)

    @jax.jit
    def look(blocks: LogitBlocks, token: jax.Array) -> tuple[jax.Array, jax.Array, tuple[jax.Array, jax.Array]]:
        return blocks.get_logprob(token), blocks.most_likely(), blocks.find_top_k(3)

    chosen = np.array([1, 3])
    some = look(blocks.select_rows(jnp.array([3, 1])).select_rows(jnp.array([1, 0])), token[chosen])
    for part, whole in zip(jax.tree.leaves(some), jax.tree.leaves(look(blocks, token)), strict=True):
        assert part.tolist() == whole[chosen].tolist()
