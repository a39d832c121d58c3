"""Programs compiled for devices that are not here, and their memory by the compiler and by the plan."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from jax.experimental import topologies

from skyrl_tx.cli import main
from skyrl_tx.testing.tiny_models import write_model


def test_a_missing_compiler_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(**_: str) -> None:
        raise NotImplementedError("JAX TPU support not installed")

    monkeypatch.setattr(topologies, "get_topology_desc", fail)
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
    monkeypatch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    write_model(tmp_path)
    assert main(["plan", "--base-model", str(tmp_path), "--device", "v5e:1x1", "--compile"]) == 2
    assert "--compile: no compiler for v5e:1x1: pip install 'skyrl_tx[tpu]'" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(find_spec("libtpu") is None, reason="libtpu is not installed")
@pytest.mark.parametrize(
    ("architecture", "flags"),
    [
        ("Qwen3ForCausalLM", ("--device", "v5e:1x1")),
        ("Qwen3MoeForCausalLM", ("--device", "v5e:2x4", "--mesh", "fsdp=2,tp=2,ep=2")),
    ],
)
def test_the_largest_programs_compile_for_one_device_and_for_eight(
    architecture: str, flags: tuple[str, ...], tmp_path: Path
) -> None:
    write_model(tmp_path, architecture)
    settings = ("--context", "512", "--backend-config.micro-batch-tokens", "2048", "--compile", "--json")
    command = [sys.executable, "-m", "skyrl_tx", "plan", "--base-model", str(tmp_path), *flags, *settings]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "JAX_PLATFORMS": "cpu"})
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    weights = found["memory"][0]["bytes"]
    assert [each["name"] for each in found["programs"]] == ["gradient", "prefill", "decode"]
    for each in found["programs"]:
        assert each["problem"] == "" and each["argument_bytes"] >= 0.9 * weights and each["num_loops"] > 0
        assert bool(each["collectives"]) == (found["device"]["number"] > 1), each
    gradient = found["programs"][0]
    assert found["kernels"] == ["attention of 2 layers in training: splash"]
    assert [each["num_kernels"] for each in found["programs"]] == [3, 0, 0]  # forward, and two of the backward pass
    assert gradient["argument_bytes"] + gradient["temporary_bytes"] <= 1.15 * gradient["planned_bytes"]
