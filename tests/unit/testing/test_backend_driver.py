"""How the backend suite compares results, and what its failures say."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from skyrl_tx.contract.backend import AbstractBackend
from skyrl_tx.contract.batches import PreparedModelPassBatch, PreparedSampleBatch
from skyrl_tx.contract.ids import ModelId
from skyrl_tx.contract.requests import OptimizerParams
from skyrl_tx.contract.results import Metrics, PassResult, SampleDelta
from skyrl_tx.testing.backend_driver import STEP, BackendDriver, nearly_equal
from skyrl_tx.testing.fake import FakeConfig
from skyrl_tx.testing.fake.backend import FakeBackend

BROKEN_SUITE = """
from skyrl_tx.testing.backend_suite import BackendSuite
from skyrl_tx.testing.fake.backend import FakeBackend
from skyrl_tx.testing.fake import FakeConfig


class Broken(FakeBackend):
    def fingerprint_changes(self):
        return {"unknown": "1"}

    def step_sample(self):
        raise ZeroDivisionError

    def cancel_sample(self, request_ids):
        raise ZeroDivisionError


class TestBroken(BackendSuite):
    backends = iter((Broken, FakeBackend))

    @classmethod
    def make_backend(cls, directory):
        return next(cls.backends)("tiny", FakeConfig(vocab_size=12))
"""


def result(*logprobs: float, loss: float = 3.0) -> PassResult:
    return PassResult(logprobs=np.array(logprobs, np.float32), sums={"loss": loss})


def test_without_tolerance_bits_are_compared():
    assert nearly_equal(result(-1.0, -2.0), result(-1.0, -2.0), 0.0)
    assert not nearly_equal(result(-1.0, -2.0), result(-1.0, np.nextafter(np.float32(-2), np.float32(0))), 0.0)


def test_a_tolerance_bounds_logprobs_and_sums():
    assert nearly_equal(result(-1.0, -2.0), result(-1.0, -2.000005, loss=3.0001), 1e-5)
    assert not nearly_equal(result(-1.0, -2.0), result(-1.0, -2.00005), 1e-5)
    assert not nearly_equal(result(-1.0, -2.0), result(-1.0, -2.0, loss=3.001), 1e-5)
    assert not nearly_equal(result(-1.0, -2.0), result(-1.0, -2.0, -3.0), 1e-5)


def drive(backend: AbstractBackend, directory: Path) -> BackendDriver:
    return BackendDriver(backend, backend.start(), directory)


def test_missing_results_and_metrics_are_named(tmp_path: Path) -> None:
    class Incomplete(FakeBackend):
        def forward(self, batch: PreparedModelPassBatch) -> list[PassResult]:
            return super().forward(batch)[:-1]

        def optim_step(self, model_id: ModelId, params: OptimizerParams) -> Metrics:
            return {"step:max": 1.0}

    driver = drive(Incomplete("tiny", FakeConfig()), tmp_path)
    model_id = driver.model()
    with pytest.raises(AssertionError, match="returned 1 results for 2 examples"):
        driver.forward(driver.batch(driver.request(model_id)))
    with pytest.raises(AssertionError, match=r"\['learning_rate:mean', 'unclipped_grad_l2:mean'\] are missing"):
        driver.optim_step(model_id, STEP)


def test_samples_that_never_get_a_token_fail(tmp_path: Path) -> None:
    class Stuck(FakeBackend):
        def step_sample(self) -> list[SampleDelta]:
            tokens, logprobs = np.zeros(0, np.int32), np.zeros(0, np.float32)
            return [SampleDelta(request_id=request.request_id, index=2, tokens=tokens, logprobs=logprobs)]

    driver = drive(Stuck("tiny", FakeConfig()), tmp_path)
    request = driver.sample_request(None)
    with pytest.raises(AssertionError, match=r"only deltas without a token.* sample 2 of request-0"):
        driver.run_samples(request)


def test_clean_cancels_the_samples_of_the_test(tmp_path: Path) -> None:
    driver = drive(FakeBackend("tiny", FakeConfig()), tmp_path)
    driver.backend.begin_sample(PreparedSampleBatch(requests=(driver.sample_request(None),)))
    driver.clean()
    assert driver.backend.step_sample() == []


def test_a_broken_backend_fails_one_test_and_failures_show_values(tmp_path: Path) -> None:
    (tmp_path / "test_broken.py").write_text(BROKEN_SUITE)
    tests = "greedy or seed_only or capabilities_can"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", ".", "-k", tests]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    output = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True).stdout
    assert "2 failed, 1 passed" in output and "1 error in" in output, output
    assert "dict_keys(['unknown'])" in output, output
