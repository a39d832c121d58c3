"""Min-p, top-k and top-p keep exactly the tokens of their definition, with their weights, in any batch."""

from collections.abc import Callable
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import NDArray

from skyrl_tx.backends.jax.sample import draw as drawing
from skyrl_tx.backends.jax.sample.draw import MAX_UNTILED_ROWS, SMALL_TOP_K, TILE, Filters, redraw_in_tiles
from skyrl_tx.backends.jax.sample.logit_blocks import LogitBlocks
from tests.support.fast_jit import fast_jit

VOCAB = 300  # three blocks, the last one padded; larger than every SMALL_TOP_K
ROWS = 512  # rows of every draw
SIGMAS = 4.0
TOP_KS = (
    0,
    1,
    3,
    SMALL_TOP_K[0],
    SMALL_TOP_K[0] + 1,
    SMALL_TOP_K[1],
    100,
    SMALL_TOP_K[2],
    SMALL_TOP_K[2] + 1,
    VOCAB - 1,
    VOCAB,
    VOCAB + 9,
    2**31 - 1,
)
TOP_PS = (0.0, 1e-30, 1e-6, 0.3, 0.5, 0.95, 0.999, 1.0)


def flat() -> np.ndarray:
    return np.random.default_rng(0).standard_normal(VOCAB).astype(np.float32)


def peaked() -> np.ndarray:
    return 8 * flat()


def tied() -> np.ndarray:
    return np.log2(np.random.default_rng(1).integers(1, 4, VOCAB)).astype(np.float32)


def equal() -> np.ndarray:
    return np.full(VOCAB, 3.0, np.float32)


def with_infinities() -> np.ndarray:
    return np.where(np.arange(VOCAB) % 3 == 0, -np.inf, flat()).astype(np.float32)


def keeps(logits: np.ndarray, top_k: int, top_p: float, min_p: float = 0.0) -> NDArray[np.bool_]:
    """Return the tokens that the definition keeps, computed directly in float64."""
    order = np.argsort(-logits, kind="stable")
    weight = np.exp(logits[order].astype(np.float64) - logits.max())
    weight[weight < min_p] = 0
    if top_k > 0:
        weight[top_k:] = 0
    before = np.cumsum(weight) - weight
    kept = np.zeros(logits.size, bool)
    kept[order] = (weight > 0) & ((before < top_p * weight.sum()) | (np.arange(logits.size) == 0) | (top_p >= 1))
    return kept


@partial(fast_jit, static_argnums=3)
def apply_filters(
    logits_V: jax.Array, token_S: jax.Array, filters: tuple[jax.Array, jax.Array, jax.Array], size: int
) -> jax.Array:
    """Apply the filters to tokens drawn from the unfiltered distribution, `size` rows at a time."""
    S = token_S.size
    key_S2 = jax.random.key_data(jax.random.split(jax.random.key(5), S))
    blocks = LogitBlocks.from_logits(jnp.tile(logits_V, (S, 1)), jnp.ones(S))
    by_row = Filters(*(jnp.broadcast_to(value, S) for value in filters), key_S2)
    return redraw_in_tiles(size, blocks, by_row, token_S)


def check(
    logits: np.ndarray, tokens: np.ndarray, top_k: int, top_p: float, size: int = TILE, min_p: float = 0.0
) -> None:
    """Check that each kept token stays and that each other token is replaced by a kept one."""
    kept, filters = keeps(logits, top_k, top_p, min_p), (np.int32(top_k), np.float32(top_p), np.float32(min_p))
    became = np.asarray(apply_filters(logits, tokens.astype(np.int32), filters, size))
    assert ((became == tokens) == kept[tokens]).all(), (top_k, top_p, min_p)
    assert kept[became].all(), (top_k, top_p, min_p)


