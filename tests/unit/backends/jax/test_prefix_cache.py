"""Which of the prompts computed lately spares how much of another."""

import jax.numpy as jnp
import numpy as np

from skyrl_tx.backends.jax.chunks import Chunks
from skyrl_tx.backends.jax.prefix_cache import ComputedPrompt, PrefixCache
from skyrl_tx.contract.ids import SamplerId
from skyrl_tx.layers import kv_cache

RED, BLUE = SamplerId("red"), SamplerId("blue")
CHUNKS = Chunks(size=4, longest=32)


def prompt(*tokens: int, room: int = 8) -> ComputedPrompt:
    keys = kv_cache.allocate(1, 1, 1, room, 1, jnp.dtype("float32"))
    return ComputedPrompt(np.array(tokens, np.int32), keys, jnp.zeros((1, 1)))


def ask(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def test_whole_chunks_of_another_prompt_and_all_of_an_equal_one():
    cache, kept = PrefixCache(64, CHUNKS), prompt(1, 2, 3, 4, 5, 6, 7, 8, 9, room=16)
    cache.add(RED, kept)
    assert cache.find(RED, ask(1, 2, 3, 4, 5, 6, 7, 8, 9)) == (kept, 9)
    assert cache.find(RED, ask(1, 2, 3, 4, 5, 6, 7, 0)) == (kept, 4)
    assert cache.find(RED, ask(1, 2, 3, 4, 5, 6, 7, 8, 0)) == (kept, 8)
    assert cache.find(RED, ask(1, 2, 3, 4, 5, 6, 7, 8)) == (kept, 4), "its last token has to be computed"
    assert cache.find(RED, ask(1, 2, 3, 0, 5)) is None
    assert cache.find(RED, ask(7)) is None
    assert cache.find(BLUE, kept.tokens) is None and cache.find(None, kept.tokens) is None


def test_the_best_is_taken():
    cache, first, second = PrefixCache(64, CHUNKS), prompt(1, 1, 1, 1, 2, 2), prompt(1, 1, 1, 1, 3, 3, 3, 3)
    cache.add(None, first)
    cache.add(None, second)
    assert cache.find(None, ask(1, 1, 1, 1, 3, 3, 3, 3, 3)) == (second, 8)


def test_the_least_recently_used_goes_first_and_the_bound_holds():
    cache, prompts = PrefixCache(16, CHUNKS), [prompt(each, 1, 1, 1, 1) for each in range(3)]
    cache.add(RED, prompts[0])
    cache.add(BLUE, prompts[1])
    assert cache.find(RED, prompts[0].tokens)
    cache.add(RED, prompts[2])
    assert cache.num_tokens == 16
    assert cache.find(BLUE, prompts[1].tokens) is None and cache.find(RED, prompts[0].tokens)
    cache.add(RED, prompt(*range(20), room=32))
    assert cache.num_tokens == 16, "what can never fit drives nobody out"


def test_a_prompt_takes_the_place_of_those_that_it_goes_on_from():
    cache, turns = PrefixCache(64, CHUNKS), [prompt(*range(1, end)) for end in (6, 8, 9)]
    for turn in turns:
        cache.add(RED, turn)
    cache.add(BLUE, turns[0])
    assert cache.num_tokens == 16
    assert cache.find(RED, ask(1, 2, 3, 4, 5)) == (turns[2], 4)


def test_a_dropped_sampler_leaves_nothing():
    cache = PrefixCache(64, CHUNKS)
    for sampler in (RED, BLUE, None):
        cache.add(sampler, prompt(1, 2, 3, 4, 5))
    cache.drop(RED)
    assert cache.num_tokens == 16 and cache.find(RED, ask(1, 2, 3, 4, 5)) is None


def test_none_is_kept_without_room():
    cache = PrefixCache(0, CHUNKS)
    cache.add(None, prompt(1, 2, 3, 4, 5))
    assert cache.find(None, ask(1, 2, 3, 4, 5)) is None
