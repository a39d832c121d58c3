"""A GPU computes the same numbers as the CPU in float32: training with every loss, AdamW and sampling.

The models have the `rms_norm_eps` of published models. How much rounding changes their numbers is
measured with a run in float64, and the GPU may be four times as far from it as the CPU is.
"""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from skyrl_tx.testing.tiny_models import write_model

pytestmark = [pytest.mark.slow, pytest.mark.gpu]

PROGRAM = Path(__file__).parents[1] / "conformance" / "on_a_mesh.py"
ONE = "fsdp=1"
FLOAT64 = Path(__file__).parent / "in_float64.py"
MAX_RATIO = 4.0
"""How many times as far from float64 as the CPU a GPU may be. It adds in another order."""
PLATFORM = os.environ.get("SKYRL_TX_GPU_PLATFORM", "cuda")
"""JAX's name of the platform. With `cpu`, the tests run without a GPU."""

DENSE: dict[str, Any] = {"num_heads": 8, "num_kv_heads": 4, "head_dim": 8, "std": 0.1, "max_context_length": 128}
LINEAR = {**DENSE, "num_layers": 4, "hidden_size": 64, "head_dim": 16}
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3ForCausalLM": DENSE,
    "Qwen3MoeForCausalLM": {**DENSE, "tied_embeddings": False},
    "GptOssForCausalLM": {**DENSE, "tied_embeddings": False},
    "DeepseekV3ForCausalLM": {**DENSE, "tied_embeddings": False},
    "Gemma3ForCausalLM": DENSE,
    "Qwen3_5ForCausalLM": LINEAR,
    "NemotronHForCausalLM": {
        **LINEAR,
        "std": 0.05,
        "keys": {"hybrid_override_pattern": "ME*-", "num_hidden_layers": 4},
    },
}


def compute_numbers(directory: Path, platform: str, *, in_float64: bool = False) -> dict[str, np.ndarray]:
    """Train and sample on the first device of a platform, in a separate process. Float64 only trains."""
    output = directory / ("float64" if in_float64 else platform)
    output.mkdir(exist_ok=True)
    # A process allocates only the GPU memory that it needs, instead of three quarters.
    variables = os.environ | {"JAX_PLATFORMS": platform, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    program, last = ([str(FLOAT64), str(PROGRAM)], "train") if in_float64 else ([str(PROGRAM)], "sample")
    command = [sys.executable, *program, str(directory), str(output), last, "shared", ONE]
    done = subprocess.run(command, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    with np.load(output / f"{ONE}.npz") as file:
        return {name: array for name, array in file.items() if name != "bytes"}


@pytest.mark.parametrize("architecture", FAMILIES)
def test_training_and_sampling_give_the_numbers_of_the_cpu(tmp_path: Path, architecture: str) -> None:
    directory = write_model(tmp_path / "model", architecture, **FAMILIES[architecture])
    with ThreadPoolExecutor() as pool:
        exact = pool.submit(compute_numbers, directory, "cpu", in_float64=True)
        on_cpu = pool.submit(compute_numbers, directory, "cpu")
        found = compute_numbers(directory, PLATFORM)
    wanted, reference = on_cpu.result(), exact.result()

    # Tokens and new adapters are equal.
    assert found.keys() == wanted.keys() and all(array.dtype != np.float32 for array in reference.values())
    equal = {name for name in wanted if name.startswith("new") or name.endswith(".tokens")}
    assert {"sample.0.tokens", "sample.2.tokens"} < equal
    assert [name for name in sorted(equal) if not np.array_equal(found[name], wanted[name])] == []

    # Other numbers are about as far from float64 as on the CPU.
    trained = sorted(reference.keys() - equal)
    limit = MAX_RATIO * max(compute_distance(wanted[name], reference[name]) for name in trained)
    distances = {name: compute_distance(found[name], reference[name]) for name in trained}
    drawn = sorted(wanted.keys() - equal - reference.keys())
    distances |= {name: compute_distance(found[name], wanted[name]) for name in drawn}
    assert 0 < limit < 1e-4 and drawn
    assert {name: value for name, value in distances.items() if not value <= limit} == {}


def compute_distance(found: np.ndarray, wanted: np.ndarray) -> float:
    """Return the largest difference, relative to the largest value."""
    difference = np.abs(found.astype(np.float64) - wanted)
    return float(difference.max(initial=0.0) / np.abs(wanted.astype(np.float64)).max(initial=1e-30))
