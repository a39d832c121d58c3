"""Prompts that one device computes at the same time.

Accelerators do this in bfloat16. Here it runs in float32 on CPU.
"""

import numpy as np
import pytest

from skyrl_tx.backends.jax.backend import JaxBackend
from skyrl_tx.backends.jax.config import JaxConfig
from skyrl_tx.backends.jax.sample import model_runner, programs
from skyrl_tx.contract.backend import StatePart
from skyrl_tx.contract.batches import PreparedSampleBatch, SampleRequest
from skyrl_tx.contract.ids import ModelId, RequestId, SamplerId
from skyrl_tx.contract.requests import LoraSpec, ModelSpec, PromptOptions, SamplingParams
from tests.support.tiny import DENSE, HYBRID, LATENTS, tiny_directory

CONFIG = JaxConfig(
    max_lora_adapters=1,
    max_sampler_adapters=1,
    sample_slots=8,
    max_sample_tokens=4096,
    max_context_length=512,
    prefill_chunk_tokens=64,
    compile_cache_dir=None,
)
LENGTHS = (70, 3, 64, 199, 30, 128)


def draw_samples(architecture: str) -> dict[tuple[str, int], list[tuple[int, float]]]:
    """Return tokens and log-probabilities of samples for six prompts, and of one prompt."""
    backend, draw = JaxBackend(str(tiny_directory(architecture)), CONFIG), np.random.default_rng(0)
    backend.start()
    model, sampler = ModelId("m"), SamplerId("s")
    backend.create_model(model, ModelSpec(lora=LoraSpec(rank=4, seed=3)))
    backend.load_sampler(sampler, backend.capture(model, {StatePart.WEIGHTS}))

    requests = [
        SampleRequest(
            request_id=RequestId(str(n)),
            sampler=sampler if n % 2 else None,
            prompt=draw.integers(2, 250, length).astype(np.int32),
            num_samples=2,
            params=SamplingParams(seed=n, max_tokens=8, eos_stops=False),
            options=PromptOptions(logprobs=n == 3),
        )
        for n, length in enumerate(LENGTHS)
    ]

    found: dict[tuple[str, int], list[tuple[int, float]]] = {}
    for delta in backend.sample(PreparedSampleBatch(requests=tuple(requests))):
        found.setdefault((delta.request_id, delta.index), []).extend(zip(delta.tokens, delta.logprobs, strict=True))
        if delta.prompt is not None:
            found[delta.request_id, -1] = list(zip(requests[3].prompt[1:], delta.prompt.logprobs[1:], strict=True))
    return found


@pytest.mark.parametrize(
    "architecture",
    [
        DENSE,
        pytest.param(HYBRID, marks=pytest.mark.slow),
        pytest.param(LATENTS, marks=[pytest.mark.slow, pytest.mark.exhaustive]),
    ],
)
def test_a_sample_has_the_tokens_it_has_alone(monkeypatch, architecture):
    wanted, rows = draw_samples(architecture), list[int]()
    begin, extend = model_runner.ModelRunner.__init__, programs.prefill

    def begin_with_four(self, *arguments, **named):
        begin(self, *arguments, **named)
        self.prompts_of_shard = 4

    def record_batch_size(params, config, pool, adapter_B, *others):
        rows.append(len(adapter_B))
        return extend(params, config, pool, adapter_B, *others)

    monkeypatch.setattr(model_runner.ModelRunner, "__init__", begin_with_four)
    monkeypatch.setattr(programs, "prefill", record_batch_size)
    found = draw_samples(architecture)
    assert set(rows) == {1, 4}
    assert found.keys() == wanted.keys() and ("3", -1) in found
    for key, own in wanted.items():
        assert [token for token, _ in found[key]] == [token for token, _ in own]
        np.testing.assert_allclose([x for _, x in found[key]], [x for _, x in own], rtol=1e-5, atol=1e-5)
