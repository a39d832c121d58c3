"""Greedy decoding of the base model and adapters in one batch gives the tokens of transformers' `generate`."""

import numpy as np
import pytest

from skyrl_tx.backends.jax.sample.scheduler import SampleScheduler
from skyrl_tx.contract.batches import PreparedSampleBatch, SampleRequest
from skyrl_tx.contract.ids import RequestId, SamplerId
from skyrl_tx.contract.requests import PromptOptions, SamplingParams
from tests.support.tiny import TINY_CONFIG, make_model_runner

pytestmark = pytest.mark.slow
ADAPTER = SamplerId("adapter")
COPIES = "abc"  # three copies of each request


@pytest.mark.parametrize(
    "reference",
    [
        "qwen3-untied",
        pytest.param("qwen2-tied", marks=pytest.mark.exhaustive),
        pytest.param("llama3-untied", marks=pytest.mark.exhaustive),
        "qwen3-moe-mixed",
        pytest.param("mistral-untied", marks=pytest.mark.exhaustive),
        pytest.param("gpt-oss-untied", marks=pytest.mark.exhaustive),
        pytest.param("deepseek-untied", marks=pytest.mark.exhaustive),
        pytest.param("glm-untied", marks=pytest.mark.exhaustive),
        pytest.param("glm-lite-untied", marks=pytest.mark.exhaustive),
        pytest.param("nemotron-untied", marks=pytest.mark.exhaustive),
        pytest.param("gemma3-tied", marks=pytest.mark.exhaustive),
        pytest.param("gemma3-untied", marks=pytest.mark.exhaustive),
        pytest.param("qwen3_5-untied", marks=pytest.mark.exhaustive),
        "qwen3_5-moe-untied",
        pytest.param("qwen3-next-untied", marks=pytest.mark.exhaustive),
    ],
    indirect=True,
)
def test_greedy_decoding_equals_transformers(reference):
    num_rows, num_new = reference.arrays["decoded"].shape
    prompts = reference.inputs["tokens"][:, :20].astype(np.int32)
    programs = make_model_runner(reference.params, reference.config, TINY_CONFIG)
    scheduler = SampleScheduler(programs, TINY_CONFIG, programs.memory, eos_token_ids=[])
    scheduler.load(ADAPTER, reference.adapter("weights0"))
    assert len(COPIES) * 2 * num_rows > TINY_CONFIG.sample_slots, "some samples wait"

    requests = [
        SampleRequest(
            request_id=RequestId(f"{name}{row}{copy}"),
            sampler=adapter,
            prompt=prompts[row],
            num_samples=1,
            params=SamplingParams(seed=0, max_tokens=num_new, temperature=0.0),
            options=PromptOptions(),
        )
        for row in range(num_rows)
        for name, adapter in (("base_decoded", None), ("decoded", ADAPTER))
        for copy in COPIES
    ]

    scheduler.begin(PreparedSampleBatch(requests=tuple(requests)))
    tokens = {request.request_id: [] for request in requests}
    while deltas := scheduler.step():
        for delta in deltas:
            tokens[delta.request_id].extend(delta.tokens.tolist())
    for name in ("base_decoded", "decoded"):
        for copy in COPIES:
            found = [tokens[RequestId(f"{name}{row}{copy}")] for row in range(num_rows)]
            assert found == reference.arrays[name].tolist()
