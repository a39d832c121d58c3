"""The scheduler continues without the samples whose constraints have not computed their next mask."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from skyrl_tx.backends.jax.config import JaxConfig
from skyrl_tx.backends.jax.sample.scheduler import SampleScheduler
from skyrl_tx.backends.jax.shapes import SampleMemory
from skyrl_tx.contract.batches import SampleRequest
from tests.support.fake_model_runner import FakeModelRunner
from tests.support.sample_requests import Results, begin, make_prompt, make_request, run

SLICE = 4
CONFIG = JaxConfig(sample_slots=16, decode_slice_tokens=SLICE, prefill_tokens=96, prefill_chunk_tokens=256)
MEMORY = SampleMemory(num_slots=16, tokens=16 * 160, prefix_tokens=640, max_length=512, page=16)


@dataclass
class Grammar:
    """Its first masks are computed, and the later ones only while `is_computed`."""

    is_computed: bool = True
    num_masks: int = 1

    def make(self) -> "Masks":
        return Masks(self)


@dataclass
class Masks:
    grammar: Grammar
    num_accepted: int = field(default=0, init=False)

    def is_ready(self, timeout_s: float = 0.0) -> bool:
        return self.grammar.is_computed or self.num_accepted < self.grammar.num_masks

    def fill_mask(self, mask: np.ndarray) -> None:
        raise AssertionError("the fake runner reads no masks")

    def accept(self, token: int) -> None:
        self.num_accepted += 1


def start(*, runs_ahead: bool = False) -> tuple[SampleScheduler, FakeModelRunner]:
    programs = FakeModelRunner(runs_ahead=runs_ahead)
    return SampleScheduler(programs, CONFIG, MEMORY, ()), programs


def constrain(grammar: Grammar, name: str, samples: int = 1) -> SampleRequest:
    request = make_request(name, make_prompt(9), max_tokens=20, samples=samples)
    return replace(request, make_constraint=grammar.make)


def finish(scheduler: SampleScheduler, results: Results) -> None:
    while deltas := scheduler.step():
        results.add(deltas)


def get_bits(*requests: SampleRequest) -> object:
    """Return the results without late masks."""
    return run(start()[0], *(replace(request, make_constraint=Grammar().make) for request in requests)).bits


def step_until(scheduler: SampleScheduler, results: Results, is_over: Callable[[], bool]) -> None:
    while not is_over():
        results.add(scheduler.step())


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_samples_without_a_constraint_go_on(runs_ahead: bool) -> None:
    scheduler, _ = start(runs_ahead=runs_ahead)
    slow, results = Grammar(is_computed=False), Results()
    plain, limited = make_request("plain", make_prompt(9), max_tokens=20), constrain(slow, "limited")
    begin(scheduler, plain, limited)
    step_until(scheduler, results, lambda: bool(results.ended))
    assert len(results.tokens["plain", 0]) == 20 and len(results.tokens["limited", 0]) == 1

    slow.is_computed = True
    finish(scheduler, results)
    assert results.bits == run(start()[0], plain, replace(limited, make_constraint=Grammar().make)).bits


def test_other_constrained_samples_take_all_steps_of_a_slice() -> None:
    scheduler, programs = start()
    slow, results = Grammar(is_computed=False), Results()
    requests = constrain(Grammar(), "fast", 2), constrain(slow, "slow")
    begin(scheduler, *requests)
    results.add(scheduler.step())  # the prompts, and the first tokens
    for _ in range(2):
        programs.decoded.clear()
        results.add(scheduler.step())
        assert programs.decoded == [1] * SLICE
    assert len(results.tokens["slow", 0]) == 1

    slow.is_computed = True
    finish(scheduler, results)
    assert results.bits == get_bits(*requests)


@pytest.mark.parametrize("first", ["program", "mask"])
def test_fewer_rows_wait_until_their_program_or_the_late_mask_is_ready(first: str) -> None:
    """The program of all rows is compiled, and the program of fewer rows would take seconds."""
    scheduler, programs = start()
    slow, results = Grammar(is_computed=False, num_masks=2), Results()
    requests = constrain(Grammar(), "fast", 2), constrain(slow, "slow")
    begin(scheduler, *requests)
    programs.uncompiled = frozenset({2})
    step_until(scheduler, results, lambda: len(results.tokens.get(("slow", 0), ())) == 2)

    # Nothing is decoded while neither is ready
    before = dict(results.tokens)
    for _ in range(2):
        [delta] = scheduler.step()
        assert delta.tokens.size == 0 and delta.stop_reason is None
    if first == "program":
        programs.uncompiled = frozenset()
        results.add(scheduler.step())
        assert len(results.tokens["fast", 0]) > len(before["fast", 0])
        assert results.tokens["slow", 0] == before["slow", 0]

    slow.is_computed = True
    finish(scheduler, results)
    assert results.bits == get_bits(*requests)
