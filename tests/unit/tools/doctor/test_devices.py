"""Checks of the driver, the devices and the memory plan."""

from dataclasses import replace
from pathlib import Path

import jax
import msgspec
import pytest

from skyrl_tx import models
from skyrl_tx.backends.jax import start_plan
from skyrl_tx.backends.jax.backend import JaxBackend
from skyrl_tx.backends.jax.config import JaxConfig
from skyrl_tx.process.memory import Gpu
from skyrl_tx.testing.tiny_models import write_model
from skyrl_tx.tools.doctor import machine, probe
from skyrl_tx.tools.doctor.findings import Finding
from skyrl_tx.tools.doctor.machine import Device, Plan, ProbeAnswer, ProbeQuestion
from skyrl_tx.tools.quickstart.model import write_tiny_model
from tests.support.model_configs import QWEN3_8B

GIB = 2**30
PLAN = Plan(
    num_parameters=8_000_000_000,
    dtype="bfloat16",
    weight_bytes=16 * GIB,
    free_bytes=44 * GIB,
    max_context_length=40960,
    kv_tokens=100_000,
    max_length=40960,
    micro_batch_tokens=8192,
    is_remat=True,
    max_models=20,
    host_weight_bytes=32 * GIB,
    host_bytes=8 * GIB,
    file_bytes=16 * GIB,
    has_end=True,
)
GPU = Device(kind="NVIDIA H100", platform="gpu", limit_bytes=60 * GIB)
H100 = Gpu("0", "GPU-1", "NVIDIA H100", "570.1", 80 * GIB, 0)
CPU = Device(kind="cpu", platform="cpu", limit_bytes=None)


def fake_answers(monkeypatch: pytest.MonkeyPatch, answer: ProbeAnswer | Finding, *gpus: Gpu) -> None:
    """Replace the results of the probe and of the driver's command."""
    monkeypatch.setattr(machine, "_ask", lambda *_: answer)
    monkeypatch.setattr(machine, "list_gpus", lambda: [*gpus])


def problems(subject, *flags: str, **more: object) -> list[Finding]:
    return [finding for finding in machine.check_devices(subject(*flags, **more)) if finding.level != "ok"]


def test_the_probe_plans_as_the_backend_does(tmp_path: Path) -> None:
    """The probe runs in a separate process and does not load the weights."""
    model = write_tiny_model(tmp_path / "tiny")
    config = JaxConfig(compile_cache_dir=None, max_lora_rank=8)
    answer = machine._ask(str(model), config)
    assert isinstance(answer, ProbeAnswer) and answer.plan is not None, answer

    backend = JaxBackend(str(model), config)
    found = backend.start()
    assert answer.devices == [CPU] and len(found.devices) == 1

    plan = answer.plan
    assert (plan.num_parameters, plan.max_length, plan.kv_tokens, plan.micro_batch_tokens, plan.max_models) == (
        found.num_parameters,
        found.max_context_length,
        found.max_sample_tokens,
        found.micro_batch_tokens,
        found.max_models,
    )
    assert plan.file_bytes == (model / "model.safetensors").stat().st_size and plan.has_end

    backend.close()


@pytest.mark.parametrize(
    ("change", "setting", "text"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "--base-model", "GPT2LMHeadModel"),
        ({}, "--base-model", "model.safetensors"),
    ],
)
def test_models_that_cannot_be_served(tmp_path: Path, change: dict[str, object], setting: str, text: str) -> None:
    (tmp_path / "config.json").write_bytes(msgspec.json.encode({**QWEN3_8B, **change}))
    answer = probe.answer_question(ProbeQuestion(base_model=str(tmp_path), backend_config={}))
    assert answer.plan is None and answer.setting == setting and text in answer.problem


def test_a_mesh_without_its_devices(tmp_path: Path) -> None:
    answer = probe.answer_question(ProbeQuestion(base_model="", backend_config={"mesh": {"tp": 64}}))
    assert answer.devices and answer.setting == "--backend-config.mesh" and "64 devices" in answer.problem


def test_a_fitting_model_is_fine(subject, monkeypatch) -> None:
    fake_answers(monkeypatch, ProbeAnswer(devices=[GPU, GPU], plan=PLAN), H100)
    findings = list(machine.check_devices(subject("--base-model", "m")))
    text = "\n".join(finding.message for finding in findings)
    assert {finding.level for finding in findings} == {"ok"}
    assert "driver 570.1" in text and "2 × NVIDIA H100 (gpu)" in text and "KV cache of 100000 tokens" in text


