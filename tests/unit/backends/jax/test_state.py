"""Sampling of a model with state of fixed size: what a slot held before, shared prompts, and the memory for states."""

import jax
import numpy as np
import pytest

from skyrl_tx import models
from skyrl_tx.backends.jax import memory
from skyrl_tx.backends.jax.config import JaxConfig
from skyrl_tx.backends.jax.memory import plan_sample_memory
from skyrl_tx.backends.jax.sample.jax_programs import JaxPrograms
from skyrl_tx.backends.jax.sample.scheduler import SampleScheduler
from skyrl_tx.backends.jax.shapes import PrefillShapes
from skyrl_tx.contract.batches import SampleRequest
from skyrl_tx.testing.tiny_models import write_model
from tests.support.fast_jit import fast_jit
from tests.support.sample_requests import BLUE, RED, ask, prompt_of, run
from tests.support.tiny import HYBRID, HYBRID_MOE, TINY_CONFIG, TinyModel, load_model, tiny_directory

LENGTH = 160
"""The length to which sequences are padded for the full forward pass."""
STD = 0.1
"""The standard deviation of weights. Norms divide by products of queries and keys, so rounding depends on it."""


@pytest.fixture(scope="module", params=[HYBRID, pytest.param(HYBRID_MOE, marks=pytest.mark.slow)])
def tiny(request: pytest.FixtureRequest) -> TinyModel:
    return load_model(tiny_directory(request.param, STD))


def start(tiny: TinyModel, **changed: int) -> SampleScheduler:
    config: JaxConfig = TINY_CONFIG.model_copy(update=changed)
    device = JaxPrograms(tiny.params, tiny.config, config)
    scheduler = SampleScheduler(device, config, device.memory, ())
    scheduler.load(RED, tiny.adapter(1))
    return scheduler


def trained_logprobs(tiny: TinyModel, request: SampleRequest, new_tokens: np.ndarray) -> np.ndarray:
    """Return the trainer's log-probability of every new token."""

    @fast_jit
    def compute(params, tokens, adapter):
        hidden = models.forward(params, tiny.config, tokens[None, :-1], adapter)
        return models.target_logprobs(params, hidden, tokens[None, 1:], adapter)[0]

    tokens = np.concatenate([request.prompt, new_tokens])
    found = compute(tiny.params, np.pad(tokens, (0, LENGTH + 1 - tokens.size)), tiny.adapter(1))
    return np.asarray(found)[request.prompt.size - 1 : tokens.size - 1]


@pytest.mark.slow
def test_only_an_equal_prompt_is_a_hit_and_all_samples_are_as_without_the_cache(tiny):
    prefix = prompt_of(96)
    prompts = {
        "first": prefix,
        "equal": prefix,
        "longer": np.concatenate([prefix, prompt_of(20, seed=1)]),
        "again": prefix,
        "part": prefix[:70],
    }
    warm, cold = start(tiny, prefix_cache_tokens=512), start(tiny, prefix_cache_tokens=0)
    hits = {}
    for name, prompt in prompts.items():
        request = ask(name, prompt, sampler=RED, max_tokens=6)
        results = run(warm, request)
        assert results.bits == run(cold, request).bits, name
        hits |= results.cache_hits
        sequence = results.sequence(name)
        np.testing.assert_allclose(sequence.logprobs, trained_logprobs(tiny, request, sequence.tokens), atol=1e-5)
    assert hits == {"equal": 96, "again": 96}


@pytest.mark.slow
def test_a_slot_shows_nothing_of_its_former_tenant(tiny):
    request = ask("mine", prompt_of(9), sampler=RED, samples=16)
    fresh = run(start(tiny), request)
    used = start(tiny)
    used.load(BLUE, jax.tree.map(lambda leaf: np.full_like(leaf, np.nan), tiny.adapter(2)))
    run(used, ask("nan", prompt_of(9), sampler=BLUE, samples=16))
    assert run(used, request).bits == fresh.bits and len(fresh.bits) == 16


@pytest.mark.slow
def test_samples_go_on_with_their_state_in_longer_slots(tiny):
    """Twelve samples outgrow slots of 64 positions; eight slots of 128 follow, so some samples are preempted."""
    request = ask("many", prompt_of(40), sampler=RED, samples=12, max_tokens=60)
    results = run(start(tiny), request)
    for index in range(12):
        sequence = results.sequence("many", index)
        np.testing.assert_allclose(sequence.logprobs, trained_logprobs(tiny, request, sequence.tokens), atol=1e-5)
    assert len({tuple(tokens) for tokens in results.tokens.values()}) == 12


@pytest.mark.parametrize("free_mib", [1, 4, 16, 64])
def test_states_count_in_the_memory_of_samples_and_prompts(tiny, monkeypatch, free_mib):
    config = JaxConfig(max_context_length=1024, sample_slots=16, prefill_chunk_tokens=128)
    monkeypatch.setattr(memory, "free_bytes", lambda _: free_mib * 2**20)
    planned = plan_sample_memory(config, tiny.params, tiny.config)

    def cache_bytes(length: int) -> int:
        shapes = jax.eval_shape(lambda: models.empty_cache(tiny.params, tiny.config, 1, length))
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))

    position = (cache_bytes(128) - cache_bytes(64)) // 64
    state = cache_bytes(64) - 64 * position
    assert state > 20 * position, "a state is as large as many positions"
    num_prompts = planned.prompt_tokens // PrefillShapes.of(config, planned.max_length).buffer_length(1)
    prompts = planned.prompt_tokens * position + num_prompts * state
    if free_mib == 1:
        assert planned.tokens == 1, "the states alone are too large"
    else:
        assert planned.prompt_bytes >= prompts
        samples = planned.tokens * position + config.sample_slots * state
        assert planned.tokens > 1 and samples + prompts <= memory.SAMPLE_SHARE * free_mib * 2**20


def test_a_model_without_attention_has_a_memory_plan(tmp_path):
    model = load_model(write_model(tmp_path / "model", HYBRID, num_layers=2))
    assert plan_sample_memory(TINY_CONFIG.model_copy(update={"max_sample_tokens": None}), model.params, model.config)
