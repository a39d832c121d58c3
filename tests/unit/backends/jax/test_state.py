"""Sampling with recurrent states: reused slots, shared prompts, and the memory for states."""

import jax
import numpy as np
import pytest

from skyrl_tx import models
from skyrl_tx.backends.jax import memory
from skyrl_tx.backends.jax.config import JaxConfig
from skyrl_tx.backends.jax.sample.scheduler import SampleScheduler
from skyrl_tx.backends.jax.shapes import MAX_PROMPTS
from skyrl_tx.contract.batches import SampleRequest
from skyrl_tx.contract.requests import PromptOptions
from skyrl_tx.testing.tiny_models import write_model
from tests.support.fast_jit import fast_jit
from tests.support.sample_requests import BLUE, RED, make_prompt, make_request, run
from tests.support.tiny import (
    BY_HEAD,
    HYBRID,
    HYBRID_MOE,
    MAMBA,
    TINY_CONFIG,
    TinyModel,
    load_model,
    make_model_runner,
    plan_samples,
    tiny_directory,
)

LENGTH = 160
"""Sequences are padded to this length for the full forward pass."""
STD = {HYBRID: 0.1, MAMBA: 0.1, HYBRID_MOE: 0.05, BY_HEAD: 0.1}
"""The standard deviation of weights. With a larger one, rounding errors grow more per layer.

At 0.1, most samples of the model with experts differ from the trainer by 2e-6 to 5e-6, but one of
twelve differs by 1.5e-5.
"""


@pytest.fixture(
    scope="module",
    params=[
        HYBRID,
        MAMBA,
        pytest.param(HYBRID_MOE, marks=[pytest.mark.slow, pytest.mark.exhaustive]),
        pytest.param(BY_HEAD, marks=[pytest.mark.slow, pytest.mark.exhaustive]),
    ],
)
def tiny(request: pytest.FixtureRequest) -> TinyModel:
    return load_model(tiny_directory(request.param, STD[request.param]))


def start(tiny: TinyModel, **changed: int) -> SampleScheduler:
    config: JaxConfig = TINY_CONFIG.model_copy(update=changed)
    device = make_model_runner(tiny.params, tiny.config, config)
    scheduler = SampleScheduler(device, config, device.memory, ())
    scheduler.load(RED, tiny.adapter(1))
    return scheduler


def compute_trained_logprobs(tiny: TinyModel, request: SampleRequest, new_tokens: np.ndarray) -> np.ndarray:
    """Return the trainer's log-probability of every new token."""

    @fast_jit
    def compute(params, tokens, adapter):
        hidden = models.forward(params, tiny.config, tokens[None, :-1], adapter)
        return models.target_logprobs(params, hidden, tokens[None, 1:], adapter)[0]

    tokens = np.concatenate([request.prompt, new_tokens])
    found = compute(tiny.params, np.pad(tokens, (0, LENGTH + 1 - tokens.size)), tiny.adapter(1))
    return np.asarray(found)[request.prompt.size - 1 : tokens.size - 1]


@pytest.mark.slow
def test_hits_change_no_bit_and_all_samples_are_as_trained(tiny):
    prefix = make_prompt(96)
    prompts = {
        "first": prefix,
        "equal": prefix,
        "longer": np.concatenate([prefix, make_prompt(20, seed=1)]),
        "again": prefix,
        "part": prefix[:70],
    }
    warm, cold = start(tiny, prefix_cache_tokens=8192), start(tiny, prefix_cache_tokens=0)
    hits = {}

    for name, prompt in prompts.items():
        request = make_request(name, prompt, sampler=RED, max_tokens=6)
        results = run(warm, request)
        assert results.bits == run(cold, request).bits, name

        hits |= results.cache_hits
        sequence = results.sequence(name)
        np.testing.assert_allclose(
            sequence.logprobs, compute_trained_logprobs(tiny, request, sequence.tokens), atol=1e-5
        )

    assert hits == {"equal": 96, "longer": 96, "part": 64}, "the longer replaced the first; of that, 64 was not kept"


