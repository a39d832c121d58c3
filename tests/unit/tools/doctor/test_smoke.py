"""The check that trains and samples on the devices."""

import math

import msgspec
import pytest

from skyrl_tx.tools.doctor import smoke
from skyrl_tx.tools.doctor.findings import Finding, error
from skyrl_tx.tools.doctor.machine import ProbeQuestion
from skyrl_tx.tools.doctor.smoke import SmokeAnswer

ANSWER = SmokeAnswer(device="NVIDIA H100 (gpu)", loss=6.2, highest_loss=12.5, logprob=-6.1, first_s=21.5, again_s=0.04)


def check(subject, monkeypatch: pytest.MonkeyPatch, answer: SmokeAnswer | Finding, *flags: str) -> Finding:
    monkeypatch.setattr(smoke, "ask_child", lambda *_: answer)
    (finding,) = smoke.check_computation(subject(*flags))
    return finding


def test_devices_that_compute_are_fine(subject, monkeypatch) -> None:
    found = check(subject, monkeypatch, ANSWER)
    assert found.level == "ok" and "NVIDIA H100 (gpu)" in found.message and "21.5 s with compilation" in found.message


@pytest.mark.parametrize("change", [{"loss": math.nan}, {"loss": 13.0}, {"loss": 0.0}, {"logprob": -math.inf}])
def test_wrong_numbers_are_errors(subject, monkeypatch, change: dict[str, float]) -> None:
    found = check(subject, monkeypatch, msgspec.structs.replace(ANSWER, **change))
    assert found.level == "error" and "wrong numbers" in found.message and "kernels loops" in found.advice


def test_a_failure_of_jax_is_passed_on(subject, monkeypatch) -> None:
    failure = error("devices", "JAX failed: no driver", "check the driver")
    assert check(subject, monkeypatch, failure) is failure


def test_other_backends_are_not_examined(subject, monkeypatch) -> None:
    found = check(subject, monkeypatch, ANSWER, "--backend", "fake")
    assert found.level == "ok" and "not examined" in found.message


@pytest.mark.slow
def test_the_cpu_trains_and_samples() -> None:
    answer = smoke.answer_question(ProbeQuestion(base_model="", backend_config={}))
    assert answer.device.endswith("(cpu)") and 0 < answer.loss < answer.highest_loss and answer.logprob < 0
