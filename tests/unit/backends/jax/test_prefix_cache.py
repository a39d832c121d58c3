"""Hits and evictions of the prefix cache."""

import numpy as np

from skyrl_tx.backends.jax.sample.prefix_cache import ComputedPrompt, PrefixCache, PromptSource
from skyrl_tx.backends.jax.sample.running import PromptKV
from skyrl_tx.backends.jax.shapes import PrefillShapes
from skyrl_tx.contract.ids import SamplerId

RED, BLUE, BASE = PromptSource(SamplerId("red")), PromptSource(SamplerId("blue")), PromptSource(None)
SHAPES = PrefillShapes(chunk_size=4, longest=32)


def prompt(*tokens: int, length: int = 8, states: dict[int, object] | None = None) -> ComputedPrompt:
    return ComputedPrompt(np.array(tokens, np.int32), PromptKV(None, length), None, states or {})


def ask(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def test_a_hit_uses_whole_chunks_of_another_prompt_or_all_of_an_equal_prompt():
    cache, kept = PrefixCache(64, SHAPES), prompt(1, 2, 3, 4, 5, 6, 7, 8, 9, length=16)
    cache.add(RED, kept)
    assert cache.find(RED, ask(1, 2, 3, 4, 5, 6, 7, 8, 9)) == (kept, 9)
    assert cache.find(RED, ask(1, 2, 3, 4, 5, 6, 7, 0)) == (kept, 4)
    assert cache.find(RED, ask(1, 2, 3, 4, 5, 6, 7, 8, 0)) == (kept, 8)
    assert cache.find(RED, ask(1, 2, 3, 4, 5, 6, 7, 8)) == (kept, 4), "its last token has to be computed"
    assert cache.find(RED, ask(1, 2, 3, 0, 5)) is None
    assert cache.find(RED, ask(7)) is None
    assert cache.find(BLUE, kept.tokens) is None and cache.find(BASE, kept.tokens) is None


def test_the_longest_prefix_is_used():
    cache, first, second = PrefixCache(64, SHAPES), prompt(1, 1, 1, 1, 2, 2), prompt(1, 1, 1, 1, 3, 3, 3, 3)
    cache.add(BASE, first)
    cache.add(BASE, second)
    assert cache.find(BASE, ask(1, 1, 1, 1, 3, 3, 3, 3, 3)) == (second, 8)


def test_the_least_recently_used_prompt_is_evicted_at_the_limit():
    cache, prompts = PrefixCache(16, SHAPES), [prompt(each, 1, 1, 1, 1) for each in range(3)]
    cache.add(RED, prompts[0])
    cache.add(BLUE, prompts[1])
    assert cache.find(RED, prompts[0].tokens)
    cache.add(RED, prompts[2])
    assert cache.num_tokens == 16
    assert cache.find(BLUE, prompts[1].tokens) is None and cache.find(RED, prompts[0].tokens)
    cache.add(RED, prompt(*range(20), length=32))
    assert cache.num_tokens == 16, "a prompt that can never fit evicts no other"


def test_a_prompt_replaces_its_own_prefixes():
    cache, turns = PrefixCache(64, SHAPES), [prompt(*range(1, end)) for end in (6, 8, 9)]
    for turn in turns:
        cache.add(RED, turn)
    cache.add(BLUE, turns[0])
    assert cache.num_tokens == 16
    assert cache.find(RED, ask(1, 2, 3, 4, 5)) == (turns[2], 4)


def test_scopes_do_not_meet():
    cache, ann, bob = PrefixCache(64, SHAPES), RED._replace(cache_scope="ann"), RED._replace(cache_scope="bob")
    cache.add(ann, prompt(1, 2, 3, 4, 5))
    for source in (bob, RED):
        assert cache.find(source, ask(1, 2, 3, 4, 5)) is None and cache.find(source, ask(1, 2, 3, 4, 6)) is None
    cache.add(bob, prompt(1, 2, 3, 4, 5, 6))
    assert cache.find(ann, ask(1, 2, 3, 4, 5)) is not None, "a longer prompt of another scope does not replace it"
    cache.drop(RED.sampler)
    assert cache.num_tokens == 0


def test_dropping_a_sampler_evicts_its_prompts():
    cache = PrefixCache(64, SHAPES)
    for source in (RED, BLUE, BASE):
        cache.add(source, prompt(1, 2, 3, 4, 5))
    cache.drop(RED.sampler)
    assert cache.num_tokens == 16 and cache.find(RED, ask(1, 2, 3, 4, 5)) is None


def test_a_cache_of_size_zero_stores_nothing():
    cache = PrefixCache(0, SHAPES)
    cache.add(BASE, prompt(1, 2, 3, 4, 5))
    assert cache.find(BASE, ask(1, 2, 3, 4, 5)) is None


def test_with_state_a_hit_ends_where_a_state_is_kept():
    cache = PrefixCache(64, SHAPES, state_tokens=10)
    kept = prompt(1, 2, 3, 4, 5, 6, 7, 8, 9, length=16, states={8: object()})
    cache.add(RED, kept)
    assert cache.find(RED, kept.tokens) == (kept, 9)
    assert cache.find(RED, ask(1, 2, 3, 4, 5, 6, 7, 8, 0)) == (kept, 8)
    other = ask(1, 2, 3, 4, 5, 6, 7, 0)
    assert cache.find(RED, other) is None and cache.find_parting(RED, other) == 4
    assert cache.find(BLUE, ask(1, 2, 3, 4, 5, 6, 7, 8, 0)) is None and cache.find_parting(BLUE, other) == 0


def test_with_state_the_longest_kept_prefix_is_used():
    cache, first = PrefixCache(64, SHAPES, state_tokens=1), prompt(1, 1, 1, 1, 2, 2, 2, 2, 2, states={4: object()})
    cache.add(BASE, first)
    cache.add(BASE, prompt(1, 1, 1, 1, 2, 2, 2, 2, 3))
    assert cache.find(BASE, ask(1, 1, 1, 1, 2, 2, 2, 2, 4)) == (first, 4)
    assert cache.find_parting(BASE, ask(1, 1, 1, 1, 2, 2, 2, 2, 4)) == 8


def test_states_count_at_their_size_and_leave_with_their_prompts():
    cache, state = PrefixCache(64, SHAPES, state_tokens=10), object()
    cache.add(RED, prompt(1, 1, 1, 1, 2, states={4: state}))
    assert cache.num_tokens == 28, "a buffer with its own state, and one more"
    cache.add(RED, prompt(1, 1, 1, 1, 3, states={4: state}))
    assert cache.num_tokens == 46, "the state is the same for both"
    cache.add(RED, prompt(2, 1, 1, 1, 3, states={4: object()}))
    assert cache.num_tokens == 56
    assert cache.find(RED, ask(2, 1, 1, 1, 2)) is not None and cache.find(RED, ask(1, 1, 1, 1, 2)) is not None
    cache.add(BLUE, prompt(1, 1, 1, 1, 2, states={4: object()}))
    assert cache.num_tokens == 56 and cache.find(RED, ask(2, 1, 1, 1, 2)) is None
    cache.add(RED, prompt(3, 1, 1, 1, 3, length=56))
    assert cache.num_tokens == 56 and cache.find(RED, ask(3, 1, 1, 1, 3)) is None, "too large with its state"


def test_with_state_a_prompt_replaces_its_own_prefixes():
    cache, turns = PrefixCache(64, SHAPES, state_tokens=1), [prompt(1, 2, 3, 4, *range(end)) for end in (2, 4)]
    for turn in turns:
        cache.add(RED, turn)
    assert cache.num_tokens == 9 and cache.find(RED, turns[1].tokens) == (turns[1], 8)
