"""Tokens are drawn from the exact distribution: temperature, then top-k, then top-p of the remaining tokens.

The reference takes logprobs from `forward` and filters them in float64. The same draws reject a
distribution that is wrong by one token at a boundary, or by a fifth of the temperature. So the test
is able to find such errors.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from skyrl_tx.backends.jax.backend import JaxBackend
from skyrl_tx.backends.jax.config import JaxConfig
from skyrl_tx.contract.ids import ModelId
from skyrl_tx.contract.requests import SamplingParams
from skyrl_tx.testing.backend_driver import BackendDriver
from skyrl_tx.testing.tiny_models import write_model

VOCAB_SIZE = 64
NUM_SAMPLES = 4000
SIGMAS = 4.0
FEWEST = 8.0  # expected draws per class; rarer tokens are pooled, as the chi-square approximation requires


def scores(bench: BackendDriver, model: ModelId, before: Sequence[int]) -> NDArray[np.float64]:
    """Return the logprob of each token of the vocabulary after `before`, as computed by `forward`."""
    row = np.array(before, np.int32)
    scored = [
        replace(
            example,
            tokens=row,
            loss_inputs={**example.loss_inputs, "target_tokens": np.append(row[1:], token).astype(np.int32)},
        )
        for token, example in enumerate(bench.request(model, [row.size] * VOCAB_SIZE))
    ]
    return np.array([result.logprobs[-1] for result in bench.backend.forward(bench.batch(scored))], np.float64)


def exact(
    logprobs: NDArray[np.float64], temperature: float, top_k: int, top_p: float, off: int = 0
) -> NDArray[np.float64]:
    """Return the reference distribution. `off` moves the boundary of the nucleus by that many tokens."""
    p = np.exp(logprobs / temperature)
    order = np.argsort(-p, kind="stable")
    if top_k > 0:
        p[order[top_k:]] = 0.0
    p /= p.sum()
    if top_p < 1.0:
        enough = int(np.searchsorted(np.cumsum(p[order]), top_p)) + 1 + off
        p[order[enough:]] = 0.0
    return p / p.sum()


def deviation(tokens: NDArray[np.int64], p: NDArray[np.float64]) -> float:
    """Return how many standard deviations chi-square is above its mean (Wilson and Hilferty 1931).

    Returns infinity if a token of probability 0 was drawn.
    """
    counts, expected = np.bincount(tokens, minlength=p.size), p * tokens.size
    if counts[p == 0.0].any():
        return float("inf")
    rare = expected < FEWEST
    observed, wanted = counts[~rare].astype(float), expected[~rare]
    if expected[rare].sum() >= FEWEST:
        observed, wanted = np.append(observed, counts[rare].sum()), np.append(wanted, expected[rare].sum())
    statistic, freedom = float(((observed - wanted) ** 2 / wanted).sum()), len(wanted) - 1
    spread = 2 / (9 * freedom)
    return ((statistic / freedom) ** (1 / 3) - (1 - spread)) / spread**0.5


@pytest.fixture(scope="module")
def bench(tmp_path_factory) -> Iterator[BackendDriver]:
    model = write_model(tmp_path_factory.mktemp("model"), vocab_size=VOCAB_SIZE, max_context_length=64, std=0.25)
    config = JaxConfig(
        compile_cache_dir=None,
        dtype="float32",
        max_lora_rank=8,
        micro_batch_tokens=256,
        sample_slots=64,
        max_sample_tokens=64 * 64,
    )

    backend = JaxBackend(str(model), config)
    yield BackendDriver(backend, backend.start(), tmp_path_factory.mktemp("snapshots"))
    backend.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [
        (1.0, -1, 1.0),
        (1.3, 12, 0.7),
        *(
            pytest.param(*values, marks=pytest.mark.exhaustive)
            for values in ((0.6, -1, 1.0), (1.7, -1, 1.0), (1.0, 7, 1.0), (1.0, -1, 0.8))
        ),
    ],
)
def test_draws_match_the_reference_distribution(
    bench: BackendDriver, temperature: float, top_k: int, top_p: float
) -> None:
    """The first token is drawn by prefill, the second by a decode step."""
    model = bench.model(steps=2)
    params = SamplingParams(seed=5, max_tokens=2, eos_stops=False, temperature=temperature, top_k=top_k, top_p=top_p)
    request = bench.sample_request(bench.sampler(model), num_samples=NUM_SAMPLES, params=params)
    tokens = np.array([drawn.tokens for drawn in bench.draw(request)], np.int64)
    commonest = int(np.bincount(tokens[:, 0]).argmax())
    after = tokens[tokens[:, 0] == commonest, 1]
    assert after.size > 300
    first, logprobs = tokens[:, 0], scores(bench, model, request.prompt.tolist())
    then = scores(bench, model, [*request.prompt, commonest])
    assert abs(deviation(first, exact(logprobs, temperature, top_k, top_p))) < SIGMAS
    assert abs(deviation(after, exact(then, temperature, top_k, top_p))) < SIGMAS

    if top_k < 0 and top_p == 1.0:
        for factor in (0.8, 1.25):
            assert deviation(first, exact(logprobs, factor * temperature, top_k, top_p)) > SIGMAS
    if top_p < 1.0:
        for off in (-1, 1):
            assert deviation(first, exact(logprobs, temperature, top_k, top_p, off)) > SIGMAS
        assert deviation(first, exact(logprobs, temperature, top_k, 1.0)) > SIGMAS
    if top_k > 0 and top_p == 1.0:
        for wrong in (top_k - 1, top_k + 1):
            assert deviation(first, exact(logprobs, temperature, wrong, top_p)) > SIGMAS
