"""Every field of a sampling request, sent by the unmodified SDK, on each backend.

Other files test invalid values (`test_bad_input_sdk.py`), frozen weights and temperatures
(`test_semantics.py`), recorded logprobs (`test_stable_reinforce.py`), and polling and cancelling
(`test_many_samples.py`).
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import tinker
from tinker import types

from tests.support.live_stack import CONTEXT, VOCAB_SIZE, LiveStack
from tests.support.live_stack import PUBLIC_NAME as BASE_MODEL

PROMPT = [5, 6, 7, 300, 8, 900]


@pytest.fixture
def base(service: tinker.ServiceClient) -> tinker.SamplingClient:
    return service.create_sampling_client(base_model=BASE_MODEL).result()


def ask(
    client: tinker.SamplingClient, *, prompt: Sequence[int] = PROMPT, samples: int = 1, **params: Any
) -> Sequence[types.SampledSequence]:
    settings = types.SamplingParams(**({"max_tokens": 24, "stop": [], "seed": 11} | params))
    return client.sample(types.ModelInput.from_ints(list(prompt)), samples, settings).result().sequences


def describe(client: tinker.SamplingClient, *, temperature: float = 1.0, **options: Any) -> types.SampleResponse:
    """Request data about the prompt. One token is sampled as well."""
    params = types.SamplingParams(max_tokens=1, stop=[], seed=3, temperature=temperature)
    return client.sample(types.ModelInput.from_ints(PROMPT), 1, params, **options).result()


@pytest.mark.slow
@pytest.mark.parametrize("stack", ["jax"], indirect=True, scope="package")
def test_cached_prefix_tokens_are_reported_and_change_no_result(base: tinker.SamplingClient):
    prompt = types.ModelInput.from_ints([9, *PROMPT, 9, *PROMPT])
    params = types.SamplingParams(max_tokens=4, stop=[], seed=3)
    first, second = (base.sample(prompt, 2, params).result() for _ in range(2))
    assert (first.prompt_cache_hit_tokens, second.prompt_cache_hit_tokens) == (0, prompt.length)
    assert [sequence.tokens for sequence in first.sequences] == [sequence.tokens for sequence in second.sequences]
    assert [sequence.logprobs for sequence in first.sequences] == [sequence.logprobs for sequence in second.sequences]


@pytest.mark.slow
@pytest.mark.parametrize("stack", ["jax"], indirect=True, scope="package")
def test_one_of_many_equal_prompts_is_scored(base: tinker.SamplingClient):
    """The SDK sends a request for each call of `compute_logprobs`, with these parameters."""
    prompt, params = types.ModelInput.from_ints([8, *PROMPT] * 9), types.SamplingParams(max_tokens=1)
    futures = [base.sample(prompt, 1, params, include_prompt_logprobs=True) for _ in range(16)]
    results = [future.result() for future in futures]
    assert sorted(result.prompt_cache_hit_tokens for result in results) == [0] + 15 * [prompt.length]
    assert all(result.prompt_logprobs == results[0].prompt_logprobs for result in results)
    assert base.compute_logprobs(prompt).result() == results[0].prompt_logprobs
    assert all(logprob is not None and logprob < 0 for logprob in results[0].prompt_logprobs[1:])


# End of a sample


def test_eos_stops_unless_the_stop_list_is_empty(base: tinker.SamplingClient) -> None:
    """The end-of-sequence token ends a sample, except if `stop` is the empty list."""
    prompt, num_samples = [VOCAB_SIZE - 4], 48
    free = ask(base, prompt=prompt, samples=num_samples, max_tokens=100, stop=[])
    assert all(len(sequence.tokens) == 100 and sequence.stop_reason == "length" for sequence in free)
    ended = ask(base, prompt=prompt, samples=num_samples, max_tokens=100, stop=None)
    cut = [index for index, sequence in enumerate(ended) if sequence.stop_reason == "stop"]
    ends = {ended[index].tokens[-1] for index in cut}
    assert 1 <= len(ends) <= 2, "the end-of-sequence tokens of the generation config"

    for whole, sequence in zip(free, ended, strict=True):
        until = next((place + 1 for place, token in enumerate(whole.tokens) if token in ends), 100)
        assert list(sequence.tokens) == list(whole.tokens)[:until], "the end-of-sequence token is kept once"
        assert len(sequence.logprobs or ()) == until
    other = next(token for token in range(VOCAB_SIZE) if all(token not in sequence.tokens for sequence in free))
    with_more = ask(base, prompt=prompt, samples=cut[0] + 1, max_tokens=100, stop=[other])
    assert with_more[-1].tokens == ended[cut[0]].tokens


def test_stop_token_is_kept_once(base: tinker.SamplingClient) -> None:
    tokens = list(ask(base)[0].tokens)
    stop = next(token for token in tokens[6:] if token not in tokens[:6])
    for stops in ([stop], [1, stop]):
        (got,) = ask(base, stop=stops)
        assert list(got.tokens) == tokens[: tokens.index(stop) + 1]
        assert got.stop_reason == "stop" and len(got.logprobs or ()) == len(got.tokens)
    (at_the_cap,) = ask(base, stop=[tokens[3]], max_tokens=tokens.index(tokens[3]) + 1)
    assert at_the_cap.stop_reason == "stop", "a stop token at max_tokens is a stop"


def test_stop_strings_are_found_across_tokens(base: tinker.SamplingClient, stack: LiveStack) -> None:
    """`stop` is one string or a list. The token that completes the match is kept."""
    text_of, tokens = stack.backend.text_of, list(ask(base, max_tokens=60)[0].tokens)

    def find_end(text: str) -> int:
        return next(n for n in range(1, len(tokens) + 1) if text in text_of(tokens[:n]))

    pairs = [(text_of([left]), text_of([right])) for left, right in pairwise(tokens)]
    across = next(
        text
        for left, right in pairs
        if "\ufffd" not in left + right and (text := left[-1:] + right[:1]) and len(text) == 2
        if not any(text in text_of([token]) for token in tokens)
    )
    assert 0 < find_end(across) < len(tokens)
    for stop in (across, [across], ["never to be met", across]):
        (got,) = ask(base, max_tokens=60, stop=stop)
        assert list(got.tokens) == tokens[: find_end(across)] and got.stop_reason == "stop"
    (earlier,) = ask(base, max_tokens=60, stop=[across, text_of(tokens[:1])])
    assert list(earlier.tokens) == tokens[:1]


def test_default_max_tokens_is_the_context_limit(base: tinker.SamplingClient) -> None:
    (got,) = ask(base, max_tokens=None)
    assert len(PROMPT) + len(got.tokens) == CONTEXT and got.stop_reason == "length"
    (one,) = ask(base, prompt=[3] * (CONTEXT - 1), max_tokens=None)
    assert len(one.tokens) == 1
    with pytest.raises(tinker.RequestFailedError, match=f"{CONTEXT} tokens.*context of {CONTEXT}"):
        ask(base, prompt=[3] * CONTEXT, max_tokens=None)


def test_context_overflow_error_names_all_three_numbers(base: tinker.SamplingClient) -> None:
    (fits,) = ask(base, max_tokens=CONTEXT - len(PROMPT))
    assert len(fits.tokens) == CONTEXT - len(PROMPT)
    too_many = CONTEXT - len(PROMPT) + 1
    with pytest.raises(tinker.RequestFailedError) as failure:
        ask(base, max_tokens=too_many)
    assert f"prompt of {len(PROMPT)} tokens" in str(failure.value) and f"max_tokens {too_many}" in str(failure.value)
    assert f"context of {CONTEXT}" in str(failure.value) and failure.value.category == types.RequestErrorCategory.User


# Sampling of tokens


def test_seeds_have_64_bits(base: tinker.SamplingClient) -> None:
    seeds = [0, 1, 2**32, 2**63, 2**64 - 1]
    drawn = {seed: [tuple(sequence.tokens) for sequence in ask(base, samples=3, seed=seed)] for seed in seeds}
    assert len({tokens for samples in drawn.values() for tokens in samples}) == 3 * len(seeds)
    assert all(
        [tuple(sequence.tokens) for sequence in ask(base, samples=3, seed=seed)] == drawn[seed] for seed in seeds
    )
    assert [tuple(sequence.tokens) for sequence in ask(base, samples=3, seed=-1)] == drawn[2**64 - 1], "the same bits"
    for seed in (-(2**63) - 1, 2**64):
        with pytest.raises(tinker.RequestFailedError, match=rf"sampling_params\.seed.*{seed}"):
            ask(base, seed=seed)


def test_greedy_sampling_and_disabled_filters(base: tinker.SamplingClient) -> None:
    greedy = list(ask(base, temperature=0.0)[0].tokens)
    for params in ({"top_k": 1}, {"top_p": 1e-6}, {"temperature": 0.0, "seed": None, "top_p": 0.5}):
        assert list(ask(base, **params)[0].tokens) == greedy
    plain = list(ask(base)[0].tokens)
    for params in ({"top_k": 0}, {"top_k": -1}, {"top_p": 1.0}, {"top_k": VOCAB_SIZE}):
        assert list(ask(base, **params)[0].tokens) == plain
    assert plain != greedy


def test_logprobs_ignore_the_sampling_filters(base: tinker.SamplingClient) -> None:
    (got,) = ask(base, top_k=5, top_p=0.5, max_tokens=8)
    tokens = [*PROMPT, *got.tokens]
    scored = base.compute_logprobs(types.ModelInput.from_ints(tokens)).result()
    np.testing.assert_allclose(got.logprobs, scored[len(PROMPT) :], rtol=0, atol=1e-5)


def test_topk_logprobs_of_sampled_tokens(base: tinker.SamplingClient) -> None:
    params = types.SamplingParams(max_tokens=5, stop=[], seed=4, temperature=0.0)
    answer = base.sample(types.ModelInput.from_ints(PROMPT), 2, params, topk_sample_logprobs=3).result()
    for sequence in answer.sequences:
        assert sequence.topk_logprobs is not None and [len(row or ()) for row in sequence.topk_logprobs] == [3] * 5
        for row, token, logprob in zip(sequence.topk_logprobs, sequence.tokens, sequence.logprobs or (), strict=True):
            assert row is not None and row[0] == (token, pytest.approx(logprob, abs=1e-6))
            assert row == sorted(row, key=lambda pair: -pair[1])


# Data about the prompt


def test_prompt_logprobs_of_all_or_the_last_positions(base: tinker.SamplingClient) -> None:
    whole = describe(base, include_prompt_logprobs=True, topk_prompt_logprobs=3, temperature=0.3)
    assert whole.prompt_logprobs is not None and whole.topk_prompt_logprobs is not None
    assert whole.prompt_logprobs[0] is None and whole.topk_prompt_logprobs[0] is None
    assert [len(row or ()) for row in whole.topk_prompt_logprobs[1:]] == [3] * (len(PROMPT) - 1)
    assert whole.prompt_logprobs == [None, *base.compute_logprobs(types.ModelInput.from_ints(PROMPT)).result()[1:]]

    for n in (1, 2, len(PROMPT) - 1):
        end = describe(base, include_prompt_logprobs=True, topk_prompt_logprobs=3, prompt_logprobs_last_n=n)
        assert end.prompt_logprobs is not None and end.topk_prompt_logprobs is not None
        assert end.prompt_logprobs == [None] * (len(PROMPT) - n) + whole.prompt_logprobs[-n:]
        assert end.topk_prompt_logprobs == [None] * (len(PROMPT) - n) + whole.topk_prompt_logprobs[-n:]
    with pytest.raises(tinker.RequestFailedError, match=f"prompt_logprobs_last_n {len(PROMPT)} must be from 1 to"):
        describe(base, include_prompt_logprobs=True, prompt_logprobs_last_n=len(PROMPT))


def test_target_logprobs_have_the_layout_of_the_request(base: tinker.SamplingClient) -> None:
    """Targets are dense or sparse (CSR). A target of -1 is skipped and gives 0."""
    whole = describe(base, include_prompt_logprobs=True, topk_prompt_logprobs=2)
    assert whole.prompt_logprobs is not None and whole.topk_prompt_logprobs is not None
    best = [[token for token, _ in row or ()] for row in whole.topk_prompt_logprobs[1:]]
    ids = np.array([[token, *row] for token, row in zip(PROMPT[1:], best, strict=True)], np.int64)
    values = np.array(
        [
            [logprob, *(value for _, value in row or ())]
            for logprob, row in zip(whole.prompt_logprobs[1:], whole.topk_prompt_logprobs[1:], strict=True)
        ]
    )

    skipped = np.zeros(ids.shape, bool)
    skipped[[0, 2, 2, 2, 4], [1, 0, 1, 2, 0]] = True
    ids[skipped], values[skipped] = -1, 0.0
    dense = describe(base, target_prompt_logprobs=types.TensorData.from_numpy(ids)).target_prompt_logprobs
    assert dense is not None and dense.dtype == "float32" and dense.sparse_crow_indices is None
    assert dense.shape == list(ids.shape)
    np.testing.assert_allclose(dense.to_numpy(), values, rtol=0, atol=1e-5)
    assert (dense.to_numpy()[skipped] == 0.0).all()

    listed = ~skipped
    listed[0, 1] = True  # lists one skipped target explicitly, as -1
    rows, columns = np.nonzero(listed)
    crow = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=len(ids)))]).tolist()

    asked = types.TensorData(
        data=ids[listed].tolist(),
        dtype="int64",
        shape=list(ids.shape),
        sparse_crow_indices=crow,
        sparse_col_indices=columns.tolist(),
    )

    sparse = describe(base, target_prompt_logprobs=asked).target_prompt_logprobs
    assert sparse is not None and sparse.dtype == "float32" and sparse.shape == list(ids.shape)
    assert (sparse.sparse_crow_indices, sparse.sparse_col_indices) == (crow, columns.tolist())
    np.testing.assert_allclose(sparse.data, values[listed], rtol=0, atol=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.5, 0.0])
def test_alternative_tokens_are_drawn_at_each_prompt_position(base: tinker.SamplingClient, temperature: float) -> None:
    k = 4
    answer = describe(base, prompt_alt_tokens_k=k, temperature=temperature)
    assert answer.prompt_alt_tokens is not None
    tokens, logprobs = answer.prompt_alt_tokens.tokens, answer.prompt_alt_tokens.logprobs
    assert (tokens.dtype, logprobs.dtype) == ("int64", "float32")
    assert tokens.shape == logprobs.shape == [len(PROMPT) - 1, k]
    ids = tokens.to_numpy()
    scored = describe(base, target_prompt_logprobs=types.TensorData.from_numpy(ids)).target_prompt_logprobs
    assert scored is not None

    at_one, own = scored.to_numpy(), logprobs.to_numpy()
    if temperature == 1.0:
        np.testing.assert_allclose(own, at_one, rtol=0, atol=1e-5)
        assert len({tuple(column) for column in ids.T.tolist()}) == k, "each column is sampled independently"
    elif temperature:
        np.testing.assert_allclose(np.diff(own) * temperature, np.diff(at_one), rtol=0, atol=2e-5)
    else:
        top = describe(base, include_prompt_logprobs=True, topk_prompt_logprobs=1).topk_prompt_logprobs
        assert top is not None and ids.tolist() == [[row[0][0]] * k for row in top[1:] if row]
        np.testing.assert_allclose(own, at_one, rtol=0, atol=1e-5)


def test_sequence_ids_are_unique(base: tinker.SamplingClient) -> None:
    names = [sequence.sequence_id for _ in range(2) for sequence in ask(base, samples=3, max_tokens=2)]
    assert len(set(names)) == 6 and all(isinstance(name, str) and name for name in names)