@pytest.mark.parametrize(
    ("row", "size"),
    [
        *((row, TILE) for row in (flat, peaked, tied, equal, with_infinities)),
        (tied, VOCAB),
        *(pytest.param(row, VOCAB, marks=pytest.mark.slow) for row in (flat, peaked, equal, with_infinities)),
    ],
)
def test_exactly_the_tokens_outside_the_filter_are_drawn_again(row, size):
    logits = row()
    drawable = np.resize(np.flatnonzero(np.isfinite(logits)), VOCAB)
    asked = [(k, p) for k in TOP_KS for p in (0.5, 1.0)] + [(k, p) for k in (0, 20, 260) for p in TOP_PS]
    for top_k, top_p in asked:
        check(logits, drawable, top_k, top_p, size)
    for min_p in (0.01, 0.3, 0.9, 1.0):
        for top_k, top_p in ((0, 1.0), (0, 0.5), (20, 1.0), (20, 0.6), (260, 1.0), (260, 0.6)):
            check(logits, drawable, top_k, top_p, size, min_p)


@pytest.mark.parametrize("vocab", [pytest.param(5000, marks=pytest.mark.slow), 20_000])
def test_filters_are_exact_over_many_blocks(vocab):
    """Most candidate tokens lie in blocks that a top-k does not read.

    With 20,000 tokens, blocks are in groups.
    """
    draw = np.random.default_rng(2)
    for logits in (draw.standard_normal(vocab), draw.integers(0, 9, vocab), np.zeros(vocab)):
        order = np.argsort(-logits, kind="stable")
        for top_k, top_p in [(1, 1.0), (20, 0.95), (24, 1.0), (25, 1.0), (64, 0.5), (200, 1.0), (700, 0.9), (0, 0.9)]:
            last = int(keeps(logits, top_k, top_p).sum())
            near = np.concatenate([order[max(last - 100, 0) :][:200], draw.choice(vocab, VOCAB)])[:VOCAB]
            check(logits.astype(np.float32), near, top_k, top_p)


def params(top_k: int | np.ndarray, top_p: float | np.ndarray, min_p: float | np.ndarray = 0.0) -> drawing.DrawParams:
    return drawing.DrawParams(
        seed_S2=np.full((ROWS, 2), 11, np.uint32),
        index_S=np.arange(ROWS, dtype=np.uint32),
        temperature_S=np.ones(ROWS, np.float32),
        top_k_S=np.broadcast_to(top_k, ROWS).astype(np.int32),
        top_p_S=np.broadcast_to(top_p, ROWS).astype(np.float32),
        min_p_S=np.broadcast_to(min_p, ROWS).astype(np.float32),
        raw_S=np.zeros(ROWS, np.bool_),
    )


compiled = jax.jit(partial(drawing.draw, max_topk=5))
"""The same program as in test_draw.py."""


def draw(logits_SV: np.ndarray, how: drawing.DrawParams, position: int) -> drawing.DrawnTokens:
    return jax.device_get(compiled(logits_SV, how, np.full(ROWS, position, np.int32), wants_topk=np.bool_(False)))


@cache
def draw_tokens(row: Callable[[], np.ndarray], top_k: int, top_p: float, min_p: float = 0.0) -> NDArray[np.int64]:
    """Return the tokens of eight positions."""
    logits = np.tile(row(), (ROWS, 1))
    return np.concatenate([draw(logits, params(top_k, top_p, min_p), position).tokens for position in range(8)])


def deviation(tokens: NDArray[np.int64], p: NDArray[np.float64]) -> float:
    """Return the deviation of chi-square from its mean, in standard deviations.

    The approximation is by Wilson and Hilferty (1931).
    """
    counts, expected = np.bincount(tokens, minlength=p.size), p * tokens.size
    rare = expected < 8  # rare tokens are pooled, because the approximation needs 8 of each
    observed, wanted = np.append(counts[~rare], counts[rare].sum()), np.append(expected[~rare], expected[rare].sum())
    statistic = float(((observed - wanted) ** 2 / np.maximum(wanted, 1e-9)).sum())
    freedom = int((wanted > 0).sum()) - 1
    spread = 2 / (9 * freedom)
    return ((statistic / freedom) ** (1 / 3) - (1 - spread)) / spread**0.5


