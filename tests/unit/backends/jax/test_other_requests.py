"""A request has the same bits alone and next to any other requests, at any row count."""

import pytest

from skyrl_tx.backends.jax.sample.scheduler import SampleScheduler
from skyrl_tx.contract.batches import SampleRequest
from skyrl_tx.contract.requests import PromptOptions
from tests.support.sample_requests import BLUE, RED, Results, begin, make_prompt, make_request, run
from tests.support.tiny import (
    GLM_LATENTS,
    HYBRID,
    LATENTS,
    MAMBA,
    MOE,
    OUTPUT_NORMS,
    SINKS,
    TINY_CONFIG,
    TinyModel,
    load_model,
    make_model_runner,
    tiny_directory,
)

SLOTS = {"sample_slots": 32, "max_sample_tokens": 32 * 64}
"""Row counts are 2, 8, 16 and 32.

There are pages for 64 positions per slot, so that some samples are preempted.
"""


def start(model: TinyModel, *, by_layer: bool = True) -> SampleScheduler:
    """Return a scheduler. Without `by_layer`, it decodes as devices other than a single CPU do."""
    config = TINY_CONFIG.model_copy(update=SLOTS)
    device = make_model_runner(model.params, model.config, config)
    device._is_single_cpu = by_layer
    scheduler = SampleScheduler(device, config, device.memory, ())
    scheduler.load(RED, model.adapter(1))
    scheduler.load(BLUE, model.adapter(2))
    return scheduler


def other_requests(size: int) -> list[SampleRequest]:
    """Return `size` requests for the base model and two adapters.

    They are short and long, with filters and reported top-k.
    """
    kinds = (
        {"temperature": 0.0, "max_tokens": 3},
        {"sampler": RED, "top_k": 3, "max_tokens": 70},
        {"sampler": BLUE, "top_p": 0.5, "options": PromptOptions(sample_topk=2)},
    )
    return [make_request(f"c{n}", make_prompt(5 + 7 * (n % 9), seed=n + 1), **kinds[n % 3]) for n in range(size)]


def check(model: TinyModel) -> None:
    mine = [
        make_request("base", make_prompt(9), samples=2, temperature=0.9, max_tokens=70),
        make_request("red", make_prompt(40), sampler=RED, temperature=0.9, max_tokens=30, top_p=0.8),
    ]
    scheduler, alone = start(model), Results()
    for request in mine:
        run(scheduler, request, into=alone)
    assert len(alone.bits) == 3

    for size in (1, 3, 17, 61):
        scheduler, results, others = start(model), Results(), other_requests(size)
        begin(scheduler, *others[::2])
        results.add(scheduler.step())
        begin(scheduler, mine[0])
        results.add(scheduler.step())
        begin(scheduler, *others[1::2], mine[1])
        run(scheduler, into=results)
        assert {key: results.bits[key] for key in alone.bits} == alone.bits, f"with {size} other samples"

        again = run(scheduler, mine[1])  # a hit of the prefix cache
        assert again.bits["red", 0] == alone.bits["red", 0]


@pytest.mark.slow
def test_long_and_preempted_samples_change_no_bit_where_every_slot_is_a_row(tiny: TinyModel) -> None:
    """All samples use one adapter, because mixed tiles of rows are another program there."""
    mine = make_request("mine", make_prompt(40), sampler=RED, samples=3, temperature=0.9, max_tokens=50)
    alone = run(start(tiny, by_layer=False), mine).bits
    scheduler, results = start(tiny, by_layer=False), Results()
    others = [
        make_request(f"c{n}", make_prompt(5 + 20 * n, seed=n), sampler=RED, samples=5, max_tokens=90) for n in range(8)
    ]
    begin(scheduler, *others[::2])
    results.add(scheduler.step())
    run(scheduler, mine, *others[1::2], into=results)
    assert {key: results.bits[key] for key in alone} == alone and len(results.ended) == 43


@pytest.mark.slow
def test_other_requests_change_no_bit(tiny: TinyModel) -> None:
    check(tiny)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("family", [MOE, HYBRID, SINKS, LATENTS, GLM_LATENTS, MAMBA, OUTPUT_NORMS])
def test_other_requests_change_no_bit_of_any_family(family: str) -> None:
    check(load_model(tiny_directory(family)))
