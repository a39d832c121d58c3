"""Greedy decoding of base model and adapters in one batch gives the tokens of transformers' `generate`."""

import numpy as np
import pytest

from skyrl_tx.backends.jax.config import JaxConfig
from skyrl_tx.backends.jax.sample.jax_programs import JaxPrograms
from skyrl_tx.backends.jax.sample.scheduler import SampleScheduler
from skyrl_tx.contract.batches import PreparedSampleBatch, SampleRequest
from skyrl_tx.contract.ids import RequestId, SamplerId
from skyrl_tx.contract.requests import PromptOptions, SamplingParams

ADAPTER = SamplerId("adapter")


@pytest.mark.parametrize(
    "reference",
    [
        "qwen3-untied",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen2-tied", "llama3-untied", "qwen3-moe-mixed")),
    ],
    indirect=True,
)
def test_greedy_decoding_equals_transformers(reference):
    num_rows, num_new = reference.arrays["decoded"].shape
    prompts = reference.inputs["tokens"][:, :20].astype(np.int32)
    config = JaxConfig(sample_slots=2, max_sample_tokens=2 * 128)  # fewer slots than samples, so that some wait
    programs = JaxPrograms(reference.params, reference.config, config)
    scheduler = SampleScheduler(programs, config, programs.memory, eos_token_ids=[])
    scheduler.load(ADAPTER, reference.adapter("weights0"))
    requests = [
        SampleRequest(
            request_id=RequestId(f"{name}{row}"),
            sampler=adapter,
            prompt=prompts[row],
            num_samples=1,
            params=SamplingParams(seed=0, max_tokens=num_new, temperature=0.0),
            options=PromptOptions(),
        )
        for row in range(num_rows)
        for name, adapter in (("base_decoded", None), ("decoded", ADAPTER))
    ]
    scheduler.begin(PreparedSampleBatch(requests=tuple(requests)))
    tokens = {request.request_id: [] for request in requests}
    while deltas := scheduler.step():
        for delta in deltas:
            tokens[delta.request_id].extend(delta.tokens.tolist())
    for name in ("base_decoded", "decoded"):
        assert [tokens[RequestId(f"{name}{row}")] for row in range(num_rows)] == reference.arrays[name].tolist()
