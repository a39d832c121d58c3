"""Drawing tokens: the exact distribution, filters, ties, independence of company."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from skyrl_tx.backends.jax import sampling

VOCAB = 300  # three blocks, the last one padded
draw = jax.jit(partial(sampling.draw, max_topk=5))


def params(rows: int, *, temperature=1.0, top_k=0, top_p=1.0, seed=7) -> sampling.DrawParams:
    def fill(value, dtype):
        return jnp.asarray(np.broadcast_to(np.asarray(value, dtype), rows))

    return sampling.DrawParams(
        seed_S2=jnp.broadcast_to(jnp.array([seed >> 32, seed & 0xFFFFFFFF], jnp.uint32), (rows, 2)),
        index_S=jnp.arange(rows, dtype=jnp.uint32),
        temperature_S=fill(temperature, np.float32),
        top_k_S=fill(top_k, np.int32),
        top_p_S=fill(top_p, np.float32),
    )


def random_logits(seed=0, spread=2.0) -> np.ndarray:
    return (spread * np.random.default_rng(seed).standard_normal(VOCAB)).astype(np.float32)


def exact(logits: np.ndarray, temperature: float, top_k: int, top_p: float) -> np.ndarray:
    """The distribution, the slow and obvious way, in float64."""
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
    rows, logits = 4096, random_logits()
    drawn = []
    for position in range(8):
        how = params(rows, temperature=temperature, top_k=top_k, top_p=top_p)
        drawn.append(draw(np.tile(logits, (rows, 1)), how, jnp.full(rows, position), wants_topk=False).token_S)
    counts = np.bincount(np.concatenate(drawn), minlength=VOCAB)
    expected = exact(logits, temperature, top_k, top_p) * counts.sum()
    assert counts[expected == 0].sum() == 0
    rare = expected < 8  # pooled, as the chi-square approximation wants
    observed, wanted = counts[~rare], expected[~rare]
    if expected[rare].sum() >= 8:
        observed, wanted = np.append(observed, counts[rare].sum()), np.append(wanted, expected[rare].sum())
    statistic, freedom = float(((observed - wanted) ** 2 / wanted).sum()), len(wanted) - 1
    assert abs(statistic - freedom) < 4 * np.sqrt(2 * freedom), (statistic, freedom)


def test_greedy_takes_the_lowest_of_equal_tokens_and_reports_temperature_one():
    logits = random_logits()
    logits[[17, 250]] = 9.0
    got = draw(logits[None], params(1, temperature=0.0, top_k=5, top_p=0.1), jnp.zeros(1, jnp.int32), wants_topk=True)
    assert got.token_S.tolist() == [17]
    np.testing.assert_allclose(got.logprob_S[0], np.log(exact(logits, 1.0, 0, 1.0)[17]), atol=1e-5)


def test_logprobs_are_of_the_scaled_distribution_before_any_filter():
    logits = random_logits()
    got = draw(
        np.tile(logits, (64, 1)), params(64, temperature=0.5, top_k=3), jnp.zeros(64, jnp.int32), wants_topk=True
    )
    expected = np.log(exact(logits, 0.5, 0, 1.0))
    np.testing.assert_allclose(got.logprob_S, expected[np.asarray(got.token_S)], atol=2e-5)
    best = np.argsort(-logits, kind="stable")[:5]
    assert (np.asarray(got.topk_token_SK) == best).all()
    np.testing.assert_allclose(got.topk_logprob_SK[0], expected[best], atol=2e-5)


def test_company_changes_no_row():
    logits = np.stack([random_logits(seed) for seed in range(4)])
    position = jnp.arange(4)
    plain = draw(logits, params(4), position, wants_topk=False)
    mixed = draw(logits, params(4, top_k=[0, 3, 0, 9], top_p=[1.0, 0.3, 1.0, 0.9]), position, wants_topk=True)
    for row in (0, 2):
        assert plain.token_S[row] == mixed.token_S[row]
        assert plain.logprob_S[row] == mixed.logprob_S[row]


def test_seed_sample_and_position_each_change_the_number():
    keys = sampling.keys(
        jnp.array([[0, 1], [0, 1], [0, 1], [1, 0], [0, 2]], jnp.uint32),
        jnp.array([0, 1, 0, 0, 0], jnp.uint32),
        jnp.array([0, 0, 1, 0, 0]),
    )
    assert len(set(sampling.uniform(keys).tolist())) == 5


@pytest.mark.parametrize("temperature", [1e-3, 1e-5, 1e-10, 1e-20, 1e-30])
@pytest.mark.parametrize("filters", [{}, {"top_k": 3}, {"top_p": 0.5}])
def test_low_temperatures_take_the_likeliest_and_lose_nothing_in_rounding(temperature, filters):
    for logits in (random_logits(), 1000 * random_logits()):
        how = params(1, temperature=temperature, **filters)
        got = draw(logits[None], how, jnp.zeros(1, jnp.int32), wants_topk=True)
        assert got.token_S.tolist() == [int(logits.argmax())] and got.logprob_S.tolist() == [0.0]
        assert got.topk_logprob_SK[0, 0] == 0.0 and not np.isnan(got.topk_logprob_SK).any()


def test_low_temperatures_report_what_they_draw_from():
    logits = 30 + np.float32(1e-5) * random_logits()
    got = draw(logits[None], params(1, temperature=1e-5), jnp.zeros(1, jnp.int32), wants_topk=True)
    best = np.argsort(-logits, kind="stable")[:5]
    np.testing.assert_allclose(got.topk_logprob_SK[0], np.log(exact(logits, 1e-5, 0, 1.0)[best]), atol=1e-5)


def test_nothing_sorts_the_vocabulary():
    """What XLA takes for a top-k and what for a sort depends on how it is read: a hundred times as slow, unseen."""
    vocab = 40 * 128
    compiled = draw.lower(
        np.zeros((2, vocab), np.float32), params(2), jnp.zeros(2, jnp.int32), wants_topk=True
    ).compile()
    sizes = [re.findall(r"\d+", shape) for shape in re.findall(r"\[([\d,]+)\]\{[^=]*? sort\(", compiled.as_text())]
    assert sizes, "rows are sorted by what they ask for"
    assert max(np.prod([int(size) for size in shape]) for shape in sizes) < vocab
