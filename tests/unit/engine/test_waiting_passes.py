"""A pass that waits for the compiler does not delay other requests."""

import numpy as np
import pytest

from skyrl_tx.contract.backend import Pass
from skyrl_tx.testing.fake.backend import FakeBackend
from tests.support.engine_harness import EngineHarness, datum, forward_backward, sample


class CompilingPass(Pass):
    """A pass whose compilation finishes only after all other requests have been computed."""

    def __init__(self, inner, backend):
        self.inner, self.backend = inner, backend

    @property
    def is_waiting(self):
        return len(self.backend.others) < self.backend.num_others

    def step(self):
        if self.is_waiting:
            self.backend.num_waits += 1
            return False
        return self.inner.step()

    def results(self):
        assert not self.is_waiting
        return self.inner.results()

    def abort(self):
        self.inner.abort()


class CompilingBackend(FakeBackend):
    """Makes passes of `model_id` wait for the compiler.

    Records all other passes and decode slices.
    """

    def __init__(self, config, model_id, num_others):
        super().__init__("tiny", config)
        self.model_id, self.num_others, self.num_waits, self.others = model_id, num_others, 0, []

    def begin_pass(self, batch, *, backward):
        inner = super().begin_pass(batch, backward=backward)
        if batch.examples[0].model_id == self.model_id:
            return CompilingPass(inner, self)
        self.others.append("pass")
        return inner

    def step_sample(self):
        deltas = super().step_sample()
        self.others += ["slice" for delta in deltas if delta.tokens.size]
        return deltas


@pytest.fixture
def harness(tmp_path):
    found = EngineHarness(tmp_path)
    found.config = found.config.model_copy(update={"max_pass_tokens": 32})  # one request per batch
    yield found
    found.close()


def test_other_models_and_samples_go_on_while_a_pass_waits_for_the_compiler(harness):
    slow, created = harness.create("slow")
    harness.run(created, harness.create("quick")[1])
    quick = slow.replace("slow", "quick")
    waiting = harness.submit(forward_backward(data=(datum(length=32),)), model_id=slow, seq_id=1)
    passes = [
        harness.submit(forward_backward(data=(datum(seed, length=32),)), model_id=quick, seq_id=1 + seed)
        for seed in range(3)
    ]
    drawn = harness.submit(sample(max_tokens=200, eos_stops=False))
    backend = CompilingBackend(harness.config, slow, num_others=8)
    harness.run(waiting, *passes, drawn, backend=backend)
    assert set(backend.others) == {"pass", "slice"}
    results = [harness.result(request_id) for request_id in (waiting, *passes)]
    assert all(np.isfinite(result.metrics["loss:sum"]) for result in results)


def test_a_pass_that_alone_waits_for_the_compiler_is_completed_when_its_program_is_there(harness):
    model_id, created = harness.create()
    harness.run(created)
    backend = CompilingBackend(harness.config, model_id, num_others=1)
    step = CompilingPass.step

    def step_until_third(running):
        if backend.num_waits == 3:
            backend.others.append("time")
        return step(running)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(CompilingPass, "step", step_until_third)
        waiting = harness.submit(forward_backward(data=(datum(length=32),)), model_id=model_id, seq_id=1)
        harness.run(waiting, backend=backend)
    assert backend.num_waits == 3
    assert np.isfinite(harness.result(waiting).metrics["loss:sum"])