@pytest.mark.slow
def test_conversations_and_system_prompts_have_equal_bits_with_hits():
    """Chunks end at 128, 256 and 512 positions.

    The second turn repeats the first with its answer.
    """
    tiny = load_model(tiny_directory(HYBRID, STD[HYBRID]))
    sizes = {"prefill_chunk_tokens": 256, "prefill_tokens": 256, "max_context_length": 512, "max_sample_tokens": 8192}
    warm, cold = (start(tiny, **sizes, prefix_cache_tokens=tokens) for tokens in (16384, 0))
    system, first, hits = make_prompt(300, seed=1), make_prompt(200, seed=2), {}

    def sample_and_compare(name: str, prompt: np.ndarray, options: PromptOptions | None = None) -> np.ndarray:
        request = make_request(name, prompt, sampler=RED, samples=2, options=options)
        results, expected = run(warm, request), run(cold, request)
        assert results.bits == expected.bits and len(results.bits) == 2, name
        if options is not None:
            np.testing.assert_array_equal(results.prompt(name).logprobs, expected.prompt(name).logprobs)
        hits.update(results.cache_hits)
        return results.sequence(name).tokens

    second = np.concatenate([first, sample_and_compare("turn 1", first), make_prompt(80, seed=3)])
    third = np.concatenate([second, sample_and_compare("turn 2", second), make_prompt(90, seed=4)])
    sample_and_compare("turn 3", third)
    for number in range(3):
        sample_and_compare(f"question {number}", np.concatenate([system, make_prompt(100 + number, seed=5 + number)]))
    for number in range(3):
        prompt = np.concatenate([system, make_prompt(100 + number, seed=8 + number)])
        sample_and_compare(f"scored {number}", prompt, PromptOptions(logprobs=True))
    assert hits.pop("scored 0") == 0
    assert hits == {
        "turn 2": 128,
        "turn 3": 256,
        **dict.fromkeys(["question 1", "question 2", "scored 1", "scored 2"], 256),
    }


@pytest.mark.slow
def test_a_hit_compiles_nothing_after_the_start():
    tiny, names = load_model(tiny_directory(HYBRID, STD[HYBRID])), []

    def note(event: str, _: float, **labels: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            names.append(str(labels["fun_name"]))

    sizes = {"max_context_length": 128, "sample_slots": 2, "max_sample_tokens": 256}  # few programs
    scheduler, prompt = start(tiny, **sizes, prefix_cache_tokens=8192), make_prompt(120)
    scheduler.compile_all(RED)
    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        requests = [make_request(f"{size}", prompt[:size], sampler=RED, max_tokens=2) for size in (40, 70, 120)]
        hits = [run(scheduler, request).cache_hits for request in requests]
    finally:
        jax.monitoring.unregister_event_duration_listener(note)
    assert hits == [{}, {"70": 32}, {"120": 64}]
    assert not {"copy_pages", "prefill", "open_rows", "run_rows", "close_rows"} & set(names)


@pytest.mark.slow
def test_pages_and_states_show_nothing_of_their_former_tenant(tiny):
    request = make_request("mine", make_prompt(9), sampler=RED, samples=16)
    fresh = run(start(tiny), request)
    used = start(tiny)
    used.load(BLUE, jax.tree.map(lambda leaf: np.full_like(leaf, np.nan), tiny.adapter(2)))
    run(used, make_request("nan", make_prompt(9), sampler=BLUE, samples=16))
    assert run(used, request).bits == fresh.bits and len(fresh.bits) == 16


@pytest.mark.slow
def test_samples_go_on_with_their_state_in_further_pages(tiny):
    request = make_request("many", make_prompt(40), sampler=RED, samples=12, max_tokens=60)
    results = run(start(tiny), request)
    for index in range(12):
        sequence = results.sequence("many", index)
        np.testing.assert_allclose(
            sequence.logprobs, compute_trained_logprobs(tiny, request, sequence.tokens), atol=1e-5
        )
    assert len({tuple(tokens) for tokens in results.tokens.values()}) == 12


@pytest.mark.parametrize("free_mib", [1, 4, 8, 16, 64])
def test_states_count_in_the_memory_of_the_cache(tiny, free_mib):
    config = JaxConfig(max_context_length=1024, sample_slots=16, prefill_chunk_tokens=128)
    planned = plan_samples(tiny.params, tiny.config, config, free_mib * 2**20)

    def cache_bytes(num_pages: int, num_states: int) -> int:
        shapes = models.describe_cache(tiny.params, tiny.config, num_pages, num_states)
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))

    page, state = cache_bytes(1, 0), cache_bytes(0, 1)
    assert state > 20 * page // planned.page, "a state is as large as many positions"
    assert planned.state_tokens * (page // planned.page) >= state
    share, in_slice = memory.SAMPLE_SHARE * free_mib * 2**20, config.sample_slots * state  # copies of all rows' states
    if (1 + config.sample_slots + MAX_PROMPTS) * state + in_slice > share:
        assert planned.tokens == 1 and free_mib <= 4, "the states alone are too large"
    else:
        cache = cache_bytes(planned.num_pages, planned.num_states)
        assert planned.tokens > 1 and cache + in_slice <= share and free_mib > 1
        assert planned.num_states > 1 + config.sample_slots + 4 or planned.prefix_tokens < 2 * planned.state_tokens


def test_a_model_without_attention_has_a_memory_plan(tmp_path):
    model = load_model(write_model(tmp_path / "model", HYBRID, num_layers=2))
    assert plan_samples(model.params, model.config, TINY_CONFIG.model_copy(update={"max_sample_tokens": None}))
