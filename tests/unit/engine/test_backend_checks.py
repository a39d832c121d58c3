"""A wrong result of a backend fails its request with an error that names the fault."""

import re
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from skyrl_tx.contract.backend import Pass
from skyrl_tx.contract.errors import ServerError
from skyrl_tx.process.setup import CannotServe
from skyrl_tx.testing.fake.backend import FakeBackend
from tests.support.engine_harness import EngineHarness, datum, forward_backward, optim_step, sample


class FaultyPass(Pass):
    """A pass whose results another function changes."""

    def __init__(self, inner, change):
        self.inner, self.change = inner, change

    def step(self):
        return self.inner.step()

    def results(self):
        return self.change(self.inner.results())

    def abort(self):
        self.inner.abort()


class FaultyBackend(FakeBackend):
    """Changes what the backend of the tests returns."""

    def __init__(self, config, *, results=lambda results: results, deltas=lambda deltas: deltas):
        super().__init__("tiny", config)
        self.change_results, self.change_deltas = results, deltas

    def begin_pass(self, batch, *, backward):
        return FaultyPass(super().begin_pass(batch, backward=backward), self.change_results)

    def step_sample(self):
        return self.change_deltas(super().step_sample())


@pytest.fixture
def harness(tmp_path):
    found = EngineHarness(tmp_path)
    yield found
    found.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda one: replace(one, logprobs=one.logprobs.astype(float)),
            r"are float64 of shape \(6,\), and must be",
        ),
        (lambda one: replace(one, logprobs=one.logprobs[:-1]), r"float32 of shape \(5,\), and must .* of shape \(6,\)"),
        (lambda one: replace(one, logprobs=one.logprobs.tolist()), "are of type list, and must be a NumPy array"),
        (lambda one: replace(one, sums={}), 'sums of the pass result of example 0 lack "loss"'),
        (lambda one: replace(one, sums={**one.sums, "entropy:sum": 1.0}), "'entropy:sum' in sums or means .* a colon"),
    ],
)
def test_faulty_results_of_a_pass_are_named(harness, change, message):
    model_id, created = harness.create()
    backend = FaultyBackend(harness.config, results=lambda results: [change(one) for one in results])
    failed = harness.submit(forward_backward(data=(datum(),)), model_id=model_id, seq_id=1)
    stepped = harness.submit(optim_step(), model_id=model_id, seq_id=2)
    harness.run(created, failed, stepped, backend=backend)
    result = harness.result(failed)
    assert result.category == "server" and result.message.startswith("fault of the backend: ")
    assert re.search(message, result.message), result.message
    assert "the gradient is incomplete" in harness.result(stepped).message


def test_too_few_results_fail_all_requests_of_the_batch_and_no_later_one(harness):
    (one, made_one), (other, made_other) = harness.create("one"), harness.create("other")
    harness.run(made_one, made_other)
    failed = [harness.submit(forward_backward(), model_id=model_id, seq_id=1) for model_id in (one, other)]
    harness.run(*failed, backend=FaultyBackend(harness.config, results=lambda results: results[:-1]))
    for request_id in failed:
        assert "results for" in harness.result(request_id).message

    good = harness.submit(forward_backward(backward=False), model_id=one, seq_id=2)
    harness.run(good)
    assert np.isfinite(harness.result(good).metrics["loss:sum"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda one: {"logprobs": one.logprobs.astype(float)}, "logprobs of SampleDelta are float64"),
        (lambda one: {"logprobs": one.logprobs[:0]}, r"float32 of shape \(0,\), and must be float32 of shape \(4,\)"),
        (lambda one: {"tokens": one.tokens.astype(np.int64)}, "tokens of SampleDelta are int64, and must be int32"),
    ],
)
def test_faulty_samples_are_named(harness, change, message):
    def change_all(deltas):
        return [msgspec.structs.replace(delta, **change(delta)) for delta in deltas]

    failed = harness.submit(sample(max_tokens=4, eos_stops=False))
    harness.run(failed, backend=FaultyBackend(harness.config, deltas=change_all))
    found = harness.result(failed).message
    assert re.search(message, found), found


def test_a_slice_without_deltas_fails_the_running_samples(harness):
    failed = [harness.submit(sample(max_tokens=4)) for _ in range(2)]
    harness.run(*failed, backend=FaultyBackend(harness.config, deltas=lambda deltas: []))
    for request_id in failed:
        assert "step_sample returned no delta, although 1 samples are running" in harness.result(request_id).message


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda found: None, "start returned NoneType instead of Capabilities"),
        (
            lambda found: replace(found, lora_targets=frozenset({"mlp", "lm_head"})),
            "lora_targets contains 'lm_head', but may only contain 'attn', 'mlp', 'unembed'",
        ),
    ],
)
def test_faulty_capabilities_end_the_start(harness, change, message):
    class Backend(FakeBackend):
        def start(self):
            return change(super().start())

    with pytest.raises(ServerError, match=message):
        harness.run(backend=Backend("tiny", harness.config))


def test_an_error_of_start_names_the_backend(harness):
    class Backend(FakeBackend):
        def start(self):
            raise KeyError("weights.embed")

    with pytest.raises(CannotServe, match=r"start\(\) of the backend failed: KeyError: 'weights.embed'"):
        harness.run(backend=Backend("tiny", harness.config))
