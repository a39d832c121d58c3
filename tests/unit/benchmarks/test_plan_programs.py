"""Programs compiled for devices that are not present, and their memory by compiler and by plan."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest
from jax.experimental import topologies

from benchmarks.ahead import programs
from benchmarks.ahead.plan_programs import PROGRAMS, main
from skyrl_tx.testing.tiny_models import write_model
from tests.support.client_environments import COMPILERS
from tests.support.model_configs import QWEN3_4B, QWEN3_8B

SPLASH = "splash_mha_fwd", "splash_mha_dq", "splash_mha_dkv"
TRITON = "mha_forward", "mha_d_query", "mha_d_key"
EIGHT = "fsdp=2,tp=2,ep=2"


def test_a_missing_compiler_ends_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(**_: str) -> None:
        raise NotImplementedError("JAX TPU support not installed")

    monkeypatch.setattr(topologies, "get_topology_desc", fail)
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
    monkeypatch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    write_model(tmp_path)
    assert main(["--base-model", str(tmp_path), "--device", "v5e:1x1"]) == 2
    assert "no compiler for v5e:1x1: pip install 'skyrl-tx-server[tpu]'" in capsys.readouterr().err


def test_programs_are_lowered_for_devices_that_are_not_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX 0.11 reads a kernel's target GPU from the mesh of the context, or from the host's GPU."""
    described = SimpleNamespace(devices=jax.devices("cpu")[:1])
    monkeypatch.setattr(topologies, "get_topology_desc", lambda **_: described)
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
    monkeypatch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    meshes, lower = [], programs._Shapes.optimizer

    def record_mesh(shapes: programs._Shapes):
        meshes.append(jax.sharding.get_abstract_mesh())
        return lower(shapes)

    monkeypatch.setattr(programs._Shapes, "optimizer", record_mesh)
    write_model(tmp_path)
    assert main(["--base-model", str(tmp_path), "--device", "v5e:1x1", "--programs", "optimizer"]) == 0
    [mesh] = meshes
    assert mesh.abstract_device.device_kind == described.devices[0].device_kind


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--device", "l4:1"), "--device: l4 is not described; of the GPUs, h100 and h200 are"),
        (("--device", "h200", "--backend", "fake"), "--backend fake: `plan` supports only the backend jax"),
    ],
)
def test_what_cannot_be_compiled_is_named(
    tmp_path: Path, flags: tuple[str, ...], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_model(tmp_path)
    assert main(["--base-model", str(tmp_path), *flags]) == 2
    assert named in capsys.readouterr().err


def test_an_unknown_program_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--base-model", "m", "--device", "h200", "--programs", "gradient,foo"])
    assert "argument --programs: 'foo' must be one of forward, gradient" in capsys.readouterr().err


def compile_programs(client_environment, model: Path, names: str, *flags: str) -> tuple[dict, dict]:
    """Return the plan as JSON and its programs by name.

    Without `names`, all programs are compiled.
    """
    compilers = client_environment(COMPILERS)
    settings = ("--backend-config.micro-batch-tokens", "2048", "--json", *(("--programs", names) if names else ()))
    command = [sys.executable, "-m", "benchmarks.ahead.plan_programs", "--base-model", str(model), *settings, *flags]
    paths = os.pathsep.join((str(Path.cwd()), str(compilers.packages)))
    variables = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": paths}
    done = subprocess.run(command, capture_output=True, text=True, env=variables)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    return found, {program["name"]: program for program in found["programs"]}


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("device", ["h200:1", "v5e:1x1"])
def test_offloaded_inputs_of_layers_take_memory_of_the_host(device: str, tmp_path: Path, client_environment) -> None:
    write_model(tmp_path, num_layers=8, hidden_size=256, max_context_length=32768)
    # These tokens exceed the on-chip memory of a TPU, which is not counted.
    tokens = ("--backend-config.micro-batch-tokens", "32768")
    kept, offloaded = (
        compile_programs(client_environment, tmp_path, "gradient", "--device", device, flag, *tokens)[1]["gradient"]
        for flag in ("--backend-config.remat", "--backend-config.offload")
    )
    inputs = 8 * 32768 * 256 * 4
    assert kept["host_bytes"] == 0 and offloaded["host_bytes"] == inputs
    assert kept["temporary_bytes"] - offloaded["temporary_bytes"] > 0.5 * inputs


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_unembedding_is_gathered_once(tmp_path: Path, client_environment) -> None:
    """It is not gathered for each of the eight chunks of log-probabilities of 2,048 tokens."""
    write_model(tmp_path, num_layers=3, vocab_size=16384, hidden_size=128)
    flags = ("--device", "h200:2", "--mesh", "fsdp=2", "--backend-config.remat")
    gradient = compile_programs(client_environment, tmp_path, "gradient", *flags)[1]["gradient"]
    unembedding = 16384 * 128 * 2
    # Once for all losses, and once more in the branch for losses that read whole rows. The layers
    # are small.
    assert gradient["text"]["collectives"]["all-gather"]["bytes"] < 3 * unembedding


@pytest.mark.slow
@pytest.mark.exhaustive
def test_weights_that_devices_gather_are_not_copied(tmp_path: Path, client_environment) -> None:
    """A copy of all layers would exceed the rest of the program: they are most of the memory."""
    write_model(tmp_path, num_layers=48, hidden_size=512, mlp_size=2048)
    flags = ("--device", "h200:2", "--mesh", "fsdp=2", "--backend-config.remat")
    flags += ("--backend-config.micro-batch-tokens", "1024")
    found, programs = compile_programs(client_environment, tmp_path, "gradient", *flags)
    gradient, weights = programs["gradient"], found["memory"][0]["bytes"]
    assert gradient["temporary_bytes"] < weights
    assert gradient["argument_bytes"] + gradient["temporary_bytes"] == pytest.approx(
        gradient["planned_bytes"], rel=0.15
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "flags", "kernels", "names"),
    [
        ("Qwen3MoeForCausalLM", ("--device", "v5e:2x4", "--mesh", EIGHT), SPLASH, "gradient,decode"),
        ("Qwen3ForCausalLM", ("--device", "h200:1"), TRITON, "gradient,decode"),
        *(
            pytest.param("Qwen3ForCausalLM", flags, kernels, "gradient,decode", marks=pytest.mark.exhaustive)
            for flags, kernels in (
                (("--device", "v5e:1x1"), SPLASH),
                (("--device", "h200:8", "--mesh", "fsdp=4,tp=2"), TRITON),
                (("--device", "h200:2", "--mesh", "tp=2"), TRITON),
            )
        ),
        *(
            pytest.param("Qwen3MoeForCausalLM", (*flags, "--mesh", EIGHT), kernels, "", marks=pytest.mark.exhaustive)
            for flags, kernels in ((("--device", "v5e:2x4"), SPLASH), (("--device", "h100:8"), TRITON))
        ),
    ],
    ids=["v5e-8", "h200-1", "v5e-1", "h200-8", "h200-2", "v5e-8-all", "h100-8-all"],
)
def test_programs_compile_for_one_device_and_for_eight(
    architecture: str, flags: tuple[str, ...], kernels: tuple[str, ...], names: str, tmp_path: Path, client_environment
) -> None:
    write_model(tmp_path, architecture, num_layers=3, head_dim=128)
    found, programs = compile_programs(client_environment, tmp_path, names, "--context", "512", *flags)
    assert tuple(programs) == (tuple(names.split(",")) if names else PROGRAMS)

    is_one = found["device"]["number"] == 1
    weights = found["memory"][0]["bytes"]
    for name, program in programs.items():
        assert program["problem"] == "", program
        if name != "optimizer":
            assert program["argument_bytes"] >= 0.9 * weights and program["text"]["num_steps"] >= 3, program
        assert is_one == (program["text"]["collectives"] == {}), program

    def select_head_kernels(found: dict[str, int]) -> dict[str, int]:
        return {name: calls for name, calls in found.items() if "rotate_normed" in name}

    # Each kernel of fused attention runs once in each of the three layers.
    in_gradient = programs["gradient"]["text"]["kernels"]
    expert_kernel = "multiply_tiles"
    others = {*select_head_kernels(in_gradient), expert_kernel}
    attention = {name: calls for name, calls in in_gradient.items() if name not in others}

    assert all(any(name.startswith(kernel) for name in attention) for kernel in kernels)
    assert set(attention.values()) == {3}
    # Norm and rotation have their own kernel for queries and for keys. The backward pass runs it
    # again.
    has_experts, is_fused = architecture == "Qwen3MoeForCausalLM", kernels is TRITON
    assert (in_gradient.get(expert_kernel, 0) >= 3 * 3) == has_experts
    assert select_head_kernels(in_gradient) == ({"rotate_normed": 12, "d_rotate_normed": 6} if is_fused else {})

    for name in {"decode", "adapters"} & set(programs):
        in_decode = programs[name]["text"]["kernels"]
        assert (in_decode.pop(expert_kernel, 0) >= 3 * 3) == has_experts
        assert in_decode == {"paged_past": 3} | ({"rotate_normed": 6} if is_fused else {})

    assert is_one == (programs["gradient"]["text"]["in_layers"] == {})

    gradient = programs["gradient"]
    assert gradient["argument_bytes"] + gradient["temporary_bytes"] <= 1.15 * gradient["planned_bytes"]

    if not names and found["device"]["name"] == "h100":  # TPUs pad each of these small arrays
        step = programs["optimizer"]
        assert step["argument_bytes"] + step["output_bytes"] == pytest.approx(step["planned_bytes"], rel=0.15)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_devices_of_dp_add_up_gradients_and_send_no_weights(tmp_path: Path, client_environment) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**QWEN3_8B, "num_hidden_layers": 4}))
    flags = ("--device", "h200:8", "--mesh", "dp=8", "--context", "512", "--backend-config.micro-batch-tokens", "8192")
    found, programs = compile_programs(client_environment, tmp_path, "gradient,decode", *flags)
    gradient, decode = (programs[name]["text"] for name in ("gradient", "decode"))
    assert gradient["collectives"].keys() == {"all-reduce"} and gradient["in_layers"]["all-reduce"]["calls"] == 4
    unembedding = 4 * 32 * (QWEN3_8B["hidden_size"] + QWEN3_8B["vocab_size"])
    layer_bytes = 4 * 4 * 32 * (2 * 8192 + 2 * 5120 + 3 * 16384)
    # The gradient of the unembedding is summed for each chunk of positions, in the branch of each
    # kind of loss.
    assert layer_bytes < gradient["collectives"]["all-reduce"]["bytes"] < 1.1 * layer_bytes + 40 * unembedding
    assert decode["in_layers"] == {} and found["limits"]["sample_slots"] == 8 * 256
    assert sum(call["bytes"] for call in decode["collectives"].values()) < 2**25 < found["memory"][0]["bytes"] // 50
    assert programs["decode"]["text"]["kernels"]["paged_past"] == 4


