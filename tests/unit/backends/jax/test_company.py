"""What two tenants' samples owe to one another: nothing while each has tiles of slots of its own, else a last bit."""

import numpy as np
import pytest

from skyrl_tx.backends.jax.backend import JaxBackend
from skyrl_tx.backends.jax.config import JaxConfig
from skyrl_tx.contract.backend import StatePart
from skyrl_tx.contract.batches import PassExample, PreparedModelPassBatch, PreparedSampleBatch, SampleRequest
from skyrl_tx.contract.requests import LoraSpec, ModelSpec, OptimizerParams, PromptOptions, SamplingParams
from skyrl_tx.testing.tiny_models import write_model

TOKENS = np.random.default_rng(0).integers(1, 250, 20).astype(np.int32)
PROMPTS = {"a": (0, [5, 7, 11]), "b": (0, [3, 4, 5, 6]), "c": (1, [6, 8, 9]), "d": (1, [9, 9, 1])}
"""Of each request its tenant and what it asks; each draws two samples."""


def backend_with(directory, num_slots):
    """Two tenants' trained weights, loaded to be sampled from."""
    model = str(write_model(directory, num_layers=1, max_context_length=64))
    config = JaxConfig(
        compile_cache_dir=None,
        dtype="float32",
        max_lora_rank=4,
        max_sampler_adapters=2,
        micro_batch_tokens=64,
        sample_slots=num_slots,
        max_sample_tokens=64 * num_slots,
    )
    backend = JaxBackend(model, config)
    backend.start()
    inputs = {"target_tokens": TOKENS[1:], "weights": np.ones(19, np.float32)}
    for tenant in ("0", "1"):
        backend.create_model(tenant, ModelSpec(lora=LoraSpec(rank=4, seed=int(tenant))))
        for _ in range(2):
            example = PassExample(
                request_id="r",
                model_id=tenant,
                tokens=TOKENS[:-1],
                loss="cross_entropy",
                loss_inputs=inputs,
                loss_config={},
            )
            backend.forward_backward(PreparedModelPassBatch(examples=(example,)))
            backend.optim_step(tenant, OptimizerParams(learning_rate=0.05))
        backend.load_sampler(tenant, backend.capture(tenant, {StatePart.WEIGHTS}))
    return backend


def drawn(backend, names, late=""):
    """Tokens and log-probabilities of the first tenant, drawn with others; those named `late` come a slice later."""
    seen = []
    for some in (names, late):
        for name in some:
            tenant, prompt = PROMPTS[name]
            request = SampleRequest(
                request_id=name,
                sampler=str(tenant),
                prompt=np.array(prompt, np.int32),
                num_samples=2,
                params=SamplingParams(seed=len(prompt), max_tokens=20, temperature=1.0),
                options=PromptOptions(),
            )
            backend.begin_sample(PreparedSampleBatch(requests=(request,)))
        if some is names:
            seen += backend.step_sample()
    while deltas := backend.step_sample():
        seen += deltas
    tokens, logprobs = {}, {}
    for delta in seen:
        if delta.request_id in "ab":
            where = delta.request_id, delta.index
            tokens.setdefault(where, []).extend(delta.tokens.tolist())
            logprobs.setdefault(where, []).extend(delta.logprobs.tolist())
    return tokens, logprobs


@pytest.mark.slow
@pytest.mark.parametrize("num_slots", [8, 4])
def test_two_tenants(tmp_path, num_slots):
    backend = backend_with(tmp_path / "model", num_slots)
    tokens, logprobs = drawn(backend, "ab")
    assert len(tokens) == 4
    largest = 0.0
    for names, late in (("ab", ""), ("abcd", ""), ("cadb", ""), ("ab", "cd"), ("ca", "b")):
        same, near = drawn(backend, names, late)
        assert same == tokens, (names, late)
        largest = max(largest, *(np.abs(np.subtract(near[key], logprobs[key])).max() for key in logprobs))
    backend.close()
    if num_slots == 8:
        assert largest == 0.0, "each tenant had a tile of four slots"
    else:
        assert 0.0 < largest < 1e-5, "the tile was shared, so each slot looked up its adapter: another program"
