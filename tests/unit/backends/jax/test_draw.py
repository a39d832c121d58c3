"""Drawing tokens: the exact distribution, filters, ties, batch invariance."""

import re
from functools import partial

import jax
import numpy as np
import pytest

from skyrl_tx.backends.jax.sample import draw as drawing

VOCAB = 300  # three blocks, the last one padded
ROWS = 512
"""Rows of each call.

Tests that need fewer rows repeat them, so that one program serves all tests here and in
test_token_filters.py.
"""

compiled = jax.jit(partial(drawing.draw, max_topk=5))


def draw(logits, how: drawing.DrawParams, position, *, wants_topk: bool) -> drawing.DrawnTokens:
    return jax.device_get(compiled(logits, how, np.asarray(position, np.int32), wants_topk=np.bool_(wants_topk)))


def params(rows: int = ROWS, *, temperature=1.0, top_k=0, top_p=1.0, seed=7, raw=False) -> drawing.DrawParams:
    def fill(value, dtype):
        return np.broadcast_to(np.asarray(value, dtype), rows)

    return drawing.DrawParams(
        seed_S2=np.tile(np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32), (rows, 1)),
        index_S=np.arange(rows, dtype=np.uint32),
        temperature_S=fill(temperature, np.float32),
        top_k_S=fill(top_k, np.int32),
        top_p_S=fill(top_p, np.float32),
        min_p_S=fill(0.0, np.float32),
        raw_S=fill(raw, np.bool_),
    )


def random_logits(seed=0, spread=2.0) -> np.ndarray:
    return (spread * np.random.default_rng(seed).standard_normal(VOCAB)).astype(np.float32)


def draw_rows(logits: np.ndarray, *, wants_topk: bool, **how) -> drawing.DrawnTokens:
    """Draw from the same logits in every row."""
    return draw(np.tile(logits, (ROWS, 1)), params(**how), np.zeros(ROWS), wants_topk=wants_topk)


def exact(logits: np.ndarray, temperature: float, top_k: int, top_p: float) -> np.ndarray:
    """Return the distribution, computed directly in float64."""
    scaled = logits.astype(np.float64) / temperature
    p = np.exp(scaled - scaled.max())
    order = np.argsort(-p, kind="stable")
    if top_k > 0:
        p[order[top_k:]] = 0
    p /= p.sum()
    if top_p < 1:
        enough = int(np.searchsorted(np.cumsum(p[order]), top_p)) + 1
        p[order[enough:]] = 0
    return p / p.sum()


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, 0, 1.0), (0.7, -1, 1.0), (1.5, 0, 1.0), (1.0, 20, 1.0), (1.0, 0, 0.8), (0.8, 40, 0.6)],
)
def test_tokens_follow_the_exact_distribution(temperature, top_k, top_p):
    logits, how = random_logits(), params(temperature=temperature, top_k=top_k, top_p=top_p)
    drawn = [
        draw(np.tile(logits, (ROWS, 1)), how, np.full(ROWS, position), wants_topk=False).tokens
        for position in range(64)
    ]
    counts = np.bincount(np.concatenate(drawn), minlength=VOCAB)
    expected = exact(logits, temperature, top_k, top_p) * counts.sum()
    assert counts[expected == 0].sum() == 0

    rare = expected < 8  # rare tokens are pooled, because the chi-square approximation needs 8 of each
    observed, wanted = counts[~rare], expected[~rare]
    if expected[rare].sum() >= 8:
        observed, wanted = np.append(observed, counts[rare].sum()), np.append(wanted, expected[rare].sum())
    statistic, freedom = float(((observed - wanted) ** 2 / wanted).sum()), len(wanted) - 1

    assert abs(statistic - freedom) < 4 * np.sqrt(2 * freedom), (statistic, freedom)


def test_greedy_draws_the_lowest_of_equal_tokens_and_reports_logprobs_at_temperature_one():
    logits = random_logits()
    logits[[17, 250]] = 9.0
    got = draw_rows(logits, wants_topk=True, temperature=0.0, top_k=5, top_p=0.1)
    assert got.tokens.tolist() == [17] * ROWS
    np.testing.assert_allclose(got.logprobs[0], np.log(exact(logits, 1.0, 0, 1.0)[17]), atol=1e-5)


def test_logprobs_are_of_the_scaled_distribution_before_filters():
    logits = random_logits()
    got = draw_rows(logits, wants_topk=True, temperature=0.5, top_k=3)
    expected = np.log(exact(logits, 0.5, 0, 1.0))
    np.testing.assert_allclose(got.logprobs, expected[np.asarray(got.tokens)], atol=2e-5)
    best = np.argsort(-logits, kind="stable")[:5]
    assert (np.asarray(got.topk_tokens) == best).all()
    np.testing.assert_allclose(got.topk_logprobs[0], expected[best], atol=2e-5)


