"""Training and sampling on any mesh give the results of one device, and shard the weights."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from skyrl_tx.testing.tiny_models import write_model
from tests.support.fast_jit import FAST_COMPILE_FLAGS

PROGRAM = Path(__file__).with_name("on_a_mesh.py")
ONE = "fsdp=1"
TOLERANCE = 1e-5  # relative to the largest value of an array
SIZES = {"num_heads": 8, "num_kv_heads": 4, "head_dim": 8, "std": 0.2, "max_context_length": 128}
DEVICES = "--xla_force_host_platform_device_count=8 --xla_cpu_collective_call_terminate_timeout_seconds=300"
"""On a machine under load, XLA ended the process after 40 s because 3 of 8 threads had not started."""
PRECISE_FLAGS = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
"""With FAST_COMPILE_FLAGS some sampled logprobs would differ by more than the tolerance."""

EXHAUSTIVE = pytest.mark.exhaustive

Numbers = dict[str, np.ndarray]


def run_on_meshes(
    directory: Path, last: str, *meshes: str, expert_lora: str = "shared", flags: str = PRECISE_FLAGS
) -> list[Numbers]:
    """Run the program in a process with eight devices and return its results for each mesh."""
    environment = os.environ | {"XLA_FLAGS": f"{DEVICES} {flags}", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(PROGRAM), str(directory), str(directory), last, expert_lora, *meshes]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found: list[Numbers] = []
    for mesh in meshes:
        with np.load(directory / f"{mesh}.npz") as file:
            found.append(dict(file))
    return found


def assert_equal(found: Numbers, wanted: Numbers) -> None:
    """Compare all arrays except `bytes`. Tokens and new adapters must be equal."""
    assert found.keys() == wanted.keys()
    for name in wanted.keys() - {"bytes"}:
        if name.startswith("new") or name.endswith(".tokens"):
            np.testing.assert_array_equal(found[name], wanted[name], err_msg=name)
        else:
            scale = np.abs(wanted[name]).max(initial=1e-30) * (
                2 if ".second" in name else 1
            )  # second moments are squares
            np.testing.assert_allclose(found[name], wanted[name], rtol=0, atol=TOLERANCE * scale, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("expert_lora", ["shared", pytest.param("own", marks=EXHAUSTIVE)])
def test_moe_training_on_eight_devices(tmp_path: Path, expert_lora: str) -> None:
    directory = write_model(tmp_path, "Qwen3MoeForCausalLM", tied_embeddings=False, num_layers=1, **SIZES)
    meshes = ONE, "fsdp=2,tp=2,ep=2"
    one, many = run_on_meshes(directory, "train", *meshes, expert_lora=expert_lora, flags=FAST_COMPILE_FLAGS)
    assert_equal(many, one)
    (whole,) = one["bytes"]
    # Experts are sharded eight ways; norms, attention and embeddings four ways, replicated over ep.
    assert len(many["bytes"]) == 8 and many["bytes"].max() < whole / 4


def test_rows_are_sharded_over_eight_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed examples span multiple parts of a row, and four KV heads are spread over more than four devices.

    Programs for multiple CPU devices are not cached, because programs that JAX loads from the cache
    may wait forever.
    """
    programs = tmp_path / "programs"
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(programs))
    directory = write_model(tmp_path, "Qwen3ForCausalLM", num_layers=1, **SIZES)
    many, one = run_on_meshes(directory, "train", "fsdp=2,tp=2,cp=2", ONE, flags=FAST_COMPILE_FLAGS)
    assert_equal(many, one)
    assert many["bytes"].max() < one["bytes"] / 7
    assert not list(programs.glob("jit_accumulate*"))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["cp=8", pytest.param("fsdp=2,tp=2,cp=2", marks=pytest.mark.exhaustive)])
