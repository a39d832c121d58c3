"""Conversion of requests to batches, and of results to outputs."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from msgspec import UNSET, structs
from tinker.lib.chunked_fwdbwd_helpers import combine_fwd_bwd_output_results
from tinker.proto.response_conv import deserialize_forward_backward_output

from skyrl_tx.contract import codec
from skyrl_tx.contract.batches import SampleRequest
from skyrl_tx.contract.errors import UserError
from skyrl_tx.contract.ids import ModelId, RequestId
from skyrl_tx.contract.requests import PromptOptions, SampledLogprobs, SamplingControls, SamplingParams
from skyrl_tx.contract.results import MeanTerm, PassResult, PromptResult, SampleDelta, SampleOutput, TopK, TrainerGap
from skyrl_tx.engine import prepare, request_checks
from skyrl_tx.engine.sample_requests import SampleAssembler
from skyrl_tx.server.http.responses import encode_pass
from skyrl_tx.testing.fake import FakeConfig
from skyrl_tx.testing.fake.backend import FakeBackend
from tests.support.engine_harness import datum, forward_backward, sample

CAPABILITIES = FakeBackend("tiny", FakeConfig(max_context_length=32)).start()
REQUEST, MODEL = RequestId("r"), ModelId("m")


def test_examples_have_all_inputs_and_config_values():
    floats = np.ones(6, np.float32)
    request = forward_backward(
        data=(datum(logprobs=floats, advantages=floats),), loss="ppo", loss_config={"clip_low_threshold": 0}
    )
    [example] = prepare.make_pass_examples(REQUEST, MODEL, request, CAPABILITIES)
    assert example.loss_config == {"clip_low_threshold": 0.0, "clip_high_threshold": 1.2}
    assert {name: (array.dtype.name, array.shape) for name, array in example.loss_inputs.items()} == {
        "target_tokens": ("int32", (6,)),
        "logprobs": ("float32", (6,)),
        "advantages": ("float32", (6,)),
        "weights": ("float32", (6,)),
    }
    assert (example.loss_inputs["weights"] == 1).all()


def test_absent_inputs_take_the_shape_of_the_targets():
    request = forward_backward(data=(datum(target_tokens=np.zeros((6, 3), np.int64)),))
    [example] = prepare.make_pass_examples(REQUEST, MODEL, request, CAPABILITIES)
    assert example.loss_inputs["weights"].shape == (6, 3)


def test_metrics_are_combined_as_the_sdk_combines_chunks():
    def result(loss, total, count):
        logprobs = np.zeros(2, np.float32)
        return PassResult(logprobs=logprobs, sums={"loss": loss}, means={"clip": MeanTerm(total, count)})

    output = prepare.combine_pass_results([result(1.0, 1, 4), result(2.5, 2, 2)], num_tokens=6)
    assert output.metrics == {
        "loss:sum": 3.5,
        "num_tokens:sum": 6.0,
        "num_datums:sum": 2.0,
        "clip:sum": 3.0,
        "clip_count:sum": 6.0,
        "clip:mean": pytest.approx(0.5),
    }
    assert all(name.count(":") == 1 for name in output.metrics)


def test_other_metrics_are_combined_by_their_suffix():
    values = {"a:sum": (1.0, 2.0), "a:mean": (1.0, 4.0), "a:max": (-3.0, -5.0)}
    results = [
        PassResult(logprobs=np.zeros(1, np.float32), sums={"loss": 0.0}, metrics={k: v[i] for k, v in values.items()})
        for i in range(2)
    ]
    found = prepare.combine_pass_results(results, num_tokens=2).metrics
    assert {name: found[name] for name in values} == {"a:sum": 3.0, "a:mean": 2.5, "a:max": -3.0}


def test_means_over_chunks_are_correct_or_absent():
    """A chunk without counted positions, for example one with zero advantages, has no mean but correct sums."""

    def chunk(*terms):
        logprobs = np.zeros(2, np.float32)
        results = [
            PassResult(logprobs=logprobs, sums={"loss": 0.0}, means={"ratio": MeanTerm(*term)}) for term in terms
        ]
        message = encode_pass(prepare.combine_pass_results(results, num_tokens=2 * len(terms)))
        return deserialize_forward_backward_output(message.SerializeToString())

    on_policy, counts_nothing, far = chunk((4, 4), (2, 2)), chunk((0, 0)), chunk((20, 10))
    assert "ratio:mean" not in counts_nothing.metrics
    folded = combine_fwd_bwd_output_results([on_policy, counts_nothing]).metrics
    assert "ratio:mean" not in folded and folded["ratio:sum"] / folded["ratio_count:sum"] == 1.0
    folded = combine_fwd_bwd_output_results([on_policy, counts_nothing, far]).metrics
    assert folded["ratio:sum"] / folded["ratio_count:sum"] == 26 / 16


def test_null_max_tokens_means_up_to_the_context():
    assert prepare.make_sample_request(REQUEST, sample(max_tokens=None), CAPABILITIES).params.max_tokens == 30
    assert prepare.make_sample_request(REQUEST, sample(), CAPABILITIES).params.max_tokens == 8


@pytest.mark.parametrize("kind", ["tempered", "raw"])
def test_logprobs_that_the_sampler_does_not_offer_are_refused_by_name(kind: str) -> None:
    """At the temperatures 0 and 1, both kinds are equal unless the logits change."""

    def check(offered: frozenset[SampledLogprobs], **params: Any) -> None:
        sample = SamplingParams(seed=1, max_tokens=4, raw_logprobs=kind == "raw" or UNSET, **params)
        request_checks.check_params(sample, replace(CAPABILITIES, sampled_logprobs=offered))

    others = frozenset[SampledLogprobs]({"tempered", "raw"} - {kind})
    for offered in (others, frozenset[SampledLogprobs]()):
        check(offered, temperature=1.0)
        check(offered, temperature=0.0, top_k=4)
        for params in ({"temperature": 0.7}, {"controls": SamplingControls(presence_penalty=1.0)}):
            with pytest.raises(UserError, match=f"sampled_logprobs '{kind}' is not offered at temperature"):
                check(offered, **params)
    check(frozenset[SampledLogprobs]({kind}), temperature=0.7)


def make_request(num_samples, **params):
    return SampleRequest(
        request_id=REQUEST,
        sampler=None,
        prompt=np.array([1], np.int32),
        num_samples=num_samples,
        params=SamplingParams(seed=0, max_tokens=9, **params),
        options=PromptOptions(sample_topk=1),
    )


def delta(index, text, stop_reason=None, prompt=None):
    tokens = np.array([ord(char) for char in text], np.int32)
    logprobs = -tokens.astype(np.float32)
    return SampleDelta(
        request_id=REQUEST,
        index=index,
        tokens=tokens,
        logprobs=logprobs,
        stop_reason=stop_reason,
        topk=TopK(token_ids=tokens[:, None], logprobs=logprobs[:, None]),
        prompt=prompt,
    )


def decode(tokens):
    return "".join(map(chr, tokens))


def test_deltas_are_joined_by_index():
    gathering = SampleAssembler(make_request(2), decode)
    prompt = PromptResult(logprobs=np.array([np.nan], np.float32))
    for sample_delta in (delta(1, "xy"), delta(0, "a", prompt=prompt), delta(1, "z", "stop")):
        gathering.add(sample_delta)
    assert gathering.num_open > 0
    gathering.add(delta(0, "b", "length"))
    assert gathering.num_open == 0
    output = gathering.build_output()
    assert [decode(sequence.tokens) for sequence in output.sequences] == ["ab", "xyz"]
    assert [sequence.stop_reason for sequence in output.sequences] == ["length", "stop"]
    assert output.prompt is prompt


def test_a_gap_comes_with_the_end_of_its_sample_and_is_stored():
    gathering, gap = SampleAssembler(make_request(2), decode), TrainerGap(mean=0.25, largest=0.5, num_tokens=2)
    gathering.add(delta(0, "a"))
    gathering.add(structs.replace(delta(0, "", "length"), trainer_gap=gap))
    gathering.add(delta(1, "b", "stop"))
    output = gathering.build_output()
    assert [sequence.trainer_gap for sequence in output.sequences] == [gap, UNSET]
    stored = codec.decode(codec.encode(output))
    assert isinstance(stored, SampleOutput) and [sequence.trainer_gap for sequence in stored.sequences] == [gap, UNSET]


def test_stop_string_truncates_tokens_logprobs_and_topk():
    gathering = SampleAssembler(make_request(1, stop_strings=("bc",)), decode)
    gathering.add(delta(0, "ab"))
    gathering.add(delta(0, "cde"))
    gathering.add(delta(0, "fgh", "length"))
    [sequence] = gathering.build_output().sequences
    assert decode(sequence.tokens) == "abc" and sequence.stop_reason == "stop"
    assert len(sequence.logprobs) == len(sequence.topk.token_ids) == len(sequence.topk.logprobs) == 3