@pytest.mark.parametrize(
    ("device", "change", "level", "text"),
    [
        (GPU, {"weight_bytes": 61 * GIB}, "error", "does not fit"),
        (GPU, {"max_length": 1000}, "warning", "at most 1000 tokens"),
        (GPU, {"max_models": 1}, "warning", "only one model of rank 64"),
        (GPU, {"has_end": False}, "warning", "no token that ends"),
        (CPU, {"host_weight_bytes": 2**60}, "error", "does not fit"),
    ],
)
def test_plans_that_are_too_small(subject, monkeypatch, device, change, level: str, text: str) -> None:
    fake_answers(monkeypatch, ProbeAnswer(devices=[device], plan=msgspec.structs.replace(PLAN, **change)))
    (found,) = problems(subject, "--base-model", "m")
    assert found.level == level and text in found.message and found.advice


@pytest.mark.parametrize(("available", "level"), [(3 * GIB, "error"), (11 * GIB, "warning"), (12 * GIB, None)])
def test_less_memory_is_available_than_the_plan_may_use(
    subject, monkeypatch, available: int, level: str | None
) -> None:
    plan = msgspec.structs.replace(PLAN, host_weight_bytes=4 * GIB, host_bytes=8 * GIB)
    fake_answers(monkeypatch, ProbeAnswer(devices=[CPU], plan=plan))
    monkeypatch.setattr(machine, "get_memory_limit", lambda: 100 * GIB)
    monkeypatch.setattr(machine, "read_available_memory", lambda: available)
    found = problems(subject, "--base-model", "m")
    assert [finding.level for finding in found] == ([level] if level else [])
    assert all("KV cache and models may take 12.0 GiB" in finding.message for finding in found)
    assert problems(subject, "--base-model", "m", pids={"engine": 3}) == [], "the server itself uses that memory"


def test_a_gpu_that_jax_does_not_use(subject, monkeypatch) -> None:
    fake_answers(monkeypatch, ProbeAnswer(devices=[CPU]), H100)
    (found,) = problems(subject)
    assert found.level == "error" and "skyrl-tx-server[cuda12]" in found.advice


def test_a_gpu_that_others_use(subject, monkeypatch) -> None:
    fake_answers(monkeypatch, ProbeAnswer(devices=[GPU]), replace(H100, used_bytes=40 * GIB))
    (found,) = problems(subject)
    assert found.level == "warning" and "40.0 GiB" in found.message
    assert problems(subject, pids={"engine": 3}) == [], "that is the server"


def test_devices_that_fail(subject, monkeypatch) -> None:
    fake_answers(monkeypatch, ProbeAnswer(devices=[], problem="no driver"))
    (found,) = problems(subject)
    assert found.level == "error" and "no driver" in found.message


@pytest.mark.parametrize(("platform", "text"), [("no-such-platform", "no-such-platform"), ("", "within 0 s")])
def test_a_probe_without_an_answer(subject, monkeypatch, platform: str, text: str) -> None:
    if platform:
        monkeypatch.setenv("JAX_PLATFORMS", platform)
    else:
        monkeypatch.setattr(machine, "_TIMEOUT_S", 0.01)
    (found,) = problems(subject)
    assert found.level == "error" and text in found.message


def test_other_backends_are_not_examined(subject) -> None:
    (found,) = machine.check_devices(subject("--backend", "fake"))
    assert found.level == "ok"


def test_the_plan_is_for_the_form_of_adapters_that_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test replaces the number of models that fit by the number of parameters of one model at rank 1."""

    def num_parameters(*arguments: object) -> int:
        (model,) = (argument for argument in arguments if isinstance(argument, models.ModelConfig))
        return sum(leaf.size for leaf in jax.tree.leaves(models.describe_adapter(model, 1).weights))

    monkeypatch.setattr(start_plan, "choose_max_models", num_parameters)
    write_model(tmp_path, "Qwen3MoeForCausalLM", num_layers=1)
    found: list[int] = []
    for form in ("shared", "own"):
        answer = probe.answer_question(ProbeQuestion(base_model=str(tmp_path), backend_config={"expert_lora": form}))
        assert answer.plan is not None
        found.append(answer.plan.max_models)
    assert found[1] - found[0] == 3 * 7 * 32, "seven of eight experts have three more factors of 32 numbers"
