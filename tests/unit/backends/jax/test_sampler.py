"""Continuous batching over a tiny model: every sample is what its request alone decides."""

from collections import defaultdict
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from skyrl_tx import models
from skyrl_tx.backends.jax.config import JaxConfig
from skyrl_tx.backends.jax.sampler import Sampler
from skyrl_tx.backends.jax.slots import CacheShape
from skyrl_tx.contract.batches import PreparedSampleBatch, SampleRequest
from skyrl_tx.contract.errors import CapacityError, UserError
from skyrl_tx.contract.ids import RequestId, SamplerId
from skyrl_tx.contract.requests import PromptOptions, SamplingParams
from skyrl_tx.contract.results import SampledSequence

EOS = 1
CONFIG = JaxConfig(
    sample_slots=16,
    max_sample_tokens=16 * 160,
    decode_slice_tokens=4,
    prefill_tokens=96,
    max_sampler_adapters=2,
    max_lora_rank=4,
    max_topk_logprobs=3,
)
LENGTH = 160
RED, BLUE = SamplerId("red"), SamplerId("blue")


def prompt_of(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(2, 256, length, dtype=np.int32)


def ask(name: str, prompt, *, sampler=None, samples=1, options=None, eos_stops=False, **params) -> SampleRequest:
    return SampleRequest(
        request_id=RequestId(name),
        sampler=sampler,
        prompt=prompt,
        num_samples=samples,
        params=SamplingParams(**{"seed": 3, "max_tokens": 12, "eos_stops": eos_stops, **params}),
        options=options or PromptOptions(),
    )


@pytest.fixture
def sampler(tiny) -> Sampler:
    made = Sampler(tiny.params, tiny.config, CONFIG, [EOS])
    made.load(RED, tiny.adapter(1))
    made.load(BLUE, tiny.adapter(2))
    return made


class Collected:
    """Deltas put together again, in the order they came."""

    def __init__(self) -> None:
        self.parts = defaultdict(list)

    def add(self, deltas) -> None:
        for delta in deltas:
            key = (delta.request_id, delta.index)
            assert not self.parts[key] or self.parts[key][-1].stop_reason is None, "a delta after the last"
            assert delta.error is None
            self.parts[key].append(delta)

    def sequence(self, name: str, index: int = 0) -> SampledSequence:
        parts = self.parts[name, index]
        assert parts[-1].stop_reason is not None, "the sample has not ended"
        return SampledSequence(
            tokens=np.concatenate([part.tokens for part in parts]),
            logprobs=np.concatenate([part.logprobs for part in parts]),
            stop_reason=parts[-1].stop_reason,
        )

    def prompt(self, name: str):
        return self.parts[name, 0][0].prompt


def run(sampler: Sampler, *requests: SampleRequest, into: Collected | None = None) -> Collected:
    collected = into or Collected()
    sampler.begin(PreparedSampleBatch(requests=requests))
    while deltas := sampler.step():
        collected.add(deltas)
    return collected


@partial(jax.jit, static_argnames="config")
def all_logprobs(params, config, tokens, adapter):
    hidden = models.forward(params, config, tokens[None], adapter)
    return jax.nn.log_softmax(models.logits(params, hidden, adapter)[0])


@partial(jax.jit, static_argnames="config")
def trained_logprobs(params, config, tokens, adapter):
    hidden = models.forward(params, config, tokens[None, :-1], adapter)
    return models.target_logprobs(params, hidden, tokens[None, 1:], adapter)[0]


def trainer(tiny, request: SampleRequest, new_tokens, adapter) -> np.ndarray:
    """What training would say of every token but the first."""
    tokens = np.concatenate([request.prompt, new_tokens])
    padded = np.pad(tokens, (0, LENGTH + 1 - tokens.size))
    return np.asarray(trained_logprobs(tiny.params, tiny.config, padded, adapter))[: tokens.size - 1]


def greedy(tiny, prompt, num: int, adapter) -> list[int]:
    """Decode by running the whole row again for each token."""
    tokens = prompt.tolist()
    for _ in range(num):
        padded = np.pad(np.array(tokens, np.int32), (0, -len(tokens) % LENGTH))
        tokens.append(int(np.argmax(all_logprobs(tiny.params, tiny.config, padded, adapter)[len(tokens) - 1])))
    return tokens[prompt.size :]


def test_greedy_equals_a_full_forward_for_each_token_with_adapters_side_by_side(tiny, sampler):
    requests = [
        ask("base", prompt_of(5), temperature=0.0),
        ask("red", prompt_of(40, seed=1), sampler=RED, temperature=0.0),
        ask("blue", prompt_of(17, seed=2), sampler=BLUE, temperature=0.0, max_tokens=23),
    ]
    got = run(sampler, *requests)
    for request, adapter in zip(requests, [None, tiny.adapter(1), tiny.adapter(2)], strict=True):
        sequence = got.sequence(request.request_id)
        assert sequence.tokens.tolist() == greedy(tiny, request.prompt, request.params.max_tokens, adapter)
        assert sequence.stop_reason == "length"
        expected = trainer(tiny, request, sequence.tokens, adapter)[request.prompt.size - 1 :]
        np.testing.assert_allclose(sequence.logprobs, expected, atol=1e-5)


def test_trainer_and_sampler_agree_on_drawn_tokens_to_the_end_of_the_cache(tiny, sampler):
    request = ask("red", prompt_of(40), sampler=RED, samples=3, max_tokens=LENGTH - 40)
    got = run(sampler, request)
    sequences = [got.sequence("red", index) for index in range(3)]
    for sequence in sequences:
        assert sequence.tokens.size == LENGTH - 40
        expected = trainer(tiny, request, sequence.tokens, tiny.adapter(1))[39:]
        np.testing.assert_allclose(sequence.logprobs, expected, atol=1e-5)
    assert len({sequence.tokens.tobytes() for sequence in sequences}) == 3


def test_trainer_and_sampler_agree_where_rows_grow_beside_filters_and_topk(tiny):
    config = CONFIG.model_copy(update={"sample_slots": 8, "max_sample_tokens": 8 * 64, "max_context_length": LENGTH})
    sampler = Sampler(tiny.params, tiny.config, config, [])
    adapters = {RED: tiny.adapter(1), BLUE: tiny.adapter(2)}
    for name, adapter in adapters.items():
        sampler.load(name, adapter)
    topk = PromptOptions(sample_topk=2)
    requests = [
        ask("red", prompt_of(40), sampler=RED, samples=3, max_tokens=60, top_p=0.7, options=topk),
        ask("blue", prompt_of(33), sampler=BLUE, samples=3, max_tokens=60, top_k=3),
    ]
    assert sampler._rows.shape == CacheShape(8, 64)
    got = run(sampler, *requests)
    assert sampler._rows.shape == CacheShape(4, 128)
    for request in requests:
        adapter, first = adapters[request.sampler], request.prompt.size - 1
        for index in range(3):
            sequence = got.sequence(request.request_id, index)
            expected = trainer(tiny, request, sequence.tokens, adapter)[first:]
            np.testing.assert_allclose(sequence.logprobs, expected, rtol=1e-5, atol=1e-5)
            padded = np.pad(np.concatenate([request.prompt, sequence.tokens]), (0, LENGTH - first - 61))
            every = np.asarray(all_logprobs(tiny.params, tiny.config, padded, adapter))
            likeliest = -np.sort(-every[first : first + 60])[:, :3]
            if request.sampler == BLUE:
                assert (sequence.logprobs >= likeliest[:, 2] * (1 + 1e-5) - 1e-5).all()
            else:
                told = np.concatenate([part.topk.logprobs for part in got.parts["red", index]])
                np.testing.assert_allclose(told, likeliest[:, :2], rtol=1e-5, atol=1e-5)


def test_who_comes_while_the_first_prompts_are_computed_joins_their_first_slice(sampler):
    def begin(name: str) -> None:
        sampler.begin(PreparedSampleBatch(requests=(ask(name, prompt_of(9), max_tokens=6),)))

    def step() -> dict[str, int]:
        new: dict[str, int] = defaultdict(int)
        for delta in sampler.step():
            new[delta.request_id] += delta.tokens.size
        return new

    begin("first")
    assert step() == {"first": 1}
    begin("second")
    assert step() == {"first": 4, "second": 5}
    begin("third")
    assert step() == {"first": 1, "second": 1, "third": 5}
    assert step() == {"third": 1}
    assert step() == {}
    begin("alone")
    assert [step(), step(), step()] == [{"alone": 1}, {"alone": 4}, {"alone": 1}]


@pytest.mark.parametrize("adapter", [None, RED])
def test_company_changes_no_bit(sampler, adapter):
    request = ask("mine", prompt_of(9), sampler=adapter, samples=3, temperature=0.9, max_tokens=20)
    alone = run(sampler, request)
    others = [
        ask("base", prompt_of(33, seed=1), temperature=0.0, max_tokens=30),
        ask("red", prompt_of(6, seed=2), sampler=RED, samples=4, top_k=3, seed=3),
        ask("blue", prompt_of(70, seed=3), sampler=BLUE, samples=2, top_p=0.5, options=PromptOptions(sample_topk=2)),
    ]
    collected = Collected()
    sampler.begin(PreparedSampleBatch(requests=tuple(others)))
    collected.add(sampler.step())
    run(sampler, request, into=collected)
    for index in range(3):
        mine, theirs = alone.sequence("mine", index), collected.sequence("mine", index)
        assert mine.tokens.tolist() == theirs.tokens.tolist()
        assert mine.logprobs.tobytes() == theirs.logprobs.tobytes()


def test_a_longer_sample_beside_it_changes_no_more_than_rounding(sampler):
    request = ask("mine", prompt_of(9), sampler=RED, samples=3)
    alone = run(sampler, request)
    got = run(sampler, ask("long", prompt_of(130, seed=1), max_tokens=20), request)  # more of the cache is read
    for index in range(3):
        mine, theirs = alone.sequence("mine", index), got.sequence("mine", index)
        assert mine.tokens.tolist() == theirs.tokens.tolist()
        np.testing.assert_allclose(mine.logprobs, theirs.logprobs, atol=1e-5)


def test_more_samples_than_slots_take_turns(sampler):
    request = ask("many", prompt_of(9), samples=19, max_tokens=6)
    got = run(sampler, request)
    sequences = [got.sequence("many", index) for index in range(19)]
    assert all(sequence.tokens.size == 6 for sequence in sequences)
    assert len({sequence.tokens.tobytes() for sequence in sequences}) == 19
    few = run(sampler, replace(request, num_samples=2))
    assert few.sequence("many", 1).tokens.tolist() == sequences[1].tokens.tolist()


def test_a_sample_ends_after_its_stop_token_which_stays_once(sampler):
    free = run(sampler, ask("free", prompt_of(9), max_tokens=20)).sequence("free").tokens.tolist()
    stop = next(token for token in free[5:] if token not in free[:5])
    cut = run(sampler, ask("cut", prompt_of(9), max_tokens=20, stop_token_ids=(stop, 999))).sequence("cut")
    assert cut.tokens.tolist() == free[: free.index(stop) + 1]
    assert cut.stop_reason == "stop"
    first = run(sampler, ask("first", prompt_of(9), stop_token_ids=(free[0],))).sequence("first")
    assert (first.tokens.tolist(), first.stop_reason) == (free[:1], "stop")


def test_eos_stops_unless_nothing_shall(tiny):
    prompt = prompt_of(9)
    eos = greedy(tiny, prompt, 3, None)[-1]
    sampler = Sampler(tiny.params, tiny.config, CONFIG, [eos])
    got = run(
        sampler,
        ask("stops", prompt, temperature=0.0, eos_stops=True, stop_token_ids=(999,)),
        ask("goes on", prompt, temperature=0.0),
    )
    assert got.sequence("stops").tokens.tolist() == greedy(tiny, prompt, 3, None)
    assert got.sequence("goes on").tokens.size == 12


def test_cancelled_requests_leave_at_once_and_others_do_not_notice(sampler):
    keep = ask("keep", prompt_of(9), samples=2)
    alone = run(sampler, keep)
    gone = [
        ask("running", prompt_of(20), samples=9),
        ask("half in", prompt_of(20), samples=9),
        ask("queued", prompt_of(5)),
    ]
    collected = Collected()
    sampler.begin(PreparedSampleBatch(requests=(keep, *gone)))
    collected.add(sampler.step())
    sampler.cancel([request.request_id for request in gone])
    before = {key for key in collected.parts if key[0] != "keep"}
    while deltas := sampler.step():
        assert {delta.request_id for delta in deltas} == {"keep"}
        collected.add(deltas)
    assert ("running", 8) in before and ("half in", 8) in before and ("queued", 0) not in before
    for index in range(2):
        assert collected.sequence("keep", index).tokens.tolist() == alone.sequence("keep", index).tokens.tolist()
    sampler.drop(RED)  # nothing is left that holds it


def test_a_sample_that_is_ended_makes_room_in_the_next_step(sampler):
    request = ask("many", prompt_of(9), samples=20, max_tokens=60)  # four wait for a slot
    alone = run(sampler, request)
    collected = Collected()
    sampler.begin(PreparedSampleBatch(requests=(request,)))
    collected.add(sampler.step())
    for index in (0, 3, 15, 19, 19, 99):
        sampler.end(RequestId("many"), index)
    assert len(sampler._rows.slots.free) == 3
    deltas = sampler.step()
    assert {delta.index for delta in deltas} == set(range(19)) - {0, 3, 15}
    collected.add(deltas)
    while deltas := sampler.step():
        collected.add(deltas)
    for index in (1, 18):
        assert collected.sequence("many", index).tokens.tolist() == alone.sequence("many", index).tokens.tolist()


def test_loading_copies_and_slots_are_used_again(tiny, sampler):
    request = ask("r", prompt_of(9), sampler=RED, temperature=0.0)
    before = run(sampler, request).sequence("r")
    with pytest.raises(CapacityError):
        sampler.load(SamplerId("third"), tiny.adapter(3))
    sampler.drop(BLUE)
    sampler.drop(BLUE)
    third = jax.tree.map(jnp.array, tiny.adapter(3))
    sampler.load(SamplerId("third"), third)
    jax.tree.map(lambda leaf: leaf.delete(), third)
    got = run(sampler, request, ask("t", prompt_of(9), sampler=SamplerId("third"), temperature=0.0))
    assert got.sequence("r").tokens.tolist() == before.tokens.tolist()
    assert got.sequence("t").tokens.tolist() == greedy(tiny, prompt_of(9), 12, tiny.adapter(3))


def test_nan_of_one_adapter_stays_there(tiny, sampler):
    sampler.drop(BLUE)
    sampler.load(BLUE, jax.tree.map(lambda leaf: np.full_like(leaf, np.nan), tiny.adapter(2)))
    request = ask("mine", prompt_of(9), sampler=RED)
    alone = run(sampler, request).sequence("mine")
    got = run(sampler, ask("nan", prompt_of(9), sampler=BLUE, samples=15), request)
    assert got.sequence("mine").tokens.tolist() == alone.tokens.tolist()
    np.testing.assert_allclose(got.sequence("mine").logprobs, alone.logprobs, atol=1e-5)  # its tile holds both
    after = run(sampler, ask("mine", prompt_of(9), sampler=RED, samples=16))  # every slot, those that held NaN too
    assert all(np.isfinite(after.sequence("mine", index).logprobs).all() for index in range(16))


def test_what_can_never_fit_is_refused_before_anything_is_queued(sampler):
    good, bad = ask("good", prompt_of(9)), ask("bad", prompt_of(90), max_tokens=423)
    with pytest.raises(UserError, match="90 tokens and max_tokens 423 make 513, more than the 512"):
        sampler.begin(PreparedSampleBatch(requests=(good, bad)))
    assert sampler.step() == []


def test_a_request_longer_than_a_slot_gets_fewer_and_longer_slots(tiny, sampler):
    before = ask("before", prompt_of(9), temperature=0.0)
    long = ask("long", prompt_of(150, seed=1), samples=9, temperature=0.0, max_tokens=14)  # eight slots of 320
    after = ask("after", prompt_of(9), temperature=0.0)
    got = run(sampler, before, long, after)
    assert got.sequence("before").tokens.tolist() == got.sequence("after").tokens.tolist()
    expected = greedy(tiny, long.prompt, 14, None)
    assert [got.sequence("long", index).tokens.tolist() for index in range(9)] == [expected] * 9


def test_sample_topk_comes_with_every_token(sampler):
    request = ask("topk", prompt_of(9), temperature=0.0, options=PromptOptions(sample_topk=2))
    got = run(sampler, request)
    parts = got.parts["topk", 0]
    assert (
        np.concatenate([part.topk.token_ids[:, 0] for part in parts]).tolist() == got.sequence("topk").tokens.tolist()
    )
    np.testing.assert_array_equal(
        np.concatenate([part.topk.logprobs[:, 0] for part in parts]), got.sequence("topk").logprobs
    )
    assert parts[-1].topk.token_ids.shape[1] == 2


def test_scores_need_no_slot_and_pass_those_who_wait(sampler):
    long = ask("long", prompt_of(9), samples=20, max_tokens=60)
    sampler.begin(PreparedSampleBatch(requests=(long,)))
    sampler.step()
    score = ask("score", prompt_of(30), max_tokens=1, options=PromptOptions(logprobs=True))
    sampler.begin(PreparedSampleBatch(requests=(score,)))
    (delta,) = [delta for delta in sampler.step() if delta.request_id == "score"]
    assert delta.stop_reason == "length" and delta.tokens.size == 1 and delta.prompt.logprobs.size == 30


def test_parts_of_a_request_draw_what_the_whole_draws_to_the_bit(sampler):
    request = ask("a", prompt_of(40), sampler=RED, samples=20, max_tokens=9)
    whole, parts = run(sampler, request), Collected()
    for first, end in ((0, 1), (1, 3), (3, 12), (12, 18), (18, 19), (19, 20)):
        part = replace(request, first_index=first, num_samples=end - first)
        sampler.begin(PreparedSampleBatch(requests=(part,)))
        if first < 18:
            parts.add(sampler.step())
    assert len(sampler._prompts.new) == 1, "two parts of one prompt wait together"
    run(sampler, into=parts)
    for index in range(20):
        left, right = whole.sequence("a", index), parts.sequence("a", index)
        assert left.tokens.tobytes() == right.tokens.tobytes() and left.logprobs.tobytes() == right.logprobs.tobytes()
