"""Penalties, logit bias, min_tokens and constraints change the next logits as in vLLM."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest

from skyrl_tx import models
from skyrl_tx.backends.jax.sample.logit_adjustment import adjust_logits, make_adjustment
from skyrl_tx.backends.jax.sample.prefill import PrefillQueue
from skyrl_tx.backends.jax.sample.running_sample import RunningSample
from skyrl_tx.backends.jax.sample.scheduler import SampleScheduler
from skyrl_tx.backends.jax.sample.slice_rows import RowCounts
from skyrl_tx.contract.batches import SampleRequest
from skyrl_tx.contract.ids import RequestId
from skyrl_tx.contract.logit_adjuster import LogitAdjuster
from skyrl_tx.contract.requests import PromptOptions, SamplingControls
from tests.support.fast_jit import fast_jit
from tests.support.sample_requests import RED, Results, begin, make_prompt, make_request, run
from tests.support.tiny import TINY_CONFIG, TinyModel, make_model_runner

LENGTH = 160
"""Sequences are padded to this length for the full forward pass."""
STOPS = (7, 250)


class OddTokens:
    """A constraint: odd and even tokens alternate, starting with an odd one."""

    def __init__(self) -> None:
        self.num_accepted = 0

    def is_ready(self, timeout_s: float = 0.0) -> bool:
        return True

    def fill_mask(self, mask: np.ndarray) -> None:
        mask[:] = 0x55555555 if self.num_accepted % 2 else 0xAAAAAAAA

    def accept(self, token: int) -> None:
        assert token % 2 == 1 - self.num_accepted % 2
        self.num_accepted += 1


CONTROLS: dict[str, dict[str, Any]] = {
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.7},
    "negative": {"frequency_penalty": -2.0, "presence_penalty": -0.5},
    "repetition": {"repetition_penalty": 1.3},
    "less than one": {"repetition_penalty": 0.8},
    "bias": {"logit_bias": ((3, 4.0), (40, -100.0), (41, 3.5), (200, 0.5))},
    "all": {
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.1,
        "logit_bias": ((250, 100.0), (9, 1.0)),
        "min_tokens": 5,
    },
}


def change(logits_V: np.ndarray, prompt: list[int], new: list[int], controls: SamplingControls) -> np.ndarray:
    """Change logits one token at a time, as the documentation of vLLM says."""
    changed = logits_V.astype(np.float64)
    for token in range(changed.size):
        if len(new) < controls.min_tokens and token in STOPS:
            changed[token] = -np.inf
        changed[token] += dict(controls.logit_bias).get(token, 0.0)
        if token in prompt or token in new:
            is_positive = changed[token] > 0
            changed[token] *= 1 / controls.repetition_penalty if is_positive else controls.repetition_penalty
        changed[token] -= controls.frequency_penalty * new.count(token)
        changed[token] -= controls.presence_penalty * (token in new)
    return changed


def start(tiny: TinyModel, **changed: int) -> SampleScheduler:
    config = TINY_CONFIG.model_copy(update=changed)
    device = make_model_runner(tiny.params, tiny.config, config)
    scheduler = SampleScheduler(device, config, device.memory, ())
    scheduler.load(RED, tiny.adapter(1))
    return scheduler


def make_adjusted(name: str, prompt: np.ndarray, controls: dict[str, Any], **params: Any) -> SampleRequest:
    return make_request(name, prompt, controls=SamplingControls(**controls), stop_token_ids=STOPS, **params)


def constrain(request: SampleRequest) -> SampleRequest:
    return replace(request, make_constraint=OddTokens)


@partial(fast_jit, static_argnames="config")
def compute_all_logits(params, config, tokens, adapter):
    return models.logits(params, models.forward(params, config, tokens[None], adapter), adapter)[0]


def compute_logits(tiny: TinyModel, request: SampleRequest, new_tokens: np.ndarray) -> np.ndarray:
    """Return the logits at the position of every new token [T, V]."""
    tokens = np.concatenate([request.prompt, new_tokens])
    padded = np.pad(tokens, (0, LENGTH - tokens.size))
    adapter = tiny.adapter(1) if request.sampler == RED else jax.tree.map(np.zeros_like, tiny.adapter(0))
    found = compute_all_logits(tiny.params, tiny.config, padded, adapter)
    return np.asarray(found)[request.prompt.size - 1 : tokens.size - 1]


def check_sequence(tiny: TinyModel, request: SampleRequest, tokens: np.ndarray, logprobs: np.ndarray) -> None:
    """Compare log-probabilities, and the tokens of greedy samples, with the changed logits."""
    controls, temperature = request.params.controls, request.params.temperature
    assert isinstance(controls, SamplingControls)
    for index, logits_V in enumerate(compute_logits(tiny, request, tokens)):
        changed = change(logits_V, request.prompt.tolist(), tokens[:index].tolist(), controls)
        scaled = (changed - changed.max()) / (temperature or 1.0)
        assert logprobs[index] == pytest.approx(scaled[tokens[index]] - np.log(np.exp(scaled).sum()), abs=2e-5)
        if temperature == 0:
            assert changed[tokens[index]] > changed.max() - 1e-5


@pytest.mark.parametrize("name", CONTROLS)
def test_changed_logits_of_rows(name: str) -> None:
    draw, controls = np.random.default_rng(3), SamplingControls(**CONTROLS[name])
    logits_SV = (3 * draw.standard_normal((4, 300))).astype(np.float32)
    prompt, new = make_prompt(40), draw.integers(0, 300, 30).tolist()
    request = make_adjusted("r", prompt, CONTROLS[name], max_tokens=50)
    adjuster = LogitAdjuster(request, frozenset(STOPS), 300)
    adjuster.accept(new[:3])
    expected = change(logits_SV[1], prompt.tolist(), new[:3], controls)
    np.testing.assert_allclose(adjuster.adjust(logits_SV[1].astype(np.float64)), expected, atol=1e-12)

    adjuster.accept(new[3:])
    changed_SV = np.asarray(fast_jit(adjust_logits)(logits_SV, make_adjustment({1: adjuster}, 4, 300)))
    np.testing.assert_allclose(changed_SV[1], change(logits_SV[1], prompt.tolist(), new, controls), atol=1e-5)
    assert (changed_SV[[0, 2, 3]] == logits_SV[[0, 2, 3]]).all(), "other rows keep their bits"


def test_extreme_penalties_give_numbers() -> None:
    controls = {"repetition_penalty": 1e-38, "logit_bias": ((5, 100.0), (6, -100.0))}
    adjuster = LogitAdjuster(make_adjusted("r", np.array([5, 6], np.int32), controls), frozenset(), 64)
    changed_SV = np.asarray(
        fast_jit(adjust_logits)(np.ones((2, 64), np.float32), make_adjustment({0: adjuster}, 2, 64))
    )
    assert np.isfinite(changed_SV).all() and changed_SV[0].argmax() == 5


def test_constraint_and_min_tokens() -> None:
    """The stop tokens are not allowed before min_tokens, unless the constraint allows nothing else."""

    class OnlyStops(OddTokens):
        def fill_mask(self, mask: np.ndarray) -> None:
            mask[0] |= 1 << 7

    request = constrain(make_adjusted("r", make_prompt(3), {"min_tokens": 2}))
    allowed = np.isfinite(LogitAdjuster(request, frozenset(STOPS), 300).adjust(np.zeros(300)))
    assert np.flatnonzero(allowed).tolist() == [token for token in range(1, 300, 2) if token != 7]
    request = replace(request, make_constraint=OnlyStops)
    assert np.flatnonzero(np.isfinite(LogitAdjuster(request, frozenset(STOPS), 300).adjust(np.zeros(300)))) == [7]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_samples_follow_the_changed_distribution(tiny: TinyModel, temperature: float) -> None:
    scheduler = start(tiny)
    requests = [
        make_adjusted(
            name,
            make_prompt(5 + 3 * n, seed=n),
            controls,
            temperature=temperature,
            samples=1 + n % 2,
            sampler=RED if n % 3 else None,
            max_tokens=14,
        )
        for n, (name, controls) in enumerate(CONTROLS.items())
    ]

    plain = make_request("plain", make_prompt(9), max_tokens=14, temperature=temperature)
    results = run(scheduler, *requests, plain)
    for request in requests:
        for index in range(request.num_samples):
            sequence = results.sequence(request.request_id, index)
            check_sequence(tiny, request, sequence.tokens, sequence.logprobs)
    assert results.sequence("all").tokens[:5].tolist().count(250) == 0
    assert results.bits["plain", 0] == run(start(tiny), plain).bits["plain", 0]


def test_a_sample_does_not_depend_on_others(tiny: TinyModel) -> None:
    """Adjusted samples have the same bits alone and in company; so have their neighbours."""
    mine = [
        make_adjusted("all", make_prompt(9), CONTROLS["all"], max_tokens=20, samples=2),
        make_adjusted("early", make_prompt(20), {"min_tokens": 6}, max_tokens=20),
        constrain(make_adjusted("odd", make_prompt(12), {}, max_tokens=20)),
        make_adjusted("one", make_prompt(12), CONTROLS["bias"], max_tokens=1),
        make_request("plain", make_prompt(9), max_tokens=20, samples=3),
    ]
    alone = {key: bits for request in mine for key, bits in run(start(tiny), request).bits.items()}
    together = run(start(tiny), *mine)
    assert together.bits == alone
    odd = together.tokens["odd", 0]
    assert [token % 2 for token in odd] == [1 - n % 2 for n in range(len(odd))]


def test_raw_logprobs_are_those_of_the_model(tiny: TinyModel) -> None:
    """They ignore controls and temperature, change no token and no neighbour, and have the same bits in company."""
    adjusted = make_adjusted("all", make_prompt(9), CONTROLS["all"], max_tokens=20, temperature=0.7, samples=2)
    early = make_adjusted("early", make_prompt(20), {"min_tokens": 6}, max_tokens=20)
    tempered = [
        replace(adjusted, options=PromptOptions(sample_topk=3)),
        constrain(early),
        make_request("plain", make_prompt(9), max_tokens=20, samples=3, temperature=1.4, sampler=RED),
    ]
    raw = [
        replace(
            request,
            request_id=RequestId(f"raw {request.request_id}"),
            params=replace(request.params, raw_logprobs=True),
        )
        for request in tempered
    ]

    alone = {key: bits for request in [*tempered, *raw] for key, bits in run(start(tiny), request).bits.items()}
    together = run(start(tiny), *tempered, *raw)
    assert together.bits == alone

    for other, request in zip(tempered, raw, strict=True):
        for index in range(request.num_samples):
            sequence = together.sequence(request.request_id, index)
            assert sequence.tokens.tolist() == together.sequence(other.request_id, index).tokens.tolist()
            rows = np.asarray(jax.nn.log_softmax(compute_logits(tiny, request, sequence.tokens)))
            own = rows[np.arange(len(rows)), sequence.tokens]
            np.testing.assert_allclose(sequence.logprobs, own, rtol=0, atol=2e-5)
            if sequence.topk is not None:
                np.testing.assert_allclose(sequence.topk.logprobs, -np.sort(-rows, axis=1)[:, :3], rtol=0, atol=2e-5)


def test_preempted_samples_are_recomputed_with_the_same_bits(tiny: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve samples need two pages each, but the cache has only 14 pages."""
    penalties = SamplingControls(frequency_penalty=1.0, repetition_penalty=1.1)
    requests = [
        make_request("all", make_prompt(40), controls=penalties, samples=6, max_tokens=34),
        make_request("early", make_prompt(40), controls=SamplingControls(min_tokens=9), samples=6, max_tokens=34),
    ]
    ample = run(start(tiny), *requests)
    config = TINY_CONFIG.model_copy(update={"prefix_cache_tokens": 0})
    device = make_model_runner(tiny.params, tiny.config, config)
    few = SampleScheduler(device, config, replace(device.memory, num_slots=12, tokens=7 * 64, prefix_tokens=0), ())
    preempted, preempt = set[str](), PrefillQueue.preempt

    def record(queue: PrefillQueue, sample: RunningSample) -> None:
        preempted.add(sample.request.request_id)
        preempt(queue, sample)

    monkeypatch.setattr(PrefillQueue, "preempt", record)
    assert run(few, *requests).bits == ample.bits
    assert "all" in preempted


