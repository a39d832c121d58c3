"""Requests to vLLM, and recorded responses of vLLM 0.32."""

import json

import numpy as np
import pytest

from skyrl_tx.contract.batches import SampleRequest
from skyrl_tx.contract.errors import UserError
from skyrl_tx.contract.ids import RequestId
from skyrl_tx.contract.requests import Constraint, PromptOptions, SamplingControls, SamplingParams
from skyrl_tx.integrations.vllm import wire
from skyrl_tx.integrations.vllm.wire import WireError

EVENT = (
    'data: {"request_id":"generate-tokens-a4","usage":null,"output_mode":"tokens","choices":[{"index":0,'
    '"finish_reason":null,"stop_reason":null,"token_ids":[495,963],"routed_experts":null,"sampling_mask":null,'
    '"weight_versions":null,"logprobs":{"content":[{"token_id":495,"logprob":-6.5,"rank":176,"top_logprobs":['
    '{"token_id":495,"logprob":-6.5,"rank":176},{"token_id":188,"logprob":-5.25,"rank":1}]},{"token_id":963,'
    '"logprob":-1.5,"rank":1,"top_logprobs":[{"token_id":963,"logprob":-1.5,"rank":1},{"token_id":7,'
    '"logprob":-2.5,"rank":2}]}]}}]}'
)
USAGE = 'data: {"usage":{"prompt_tokens":3,"total_tokens":23,"completion_tokens":20},"choices":[]}'
PROMPT = [
    None,
    {"1": {"logprob": -6.75, "rank": 401}, "802": {"logprob": -5.0, "rank": 1}, "165": {"logprob": -5.5, "rank": 2}},
    {"2": {"logprob": -1.0, "rank": 1}, "803": {"logprob": -5.25, "rank": 2}},
]


def request(options: PromptOptions | None = None, **params: object) -> SampleRequest:
    return SampleRequest(
        request_id=RequestId("r"),
        sampler=None,
        prompt=np.array([3, 1, 2], np.int32),
        num_samples=1,
        params=SamplingParams(**{"seed": 7, "max_tokens": 8} | params),
        options=options or PromptOptions(),
        cache_scope="ann",
    )


def body(request: SampleRequest, index: int = 0) -> dict:
    return wire.make_sample_body(request, index, model="base", eos_token_ids=(0, 9), stream_tokens=16)


def test_a_body_has_everything_that_a_sample_depends_on():
    sampling = body(request(stop_token_ids=(5, 9), temperature=0.5))["sampling_params"]
    assert sampling == {
        "max_tokens": 8,
        "temperature": 0.5,
        "seed": wire.derive_seed(7, 0),
        "stop_token_ids": [5, 9, 0],
        "ignore_eos": True,
        "logprobs": 0,
        "detokenize": False,
        "stream_interval": 16,
    }
    assert body(request(eos_stops=False))["sampling_params"]["stop_token_ids"] == []
    assert body(request(PromptOptions(sample_topk=3)))["sampling_params"]["logprobs"] == 4


def test_filters_are_sent_where_they_change_something():
    assert {"top_k", "top_p"}.isdisjoint(body(request(temperature=0.0, top_k=4, top_p=0.5))["sampling_params"])
    sampling = body(request(top_k=4, top_p=0.5))["sampling_params"]
    assert (sampling["top_k"], sampling["top_p"]) == (4, 0.5)


def test_controls_that_change_something_are_passed_on():
    controls = SamplingControls(min_p=0.5, presence_penalty=1.0, logit_bias=((5, -1.5),), min_tokens=3)
    sampling, plain = body(request(controls=controls))["sampling_params"], body(request())["sampling_params"]
    added = {"min_p": 0.5, "presence_penalty": 1.0, "logit_bias": {"5": -1.5}, "min_tokens": 3}
    assert sampling == plain | added


@pytest.mark.parametrize(
    ("kind", "text", "sent"),
    [
        ("json_schema", '{"type": "object"}', {"json": {"type": "object"}}),
        ("regex", "[ab]+", {"regex": "[ab]+"}),
        ("choice", '["a", "b"]', {"choice": ["a", "b"]}),
        ("grammar", 'root ::= "a"', {"grammar": 'root ::= "a"'}),
    ],
)
def test_a_constraint_of_the_client_is_passed_on(kind: str, text: str, sent: dict):
    made = request(controls=SamplingControls(constraint=Constraint(kind=kind, text=text)))
    wire.check_sample(made, allows_filters=False)
    assert body(made)["sampling_params"]["structured_outputs"] == sent


def test_the_salt_of_a_cache_hides_its_scope():
    one = body(request())
    assert one["cache_salt"] != "ann" and one["cache_salt"] == body(request(), 3)["cache_salt"]


