"""A CPU compiles the programs of the first samples before a request needs them."""

import logging
import re
import time
from typing import Any

import jax
import pytest

from skyrl_tx.backends.jax.compiler import Compiler
from skyrl_tx.backends.jax.devices import CompilationMonitor
from skyrl_tx.backends.jax.sample.scheduler import SampleScheduler
from tests.support.sample_requests import RED, make_prompt, make_request, run
from tests.support.tiny import TINY_CONFIG, TinyModel, make_model_runner


@pytest.mark.slow  # it compiles eight programs
def test_the_first_samples_of_a_server_find_their_programs_compiled(
    tiny: TinyModel, caplog: pytest.LogCaptureFixture
) -> None:
    """A CPU compiles them in the background, for the base model and for an adapter of the usual rank."""
    config = TINY_CONFIG.model_copy(update={"max_topk_logprobs": 4, "sample_slots": 8})  # unlike in other tests
    compiler = Compiler[Any](2, CompilationMonitor())
    device = make_model_runner(tiny.params, tiny.config, config, compiler)
    red = tiny.adapter(1)
    device.queue_first_samples(red.weights["unembed"].a.shape[-1])
    while compiler.progress() is not None:
        time.sleep(0.01)
    scheduler = SampleScheduler(device, config, device.memory, ())
    scheduler.load(RED, red)

    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        requests = (
            make_request("base", make_prompt(20), max_tokens=60),
            make_request("red", make_prompt(9), sampler=RED, max_tokens=60),
        )
        for request in requests:
            run(scheduler, request)
    compiled = set(re.findall(r"XLA compilation of jit\((\w+)\)", caplog.text))
    in_advance = {"prefill", "compute_first_logits", "draw_first", "run_rows", "close_rows", "unstack_params"}
    assert not compiled & {*in_advance, "open_decode_slice_by_layer"}
    assert {key[0] for key in compiler.ready} == {"prefill", "first token", "rows"}
    compiler.close()