@pytest.mark.parametrize("row", [flat, *(pytest.param(row, marks=pytest.mark.slow) for row in (peaked, tied))])
@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [
        *((0, 0.95, 0.0), (0, 0.2, 0.0), (5, 1.0, 0.0), (20, 0.95, 0.0)),
        *((50, 0.5, 0.0), (200, 0.9, 0.0), (270, 1.0, 0.0), (270, 0.7, 0.0)),
        *((0, 1.0, 0.1), (0, 0.9, 0.1), (50, 0.9, 0.2), (270, 0.9, 0.05)),
    ],
)
def test_filtered_tokens_follow_their_weights(row, top_k, top_p, min_p):
    logits = row()
    drawn, plain = draw_tokens(row, top_k, top_p, min_p), draw_tokens(row, 0, 1.0)
    kept = keeps(logits, top_k, top_p, min_p)
    weight = np.where(kept, np.exp(logits.astype(np.float64) - logits.max()), 0.0)
    assert kept[drawn].all()
    assert (drawn == plain)[kept[plain]].all(), "a kept token is not drawn again"
    if kept.sum() > 1:
        assert abs(deviation(drawn, weight / weight.sum())) < SIGMAS
        again = drawn[~kept[plain]]
        if again.size > 1000:
            assert abs(deviation(again, weight / weight.sum())) < SIGMAS


KINDS = [
    *((0, 1.0, 0.0), (0, 0.9, 0.0), (0, 0.1, 0.0), (20, 1.0, 0.0), (20, 0.9, 0.0)),
    *((60, 0.9, 0.0), (270, 1.0, 0.0), (270, 0.6, 0.0), (1, 0.5, 0.0)),
    *((0, 1.0, 0.2), (0, 0.8, 0.1), (20, 0.9, 0.1), (270, 0.9, 0.02)),
]


def all_kinds() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    top_k, top_p, min_p = np.resize(KINDS, (ROWS, 3)).T
    return top_k.astype(np.int32), top_p.astype(np.float32), min_p.astype(np.float32)


def test_batch_invariance():
    """A row is the same at another index, among rows without filters, and among rows of NaN."""
    logits = np.stack([(1 + row % 5) * np.roll(flat(), row) for row in range(ROWS)])
    (top_k, top_p, min_p), back = all_kinds(), np.arange(ROWS)[::-1]
    how = params(top_k, top_p, min_p)
    together = draw(logits, how, 0)
    turned = draw(logits[back], jax.tree.map(lambda leaf: leaf[back], how), 0)

    assert turned.tokens[back].tolist() == together.tokens.tolist()
    assert turned.logprobs[back].tolist() == together.logprobs.tolist()

    for turn in range(3):
        mine = np.random.default_rng(turn).random(ROWS) < 0.1
        filters = np.where(mine, top_k, 0), np.where(mine, top_p, 1.0), np.where(mine, min_p, 0.0)
        among_plain = draw(logits, params(*filters), 0)
        non_finite = draw(np.where(mine[:, None], logits, np.float32(np.nan)), how, 0)
        for other in (among_plain, non_finite):
            assert other.tokens[mine].tolist() == together.tokens[mine].tolist()
            assert other.logprobs[mine].tolist() == together.logprobs[mine].tolist()


def test_rows_have_the_same_bits_in_programs_of_other_sizes():
    """Few rows are processed at once, many rows in tiles."""
    logits = np.random.default_rng(4).standard_normal((64, 20_000)).astype(np.float32)
    how = jax.tree.map(lambda leaf: leaf[:64], params(*np.resize(KINDS, (ROWS, 3)).T))

    def first(rows: int, position: int) -> drawing.DrawnTokens:
        own = jax.tree.map(lambda leaf: leaf[:rows], how)
        positions = np.full(rows, position, np.int32)
        return jax.device_get(compiled(logits[:rows], own, positions, wants_topk=np.bool_(True)))

    for position in range(4):
        many = first(64, position)
        for rows in (2, MAX_UNTILED_ROWS):
            few = first(rows, position)
            for mine, other in zip(jax.tree.leaves(few), jax.tree.leaves(many), strict=True):
                assert mine.tolist() == other[:rows].tolist(), rows


@pytest.mark.parametrize("values", [np.nan, np.inf, -np.inf, (np.nan, 0.0), (np.inf, 0.0), (-np.inf, np.inf)])
def test_non_finite_logits_still_yield_a_token(values):
    logits = np.resize(np.asarray(values, np.float32), (ROWS, VOCAB))
    token_S = draw(logits, params(*all_kinds()), 0).tokens
    assert ((token_S >= 0) & (token_S < VOCAB)).all()