def test_running_ahead_changes_no_sample(tiny: TinyModel) -> None:
    """Slices of adjusted samples run between plain slices, which are dispatched ahead."""
    requests = [
        make_adjusted("all", make_prompt(9), CONTROLS["all"], max_tokens=30),
        make_adjusted("early", make_prompt(20), {"min_tokens": 6}, max_tokens=40, samples=2),
        constrain(make_adjusted("odd", make_prompt(12), {}, max_tokens=20)),
        make_request("plain", make_prompt(9), max_tokens=50),
    ]
    ahead = start(tiny, sample_slots=8)
    device = ahead._programs
    device._is_single_cpu, device.runs_ahead, device._counts = False, True, RowCounts([8])
    assert run(ahead, *requests).tokens == run(start(tiny, sample_slots=8), *requests).tokens


def test_a_sample_is_adjusted_only_until_min_tokens(tiny: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until then a sample takes single steps, and afterwards it shares a slice with plain samples."""
    scheduler, slices = start(tiny), list[tuple[list[str], int]]()
    dispatch: Callable[..., Any] = scheduler._programs.dispatch

    def record(samples: Any, num_steps: int) -> Any:
        slices.append((sorted(sample.key[0] for sample in samples), num_steps))
        return dispatch(samples, num_steps)

    monkeypatch.setattr(scheduler._programs, "dispatch", record)
    run(
        scheduler,
        make_adjusted("early", make_prompt(5), {"min_tokens": 3}, max_tokens=12),
        make_request("plain", make_prompt(6), max_tokens=12, stop_token_ids=STOPS),
    )
    assert slices[:5] == [(["plain"], 4), (["early"], 1), (["plain"], 4), (["early"], 1), (["early", "plain"], 4)]


def test_top_logprobs_of_a_constrained_sample(tiny: TinyModel) -> None:
    request = constrain(make_adjusted("r", make_prompt(5), {}, options=PromptOptions(sample_topk=4)))
    parts = run(start(tiny), request).parts[RequestId("r"), 0]
    tokens = np.concatenate([part.topk.token_ids for part in parts if part.topk is not None])
    assert (tokens % 2 == (1 - np.arange(len(tokens)) % 2)[:, None]).all()


def test_samples_continue_while_the_mask_of_another_is_computed(tiny: TinyModel) -> None:
    is_computed = False

    class SlowTokens(OddTokens):
        def is_ready(self, timeout_s: float = 0.0) -> bool:
            return is_computed or not self.num_accepted

        def fill_mask(self, mask: np.ndarray) -> None:
            assert self.is_ready(), "the scheduler waits for this mask"
            super().fill_mask(mask)

    plain = make_request("plain", make_prompt(9), max_tokens=20, samples=2)
    odd = make_adjusted("odd", make_prompt(12), {}, max_tokens=20)
    scheduler, results = start(tiny), Results()
    begin(scheduler, plain, replace(odd, make_constraint=SlowTokens))

    # Both plain samples end, and then rounds report progress without tokens
    while len(results.ended) < 2:
        results.add(scheduler.step())
    for _ in range(2):
        [delta] = scheduler.step()
        assert (delta.request_id, delta.tokens.size, delta.stop_reason) == ("odd", 0, None)
    assert len(results.tokens["odd", 0]) == 1

    is_computed = True
    while deltas := scheduler.step():
        results.add(deltas)
    alone = run(start(tiny), plain, constrain(odd))
    assert results.bits == alone.bits
