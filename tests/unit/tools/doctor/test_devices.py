"""Checks of the driver, the devices and the memory plan, and the check that trains and samples."""

import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import msgspec
import pytest

from skyrl_tx import models
from skyrl_tx.backends.jax import start_plan
from skyrl_tx.backends.jax.backend import JaxBackend
from skyrl_tx.backends.jax.config import JaxConfig, MeshConfig
from skyrl_tx.process.memory import Gpu
from skyrl_tx.testing.tiny_models import write_model
from skyrl_tx.tools.doctor import machine, probe
from skyrl_tx.tools.doctor.findings import Finding, ok
from skyrl_tx.tools.doctor.machine import ProbeQuestion
from skyrl_tx.tools.quickstart.model import write_tiny_model
from tests.support.model_configs import QWEN3_8B

GIB = 2**30
CONFIG = JaxConfig()
H100 = Gpu("0", "GPU-1", "NVIDIA H100", "570.1", 80 * GIB, 0)


def ask(base_model: Path | str = "", *, has_gpus: bool = False, **config: object) -> list[Finding]:
    """Return the findings of the probe in this process."""
    return list(
        probe.check_devices(
            ProbeQuestion(
                check="devices",
                base_model=str(base_model),
                backend_config=config,
                has_gpus=has_gpus,
                is_serving=False,
            )
        )
    )


def fake_driver(monkeypatch: pytest.MonkeyPatch, *gpus: Gpu) -> None:
    """Replace the result of the driver's command, and the findings of the probe."""
    monkeypatch.setattr(machine, "_run_probe", lambda *_, **__: [ok("devices", "fine")])
    monkeypatch.setattr(machine, "list_gpus", lambda: [*gpus])


def problems(findings: Iterable[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.level != "ok"]


@pytest.fixture(scope="module")
def plan() -> start_plan.StartPlan:
    """Plan a model of 8B parameters on a GPU."""
    model = models.find_family(QWEN3_8B).config_from_hf(QWEN3_8B)
    layout = start_plan.make_abstract_layout(MeshConfig())
    return start_plan.plan_start(CONFIG, layout, model, jnp.dtype("bfloat16"), platform="gpu", limit_bytes=60 * GIB)


def test_the_probe_plans_as_the_backend_does(subject, tmp_path: Path) -> None:
    """The probe runs in a separate process and does not load the weights."""
    model = write_tiny_model(tmp_path / "tiny")
    flags = ("--backend-config.max-lora-rank", "8", "--backend-config.compile-cache-dir", tmp_path / "cache")
    findings = list(machine.check_devices(subject("--base-model", model, *flags)))
    text = "\n".join(finding.message for finding in findings)

    backend = JaxBackend(str(model), JaxConfig(compile_cache_dir=None, max_lora_rank=8))
    found = backend.start()
    backend.close()
    assert len(found.devices) == 1 and "1 × cpu (cpu)" in text
    size = (model / "model.safetensors").stat().st_size / 2**20
    assert f"{found.num_parameters:,} parameters, weight files of {size:.1f} MiB" in text
    memory = f"KV cache of {found.max_sample_tokens} tokens; micro-batches of {found.micro_batch_tokens} tokens"
    assert memory in text and f"{found.max_models} models of rank 8 in training" in text
    assert "no token that ends" not in text and "samples can have at most" not in text


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({}, "model.safetensors"),
    ],
)
def test_models_that_cannot_be_served(tmp_path: Path, change: dict[str, object], text: str) -> None:
    (tmp_path / "config.json").write_bytes(msgspec.json.encode({**QWEN3_8B, **change}))
    (found,) = problems(ask(tmp_path))
    assert found.level == "error" and found.message.startswith("--base-model: ") and text in found.message
    assert "hub id of a supported model" in found.advice


def test_a_model_without_an_end_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe.hf, "read_eos_token_ids", lambda _: ())
    (found,) = problems(ask(write_tiny_model(tmp_path / "tiny")))
    assert found.level == "warning" and "no token that ends" in found.message and found.advice


def test_a_mesh_without_its_devices() -> None:
    found = ask(mesh={"tp": 64})
    assert found[0].check == "devices" and found[0].level == "ok"
    assert found[1].message.startswith("--backend-config.mesh: ") and "64 devices" in found[1].message


def test_a_fitting_plan_is_fine(plan: start_plan.StartPlan) -> None:
    (found,) = probe.check_plan(plan, CONFIG, 60 * GIB, 40960, is_serving=False)
    assert found.level == "ok" and f"KV cache of {plan.samples.tokens} tokens" in found.message