def test_a_row_of_16k_tokens_on_eight_devices(tmp_path: Path, mesh: str) -> None:
    sizes = SIZES | {"max_context_length": 16384}
    directory = write_model(tmp_path, "Qwen3ForCausalLM", num_layers=1, **sizes)
    one, many = run_on_meshes(directory, "long", ONE, mesh, flags=FAST_COMPILE_FLAGS)
    assert_equal(many, one)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "meshes", "expert_lora"),
    [
        ("Qwen2ForCausalLM", {"fsdp=2,tp=4": 8, "dp=2,fsdp=2,tp=2": 4}, "shared"),
        pytest.param("Qwen2ForCausalLM", {"fsdp=8": 8}, "shared", marks=EXHAUSTIVE),
        pytest.param("Qwen3ForCausalLM", {"cp=8": 8, "fsdp=4,cp=2": 8, "tp=4,cp=2": 8}, "shared", marks=EXHAUSTIVE),
        pytest.param("Qwen3MoeForCausalLM", {"fsdp=2,tp=2,cp=2": 8, "ep=4,cp=2": 2}, "shared", marks=EXHAUSTIVE),
        pytest.param("Qwen3_5ForCausalLM", {"fsdp=4,cp=2": 8}, "shared", marks=EXHAUSTIVE),
        pytest.param("NemotronHForCausalLM", {"fsdp=4,cp=2": 8}, "shared", marks=EXHAUSTIVE),
        pytest.param("GptOssForCausalLM", {"ep=2,tp=2,cp=2": 4}, "own", marks=EXHAUSTIVE),
        pytest.param("Gemma3ForCausalLM", {"tp=4,cp=2": 8}, "shared", marks=EXHAUSTIVE),
        pytest.param("DeepseekV3ForCausalLM", {"ep=2,cp=4": 4}, "shared", marks=EXHAUSTIVE),
        ("Qwen3MoeForCausalLM", {"fsdp=2,tp=2,ep=2": 4}, "own"),
        pytest.param("Qwen3MoeForCausalLM", {"dp=8": 1, "dp=2,tp=2,ep=2": 2}, "shared", marks=EXHAUSTIVE),
        pytest.param("Qwen3ForCausalLM", {"dp=4,cp=2": 2}, "shared", marks=EXHAUSTIVE),
        pytest.param("Qwen3_5MoeForCausalLM", {"dp=2,tp=2,ep=2": 2}, "shared", marks=EXHAUSTIVE),
        pytest.param("NemotronHForCausalLM", {"dp=4,tp=2": 2}, "shared", marks=EXHAUSTIVE),
        pytest.param("Qwen3MoeForCausalLM", {"ep=8": 1}, "own", marks=EXHAUSTIVE),
        pytest.param("Qwen3MoeForCausalLM", {"ep=8": 1, "fsdp=2,tp=2,ep=2": 4}, "shared", marks=pytest.mark.exhaustive),
        pytest.param("GptOssForCausalLM", {"ep=8": 1, "fsdp=2,tp=2,ep=2": 4}, "own", marks=pytest.mark.exhaustive),
        pytest.param("GptOssForCausalLM", {"fsdp=2,tp=2,ep=2": 4}, "shared", marks=EXHAUSTIVE),
        ("Qwen3_5ForCausalLM", {"fsdp=4,tp=2": 8}, "shared"),
        pytest.param("Qwen3_5MoeForCausalLM", {"fsdp=2,tp=2,ep=2": 4}, "shared", marks=EXHAUSTIVE),
        pytest.param("Qwen3NextForCausalLM", {"fsdp=2,tp=2,ep=2": 4}, "shared", marks=pytest.mark.exhaustive),
        pytest.param("DeepseekV3ForCausalLM", {"fsdp=2,tp=2,ep=2": 4}, "shared", marks=EXHAUSTIVE),
        pytest.param("NemotronHForCausalLM", {"fsdp=2,tp=2,ep=2": 4}, "shared", marks=EXHAUSTIVE),
        pytest.param("Glm4MoeForCausalLM", {"fsdp=2,tp=2,ep=2": 4}, "shared", marks=pytest.mark.exhaustive),
        pytest.param(
            "Gemma3ForCausalLM", {"fsdp=2,tp=4": 8}, "shared", marks=EXHAUSTIVE
        ),  # its norms are sharded like other norms
        *(
            pytest.param(name, {"ep=8": 1}, "shared", marks=pytest.mark.exhaustive)
            for name in ("GptOssForCausalLM", "Qwen3_5MoeForCausalLM", "DeepseekV3ForCausalLM")
        ),
    ],
)
def test_training_and_sampling_on_a_mesh(
    tmp_path: Path, architecture: str, meshes: dict[str, int], expert_lora: str
) -> None:
    """`meshes` maps each mesh to the number of shards of all weights other than experts."""
    mixed = {"tied_embeddings": False, "num_layers": 2, "experts": {"mlp_only_layers": [0]}, "std": 0.1}
    # Norms divide by outputs near 0, and AdamW by gradients near 0. A large epsilon limits how
    # rounding errors grow.
    linear = {"num_layers": 4, "hidden_size": 64, "head_dim": 16, "std": 0.1, "keys": {"rms_norm_eps": 0.1}}
    four_layers = {"hybrid_override_pattern": "ME*-", "num_hidden_layers": 4}

    more = {
        "Qwen3MoeForCausalLM": mixed,
        "GptOssForCausalLM": {"tied_embeddings": False, "std": 0.1},
        "Qwen3_5ForCausalLM": linear,
        "Qwen3_5MoeForCausalLM": {"tied_embeddings": False, **linear},
        "Qwen3NextForCausalLM": {"tied_embeddings": False, **linear},
        "DeepseekV3ForCausalLM": {"tied_embeddings": False, "std": 0.1},
        "NemotronHForCausalLM": {**linear, "keys": {"layer_norm_epsilon": 0.1, **four_layers}},
        "Glm4MoeForCausalLM": {"tied_embeddings": False, "std": 0.1},
    }.get(architecture, {})

    directory = write_model(tmp_path, architecture, **SIZES | more)
    one, *many = run_on_meshes(directory, "sample", ONE, *meshes, expert_lora=expert_lora)
    (whole,) = one["bytes"]
    for found, parts in zip(many, meshes.values(), strict=True):
        assert_equal(found, one)
        small = 0.03 * whole  # unsharded weights, such as norms of heads
        assert found["bytes"].max() <= whole / parts + small
