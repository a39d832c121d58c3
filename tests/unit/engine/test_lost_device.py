"""A lost device ends the engine, no matter which backend call detects it, and fails no request."""

import numpy as np
import pytest

from skyrl_tx.contract.errors import BackendLost, ErrorCategory
from skyrl_tx.contract.requests import SaveWeights
from skyrl_tx.contract.results import SampleDelta
from skyrl_tx.testing.fake.backend import FakeBackend
from skyrl_tx.testing.fake.model import FakeSnapshot
from tests.support.engine_harness import forward_backward, optim_step, sample


class LosingDeviceBackend(FakeBackend):
    """A fake backend that loses its device at the nth computation.

    All later computations fail too.
    """

    def __init__(self, harness, computations_left):
        super().__init__("tiny", harness.config)
        self.computations_left = computations_left

    def _compute(self, delay_s=0.0):
        self.computations_left -= 1
        self.is_lost |= self.computations_left < 0
        super()._compute(delay_s)


def submit_all(harness):
    """Submit training and samples for two models."""
    submitted = []
    for name in ("a", "b"):
        model_id, created = harness.create(name)
        work = (forward_backward(1), optim_step(), forward_backward(2), optim_step())
        steps = [harness.submit(request, model_id=model_id, seq_id=n) for n, request in enumerate(work, 1)]
        save = harness.submit(SaveWeights(kind="sampler_weights", name="s"), model_id=model_id, seq_id=5)
        submitted += [created, *steps, save, harness.submit(sample())]
    return submitted


def summarize(harness, request_ids):
    results = [harness.result(request_id) for request_id in request_ids]
    return [dict(result.metrics) if hasattr(result, "metrics") else type(result).__name__ for result in results]


@pytest.fixture
def undisturbed(tmp_path_factory):
    from tests.support.engine_harness import EngineHarness

    harness = EngineHarness(tmp_path_factory.mktemp("undisturbed"))
    request_ids = submit_all(harness)
    harness.run(*request_ids)
    yield summarize(harness, request_ids)
    harness.close()


def test_every_request_runs_again_and_no_gradient_is_incomplete(harness, undisturbed):
    request_ids = submit_all(harness)
    num_lost = 0
    for computations in range(0, 24, 2):  # each engine gets a little further before its device is lost
        try:
            harness.run(*request_ids, backend=LosingDeviceBackend(harness, computations))
        except BackendLost:
            num_lost += 1
        else:
            break
    assert num_lost >= 3
    harness.run(*request_ids)
    assert summarize(harness, request_ids) == undisturbed


def test_prompt_that_fails_on_a_lost_device_is_no_failure_of_its_request(harness):
    class Prefill(FakeBackend):
        def step_sample(self):
            (request_id,) = self._open.by_request()
            self.is_lost = True
            empty = np.zeros(0, np.int32)
            return [SampleDelta(request_id=request_id, index=0, tokens=empty, logprobs=empty, error="INTERNAL")]

    sampled = harness.submit(sample())
    with pytest.raises(BackendLost):
        harness.run(sampled, backend=Prefill("tiny", harness.config))
    harness.run(sampled)
    assert len(harness.result(sampled).sequences[0].tokens) == 8


def test_save_whose_copy_to_the_host_meets_the_lost_device_runs_again(harness, monkeypatch):
    backend = FakeBackend("tiny", harness.config)
    model_id, created = harness.create()
    save = harness.submit(SaveWeights(kind="sampler_weights", name="s"), model_id=model_id, seq_id=1)

    def fail(*_):
        backend.is_lost = True
        raise RuntimeError("INTERNAL: device-to-host copy")

    with monkeypatch.context() as patch, pytest.raises(BackendLost, match="lost"):
        patch.setattr(FakeSnapshot, "write", fail)
        harness.run(created, save, backend=backend)
    harness.run(created, save)
    assert harness.result(save).path


def test_unexpected_error_on_a_healthy_device_fails_its_request_only(harness):
    class Buggy(FakeBackend):
        def optim_step(self, model_id, params):
            raise RuntimeError("a bug")

    model_id, _ = harness.create()
    step = harness.submit(optim_step(), model_id=model_id, seq_id=1)
    harness.run(step, backend=Buggy("tiny", harness.config))
    assert harness.result(step).category == ErrorCategory.SERVER
