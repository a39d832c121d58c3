"""Recurrent states that the prefix cache keeps, tested on fake programs.

The fake fails if a chunk or a sample starts from a state that does not match the keys before it.
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from skyrl_tx.backends.jax.config import JaxConfig
from skyrl_tx.backends.jax.sample.scheduler import SampleScheduler
from skyrl_tx.backends.jax.shapes import SampleMemory
from skyrl_tx.contract.requests import PromptOptions
from tests.support.fake_model_runner import FakeModelRunner
from tests.support.sample_requests import BLUE, RED, make_prompt, make_request, run

CONFIG = JaxConfig(sample_slots=8, decode_slice_tokens=4, prefill_tokens=64, prefill_chunk_tokens=32)
STATE = 40
MEMORY = SampleMemory(8, 8 * 256, prefix_tokens=2048, max_length=512, state_tokens=STATE, page=16)
SYSTEM = make_prompt(70)


def start(programs: FakeModelRunner, memory: SampleMemory = MEMORY) -> SampleScheduler:
    scheduler = SampleScheduler(programs, CONFIG, memory, ())
    scheduler.load(RED, 1)
    scheduler.load(BLUE, 2)
    return scheduler


def count_hits(prompts: Mapping[str, np.ndarray], memory: SampleMemory = MEMORY) -> dict[str, int]:
    """Return how many tokens of each prompt came from the cache.

    Check that hits change no bit and that the cache stays within its limit.
    """
    programs, hits = FakeModelRunner(), {}
    scheduler = start(programs, memory)
    for name, prompt in prompts.items():
        request = make_request(name, prompt, sampler=RED, samples=2)
        results = run(scheduler, request)
        fresh = start(FakeModelRunner(), replace(memory, prefix_tokens=0))
        assert results.bits == run(fresh, request).bits, name
        hits |= results.cache_hits
    assert scheduler.meters().prefix_cache_tokens <= memory.prefix_tokens
    return hits


def join(*parts: np.ndarray) -> np.ndarray:
    return np.concatenate(parts)


def test_a_turn_of_a_conversation_continues_after_the_last_whole_chunk_of_the_turn_before():
    text = make_prompt(250)
    assert count_hits({f"turn {size}": text[:size] for size in (20, 50, 64, 97, 180, 181, 250)}) == {
        "turn 64": 32,
        "turn 97": 64,
        "turn 180": 96,
        "turn 181": 160,
        "turn 250": 160,
    }


def test_questions_after_a_system_prompt_begin_where_the_first_two_parted():
    prompts = {f"question {n}": join(SYSTEM, make_prompt(50 + n, seed=n)) for n in range(1, 5)}
    assert count_hits(prompts) == {"question 3": 64, "question 4": 64}


def test_a_short_question_needs_no_other_before_it():
    prompts = {f"question {n}": join(SYSTEM, make_prompt(9 + n, seed=n)) for n in range(1, 3)}
    assert count_hits(prompts) == {"question 2": 64}


def test_branches_of_a_conversation_begin_where_the_first_left_it():
    """The first branch replaces the conversation that it continues, but keeps its initial state."""
    branches = {f"branch {n}": join(SYSTEM, make_prompt(100, seed=n)) for n in range(1, 4)}
    assert count_hits({"root": SYSTEM, **branches}) == dict.fromkeys(branches, 64)


def test_a_later_parting_is_kept_as_well():
    shared = join(SYSTEM, make_prompt(60, seed=1))
    prompts = {f"question {n}": join(SYSTEM, make_prompt(50 + n, seed=n)) for n in range(2, 4)}
    longer = {f"longer {n}": join(shared, make_prompt(70, seed=n)) for n in range(4, 7)}
    assert count_hits(prompts | longer) == {"longer 4": 64, "longer 5": 64, "longer 6": 128}


def test_without_room_for_states_only_equal_prompts_are_hits():
    prompts = {name: join(SYSTEM, make_prompt(20, seed=n)) for name, n in (("first", 1), ("alike", 2), ("equal", 2))}
    assert count_hits(prompts) == {"alike": 64, "equal": 90}
    assert count_hits(prompts, replace(MEMORY, prefix_tokens=96 + STATE)) == {"equal": 90}


def test_scored_prompts_keep_states_too():
    """As without scores, the second prompt shows where prompts differ."""
    scheduler, options = start(FakeModelRunner()), PromptOptions(logprobs=True)
    requests = [
        make_request(f"{n}", join(SYSTEM, make_prompt(50 + n, seed=n)), sampler=RED, max_tokens=1, options=options)
        for n in range(4)
    ]
    results = run(scheduler, *requests)
    assert results.cache_hits == {"0": 0, "1": 0, "2": 64, "3": 64}
    for request in requests:
        alone = run(start(FakeModelRunner(), replace(MEMORY, prefix_tokens=0)), request)
        np.testing.assert_array_equal(
            results.prompt(request.request_id).logprobs, alone.prompt(request.request_id).logprobs
        )


def test_states_of_other_samplers_and_of_scored_prompts_are_not_used():
    scheduler = start(FakeModelRunner())
    run(scheduler, make_request("red", SYSTEM, sampler=RED))
    longer = join(SYSTEM, make_prompt(20, seed=1))
    assert run(scheduler, make_request("blue", longer, sampler=BLUE)).cache_hits == {}
    scored = make_request("scored", longer, sampler=RED, options=PromptOptions(logprobs=True))
    assert run(scheduler, scored).cache_hits == {"scored": 0}
    assert run(scheduler, make_request("longer", longer, sampler=RED)).cache_hits == {"longer": 64}
    scheduler.drop(RED)
    scheduler.load(RED, 3)
    assert run(scheduler, make_request("again", longer, sampler=RED)).cache_hits == {}
    assert scheduler.meters().prefix_cache_tokens == 2 * (96 + 2 * STATE), "the prompts of blue and of the new red"


@pytest.mark.parametrize("prefix_tokens", [0, 200, 700])
def test_prompts_and_samples_share_the_states(prefix_tokens):
    """The memory is the smallest that a plan has.

    It holds the longest sample with its state, and the states of prompts and prefixes.
    """
    memory = replace(MEMORY, num_slots=2, tokens=256, max_length=256, prefix_tokens=prefix_tokens)
    scheduler = start(FakeModelRunner(), memory)
    sizes = (20, 240, 250, 200, 230, 30, 96, 97, 128, 33, 240, 99)
    requests = [
        make_request(
            f"{n}", join(SYSTEM[:size], make_prompt(size, seed=n))[:size], samples=1 + n % 3, max_tokens=1 + n % 5
        )
        for n, size in enumerate(sizes)
    ]
    results = run(scheduler, *requests)

    assert scheduler.meters().kv_cache_tokens_used == 0
    assert scheduler.meters().prefix_cache_tokens <= prefix_tokens
    for request in requests:
        for index in range(request.num_samples):
            assert len(results.tokens[request.request_id, index]) == request.params.max_tokens
