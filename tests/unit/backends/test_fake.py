"""The fake backend's numbers, computed by hand."""

import numpy as np
import pytest

from skyrl_tx.contract.batches import PreparedSampleBatch, SampleRequest
from skyrl_tx.contract.ids import RequestId
from skyrl_tx.contract.loss_reference import LOSS_FUNCTIONS, evaluate
from skyrl_tx.contract.losses import LOSS_SPECS
from skyrl_tx.contract.requests import LoraSpec, PromptOptions, SamplingParams
from skyrl_tx.testing.fake import FakeConfig
from skyrl_tx.testing.fake.backend import FakeBackend
from skyrl_tx.testing.fake.model import compute_gradient, fresh_adapter, log_softmax, logits, make_distribution

VOCAB = 8


def test_the_base_model_counts():
    logprobs = log_softmax(logits(np.array([3, VOCAB - 1], np.int32), None, VOCAB))
    assert np.exp(logprobs[0, 4]) == pytest.approx(1 / 2)
    assert np.exp(logprobs[0, 5]) == pytest.approx(1 / (2 * (VOCAB - 1)))
    assert np.exp(logprobs[1, 0]) == pytest.approx(1 / 2)


@pytest.mark.parametrize("name", sorted(LOSS_FUNCTIONS))
def test_gradients_match_finite_differences(name):
    draw = np.random.default_rng(0)
    adapter = fresh_adapter(LoraSpec(rank=2, seed=1), VOCAB)
    adapter.b_VR[:] = 0.1 * draw.standard_normal(adapter.b_VR.shape)
    tokens = draw.integers(0, VOCAB, 6, dtype=np.int32)
    targets = draw.integers(0, VOCAB, 6, dtype=np.int32)[:, None]

    def compute_logprobs():
        all_logprobs = log_softmax(logits(tokens, adapter, VOCAB))
        return all_logprobs, np.take_along_axis(all_logprobs, targets, axis=1)[:, 0]

    before = compute_logprobs()[1]
    inputs = {
        "weights": draw.random(6) + 0.5,
        "logprobs": before - 0.3 * draw.standard_normal(6),
        "advantages": draw.standard_normal(6),
        "sequence_ratio_mask": np.array([0.0, 1, 1, 1, 0, 1]),
        "sampled": np.array([0.0, 1, 1, 1, 0, 1]),
    }
    all_logprobs, logprobs = compute_logprobs()
    config = dict(LOSS_SPECS[name].config) | ({"kl_coeff": 0.3} if name == "stable_reinforce" else {})
    d_logprobs = evaluate(name, logprobs, inputs, config).slope
    found = compute_gradient(tokens, targets, d_logprobs[:, None], all_logprobs, adapter)

    def surrogate():
        """Return the loss that autodiff differentiates, with detached factors held constant."""
        now = compute_logprobs()[1]
        if name == "cispo":
            ratio = np.clip(np.exp(logprobs - inputs["logprobs"]), 0.0, 4.0)
            return -(ratio * now * inputs["advantages"] * inputs["weights"]).sum()

        if name == "stable_reinforce":
            ratio = np.minimum(np.exp(logprobs - inputs["logprobs"]), 2.0)
            terms = -ratio * now * inputs["advantages"] + 0.5 * 0.3 * (now - inputs["logprobs"]) ** 2
            return (inputs["sampled"] * inputs["weights"] * terms).sum()

        if name == "gspo":
            mask = inputs["sequence_ratio_mask"]
            ratio = np.exp((mask * (logprobs - inputs["logprobs"])).sum() / mask.sum()) * np.exp(now - logprobs)
            gain = np.minimum(ratio * inputs["advantages"], np.clip(ratio, 0.8, 1.2) * inputs["advantages"])
            return -(inputs["weights"] * gain).sum()
        return evaluate(name, now, inputs, config).loss.sum()

    for array, expected in ((adapter.a_RV, found.a_RV), (adapter.b_VR, found.b_VR)):
        for index in np.ndindex(array.shape):
            kept = array[index]
            array[index] = kept + 1e-6
            above = surrogate()
            array[index] = kept - 1e-6
            slope_here = (above - surrogate()) / 2e-6
            array[index] = kept
            assert expected[index] == pytest.approx(slope_here, abs=1e-5)


@pytest.mark.parametrize("name", sorted(LOSS_FUNCTIONS))
def test_positions_of_weight_zero_have_no_effect(name):
    """This holds for any distance between the policies and for any advantage."""
    inputs = {key: np.ones(2) for key in ("sequence_ratio_mask", "sampled")}
    inputs |= {"weights": np.array([0.0, 1.0]), "advantages": np.array([-3e38, 1.0]), "logprobs": np.full(2, -2e3)}
    value = evaluate(name, np.full(2, -1.0), inputs, LOSS_SPECS[name].config)
    assert np.isfinite(value.loss).all() and np.isfinite(value.slope).all()
    assert value.loss[0] == value.slope[0] == 0


def test_prompt_questions():
    backend = FakeBackend("tiny", FakeConfig(vocab_size=VOCAB))
    backend.start()
    options = PromptOptions(
        logprobs=True, last_n=2, topk=2, target_tokens=np.array([[-1, 0], [3, 4], [4, -1]]), alt_tokens_k=3
    )
    params = SamplingParams(seed=0, max_tokens=1, temperature=0.0)
    prompt = np.array([1, 2, 3, 5], np.int32)
    request = SampleRequest(
        request_id=RequestId("r"), sampler=None, prompt=prompt, num_samples=1, params=params, options=options
    )
    [delta] = backend.sample(PreparedSampleBatch(requests=(request,)))
    half, rest = np.log(1 / 2), np.log(1 / 14)
    assert list(delta.tokens) == [6] and delta.logprobs[0] == pytest.approx(half)

    found = delta.prompt
    np.testing.assert_allclose(found.logprobs, [np.nan, np.nan, half, rest], rtol=1e-6)
    np.testing.assert_allclose(found.targets, [[0, rest], [half, rest], [half, 0]], rtol=1e-6)
    assert found.topk.token_ids.tolist() == [[0, 0], [0, 0], [3, 0], [4, 0]]
    assert found.topk.logprobs[0].tolist() == [-99999.0, -99999.0]
    assert found.alt_tokens.token_ids.tolist() == [[2] * 3, [3] * 3, [4] * 3]


@pytest.mark.parametrize(("top_k", "top_p", "kept"), [(-1, 0.5, {0, 1}), (2, 0.6, {0}), (2, 0.7, {0, 1})])
def test_top_p_applies_after_top_k(top_k, top_p, kept):
    """Top-k leaves two of 0.4, 0.2, 0.2, 0.2, renormalised to 2/3 and 1/3."""
    probabilities = np.log(np.array([0.4, 0.2, 0.2, 0.2]))
    distribution = make_distribution(probabilities, 1.0, top_k, top_p)
    assert {distribution.draw([seed]) for seed in range(60)} == kept


@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1, 2**32, 2**63 + 5, 2**64 - 1])
def test_tokens_are_drawn_by_the_numbers_of_a_numpy_generator(seed: int) -> None:
    distribution = make_distribution(np.zeros(1000), 1.0)
    number = np.random.default_rng([seed, 3, 2]).random()
    assert distribution.draw([seed, 3, 2]) == int(number * 1000)
