"""Samples of two tenants are batch-invariant, whether or not they share a tile of rows."""

import numpy as np
import pytest

from skyrl_tx.backends.jax.backend import JaxBackend
from skyrl_tx.contract.backend import StatePart
from skyrl_tx.contract.batches import PassExample, PreparedModelPassBatch, PreparedSampleBatch, SampleRequest
from skyrl_tx.contract.requests import LoraSpec, ModelSpec, OptimizerParams, PromptOptions, SamplingParams
from tests.support.tiny import TINY_CONFIG, tiny_directory

TOKENS = np.random.default_rng(0).integers(1, 250, 20).astype(np.int32)
PROMPTS = {"a": (0, [5, 7, 11]), "b": (0, [3, 4, 5, 6]), "c": (1, [6, 8, 9]), "d": (1, [9, 9, 1])}
"""The tenant and the prompt of each request. Each request draws two samples."""


def start_backend(num_slots):
    """Return a backend with the trained weights of two tenants, loaded for sampling."""
    config = TINY_CONFIG.model_copy(update={"sample_slots": num_slots, "max_sample_tokens": 64 * num_slots})
    backend = JaxBackend(str(tiny_directory()), config)
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


def draw_samples(backend, names, late=""):
    """Return the first tenant's tokens and log-probabilities.

    Requests named in `late` arrive a slice later.
    """
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
def test_batch_invariance_of_two_tenants(num_slots):
    backend = start_backend(num_slots)
    tokens, logprobs = draw_samples(backend, "ab")
    assert len(tokens) == 4
    for names, late in (("ab", ""), ("abcd", ""), ("cadb", ""), ("ab", "cd"), ("ca", "b")):
        assert draw_samples(backend, names, late) == (tokens, logprobs), (names, late)
    backend.close()