def test_raw_logprobs_are_of_the_models_own_distribution():
    """They depend on neither the temperature nor the filters, and change no token and no other row."""
    logits, raw = random_logits(seed=4), np.arange(ROWS) % 2 == 0
    how = {"temperature": np.where(np.arange(ROWS) % 4 < 2, 0.7, 1.5), "top_k": 8, "wants_topk": True}
    tempered, mixed = (draw_rows(logits, **how, raw=rows) for rows in (False, raw))
    assert (mixed.tokens == tempered.tokens).all() and (mixed.topk_tokens == tempered.topk_tokens).all()
    assert (mixed.logprobs[~raw] == tempered.logprobs[~raw]).all()
    assert (mixed.topk_logprobs[~raw] == tempered.topk_logprobs[~raw]).all()

    logprobs = np.log(exact(logits, 1.0, 0, 1.0))
    np.testing.assert_allclose(mixed.logprobs[raw], logprobs[mixed.tokens[raw]], rtol=0, atol=2e-6)
    np.testing.assert_allclose(mixed.topk_logprobs[raw], logprobs[mixed.topk_tokens[raw]], rtol=0, atol=2e-6)
    assert len(set(mixed.logprobs[raw][mixed.tokens[raw] == mixed.tokens[0]])) == 1  # at both temperatures
    at_one = draw_rows(logits, temperature=1.0, wants_topk=False)
    both = np.intersect1d(at_one.tokens, mixed.tokens[raw])
    assert both.size > 4
    for token in both:  # the same bits as at temperature 1
        assert mixed.logprobs[raw][mixed.tokens[raw] == token][0] == at_one.logprobs[at_one.tokens == token][0]


def test_raw_logprobs_are_of_the_logits_before_they_are_adjusted():
    logits, banned = random_logits(seed=5), np.arange(VOCAB) % 3 > 0
    rows, changed = np.tile(logits, (ROWS, 1)), np.where(banned, -np.inf, logits / 2)
    raw = np.arange(ROWS) % 2 == 0
    changed_rows, position = np.tile(changed, (ROWS, 1)).astype(np.float32), np.zeros(ROWS, np.int32)
    drawn = jax.device_get(compiled(changed_rows, params(raw=raw), position, rows, wants_topk=np.bool_(True)))

    assert not banned[drawn.tokens].any()
    for is_raw, own in ((True, logits), (False, changed)):
        with np.errstate(divide="ignore"):
            logprobs = np.log(exact(own, 1.0, 0, 1.0))
        chosen = raw == is_raw
        np.testing.assert_allclose(drawn.logprobs[chosen], logprobs[drawn.tokens[chosen]], rtol=0, atol=2e-6)
        best = -np.sort(-logprobs)[:5]
        np.testing.assert_allclose(drawn.topk_logprobs[chosen], np.tile(best, (chosen.sum(), 1)), rtol=0, atol=2e-6)


def test_batch_invariance():
    logits = np.stack([random_logits(seed) for seed in range(ROWS)])
    position = np.arange(ROWS)
    filters = {"top_k": np.resize([0, 3, 0, 9], ROWS), "top_p": np.resize([1.0, 0.3, 1.0, 0.9], ROWS)}
    plain = draw(logits, params(), position, wants_topk=False)
    mixed = draw(logits, params(**filters), position, wants_topk=True)
    np.testing.assert_array_equal(plain.tokens[::2], mixed.tokens[::2])
    np.testing.assert_array_equal(plain.logprobs[::2], mixed.logprobs[::2])


def test_the_random_number_depends_on_seed_sample_and_position():
    numbers = jax.jit(lambda *arguments: drawing.uniform(drawing.make_keys(*arguments)))(
        np.array([[0, 1], [0, 1], [0, 1], [1, 0], [0, 2]], np.uint32),
        np.array([0, 1, 0, 0, 0], np.uint32),
        np.array([0, 0, 1, 0, 0]),
    )
    assert len(set(numbers.tolist())) == 5


@pytest.mark.parametrize("temperature", [1e-3, 1e-5, 1e-10, 1e-20, 1e-30])
@pytest.mark.parametrize("filters", [{}, {"top_k": 3}, {"top_p": 0.5}])
def test_low_temperatures_draw_the_most_likely_token_without_rounding_loss(temperature, filters):
    for logits in (random_logits(), 1000 * random_logits()):
        got = draw_rows(logits, wants_topk=True, temperature=temperature, **filters)
        assert got.tokens.tolist() == [int(logits.argmax())] * ROWS and not got.logprobs.any()
        assert not got.topk_logprobs[:, 0].any() and not np.isnan(got.topk_logprobs).any()


def test_low_temperatures_report_the_distribution_drawn_from():
    logits = 30 + np.float32(1e-5) * random_logits()
    got = draw_rows(logits, wants_topk=True, temperature=1e-5)
    best = np.argsort(-logits, kind="stable")[:5]
    np.testing.assert_allclose(got.topk_logprobs[0], np.log(exact(logits, 1e-5, 0, 1.0)[best]), atol=1e-5)


def test_no_program_sorts_the_vocabulary():
    """XLA may compile a top-k to a full sort, depending on how the result is used.

    A full sort is a hundred times slower.
    """
    vocab = 40 * 128
    arguments = np.zeros((2, vocab), np.float32), params(2), np.zeros(2, np.int32)
    text = compiled.lower(*arguments, wants_topk=np.bool_(True)).compile().as_text()
    sizes = [re.findall(r"\d+", shape) for shape in re.findall(r"\[([\d,]+)\]\{[^=]*? sort\(", text)]
    assert sizes, "the sort of rows by filter is found"
    assert max(np.prod([int(size) for size in shape]) for shape in sizes) < vocab