@pytest.mark.slow
def test_a_decode_step_with_an_adapter_copies_no_weights(tmp_path: Path, client_environment) -> None:
    """Copies of the maps with the adapter's factors appended would write 177 MB more."""
    (tmp_path / "config.json").write_text(json.dumps({**QWEN3_4B, "num_hidden_layers": 2}))
    flags = ("--device", "h200:1", "--context", "4096", "--backend-config.max-sample-tokens", "131072")
    step = compile_programs(client_environment, tmp_path, "adapter", *flags)[1]["adapter"]["text"]
    # In-place updates of the KV cache count as written. Six launches belong to min_p and three to raw
    # log-probabilities, which run only if a row has them.
    assert step["num_launches"] <= 224 and step["written_bytes"] < 2.35e9


@pytest.mark.slow
@pytest.mark.exhaustive
def test_devices_exchange_logits_and_not_the_unembedding(tmp_path: Path, client_environment) -> None:
    """In a decode step, each device computes its part of the vocabulary.

    The logits are far smaller than the unembedding.
    """
    (tmp_path / "config.json").write_text(json.dumps({**QWEN3_8B, "num_hidden_layers": 2}))
    flags = ("--device", "v5e:2x4", "--mesh", "tp=8", "--context", "512")
    found, programs = compile_programs(client_environment, tmp_path, "decode", *flags)
    logits = 4 * found["limits"]["sample_slots"] * QWEN3_8B["vocab_size"]
    sent = sum(call["bytes"] for call in programs["decode"]["text"]["collectives"].values())
    assert sent < 1.2 * logits < 2 * QWEN3_8B["hidden_size"] * QWEN3_8B["vocab_size"]