@pytest.mark.parametrize(
    ("limit", "change", "level", "text"),
    [
        (60 * GIB, {"weight_bytes": 61 * GIB}, "error", "does not fit"),
        (60 * GIB, {"max_length": 1000}, "warning", "at most 1000 tokens"),
        (60 * GIB, {"max_models": 1}, "warning", "only one model of rank 64"),
        (None, {"host_weight_bytes": 2**60}, "error", "does not fit"),
    ],
)
def test_plans_that_are_too_small(plan, limit: int | None, change: dict[str, int], level: str, text: str) -> None:
    if "max_length" in change:
        change = {"samples": replace(plan.samples, **change)}
    (found,) = problems(probe.check_plan(replace(plan, **change), CONFIG, limit, 40960, is_serving=False))
    assert found.level == level and text in found.message and found.advice


@pytest.mark.parametrize(("available", "level"), [(3 * GIB, "error"), (11 * GIB, "warning"), (12 * GIB, None)])
def test_less_memory_is_available_than_the_plan_may_use(plan, monkeypatch, available: int, level: str | None) -> None:
    plan = replace(plan, host_weight_bytes=4 * GIB, host_bytes=8 * GIB)
    monkeypatch.setattr(probe, "get_memory_limit", lambda: 100 * GIB)
    monkeypatch.setattr(probe, "read_available_memory", lambda: available)
    found = problems(probe.check_plan(plan, CONFIG, None, 40960, is_serving=False))
    assert [finding.level for finding in found] == ([level] if level else [])
    assert all("KV cache and models may take 12.0 GiB" in finding.message for finding in found)
    is_fine = problems(probe.check_plan(plan, CONFIG, None, 40960, is_serving=True)) == []
    assert is_fine, "the server itself uses that memory"


def test_a_gpu_that_jax_does_not_use() -> None:
    (found,) = problems(ask(has_gpus=True))
    assert found.level == "error" and "skyrl-tx-server[cuda12]" in found.advice


def test_the_driver_is_described(subject, monkeypatch) -> None:
    fake_driver(monkeypatch, H100)
    found = list(machine.check_devices(subject()))
    assert problems(found) == [] and "driver 570.1" in found[0].message and found[1].message == "fine"


def test_a_gpu_that_others_use(subject, monkeypatch) -> None:
    fake_driver(monkeypatch, replace(H100, used_bytes=40 * GIB))
    (found,) = problems(machine.check_devices(subject()))
    assert found.level == "warning" and "40.0 GiB" in found.message
    assert problems(machine.check_devices(subject(pids={"engine": 3}))) == [], "that is the server"


@pytest.mark.parametrize(("platform", "text"), [("no-such-platform", "no-such-platform"), ("", "within 0 s")])
def test_a_probe_without_an_answer(subject, monkeypatch, platform: str, text: str) -> None:
    if platform:
        monkeypatch.setenv("JAX_PLATFORMS", platform)
    else:
        monkeypatch.setattr(machine, "_TIMEOUT_S", 0.01)
    (found,) = problems(machine.check_devices(subject()))
    assert found.level == "error" and text in found.message


def test_other_backends_are_not_examined(subject) -> None:
    for check in (machine.check_devices, machine.check_computation):
        (found,) = check(subject("--backend", "fake"))
        assert found.level == "ok" and "not examined" in found.message


def test_the_plan_is_for_the_form_of_adapters_that_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test replaces the number of models that fit by the number of parameters of one model at rank 1."""

    def num_parameters(*arguments: object) -> int:
        (model,) = (argument for argument in arguments if isinstance(argument, models.ModelConfig))
        return sum(leaf.size for leaf in jax.tree.leaves(models.describe_adapter(model, 1).weights))

    monkeypatch.setattr(start_plan, "choose_max_models", num_parameters)
    write_model(tmp_path, "Qwen3MoeForCausalLM", num_layers=1)
    found: list[int] = []
    for form in ("shared", "own"):
        (shown,) = (finding.message for finding in ask(tmp_path, expert_lora=form) if "of rank" in finding.message)
        found.append(int(shown.split(" models of rank")[0].split()[-1]))
    assert found[1] - found[0] == 3 * 7 * 32, "seven of eight experts have three more factors of 32 numbers"


def test_devices_that_compute_are_fine() -> None:
    found = probe.judge_numbers("NVIDIA H100 (gpu)", 512, 6.2, -6.1, [21.5, 0.04])
    assert found.level == "ok" and "NVIDIA H100 (gpu)" in found.message and "21.5 s with compilation" in found.message


@pytest.mark.parametrize(("loss", "logprob"), [(math.nan, -6.1), (13.0, -6.1), (0.0, -6.1), (6.2, -math.inf)])
def test_wrong_numbers_are_errors(loss: float, logprob: float) -> None:
    found = probe.judge_numbers("NVIDIA H100 (gpu)", 512, loss, logprob, [21.5, 0.04])
    assert found.level == "error" and "wrong numbers" in found.message and "kernels loops" in found.advice


@pytest.mark.slow
def test_the_cpu_trains_and_samples(subject) -> None:
    (found,) = machine.check_computation(subject())
    assert found.level == "ok" and "(cpu) trained and sampled" in found.message