def test_seeds_differ_by_seed_and_index_and_are_never_negative():
    seeds = {wire.derive_seed(seed, index) for seed in (0, 1, 2, -1, 2**64 - 2, 2**63) for index in range(50)}
    assert len(seeds) == 300
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert len({seed % 2**32 for seed in seeds}) == 300  # the random number generator on a CPU has 32 bits
    # A release that draws different values would change the samples for a client's seed.
    assert wire.derive_seed(7, 0) == 7127318741406446


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"top_k": 5}, r"sampling_params.top_k 5 must be -1, because this server samples with vLLM"),
        ({"top_p": 0.5}, r"sampling_params.top_p 0.5 must be 1"),
        ({"controls": SamplingControls(min_p=0.5)}, r"min_p 0.5 must be 0, because this server samples with vLLM"),
        (
            {"controls": SamplingControls(constraint=Constraint(kind="lark", text="start: /a/"))},
            r"tool_choice: this server samples with vLLM and cannot force tool calls",
        ),
        ({"temperature": 0.001}, r"sampling_params.temperature 0.001 must be 0, or from 0.01 to 2.0"),
        ({"temperature": 3.0}, r"sampling_params.temperature 3.0 must be 0, or from 0.01 to 2.0"),
    ],
)
def test_what_vllm_would_sample_otherwise_is_refused_by_name(params: dict[str, float], message: str):
    with pytest.raises(UserError, match=message):
        wire.check_sample(request(**params), allows_filters=False)


def test_filters_are_allowed_for_greedy_samples_and_by_a_setting():
    wire.check_sample(request(temperature=0.0, top_k=5, top_p=0.5), allows_filters=False)
    wire.check_sample(request(top_k=5, top_p=0.5), allows_filters=True)
    with pytest.raises(UserError, match="temperature"):
        wire.check_sample(request(temperature=0.001), allows_filters=True)


def test_an_event_has_tokens_log_probabilities_and_the_likeliest_ones():
    chunk = wire.read_event(EVENT, 1)
    assert chunk is not None and chunk.topk is not None and chunk.stop_reason is None
    assert (chunk.tokens.tolist(), chunk.logprobs.tolist()) == ([495, 963], [-6.5, -1.5])
    assert (chunk.topk.token_ids.tolist(), chunk.topk.logprobs.tolist()) == ([[188], [963]], [[-5.25], [-1.5]])
    plain = wire.read_event(EVENT, 0)
    assert plain is not None and plain.topk is None


@pytest.mark.parametrize("line", [USAGE, "data: [DONE]", "", ": comment"])
def test_other_lines_say_nothing(line: str):
    assert wire.read_event(line, 0) is None


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('data: {"error":{"message":"Internal server error","code":500}}', "error: Internal server error"),
        (
            EVENT.replace('"finish_reason":null', '"finish_reason":"abort"'),
            "ended the sample with finish_reason 'abort'",
        ),
        (EVENT.replace("[495,963]", "[495]"), "1 tokens have 2 log-probabilities"),
        ("data: {", "unexpected form"),
        ('data: {"choices":[{}]}', "unexpected form"),
    ],
)
def test_a_bad_event_is_an_error(line: str, message: str):
    with pytest.raises(WireError, match=message):
        wire.read_event(line, 0)


def test_results_about_a_prompt_are_those_of_its_last_tokens():
    prompt = np.array([3, 1, 2], np.int32)
    found = wire.read_prompt_result({"prompt_logprobs": PROMPT}, prompt, PromptOptions(logprobs=True, topk=2))
    assert found.logprobs is not None and found.topk is not None
    np.testing.assert_array_equal(found.logprobs, np.array([np.nan, -6.75, -1.0], np.float32))
    assert found.topk.token_ids.tolist() == [[0, 0], [802, 165], [2, 803]]
    assert found.topk.logprobs.tolist() == [[-99999.0, -99999.0], [-5.0, -5.5], [-1.0, -5.25]]
    last = wire.read_prompt_result({"prompt_logprobs": PROMPT}, prompt, PromptOptions(logprobs=True, last_n=1))
    assert last.logprobs is not None and np.isnan(last.logprobs[:2]).all() and last.logprobs[2] == -1.0


@pytest.mark.parametrize("content", [{}, {"prompt_logprobs": None}, {"prompt_logprobs": PROMPT[:2]}])
def test_bad_results_about_a_prompt_are_an_error(content: dict):
    with pytest.raises(WireError):
        wire.read_prompt_result(content, np.array([3, 1, 2], np.int32), PromptOptions(logprobs=True))


def test_an_error_response_gives_its_message():
    assert wire.read_error(json.dumps({"error": {"message": "no  such\nmodel"}})) == "no such model"
    assert wire.read_error("<html>Bad gateway</html>") == "<html>Bad gateway</html>"
